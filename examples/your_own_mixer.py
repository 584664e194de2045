"""A mixer of your own in a model of this family: one class with a config, named by a dotted path; nothing to register."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gnomon.config import setting
from gnomon.model.config import preset
from gnomon.model.layers import Linear
from gnomon.model.parts import TensorSpec, linear
from gnomon.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningMeanConfig:
    """A gated mean over everything so far; what `ModelConfig` needs to price it."""

    width: int = setting(64, "channels")

    def tensors(self, hidden_size: int) -> Iterator[TensorSpec]:
        """Its two projections."""
        return iter([linear("in_proj", self.width, hidden_size), linear("o_proj", hidden_size, self.width)])

    def flops_per_token(self, hidden_size: int, context: int) -> int:
        """Independent of the context, like every recurrence."""
        return 4 * self.width * hidden_size


class RunningMean(nn.Module):
    """out = W (mean over time of V x)."""

    Config = RunningMeanConfig

    def __init__(self, config: RunningMeanConfig, hidden_size: int, eps: float):
        super().__init__()
        self.in_proj, self.o_proj = Linear(hidden_size, config.width), Linear(config.width, hidden_size)

    def forward(self, x: Tensor, state: None = None, cu_seqlens: None = None) -> Tensor:
        """Mix along time; this small one takes neither states nor packed documents."""
        count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        return self.o_proj(self.in_proj(x).cumsum(1) / count)


if __name__ == "__main__":
    kind = f"{sys.modules[__name__].__name__}:RunningMean"
    config = preset("tiny", (f'layer_pattern=["{kind}","kda","kda","mla"]', f'mixers."{kind}".width=32'))
    logits = Transformer(config).initialise()(torch.arange(12).unsqueeze(0))
    print(f"{' '.join(config.layers)}\n{config.num_parameters():,} parameters, logits {tuple(logits.shape)}")
