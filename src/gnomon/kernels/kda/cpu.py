"""KDA in C++: forward token by token on cached slices of the state (csrc/kda.cpp), backward in chunks (csrc/kda_backward.cpp).

Inputs may be bf16 and are converted tile by tile; sums and states are fp32. The forward pass keeps v − Sᵀk of every token and the
state before every `PERIOD`-th one; the backward pass begins from those. Read next: `gnomon.kernels.native` (where the library comes from).
"""

import math
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnomon.errors import KernelError
from gnomon.kernels import native
from gnomon.kernels.kda.layout import document_bounds
from gnomon.kernels.kda.reference import transition_by
from gnomon.kernels.kda.segments import chunk_in_segments, segments_per_document
from gnomon.kernels.operator import needs_grad

NARROWEST = 16  # columns of a slice of the state, the smallest part of a head that a thread takes
PERIOD = 64  # tokens between two kept states: the chunks between them stay in the second-level cache


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
    borders = document_bounds(q.shape[0], q.shape[1], cu_seqlens)
    _check_shapes(q, k, v, g, beta, initial_state, (len(borders) - 1, *q.shape[2:], v.shape[-1]))
    lengths, (heads, keys), values = [b - a for a, b in pairwise(borders)], q.shape[2:], v.shape[-1]
    counts = segments_per_document(lengths, heads, keys, values, native.threads(), -(-values // NARROWEST))
    if all(count == 1 for count in counts):
        return _whole(q, k, v, g, beta, initial_state, borders)
    flat = [x.flatten(0, 1) for x in (q, k, v, g, beta)]
    o, last = chunk_in_segments(_whole, flat, initial_state, borders, counts)
    return o.view(v.shape), last


def _whole(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, borders: list[int]
) -> tuple[Tensor, Tensor]:
    """Documents between these borders of the rows, whatever the leading dimensions."""
    bounds = torch.tensor(borders)
    if needs_grad(q, k, v, g, beta, initial):
        return _Chunk.apply(q, k, v, g, beta, initial, bounds)
    o, last, *_ = _forward(q, k, v, g, beta, initial, bounds, keep=False)
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
    """Needs the library, fp32 or bf16 on the CPU, and an fp32 state."""
    return native.refuse_rows(q=q, k=k, v=v, g=g, beta=beta) or native.refuse(initial_state=initial_state)


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
    """Needs the library and fp32 or bf16 on the CPU."""
    return native.refuse_rows(k=k, v=v, g=g, beta=beta)


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
    sizes = (q.shape[:-1].numel(), q.shape[-1], v.shape[-1])
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
    """Needs the library and fp32 or bf16 on the CPU."""
    return native.refuse_rows(q=q, k=k)


def decay(
    z: Float[Tensor, "*B H K"], A_log: Float[Tensor, " H"], lower_bound: float | None, bias: Float[Tensor, " HK"] | None = None
) -> Float[Tensor, "*B H K"]:
    """`reference.decay` with a bound, in one pass (csrc/decay.cpp)."""
    return _Decay.apply(z, A_log, lower_bound, bias)


def refuse_decay(z: Tensor, A_log: Tensor, lower_bound: float | None, bias: Tensor | None = None) -> str | None:
    """Needs the library, a bound and fp32 on the CPU."""
    if lower_bound is None:
        return "there is no bound; the C++ kernel has the bounded form alone"
    return native.refuse(z=z, A_log=A_log, bias=bias)


def decode(
    projected: Float[Tensor, "N C"],
    raw_decay: Float[Tensor, "N H K"],
    raw_beta: Float[Tensor, "N H"],
    gate: Float[Tensor, "N H K"],
    conv: Float[Tensor, "S W1 C"],
    matrix: Float[Tensor, "S H K K"],
    conv_weight: Float[Tensor, "C W"],
    A_log: Float[Tensor, " H"],
    dt_bias: Float[Tensor, " HK"],
    norm: Float[Tensor, " K"],
    lower_bound: float | None,
    eps: float,
    cu_seqlens: Int[Tensor, " S1"],
    copies: Int[Tensor, "M 2"] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`reference.decode` in one call (csrc/kda_decode.cpp); a row's bits depend on its own sequence alone, not on its cut into calls."""
    bounds = torch.tensor(document_bounds(1, len(projected), cu_seqlens))
    rows = [x.contiguous() for x in (projected, raw_decay, raw_beta, gate)]
    weights = _decode_weights(rows, bounds, conv, matrix, conv_weight, A_log, dt_bias, norm)
    conv, matrix = (x.clone(memory_format=torch.contiguous_format) for x in (conv, matrix))
    wanted = torch.empty(0, 2, dtype=torch.int64) if copies is None else copies.to(torch.int64)
    _check_copies(wanted, bounds)
    at = torch.cat([wanted, torch.arange(len(wanted))[:, None]], 1)
    kept = conv.new_empty(len(at), *conv.shape[1:]), matrix.new_empty(len(at), *matrix.shape[1:])
    out, slots = torch.empty_like(rows[3]), torch.arange(len(conv))
    sizes = (raw_decay.shape[1], raw_decay.shape[2], conv_weight.shape[1])
    native.library().gnomon_kda_decode(
        *(x.data_ptr() for x in weights), lower_bound or 0.0, eps, *sizes, bounds.data_ptr(), len(conv), *(x.data_ptr() for x in rows),
        conv.data_ptr(), matrix.data_ptr(), slots.data_ptr(), 1, at.data_ptr(), len(at), *(x.data_ptr() for x in kept), None,
        out.data_ptr(), native.threads(),
    )
    return out, conv, matrix, *kept


def refuse_decode(
    projected: Tensor, raw_decay: Tensor, raw_beta: Tensor, gate: Tensor, conv: Tensor, matrix: Tensor, conv_weight: Tensor,
    A_log: Tensor, dt_bias: Tensor, norm: Tensor, lower_bound: float | None, eps: float, cu_seqlens: Tensor, copies: Tensor | None = None,
) -> str | None:
    """Needs the library, fp32 on the CPU and no gradients."""
    tensors = (projected, raw_decay, raw_beta, gate, conv, matrix, conv_weight, A_log, dt_bias, norm)
    if needs_grad(*tensors):
        return "gradients are needed, and decoding in C++ has no backward"
    names = ("projected", "raw_decay", "raw_beta", "gate", "conv", "matrix", "conv_weight", "A_log", "dt_bias", "norm")
    return native.refuse(**dict(zip(names, tensors, strict=True)))


def commit(
    projected: Float[Tensor, "N C"],
    raw_decay: Float[Tensor, "N H K"],
    raw_beta: Float[Tensor, "N H"],
    conv: Float[Tensor, "S W1 C"],
    matrix: Float[Tensor, "S H K K"],
    conv_weight: Float[Tensor, "C W"],
    A_log: Float[Tensor, " H"],
    dt_bias: Float[Tensor, " HK"],
    lower_bound: float | None,
    cu_seqlens: Int[Tensor, " S1"],
    prefix: Int[Tensor, " S"],
) -> tuple[Tensor, Tensor]:
    """`reference.commit` (csrc/kda_decode.cpp): the same bits as `decode` of the prefix alone."""
    bounds, prefix = torch.tensor(document_bounds(1, len(projected), cu_seqlens)), prefix.to(torch.int64).contiguous()
    rows = [projected, raw_decay, raw_beta]
    norm = dt_bias[: raw_decay.shape[2]]  # neither it nor a gate takes part
    weights = _decode_weights([*rows, raw_decay], bounds, conv, matrix, conv_weight, A_log, dt_bias, norm)[:3]
    if len(prefix) != len(conv) or bool(((prefix < 0) | (prefix > bounds.diff())).any()):
        raise KernelError(f"prefix {prefix.tolist()[:8]}… must lie between 0 and each sequence's length, {bounds.diff().tolist()[:8]}…")
    conv, matrix = (x.clone(memory_format=torch.contiguous_format) for x in (conv, matrix))
    inputs = torch.cat([x.flatten(1) for x in rows], 1)
    sizes = (raw_decay.shape[1], raw_decay.shape[2], conv_weight.shape[1])
    slots = torch.arange(len(conv))
    native.library().gnomon_kda_commit(
        *(x.data_ptr() for x in weights), lower_bound or 0.0, *sizes, inputs.data_ptr(), bounds.data_ptr(), len(conv), prefix.data_ptr(),
        conv.data_ptr(), matrix.data_ptr(), slots.data_ptr(), native.threads(),
    )
    return conv, matrix


def refuse_commit(
    projected: Tensor, raw_decay: Tensor, raw_beta: Tensor, conv: Tensor, matrix: Tensor, conv_weight: Tensor, A_log: Tensor,
    dt_bias: Tensor, lower_bound: float | None, cu_seqlens: Tensor, prefix: Tensor,
) -> str | None:
    """Needs the library, fp32 on the CPU and no gradients."""
    return refuse_decode(
        projected, raw_decay, raw_beta, raw_decay, conv, matrix, conv_weight, A_log, dt_bias, dt_bias, lower_bound, 0.0, cu_seqlens
    )


def _decode_weights(rows: list[Tensor], bounds: Tensor, conv: Tensor, matrix: Tensor, *weights: Tensor) -> list[Tensor]:
    """The weights as the library wants them, taps first; refuses shapes that do not fit each other."""
    count, heads, width = rows[1].shape
    conv_weight, *_ = weights
    channels, taps, sequences = 3 * heads * width, conv_weight.shape[1], len(bounds) - 1
    expected = {
        "projected": (rows[0], (count, channels)), "raw_beta": (rows[2], (count, heads)), "gate": (rows[3], rows[1].shape),
        "conv": (conv, (sequences, taps - 1, channels)), "matrix": (matrix, (sequences, heads, width, width)),
        "conv_weight": (conv_weight, (channels, taps)), "A_log": (weights[1], (heads,)), "dt_bias": (weights[2], (heads * width,)),
        "norm": (weights[3], (width,)),
    }
    for name, (x, shape) in expected.items():
        if tuple(x.shape) != tuple(shape):
            raise KernelError(f"{name} has shape {tuple(x.shape)}, but raw_decay {tuple(rows[1].shape)} of {sequences} sequences "
                              f"needs {tuple(shape)}")
    return [conv_weight.mT.contiguous(), *(x.contiguous() for x in weights[1:])]


def _check_copies(copies: Tensor, bounds: Tensor) -> None:
    """Copies are taken in one walk over the tokens: they must be in order and inside their sequence."""
    rows = copies.tolist()
    lengths = bounds.diff().tolist()
    if rows != sorted(rows) or any(not 0 <= s < len(lengths) or not 0 <= tokens <= lengths[s] for s, tokens in rows):
        raise KernelError(f"copies must be rising pairs (sequence, tokens seen) inside sequences of {lengths[:8]}… tokens: {rows[:8]}…")


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, scale: float) -> Tensor:
        x = x.contiguous()
        ctx.eps, ctx.scale = eps, scale
        ctx.save_for_backward(x)
        y, sizes = torch.empty_like(x, dtype=torch.float32), (x.shape[:-1].numel(), x.shape[-1])
        native.library().gnomon_unit_forward(x.data_ptr(), native.bf16_bits(x), *sizes, eps, scale, y.data_ptr(), native.threads())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None, None]:
        (x,), d_y = ctx.saved_tensors, d_y.contiguous()
        d_x, sizes = torch.empty_like(x), (x.shape[:-1].numel(), x.shape[-1])
        inputs = (x.data_ptr(), d_y.data_ptr(), native.bf16_bits(x), *sizes, ctx.eps, ctx.scale)
        native.library().gnomon_unit_backward(*inputs, d_x.data_ptr(), native.threads())
        return d_x, None, None


class _Decay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, A_log: Tensor, lower_bound: float, bias: Tensor | None) -> Tensor:
        z, A_log, bias = z.contiguous(), A_log.contiguous(), None if bias is None else bias.contiguous()
        if len(A_log) != z.shape[-2] or (bias is not None and bias.numel() != z.shape[-2:].numel()):
            raise KernelError(f"decay: logits {tuple(z.shape)} need a rate for each of {z.shape[-2]} heads and a bias for each channel")
        g, ctx.bound = torch.empty_like(z), lower_bound
        inputs = (z.data_ptr(), native.address(bias), A_log.data_ptr())
        sizes = (z.shape[:-2].numel(), *z.shape[-2:])
        native.library().gnomon_decay_forward(*inputs, lower_bound, *sizes, g.data_ptr(), native.threads())
        ctx.save_for_backward(z, A_log, bias, g)
        return g

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_g: Tensor) -> tuple[Tensor | None, ...]:
        z, A_log, bias, g = ctx.saved_tensors
        d_g, d_z, d_rate = d_g.contiguous(), torch.empty_like(z), torch.empty_like(A_log)
        d_bias = z.new_empty(z.shape[-2:].numel()) if bias is None else torch.empty_like(bias)
        inputs = (z.data_ptr(), native.address(bias), A_log.data_ptr(), g.data_ptr(), d_g.data_ptr())
        outputs = (d_z.data_ptr(), d_bias.data_ptr(), d_rate.data_ptr())
        sizes = (z.shape[:-2].numel(), *z.shape[-2:])
        native.library().gnomon_decay_backward(*inputs, ctx.bound, *sizes, *outputs, native.threads())
        return d_z, d_rate, None, None if bias is None else d_bias


class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta, initial, bounds = inputs
        o, last, *kept = _forward(*inputs, keep=True)
        ctx.has_initial, ctx.value_type = initial is not None, v.dtype
        ctx.save_for_backward(q, k, g, beta, *kept, bounds)
        return o, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        *saved, bounds = ctx.saved_tensors
        q, k, g, beta, error, states, d_o, d_last = (x.contiguous() for x in (*saved, d_o, d_last))
        types = (q.dtype, k.dtype, ctx.value_type, g.dtype, beta.dtype)
        grads = [torch.empty_like(x, dtype=torch.float32) for x in (q, k, error, g, beta, d_last)]
        operands, inputs = (q, k, g, beta), (error, states, d_o, d_last, bounds)
        sizes = (len(bounds) - 1, *q.shape[-2:], error.shape[-1], PERIOD)
        native.library().gnomon_kda_backward(
            *(x.data_ptr() for x in operands), native.bf16_bits(*operands), *(x.data_ptr() for x in inputs), *sizes,
            *(x.data_ptr() for x in grads), native.threads(),
        )
        return *(x.to(dtype) for x, dtype in zip(grads, types, strict=False)), grads[5] if ctx.has_initial else None, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, bounds: Tensor, *, keep: bool
) -> tuple[Tensor, ...]:
    """Outputs and last states, and with `keep` what the backward pass needs."""
    q, k, v, g, beta = (x.detach().contiguous() for x in (q, k, v, g, beta))
    initial = None if initial is None else initial.detach().contiguous()
    documents, (heads, keys), values = len(bounds) - 1, q.shape[-2:], v.shape[-1]
    outputs = [torch.empty_like(v, dtype=torch.float32), g.new_empty(documents, heads, keys, values, dtype=torch.float32)]
    if keep:
        periods = int(((bounds.diff() + PERIOD - 1) // PERIOD).sum())
        outputs += [torch.empty_like(outputs[0]), outputs[1].new_empty(periods, heads, keys, values)]
    operands = (q, k, v, g, beta)
    results = [x.data_ptr() for x in outputs] + [None] * (4 - len(outputs))
    native.library().gnomon_kda_forward(
        *(x.data_ptr() for x in operands), native.bf16_bits(*operands), native.address(initial), bounds.data_ptr(), documents, heads, keys,
        values, PERIOD, *results, native.threads(),
    )
    return tuple(outputs)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, states: tuple[int, ...]) -> None:
    """Plain pointers carry no shapes: a mismatch must not reach them."""
    expected = {"k": (k, q.shape), "g": (g, q.shape), "v": (v, (*q.shape[:-1], v.shape[-1])), "beta": (beta, q.shape[:-1])}
    if state is not None:
        expected["state"] = (state, states)
    for name, (x, shape) in expected.items():
        if tuple(x.shape) != tuple(shape):
            raise KernelError(f"{name} has shape {tuple(x.shape)}, but q {tuple(q.shape)} needs {tuple(shape)}")
