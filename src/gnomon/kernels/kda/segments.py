"""One long document on many threads: its segments are walked at the same time and composed exactly (report section 5.1.1).

The recurrence is affine in the state. A segment walked from [0 | I] gives, per token, what it would put out from a zero state, and
the row that multiplies the state it really starts from; and at its end the transition (S̃, M). States at the borders follow one from
the other, S ← S̃ + M S, and the outputs are completed by one product. All of it is differentiable, so gradients take the same path.
Read next: `gnomon.kernels.kda.reference.transition`.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

MIN_SEGMENT = 256  # tokens; below, the product with the incoming state and the start of a region weigh too much
MIN_GAIN = 1.2  # a split must promise this much, or the model's own error decides
TAIL = 0.25  # completing the outputs: one multiplication per entry of the state, where the walk needs four operations


def segments_per_document(lengths: list[int], heads: int, keys: int, values: int, threads: int, width: int) -> list[int]:
    """How many segments each document should be walked in; ones where a split does not pay.

    `width` is how many threads can share one head without a split (its slices of columns). A split walks keys + values columns
    instead of values, so it pays only where at least that many more threads find work.
    """
    whole = _seconds(lengths, [1] * len(lengths), heads, 1.0, threads, width)
    best, split = whole / MIN_GAIN, [1] * len(lengths)
    for pieces in range(2, threads + 1):
        # The longest document is cut into `pieces`, the others into pieces of about that length.
        target = max(MIN_SEGMENT, -(-max(lengths, default=0) // pieces))
        counts = [max(1, round(length / target)) for length in lengths]
        extra = (keys + values) / values + TAIL
        if (seconds := _seconds(lengths, counts, heads, extra, threads, width)) < best:
            best, split = seconds, counts
    return split


def _seconds(lengths: list[int], counts: list[int], heads: int, extra: float, threads: int, width: int) -> float:
    """Time in tokens walked by one thread: bounded by the sum of the work and by the longest piece."""
    cost = [length * (extra if count > 1 else 1.0) for length, count in zip(lengths, counts, strict=True)]
    longest = max((c / count for c, count in zip(cost, counts, strict=True)), default=0.0)
    return max(sum(cost) * heads / threads, longest / min(width, threads))


def chunk_in_segments(
    form: Callable[..., tuple[Tensor, Tensor]],
    rows: list[Tensor],
    initial: Tensor | None,
    bounds: list[int],
    counts: list[int],
) -> tuple[Tensor, Tensor]:
    """`form(q, k, v, g, beta, initial, bounds)` on `rows` of tokens q, k, v, g, beta [N, H, ·], document s in `counts[s]` segments.

    Equal to the unsplit result up to fp32 rounding of the border states, which do not pile up: M shrinks what comes in.
    """
    q, k, v, g, beta = rows
    heads, keys, values = k.shape[1], k.shape[2], v.shape[2]
    cuts = [a + (b - a) * i // n for (a, b), n in zip(pairwise(bounds), counts, strict=True) for i in range(n)] + bounds[-1:]
    zeros = v.new_zeros(len(cuts) - 1, heads, keys, values, dtype=torch.float32)
    identity = torch.eye(keys, dtype=zeros.dtype, device=v.device).expand(len(cuts) - 1, heads, -1, -1)
    wide = torch.cat([v, v.new_zeros(1).expand(*v.shape[:2], keys)], -1)
    o, last = form(q, k, wide, g, beta, torch.cat([zeros, identity], -1), cuts)
    added, carried = last.split([values, keys], -1)
    starts: list[Tensor] = []
    ends: list[Tensor] = []
    segment = 0
    for s, n in enumerate(counts):
        state = zeros[0] if initial is None else initial[s]
        for _ in range(n):
            starts.append(state)
            state = added[segment] + carried[segment] @ state
            segment += 1
        ends.append(state)
    own, reach = o.split([values, keys], -1)
    parts = [own[a:b] + torch.einsum("nhk,hkv->nhv", reach[a:b], state) for (a, b), state in zip(pairwise(cuts), starts, strict=True)]
    return torch.cat([own[:0], *parts]), torch.stack(ends) if ends else last[..., :values]
