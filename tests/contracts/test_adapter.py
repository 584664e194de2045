"""Low-rank adapters: what is written is what PEFT's layout says, what is applied is what its formula says, and what is lost is told."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from posttraining_fixtures import network, save
from safetensors.numpy import load_file, save_file

from gnomon.errors import CheckpointError, ConfigError
from gnomon.model import adapter
from gnomon.model.transformer import Transformer
from gnomon.model.weights import save_pretrained
from gnomon.posttrain.learner import Document, stream, token_logprobs
from gnomon.posttrain.teachers import TeacherConfig, Teachers

VOCABULARY = 64
DOCUMENT = Document(token_ids=(5, 6, 7, 60, 2, 2, 41), mask=(False, False, True, True, False, True, True))


def expert(seed: int, size: float = 0.05) -> Transformer:
    """The base, moved a little everywhere."""
    model = network(VOCABULARY)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=draws)
    return model


def by_name(model: Transformer, folder: Path) -> dict[str, np.ndarray]:
    """All tensors of the released layout, as a file of it says them."""
    save_pretrained(model, folder, quantize=False)
    return {name.removeprefix("language_model."): value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def merged(base: dict[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    """What PEFT's formula makes of a base: W + alpha / r B A, an embedding's transposed."""
    table, found = json.loads((folder / "adapter_config.json").read_text()), dict(base)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, a in tensors.items():
        for reads, writes in ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B")):
            if name.endswith(reads):
                module = name.removesuffix(reads)
                rank = a.shape[0]
                alpha = table["alpha_pattern"].get(module.removeprefix("base_model.model."), table["lora_alpha"])
                delta = alpha / rank * (tensors[module + writes] @ a)
                place = f"{module.removeprefix('base_model.model.')}.weight"
                found[place] = base[place] + (delta.T if "embedding" in reads else delta)
    return found


def test_all_of_a_difference_at_full_rank(tmp_path: Path) -> None:
    """Base and adapter are the expert, routed experts one by one; the layout's formula says the same."""
    base, wanted = network(VOCABULARY), expert(1)
    made, loss = adapter.difference(base, wanted, 64)
    assert loss.error < 1e-6 and made.rest
    made.save(tmp_path / "adapter", "runs/base")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(".experts.3.w1.lora_A.weight" in name for name in names) and all(name.startswith("base_model.model.") for name in names)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == "runs/base"
    by_hand, told = merged(by_name(base, tmp_path / "b"), tmp_path / "adapter"), by_name(wanted, tmp_path / "e")
    rest = load_file(tmp_path / "adapter" / "adapter_rest.safetensors")
    for name, value in told.items():
        if name in rest:
            assert value.ndim != 2
        else:
            np.testing.assert_allclose(by_hand[name], value, atol=1e-5, err_msg=name)
    adapter.load(tmp_path / "adapter").apply(base)
    for name, tensor in base.state_dict().items():
        torch.testing.assert_close(tensor, wanted.state_dict()[name], atol=1e-5, rtol=1e-5)


def test_what_a_small_rank_loses_is_told(tmp_path: Path) -> None:
    """The error is that of numpy's best approximation, map by map and over all."""
    base, wanted = network(VOCABULARY), expert(2)
    made, loss = adapter.difference(base, wanted, 4)
    ours, theirs = by_name(base, tmp_path / "b"), by_name(wanted, tmp_path / "e")
    whole = left = 0.0
    for module, told in loss.by_module.items():
        values = np.linalg.svd(theirs[f"{module}.weight"].astype(np.float64) - ours[f"{module}.weight"], compute_uv=False)
        assert told == pytest.approx(np.sqrt((values[4:] ** 2).sum() / (values ** 2).sum()), rel=1e-6)
        whole, left = whole + (values ** 2).sum(), left + (values[4:] ** 2).sum()
    assert loss.error == pytest.approx(np.sqrt(left / whole), rel=1e-6) and 0.1 < loss.error < 1
    assert made.nbytes < sum(value.nbytes for value in theirs.values()) / 2


def test_an_adapter_of_others(tmp_path: Path) -> None:
    """Scales by alpha, by module and by root of rank; names with the family's prefix."""
    draws = np.random.default_rng(0)
    names = ("model.layers.0.self_attn.q_proj", "language_model.model.layers.1.self_attn.o_proj")
    base = network(VOCABULARY)
    weights = by_name(base, tmp_path / "b")
    tensors = {}
    for name in names:
        rows, columns = weights[f"{name.removeprefix('language_model.')}.weight"].shape
        tensors[f"base_model.model.{name}.lora_A.weight"] = draws.standard_normal((2, columns), np.float32)
        tensors[f"base_model.model.{name}.lora_B.weight"] = draws.standard_normal((rows, 2), np.float32)
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    for table, scales in (({"lora_alpha": 6}, (3.0, 3.0)), ({"lora_alpha": 6, "alpha_pattern": {"o_proj": 1}}, (3.0, 0.5)),
                          ({"lora_alpha": 4, "use_rslora": True}, (4 / 2**0.5,) * 2)):
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, **table}))
        model = network(VOCABULARY)
        adapter.load(folder).apply(model)
        after = by_name(model, tmp_path / "after")
        for name, scale in zip(names, scales, strict=True):
            place = f"{name.removeprefix('language_model.')}.weight"
            product = tensors[f"base_model.model.{name}.lora_B.weight"] @ tensors[f"base_model.model.{name}.lora_A.weight"]
            np.testing.assert_allclose(after[place], weights[place] + scale * product, atol=1e-4)


@pytest.mark.parametrize(("table", "names", "words"), [
    ({"peft_type": "IA3"}, {}, "peft_type"), ({"peft_type": "LORA", "use_dora": True}, {}, "use_dora"),
    ({"peft_type": "LORA"}, {"base_model.model.x.lora_A.weight": (2, 3)}, "no counterpart"),
    ({"peft_type": "LORA"}, {"base_model.model.x.lora_A.weight": (2, 3), "base_model.model.x.lora_B.weight": (3, 1)}, "ranks must agree"),
    ({"peft_type": "LORA"}, {"other": (2, 3)}, "unknown tensors"),
    ({"peft_type": "LORA"}, {"base_model.model.x.lora_A.weight": (2, 3), "base_model.model.x.lora_B.weight": (3, 2)}, "does not have"),
    ({"peft_type": "LORA"}, {"base_model.model.lm_head.lora_A.weight": (2, 3), "base_model.model.lm_head.lora_B.weight": (3, 2)},
     "the model's"),
])
def test_what_is_refused(table: dict[str, Any], names: dict[str, tuple[int, int]], words: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(table))
    save_file({name: np.zeros(shape, np.float32) for name, shape in names.items()}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        adapter.load(tmp_path).apply(network(VOCABULARY))
    with pytest.raises(ConfigError, match="'rank' is 0"):
        adapter.difference(network(VOCABULARY), network(VOCABULARY), 0)


def test_nine_teachers_of_one_base(tmp_path: Path) -> None:
    """Each says what the weights that it stands for say; the base is read from the disk once, and held once beside the network."""
    base = save(network(VOCABULARY), tmp_path / "base")
    cells = [(domain, effort) for domain in "abc" for effort in ("low", "high", "max")]
    for number, cell in enumerate(cells):
        adapter.difference(network(VOCABULARY), expert(10 + number), 3)[0].save(tmp_path / "-".join(cell))
    bench = Teachers([TeacherConfig(domain=d, effort=e, run=base, adapter=tmp_path / f"{d}-{e}") for d, e in cells],
                     network(VOCABULARY).config, remembered=0)
    for _ in range(2):
        found = bench.score([(cell, DOCUMENT) for cell in cells])
    for number, said in enumerate(found):
        model = network(VOCABULARY).eval()
        made, _ = adapter.difference(network(VOCABULARY), expert(10 + number), 3)
        made.apply(model)
        with torch.no_grad():
            alone = token_logprobs(model, stream([DOCUMENT]))
        torch.testing.assert_close(said.logprobs, alone, atol=1e-5, rtol=0)
    assert bench.reads == 1 and len({tuple(each.logprobs.tolist()) for each in found}) == 9
