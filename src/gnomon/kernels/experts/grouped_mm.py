"""Routed experts on NVIDIA GPUs through PyTorch's grouped product, `torch.nn.functional.grouped_mm`; a thin adapter.

All experts' rows go through one kernel per projection, and nothing waits for the device: expert sizes stay there. Autograd is PyTorch's.
Read next: `reference.py`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from gnomon.kernels.situ import situ_glu

ALIGNMENT = 8  # the kernel wants rows of whole 16 bytes
CAPABILITY = (8, 0)  # the first GPUs that it runs on


def refuse_experts(
    z: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, ids: Tensor, weights: Tensor, beta1: float | None, beta2: float | None
) -> str | None:
    """Needs CUDA tensors in bf16, widths that are multiples of 8, and a GPU of at least Ampere's generation."""
    if not hasattr(functional, "grouped_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
    for name, x in {"z": z, "w_gate": w_gate, "w_up": w_up, "w_down": w_down}.items():
        if not x.is_cuda or x.dtype != torch.bfloat16:
            return f"{name} is {x.dtype} on {x.device}; PyTorch's grouped product takes torch.bfloat16 on CUDA"
    if w_gate.shape[1] % ALIGNMENT or w_gate.shape[2] % ALIGNMENT:
        return f"experts are {tuple(w_gate.shape[1:])}; PyTorch's grouped product takes widths that are multiples of {ALIGNMENT}"
    if torch.cuda.get_device_capability(z.device) < CAPABILITY:
        return f"{torch.cuda.get_device_name(z.device)} has no grouped product in bf16"
    return None


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
    """As the reference, except that ids are not checked: that would wait for the device."""
    order = torch.argsort(ids.reshape(-1), stable=True)
    position = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    ends = torch.bincount(ids.reshape(-1), minlength=w_gate.shape[0]).cumsum(0).to(torch.int32)
    x = z.index_select(0, order // ids.shape[1])
    gate, up = (functional.grouped_mm(x, w.mT, offs=ends) for w in (w_gate, w_up))
    outputs = functional.grouped_mm(situ_glu(gate, up, beta1, beta2), w_down.mT, offs=ends)
    by_slot = outputs.index_select(0, position).unflatten(0, ids.shape)
    return (weights.float().unsqueeze(-1) * by_slot.float()).sum(dim=1).to(z.dtype)
