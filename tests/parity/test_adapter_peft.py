"""Our LoRA adapters against PEFT itself: what it writes is read here, what is written here it reads, and both add the same."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from gnomon.model import adapter
from gnomon.model.adapter import Adapter, Pair

peft = pytest.importorskip("peft", reason="peft is not installed")


class Part(nn.Module):
    """Two maps and a table, named as parts of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)


class Net(nn.Module):
    """Names as in the released layout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.layers = nn.Embedding(10, 6), nn.ModuleList([Part(), Part()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Something of everything."""
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = hidden + layer.o_proj(layer.q_proj(hidden))
        return hidden

    def prepare_inputs_for_generation(self) -> None:
        """What PEFT asks of a causal model."""


def net() -> Net:
    """The same each time."""
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("options", [{"lora_alpha": 6}, {"lora_alpha": 6, "use_rslora": True},
                                     {"lora_alpha": 4, "rank_pattern": {"o_proj": 2}, "alpha_pattern": {"o_proj": 1}}])
def test_what_peft_writes_is_read(options: dict[str, object], tmp_path: Path) -> None:
    """Every map's product with its scale is what PEFT merges into the weights."""
    before = {name: value.clone() for name, value in net().state_dict().items()}
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "o_proj", "embed_tokens"], init_lora_weights=False, **options)
    wrapped = peft.get_peft_model(net(), config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it knows no configuration of such a model
        wrapped.save_pretrained(tmp_path)
    merged = wrapped.merge_and_unload().state_dict()
    made = adapter.load(tmp_path)
    assert len(made.pairs) == 5
    for module, pair in made.pairs.items():
        name = f"{module}.weight"
        torch.testing.assert_close(before[name] + pair.delta, merged[name], atol=1e-5, rtol=1e-5)


def test_what_is_written_here_peft_reads(tmp_path: Path) -> None:
    """Maps and an embedding, of one rank and scales of their own."""
    draws = torch.Generator().manual_seed(1)
    shapes = {"layers.0.q_proj": (8, 6), "layers.0.o_proj": (6, 8), "layers.1.q_proj": (8, 6), "layers.1.o_proj": (6, 8)}
    pairs = {name: Pair(a=torch.randn(3, columns, generator=draws), b=torch.randn(rows, 3, generator=draws),
                        scale=2.0 if "q" in name else 0.5) for name, (rows, columns) in shapes.items()}
    pairs["embed_tokens"] = Pair(a=torch.randn(3, 10, generator=draws), b=torch.randn(6, 3, generator=draws), looked_up=True)
    Adapter(pairs=pairs).save(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == ["embed_tokens", "o_proj", "q_proj"]
    base = net()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    merged = peft.PeftModel.from_pretrained(base, tmp_path).merge_and_unload().state_dict()
    for name, value in merged.items():
        module = name.removesuffix(".weight")
        torch.testing.assert_close(value, before[name] + pairs[module].delta, atol=1e-5, rtol=1e-5)
