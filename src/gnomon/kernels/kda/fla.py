"""KDA on NVIDIA GPUs through flash-linear-attention's Triton kernels; a thin adapter, nothing is rewritten here.

The package is optional (`pip install gnomon[gpu]`). Its products run on matrix units, so results agree with the reference to their
precision, not to fp32's. Read next: `gnomon.kernels.kda.reference`.
"""

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

SAFE_LOG_DECAY = -5.0  # gates bounded by this may use the package's dense diagonal tiles
MAX_KEYS = 256  # the widest key its kernels are written for


def chunk(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    initial_state: Float[Tensor, "S H K V"] | None = None,
    cu_seqlens: Int[Tensor, " S1"] | None = None,
    min_log_decay: float = -math.inf,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "S H K V"]]:
    """`reference.chunk` by `fla.ops.kda.chunk_kda`, with queries already scaled and gates already computed."""
    kernel, reason = _kernel()
    assert kernel is not None, reason
    return kernel(
        q,
        k,
        v,
        g,
        beta,
        scale=1.0,
        initial_state=initial_state,
        output_final_state=True,
        safe_gate=min_log_decay >= SAFE_LOG_DECAY,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(q.device, torch.int64),
    )


def refuse_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    min_log_decay: float = -math.inf,
) -> str | None:
    """Needs the package and Triton, CUDA tensors in at most fp32, keys of at most 256 channels and no empty document."""
    for name, x in {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}.items():
        if x is not None and (not x.is_cuda or x.dtype == torch.float64):
            return f"{name} is {x.dtype} on {x.device}; flash-linear-attention takes at most torch.float32 on CUDA"
    if initial_state is not None and initial_state.dtype != torch.float32:
        return f"initial_state is {initial_state.dtype}; flash-linear-attention takes states in torch.float32"
    if q.shape[-1] > MAX_KEYS:
        return f"keys have {q.shape[-1]} channels; flash-linear-attention takes at most {MAX_KEYS}"
    if q.shape[1] == 0 or (cu_seqlens is not None and bool((cu_seqlens.diff() <= 0).any())):
        return "an empty document passes its state through, which flash-linear-attention does not promise"
    return _kernel()[1]


@functools.cache
def _kernel() -> tuple[Callable[..., Any] | None, str | None]:
    """The package's function, or why there is none."""
    try:
        return importlib.import_module("fla.ops.kda").chunk_kda, None
    except ImportError as error:
        return None, f"flash-linear-attention is not usable ({error}): pip install gnomon[gpu]"
