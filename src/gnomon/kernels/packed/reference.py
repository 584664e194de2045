"""Products with packed weights: the values of the weights, inputs rounded once to bf16 where the weights have no more, sums in fp32.

Rounding the inputs is what the released model does at every product; accumulation stays fp32 and the result is not rounded.
Read next: `matrix.py`, `gnomon/kernels/experts/reference.py`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gnomon.kernels.experts.reference import group
from gnomon.kernels.mxfp.reference import fake_mxfp8
from gnomon.kernels.packed.matrix import F32, PackedExperts, PackedMatrix
from gnomon.kernels.situ.reference import situ_glu


def multiply(x: Float[Tensor, "*S I"], w: PackedMatrix) -> Float[Tensor, "*S O"]:
    """W x for every row, in fp32; x is rounded to bf16 first unless the weights are fp32."""
    return torch.nn.functional.linear(_rounded(x, w), w.values())


def experts(
    z: Float[Tensor, "N L"],
    stack: PackedExperts,
    ids: Int[Tensor, "N k"],
    weights: Float[Tensor, "N k"],
    beta1: float | None,
    beta2: float | None,
) -> Float[Tensor, "N L"]:
    """sum_k weights[n,k] W_down round(SiTU(W_gate round(z), W_up round(z))) of expert ids[n,k], with the rounding of `multiply`.

    A stack with MXFP8 activations rounds z and the intermediate to MXFP8 before that.
    Raises `KernelError` for an id that names no expert.
    """
    coarse = fake_mxfp8 if stack.mxfp8_activations else torch.Tensor.float
    z, grouping = coarse(z), group(ids, len(stack))
    outputs = [z.new_empty(0, stack.latent)]
    for e, x in enumerate(z[grouping.rows].split(grouping.counts)):
        if len(x):
            hidden = situ_glu(multiply(x, stack.gate[e]), multiply(x, stack.up[e]), beta1, beta2)
            outputs.append(multiply(coarse(hidden), stack.down[e]))
    by_slot = torch.cat(outputs)[grouping.position].unflatten(0, ids.shape)  # [N, k, L]
    return (weights.unsqueeze(-1) * by_slot).sum(dim=1)


def _rounded(x: Tensor, w: PackedMatrix) -> Tensor:
    return x.float() if w.format == F32 else x.to(torch.bfloat16).float()
