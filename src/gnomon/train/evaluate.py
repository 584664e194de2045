"""Held-out text: loss, bits per byte, and loss by position (report §3, context extension).

Bits per byte compares models with different vocabularies, and compressors. Loss by position shows whether more context helps,
also beyond the trained length: nothing in the model encodes a position, so nothing needs recalibration.
Read next: `report.py`.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnomon.data.packing import one_pass
from gnomon.data.pictures import Pictures
from gnomon.data.shards import Shards
from gnomon.data.tokenizer import Tokenizer
from gnomon.model.multimodal import Multimodal
from gnomon.model.transformer import Transformer
from gnomon.train.objective import token_losses

BATCH_TOKENS = 8192  # tokens of one forward pass
PICTURES_TOGETHER = 32
FIRST_BUCKET = 32  # positions below this are one bucket; buckets double from here


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """Held-out result at one context length. `by_position` rows are (first position, past the last, loss, tokens), `answers` is the
    share of questions about scattered evidence that are answered right, in windows of this context, `kinds` the same by kind of task with
    their number, `distances` rows (nearest, past the farthest, share of pieces found, pieces). `pictures` has the share of right answers
    about pictures and their number by kind."""

    context: int
    loss: float
    bits_per_byte: float
    tokens: int
    by_position: tuple[tuple[int, int, float, int], ...]
    answers: float | None = None
    kinds: dict[str, tuple[float, int]] = field(default_factory=dict)
    distances: tuple[tuple[int, int, float, int], ...] = ()
    pictures: dict[str, tuple[float, int]] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@contextmanager
def frozen(model: Transformer) -> Iterator[None]:
    """Inside, the model only looks: routers and logits are not watched, nothing is kept for a backward pass."""
    names = ("observing", "auxiliary", "watch_logits")
    watchers = [(module, name, getattr(module, name)) for module in model.modules() for name in names if hasattr(module, name)]
    training = model.training
    for module, name, _ in watchers:
        setattr(module, name, False)
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, name, value in watchers:
            setattr(module, name, value)
        model.train(training)


def held_out(model: Transformer, shards: Sequence[Shards], tokenizer: Tokenizer, context: int, tokens: int) -> HeldOut:
    """Evaluate at a context length over about `tokens` tokens of each source.

    The first token of a document, which nothing precedes, counts neither as loss nor as bytes. Loss by position reads only
    documents that are long enough to reach every bucket, so that buckets differ in position alone.
    """
    lengths = byte_lengths(tokenizer)
    with frozen(model):
        nats, size, count = 0.0, 0, 0
        for part in shards:
            n, b, c = _sums(model, part, lengths, context, tokens, tokenizer.pad_id)
            nats, size, count = nats + n, size + b, count + c
        by_position = loss_by_position(model, shards, context, tokens)
    loss = nats / max(1, count)
    return HeldOut(context=context, loss=loss, bits_per_byte=nats / math.log(2) / max(1, size), tokens=count, by_position=by_position)


def share_read(eye: Multimodal, pictures: Pictures, samples: int) -> float:
    """Share of pictures whose whole answer is the likeliest token at every place, which is what greedy generation would say.

    Samples are looked at together, end to end; the model must be `frozen`.
    """
    right, device = 0, next(eye.parameters()).device
    for first in range(0, samples, PICTURES_TOGETHER):
        drawn = [pictures.sample(index) for index in range(first, min(samples, first + PICTURES_TOGETHER))]
        ends = np.cumsum([len(sample.item.tokens) for sample in drawn])
        starts = [0, *ends.tolist()]
        ids = torch.from_numpy(np.concatenate([sample.item.tokens for sample in drawn])).to(device)
        images = [image.moved(start) for start, sample in zip(starts, drawn, strict=False) for image in sample.item.images]
        bounds = torch.tensor(starts, dtype=torch.int32, device=device)
        hidden = eye.language_model.hidden(None, embeddings=eye.embeddings(ids[None], images), cu_seqlens=bounds)[0]
        for start, sample in zip(starts, drawn, strict=False):
            places = torch.arange(start + sample.answer[0], start + sum(sample.answer), device=device)
            right += bool((eye.language_model.head(hidden[places - 1]).argmax(-1) == ids[places]).all())
    return right / samples


def byte_lengths(tokenizer: Tokenizer) -> Tensor:
    """Bytes of text behind each id; reserved ids stand for none."""
    specials = set(tokenizer.special_ids.values())
    return torch.tensor([0 if i in specials else len(tokenizer.decode_bytes([i])) for i in range(tokenizer.vocab_size)])


def _sums(model: Transformer, shards: Shards, lengths: Tensor, context: int, tokens: int, pad_id: int) -> tuple[float, int, int]:
    """Summed loss in nats, bytes and number of the predicted tokens."""
    device = next(model.parameters()).device
    nats, size, count = 0.0, 0, 0
    for batch in one_pass(shards, max(1, BATCH_TOKENS // context), context, pad_id=pad_id):
        batch = batch.to(device)
        hidden = model.hidden(batch.tokens, cu_seqlens=batch.cu_seqlens, token_mask=batch.token_mask)
        targets = batch.targets[batch.loss_mask]
        nats += token_losses(model, hidden[batch.loss_mask], targets).double().sum().item()
        size += int(lengths[targets.cpu()].sum())
        count += targets.numel()
        if count >= tokens:
            break
    return nats, size, count


@torch.no_grad()
def loss_by_position(
    model: Transformer, shards: Sequence[Shards], context: int, tokens: int, window: int | None = None
) -> tuple[tuple[int, int, float, int], ...]:
    """Rows (first position, past the last, loss, tokens) over documents longer than `context`, about `tokens` tokens of them.

    With `window` the same documents are cut into pieces of that many tokens that do not see each other: what is lost against the
    uncut ones is what the context beyond the window is worth. Routers must be `frozen` if they observe.
    """
    long = [(part, int(i)) for part in shards for i in np.flatnonzero(part.lengths > context)]
    chosen = long[: max(1, tokens // context)]
    device = next(model.parameters()).device
    total, rows = torch.zeros(context, dtype=torch.float64), max(1, BATCH_TOKENS // context)
    for start in range(0, len(chosen), rows):
        documents = [part[i][: context + 1].astype(np.int64) for part, i in chosen[start : start + rows]]
        ids = torch.from_numpy(np.stack(documents)).to(device)  # [B, T + 1]
        hidden = model.hidden(ids[:, :-1], cu_seqlens=_cuts(len(documents), context, window, device)).flatten(0, 1)
        total += token_losses(model, hidden, ids[:, 1:].flatten()).view(len(documents), context).double().sum(0).cpu()
    if not chosen:
        return ()
    return tuple((low, high, total[low:high].mean().item() / len(chosen), (high - low) * len(chosen)) for low, high in buckets(context))


def _cuts(documents: int, context: int, window: int | None, device: torch.device) -> Tensor | None:
    if window is None:
        return None
    starts = [row * context + place for row in range(documents) for place in range(0, context, window)]
    return torch.tensor([*starts, documents * context], dtype=torch.int32, device=device)


def buckets(context: int) -> list[tuple[int, int]]:
    """Position ranges that double in width: (0, 32), (32, 64), (64, 128), …"""
    edges = [0]
    while edges[-1] < context:
        edges.append(min(context, max(FIRST_BUCKET, 2 * edges[-1])))
    return list(zip(edges, edges[1:], strict=False))
