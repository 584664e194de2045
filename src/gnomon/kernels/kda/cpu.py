"""KDA in C++ (csrc/kda.cpp): token by token on cached slices of the state, forward and backward, fp32.

On a CPU the recurrence itself needs fewer operations than the chunkwise form and no guard against large exponents.
The forward pass keeps v − Sᵀk of every token and the state before every `PERIOD`-th one; the backward pass replays from those.
Read next: `gnomon.kernels.native` (where the library comes from).
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnomon.errors import KernelError
from gnomon.kernels import native
from gnomon.kernels.kda.layout import document_bounds
from gnomon.kernels.kda.reference import transition_by
from gnomon.kernels.operator import needs_grad

PERIOD = 32  # tokens between two kept states: their history and operands stay in the first-level cache


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
    """`reference.chunk`; any decay is safe here, so `min_log_decay` is not needed."""
    bounds = torch.tensor(document_bounds(q.shape[0], q.shape[1], cu_seqlens))
    _check_shapes(q, k, v, g, beta, initial_state, (len(bounds) - 1, *q.shape[2:], v.shape[-1]))
    if needs_grad(q, k, v, g, beta, initial_state):
        return _Chunk.apply(q, k, v, g, beta, initial_state, bounds)
    o, last, *_ = _forward(q, k, v, g, beta, initial_state, bounds, keep=False)
    return o, last


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
    """Needs the library and fp32 on the CPU."""
    return native.refuse(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)


def transition(
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    cu_seqlens: Int[Tensor, " S1"] | None = None,
    min_log_decay: float = -math.inf,
) -> tuple[Float[Tensor, "S H K K"], Float[Tensor, "S H K V"]]:
    """`reference.transition` by the `chunk` above."""
    return transition_by(chunk, k, v, g, beta, cu_seqlens, min_log_decay)


def refuse_transition(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None, min_log_decay: float = -math.inf
) -> str | None:
    """Needs the library and fp32 on the CPU."""
    return native.refuse(k=k, v=v, g=g, beta=beta)


def step(
    q: Float[Tensor, "B H K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B H V"],
    g: Float[Tensor, "B H K"],
    beta: Float[Tensor, "B H"],
    state: Float[Tensor, "B H K V"],
) -> tuple[Float[Tensor, "B H V"], Float[Tensor, "B H K V"]]:
    """`reference.step` in one pass over the state."""
    _check_shapes(q, k, v, g, beta, state, (*q.shape, v.shape[-1]))
    q, k, v, g, beta, state = (x.contiguous() for x in (q, k, v, g, beta, state))
    o, following = torch.empty_like(v), torch.empty_like(state)
    sizes = (q.shape[0] * q.shape[1], q.shape[2], v.shape[2])
    inputs = (native.address(x) for x in (q, k, v, g, beta, state))
    native.library().gnomon_kda_step(*inputs, *sizes, o.data_ptr(), following.data_ptr(), native.threads())
    return o, following


def refuse_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> str | None:
    """Needs the library, fp32 on the CPU and no gradients."""
    if needs_grad(q, k, v, g, beta, state):
        return "gradients are needed, and the step in C++ has no backward"
    return native.refuse(q=q, k=k, v=v, g=g, beta=beta, state=state)


def prepare(
    q: Float[Tensor, "B T H K"], k: Float[Tensor, "B T H K"], eps: float = 1e-6
) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T H K"]]:
    """`reference.prepare`, one pass over each row."""
    return _Unit.apply(q, eps, q.shape[-1] ** -0.5), _Unit.apply(k, eps, 1.0)


def refuse_prepare(q: Tensor, k: Tensor, eps: float = 1e-6) -> str | None:
    """Needs the library and fp32 on the CPU."""
    return native.refuse(q=q, k=k)


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, scale: float) -> Tensor:
        x = x.contiguous()
        ctx.eps, ctx.scale = eps, scale
        ctx.save_for_backward(x)
        y, width = torch.empty_like(x), x.shape[-1]
        native.library().gnomon_unit_forward(x.data_ptr(), x.shape[:-1].numel(), width, eps, scale, y.data_ptr(), native.threads())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None, None]:
        (x,), d_y = ctx.saved_tensors, d_y.contiguous()
        d_x, sizes = torch.empty_like(x), (x.shape[:-1].numel(), x.shape[-1])
        inputs = (x.data_ptr(), d_y.data_ptr(), *sizes, ctx.eps, ctx.scale)
        native.library().gnomon_unit_backward(*inputs, d_x.data_ptr(), native.threads())
        return d_x, None, None


class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, _, g, beta, initial, bounds = inputs
        o, last, *kept = _forward(*inputs, keep=True)
        ctx.has_initial = initial is not None
        ctx.save_for_backward(q, k, g, beta, *kept, bounds)
        return o, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        *saved, bounds = ctx.saved_tensors
        q, k, g, beta, error, states, d_o, d_last = (x.contiguous() for x in (*saved, d_o, d_last))
        grads = [torch.empty_like(x) for x in (q, k, error, g, beta, d_last)]
        inputs = [native.address(x) for x in (q, k, g, beta, error, states, d_o, d_last, bounds)]
        sizes = (len(bounds) - 1, *q.shape[2:], error.shape[-1], PERIOD)
        native.library().gnomon_kda_backward(*inputs, *sizes, *(x.data_ptr() for x in grads), native.threads())
        return *grads[:5], grads[5] if ctx.has_initial else None, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, bounds: Tensor, *, keep: bool
) -> tuple[Tensor, ...]:
    """Outputs and last states, and with `keep` what the backward pass needs."""
    q, k, v, g, beta = (x.detach().contiguous() for x in (q, k, v, g, beta))
    initial = None if initial is None else initial.detach().contiguous()
    documents, (heads, keys), values = len(bounds) - 1, q.shape[2:], v.shape[-1]
    outputs = [torch.empty_like(v), v.new_empty(documents, heads, keys, values)]
    if keep:
        periods = int(((bounds.diff() + PERIOD - 1) // PERIOD).sum())
        outputs += [torch.empty_like(v), v.new_empty(periods, heads, keys, values)]
    inputs = [native.address(x) for x in (q, k, v, g, beta, initial, bounds)]
    results = [x.data_ptr() for x in outputs] + [None] * (4 - len(outputs))
    native.library().gnomon_kda_forward(*inputs, documents, heads, keys, values, PERIOD, *results, native.threads())
    return tuple(outputs)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, states: tuple[int, ...]) -> None:
    """Plain pointers carry no shapes: a mismatch must not reach them."""
    expected = {"k": (k, q.shape), "g": (g, q.shape), "v": (v, (*q.shape[:-1], v.shape[-1])), "beta": (beta, q.shape[:-1])}
    if state is not None:
        expected["state"] = (state, states)
    for name, (x, shape) in expected.items():
        if tuple(x.shape) != tuple(shape):
            raise KernelError(f"{name} has shape {tuple(x.shape)}, but q {tuple(q.shape)} needs {tuple(shape)}")
