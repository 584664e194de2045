"""A checkpoint: the KDA state of all layers after a whole number of hash blocks, kept to be copied by whoever continues from there.

Nobody ever writes to a checkpoint. All layers lie in one slot or one packed piece, so there is no half of one. It carries its own token
count and chained hash, and so does the memory it lies in; both are compared before it is restored, because a wrong state crashes nothing.

Packed, a state takes a half (bf16) or a quarter (int8 with one scale per head and key channel) of its bytes, and what that costs is
measured when it is done: the error is kept with it. Read next: `store.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from gnomon.errors import ConfigError
from gnomon.model.inference_state import StatePool
from gnomon.serve.cache_settings import FORMS, Form

Kind = Literal["grid", "turn", "end"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedState:
    """A state outside the pool: matrices [layers, H, K, V] as fp32, bf16 or int8, scales [layers, H, K, 1] of the latter, and the
    convolution's history, which is small and stays exact. `error` is what packing lost: the largest ‖Ŝ − S‖ ÷ ‖S‖ of a head.
    """

    form: Form
    matrices: Tensor
    scales: Tensor | None
    conv: Tensor
    error: float

    @property
    def bytes(self) -> int:
        """Bytes of all parts."""
        return self.matrices.nbytes + self.conv.nbytes + (0 if self.scales is None else self.scales.nbytes)


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    """The state after `length` tokens whose chained hash is `digest`, in `slot`, or `packed` to rest.

    `kind` is "turn" where requests are expected to come back (boundaries of turns, forks) and "end" where a sequence ended. `error` bounds
    what packing lost on the way here. `score` and `floor` are what eviction goes by (`worth.py`), `hits` how often it was restored.
    """

    length: int
    digest: bytes
    slot: int | None
    bytes: int
    kind: Kind
    packed: PackedState | None = None
    error: float = 0.0
    hits: int = 0
    score: float = 0.0
    floor: float = 0.0


def pack(pool: StatePool, slot: int, form: Form) -> PackedState:
    """A copy of a slot's state in this form. Raises `ConfigError` for a form that there is not."""
    if form not in FORMS:
        raise ConfigError(f"'{form}' is no form of a checkpoint; choose one of: {', '.join(FORMS)}")
    exact, scales = pool.matrices[slot], None
    if form == "fp32":
        matrices = exact.clone()
    elif form == "bf16":
        matrices = exact.to(torch.bfloat16)
    else:
        scales = exact.abs().amax(-1, keepdim=True) / 127
        matrices = (exact / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8)
    error = 0.0 if form == "fp32" else _error(exact, _values(matrices, scales))
    return PackedState(form=form, matrices=matrices, scales=scales, conv=pool.conv[slot].clone(), error=error)


def unpack(state: PackedState, pool: StatePool, slot: int) -> None:
    """Write a packed state into a slot."""
    pool.matrices[slot] = _values(state.matrices, state.scales)  # from whatever device
    pool.conv[slot] = state.conv


def _values(matrices: Tensor, scales: Tensor | None) -> Float[Tensor, "L H K V"]:
    values = matrices.to(torch.float32)
    return values if scales is None else values * scales


def _error(exact: Float[Tensor, "L H K V"], rounded: Float[Tensor, "L H K V"]) -> float:
    if not exact.numel():
        return 0.0
    lost, whole = (x.flatten(2).norm(dim=-1) for x in (rounded - exact, exact))
    return float((lost / whole.clamp(min=torch.finfo(torch.float32).tiny)).max())
