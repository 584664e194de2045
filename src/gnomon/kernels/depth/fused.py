"""The depth read with a handwritten backward: keeps two numbers per token and source, and no copy of any source.

With r_j = 1/rms(v_j), l_j = r_j <u, v_j> (u is the query), p = softmax(l), h = sum_j p_j v_j and dh the incoming gradient:
  dp_j = <dh, v_j>,  dl_j = p_j (dp_j - sum_i p_i dp_i),
  dv_j = p_j dh + dl_j (r_j u - l_j r_j^2 v_j / D),  du = sum_j dl_j r_j v_j.
Only r and l are saved; the sources are held by reference, so a read costs no more activation memory than a residual sum
(report §5.2.2). Read next: `gnomon/model/residuals.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnomon.kernels.depth.reference import check_sources, compute_dtype


def refuse_depth_read(sources: Sequence[Tensor], query: Tensor, eps: float) -> str | None:
    """Runs everything the reference runs."""
    return None


def depth_read(sources: Sequence[Tensor], query: Float[Tensor, "D"], eps: float) -> Float[Tensor, "B T D"]:
    """As the reference."""
    check_sources(sources, query)
    return _DepthRead.apply(eps, query, *sources)


class _DepthRead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, eps: float, query: Tensor, *sources: Tensor) -> Tensor:
        shape, width, dtype = sources[0].shape, sources[0].shape[-1], compute_dtype(sources[0])
        u = query.to(dtype)
        inverse_rms = torch.empty(len(sources), shape[:-1].numel(), dtype=dtype, device=query.device)  # [n, N]
        scores = torch.empty_like(inverse_rms)
        for j, source in enumerate(sources):
            v = source.reshape(-1, width).to(dtype)
            square = torch.linalg.vector_norm(v, dim=-1).square_()
            torch.rsqrt(square.div_(width).add_(eps), out=inverse_rms[j])
            torch.mv(v, u, out=scores[j])
        scores *= inverse_rms
        p = scores.softmax(dim=0).unsqueeze(-1)
        mixed = sources[0].reshape(-1, width).to(dtype) * p[0]
        for j in range(1, len(sources)):
            mixed.addcmul_(sources[j].reshape(-1, width).to(dtype), p[j])
        ctx.save_for_backward(query, inverse_rms, scores, *sources)
        return mixed.to(sources[0].dtype).view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, inverse_rms, scores, *sources = ctx.saved_tensors
        shape, width, dtype = sources[0].shape, sources[0].shape[-1], inverse_rms.dtype
        u, dh = query.to(dtype), grad.reshape(-1, width).to(dtype)
        p = scores.softmax(dim=0)  # [n, N]
        dp = torch.stack([torch.linalg.vecdot(source.reshape(-1, width).to(dtype), dh) for source in sources])
        dl = p * (dp - (p * dp).sum(dim=0))
        along_u = dl * inverse_rms
        along_v = (along_u * inverse_rms).mul_(scores).div_(-width)
        du = torch.zeros_like(u)
        d_sources: list[Tensor | None] = []
        for j, source in enumerate(sources):
            v = source.reshape(-1, width).to(dtype)
            du.addmv_(v.T, along_u[j])
            if ctx.needs_input_grad[2 + j]:
                dv = dh * p[j].unsqueeze(-1)
                dv.addcmul_(v, along_v[j].unsqueeze(-1)).addr_(along_u[j], u)
                d_sources.append(dv.to(source.dtype).view(shape))
            else:
                d_sources.append(None)
        return None, du.to(query.dtype), *d_sources
