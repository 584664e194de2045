"""Routed experts as dense products over sorted rows: no padding, no capacity, no dropped token (report §2.3).

The pairs (token, expert) are sorted by expert, each expert multiplies its own contiguous rows, and the outputs return to
their tokens in the order of `ids`, so the sum over a token's experts does not depend on what other tokens chose.
Read next: `gnomon/kernels/situ/reference.py` for the activation.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gnomon.errors import KernelError
from gnomon.kernels.mxfp.reference import fake_mxfp8
from gnomon.kernels.situ.reference import situ_glu


class Grouping(NamedTuple):
    """The pairs (token, slot) sorted by expert."""

    rows: Tensor  # token of each sorted pair [N*k]
    order: Tensor  # flat pair (token * k + slot) of each sorted position [N*k]
    position: Tensor  # sorted position of each flat pair [N*k], the inverse of `order`
    counts: list[int]  # pairs per expert, length E


def group(ids: Int[Tensor, "N k"], num_experts: int) -> Grouping:
    """Sort the pairs by expert, stable in token order. Raises `KernelError` for an id outside 0..num_experts-1."""
    flat = ids.reshape(-1)
    if flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= num_experts):
        raise KernelError(f"experts: ids span {int(flat.min())}..{int(flat.max())}, the stacks hold experts 0..{num_experts - 1}")
    order = torch.argsort(flat, stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(order.numel(), device=order.device)
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    return Grouping(order // ids.shape[1], order, position, counts)


def experts(
    z: Float[Tensor, "N L"],
    w_gate: Float[Tensor, "E I L"],
    w_up: Float[Tensor, "E I L"],
    w_down: Float[Tensor, "E L I"],
    ids: Int[Tensor, "N k"],
    weights: Float[Tensor, "N k"],
    beta1: float | None,
    beta2: float | None,
) -> Float[Tensor, "N L"]:
    """u_n = sum_k weights[n,k] * E_ids[n,k](z_n) with E_e(z) = W_down[e] SiTU(W_gate[e] z, W_up[e] z).

    Each expert's output is rounded to the dtype of `z`; the weighted sum runs in fp32 (fp64 for fp64) and is cast once.
    Gradients flow to z, the three stacks and the weights; `ids` are fixed.
    Raises `KernelError` for an id that names no expert.
    """
    return _experts(z, w_gate, w_up, w_down, ids, weights, lambda gate, up: situ_glu(gate, up, beta1, beta2))


def experts_mxfp8(
    z: Float[Tensor, "N L"],
    w_gate: Float[Tensor, "E I L"],
    w_up: Float[Tensor, "E I L"],
    w_down: Float[Tensor, "E L I"],
    ids: Int[Tensor, "N k"],
    weights: Float[Tensor, "N k"],
    beta1: float | None,
    beta2: float | None,
) -> Float[Tensor, "N L"]:
    """The same where every product of an expert reads MXFP8 (report §4.1.4): z and the intermediate are rounded, rule `even`.

    Gradients go straight through both roundings. Raises `KernelError` for widths that are no multiple of 32.
    """
    return _experts(fake_mxfp8(z), w_gate, w_up, w_down, ids, weights, lambda gate, up: fake_mxfp8(situ_glu(gate, up, beta1, beta2)))


def _experts(
    z: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, ids: Tensor, weights: Tensor, activate: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    grouping = group(ids, w_gate.shape[0])
    outputs = []
    for expert, x in enumerate(z[grouping.rows].split(grouping.counts)):
        hidden = activate(x @ w_gate[expert].T, x @ w_up[expert].T)
        outputs.append(hidden @ w_down[expert].T)
    by_slot = torch.cat(outputs)[grouping.position].unflatten(0, ids.shape)  # [N, k, L]
    dtype = torch.promote_types(z.dtype, torch.float32)
    return (weights.to(dtype).unsqueeze(-1) * by_slot.to(dtype)).sum(dim=1).to(z.dtype)
