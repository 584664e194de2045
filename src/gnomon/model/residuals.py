"""Attention over depth: what the residual stream is when it remembers its past (report §2.2, eq. 8–10).

A `DepthStream` holds finished sources (the bank: the embedding and completed blocks) and the running sum of the current block.
Before each sublayer a learned query mixes the bank and the running sum; the sublayer's output is added to the running sum only.
Three modes, told apart only by when the running sum is banked:

* `block`: before the attention of every `attn_res_block_size`-th layer, after it was read; what K3 does;
* `full`: before every sublayer, so that each output is its own source;
* `off`: never; with an empty bank a read returns the running sum, which is the plain residual.

Read next: `transformer.py`; `gnomon/kernels/depth/reference.py` for the mix itself.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gnomon.kernels import depth


@dataclass(frozen=True, slots=True)
class DepthStream:
    """Bank, oldest first, and the running sum of the block in progress; all `[B, T, D]`.

    This is all that passes between layers, so it is also what a pipeline sends. `partial` is `None` right after a commit.
    """

    bank: tuple[Tensor, ...] = ()
    partial: Tensor | None = None

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """What a read mixes: the bank, then the running sum."""
        return self.bank if self.partial is None else (*self.bank, self.partial)

    def add(self, output: Float[Tensor, "B T D"]) -> "DepthStream":
        """Add a sublayer's output to the running sum; the first one after a commit starts it. The stream keeps its type."""
        output = output.to(self.sources[0].dtype)
        return DepthStream(self.bank, output if self.partial is None else self.partial + output)

    def commit(self) -> "DepthStream":
        """Bank the raw running sum and start a new block."""
        return self if self.partial is None else DepthStream((*self.bank, self.partial), None)


class DepthQuery(nn.Module):
    """The norm weight γ of one read; its pseudo-query w is a sibling, as the released names have it."""

    def __init__(self, width: int, rows: int | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width) if rows is None else torch.empty(rows, width))


class DepthReader(nn.Module):
    """Owner of named reads: `NAME_norm.weight` [D] and `NAME_proj.weight` [1, D] for each name."""

    def add_read(self, name: str, width: int) -> None:
        """Create the parameters of a read."""
        self.add_module(f"{name}_norm", DepthQuery(width))
        self.add_module(f"{name}_proj", DepthQuery(width, rows=1))

    def freeze_read(self, name: str) -> None:
        """Exclude a read from training."""
        for part in ("norm", "proj"):
            self.get_submodule(f"{name}_{part}").requires_grad_(False)

    def query(self, name: str) -> Float[Tensor, "D"]:
        """γ · w, multiplied in fp32 and never rounded."""
        gamma = getattr(self, f"{name}_norm").weight.float()
        return gamma * getattr(self, f"{name}_proj").weight[0].float()

    def read(self, name: str, stream: DepthStream, eps: float) -> Float[Tensor, "B T D"]:
        """The mix of all sources; with one source there is nothing to mix."""
        sources = stream.sources
        return sources[0] if len(sources) == 1 else depth.depth_read(sources, self.query(name), eps)

    def read_weights(self, name: str, stream: DepthStream, eps: float) -> Float[Tensor, "B T n"]:
        """The probabilities of a read, one per source."""
        return depth.depth_weights(stream.sources, self.query(name), eps)


def commits_before(mode: str, block_size: int, layer: int, sublayer: str) -> bool:
    """Whether the running sum is banked after the read of this sublayer (`"attention"` or `"mlp"`) and before it runs."""
    if mode == "full":
        return True
    return mode == "block" and sublayer == "attention" and layer % block_size == 0
