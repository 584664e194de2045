"""A checkpoint behind transformers' Auto classes, whose library has no K3 model, so that programs of that world run on it unchanged.

    python -m gnomon.model.auto lm_eval --model hf --model_args pretrained=CHECKPOINT --tasks …

registers the classes and runs the module that follows; `register()` does it in a program of your own. The network is `Transformer`;
padding of either side is cut off before it, so a row gives what it gives alone. Needs `pip install 'gnomon[hf]'`.
"""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from gnomon.errors import ConfigError
from gnomon.model.auto_config import KimiK3Config
from gnomon.model.huggingface import to_model_config
from gnomon.model.state import LayerState
from gnomon.model.transformer import Transformer
from gnomon.model.weights import load_pretrained, save_pretrained

try:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutputWithPast
except ImportError as error:
    raise ConfigError(f"transformers cannot be imported ({error}); install it: pip install 'gnomon[hf]'") from None

HARMLESS = {"revision", "trust_remote_code", "cache_dir", "local_files_only", "token", "low_cpu_mem_usage", "attn_implementation",
            "use_safetensors", "weights_only", "adapter_kwargs", "_from_auto", "_commit_hash", "config", "subfolder", "gguf_file"}
"""Options of `from_pretrained` that change nothing about a local checkpoint in this layout, or must be empty to mean that."""


class Rows:
    """What `generate` keeps between calls: one list of layer states per row of the batch."""

    def __init__(self, states: list[list[LayerState]]):
        self.states = states

    def reorder_cache(self, rows: Tensor) -> None:
        """Let row i go on from what row `rows[i]` was: beam search."""
        self.states = [[state.copy() for state in self.states[row]] for row in rows.tolist()]


class KimiK3ForCausalLM(PreTrainedModel, GenerationMixin):
    """The network under the interface that `generate` and evaluation programs expect."""

    config_class = KimiK3Config
    main_input_name = "input_ids"
    base_model_prefix = "network"
    _is_stateful = True

    def __init__(self, config: KimiK3Config, network: Transformer | None = None):
        super().__init__(config)
        self.network = Transformer(to_model_config(config.to_dict())).initialise() if network is None else network

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Self:
        """Read a folder in the released layout. `dtype` (default: as stored) and `device_map` with one device are honoured.

        Raises `ConfigError` for an option that this model cannot honour, `CheckpointError` for a folder that does not hold the model.
        """
        folder: str | Path = args[0] if args else options.pop("pretrained_model_name_or_path")
        dtype = options.pop("dtype", None) or options.pop("torch_dtype", None)
        place = options.pop("device_map", None)
        foreign = sorted(name for name, value in options.items() if name not in HARMLESS and value not in (None, False))
        if foreign:
            raise ConfigError(f"'{foreign[0]}' is not for checkpoints of this kind; leave it out")
        device = next(iter(place.values())) if isinstance(place, dict) else "cpu" if place in (None, "auto") else place
        kind = None if dtype in (None, "auto") else getattr(torch, dtype) if isinstance(dtype, str) else dtype
        network = load_pretrained(folder, dtype=kind, device=device)
        config = options.get("config") or KimiK3Config.from_pretrained(folder)
        return cls(config, network).eval()

    def save_pretrained(self, *args: Any, **options: Any) -> None:
        """Write the released layout; the tokenizer is its owner's to save."""
        save_pretrained(self.network, args[0] if args else options["save_directory"])

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the states are the network's own, see `Rows`

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.network.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the bulk of the weights."""
        return self.network.model.embed_tokens.weight.dtype

    def get_input_embeddings(self) -> nn.Module:
        """The embedding table."""
        return self.network.model.embed_tokens

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, cache: Rows | None = None,
                use_cache: bool | None = None, logits_to_keep: int = 0, **_: Any) -> CausalLMOutputWithPast:
        """Logits [B, T, V], zeros where the mask is zero; with `labels` the mean loss of the tokens that follow (−100: not learnt)."""
        if cache is not None:
            pieces = [self.network(row[None, -1:], states=states)[0] for row, states in zip(input_ids, cache.states, strict=True)]
            return CausalLMOutputWithPast(logits=torch.stack(pieces), cache=cast(Any, cache))
        kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        kept = kept.bool()
        states = [self.network.new_states() for _ in input_ids] if use_cache else None
        rows = []
        for index, (ids, mask) in enumerate(zip(input_ids, kept, strict=True)):
            row = self.network(ids[mask][None], states=None if states is None else states[index])[0]
            whole = row.new_zeros(len(ids), row.shape[-1])
            rows.append(whole.masked_scatter(mask[:, None], row))
        logits = pad_sequence(rows, batch_first=True)
        logits = logits[:, -logits_to_keep:] if logits_to_keep else logits
        loss = None if labels is None else functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=cast(Any, None if states is None else Rows(states)))


def register() -> None:
    """Make `AutoConfig` and `AutoModelForCausalLM` know `kimi_k3`; `AutoTokenizer` reads the exported tokenizer as it is. Twice is once."""
    AutoConfig.register("kimi_k3", KimiK3Config, exist_ok=True)
    AutoModelForCausalLM.register(KimiK3Config, KimiK3ForCausalLM, exist_ok=True)


def run(module: str, arguments: list[str]) -> None:
    """Register, then run a module as `python -m` would."""
    register()
    sys.argv = [module, *arguments]
    execute: Callable[..., Any] = runpy.run_module
    execute(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m gnomon.model.auto MODULE [ARGUMENT …], for instance lm_eval")
    run(sys.argv[1], sys.argv[2:])
