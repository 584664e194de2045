"""Latent attention over pages in C++ (csrc/attention.cpp), for inference: each cached row is read once for all heads and new tokens.

Read next: `gnomon.kernels.native` (where the library comes from), `csrc/attention.h` (the two forms and how one is chosen).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gnomon.kernels import native
from gnomon.kernels.mla.reference import check_paged
from gnomon.kernels.operator import needs_grad

FORMATS = {torch.float32: 0, torch.bfloat16: 1}  # of csrc/matrix.h


def refuse_paged(
    q: Tensor, pages: Tensor, kv_b: Tensor, table: Tensor, past: Tensor, cu_seqlens: Tensor, scale: float
) -> str | None:
    """Needs the library, queries in fp32, pages and weights in fp32 or bf16 on the CPU, and no gradients."""
    if needs_grad(q, pages, kv_b):
        return "gradients are needed, and attention over pages in C++ has no backward"
    for name, x in {"pages": pages, "kv_b": kv_b}.items():
        if x.dtype not in FORMATS or x.device.type != "cpu":
            return f"{name} is {x.dtype} on {x.device}; the C++ kernel takes torch.float32 or torch.bfloat16 on the CPU"
    if not pages.is_contiguous():
        return f"pages have strides {pages.stride()}; the C++ kernel reads them where they are, so they must be contiguous"
    return native.refuse(q=q)


def paged(
    q: Float[Tensor, "N H Q"],
    pages: Float[Tensor, "P page cr"],
    kv_b: Float[Tensor, "H nv c"],
    table: Int[Tensor, "S M"],
    past: Int[Tensor, " S"],
    cu_seqlens: Int[Tensor, " S1"],
    scale: float,
) -> Float[Tensor, "N H v"]:
    """`reference.paged`; with pages and `kv_b` both in bf16, operands of all products are rounded to bf16 and summed in fp32."""
    check_paged(q, pages, kv_b, table, past, cu_seqlens)
    heads, latent, rope = q.shape[1], kv_b.shape[-1], pages.shape[-1] - kv_b.shape[-1]
    nope = q.shape[-1] - rope
    value = kv_b.shape[1] - nope
    q, kv_b, table = q.contiguous(), kv_b.contiguous(), table.int().contiguous()
    past, bounds = past.long().contiguous(), cu_seqlens.long().contiguous()
    product = torch.bfloat16 if pages.dtype == kv_b.dtype == torch.bfloat16 else torch.float32
    out = q.new_empty(len(q), heads, value)
    native.library().gnomon_latent_attention(
        q.data_ptr(), pages.data_ptr(), FORMATS[pages.dtype], pages.shape[1], kv_b.data_ptr(), FORMATS[kv_b.dtype], FORMATS[product],
        table.data_ptr(), table.shape[1], past.data_ptr(), bounds.data_ptr(), len(past), heads, nope, rope, value, latent,
        scale, out.data_ptr(), native.threads(),
    )  # fmt: skip
    return out
