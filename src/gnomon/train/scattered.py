"""Questions about evidence that is scattered over a window: how many are answered, by kind of task and by distance (report §3.4).

The kinds are those that RULER made customary: values that must all be found (`boxes`, `code`, `order`), variables that lead to each other
from hop to hop (`chain`), entries that are added up (`total`). Where a part of an answer is decided by one piece of evidence alone, that
part is judged for itself, so that finding can be drawn over the distance to what is found. Read next: `evaluate.py`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.data.long_context import LongContext, LongSample, Placed
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import ConfigError
from gnomon.model.multimodal import Multimodal
from gnomon.model.transformer import Transformer

Share = tuple[float, int]
"""How many of how many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One question: its kind, whether all of the answer is right, and for each part that one piece decides (distance, right)."""

    kind: str
    right: bool
    parts: tuple[tuple[int, bool], ...]


@torch.no_grad()
def ask(model: Transformer, sources: Sequence[LongContext], context: int, samples: int, eye: Multimodal | None = None) -> list[Answered]:
    """Ask about `samples` windows of each source; a token is right if it is the likeliest one, what greedy generation would say.

    `eye` is the model with tower and projector, where windows have pictures. Nothing where there is no source, or where the context is too
    short for its evidence. The model must be `frozen`.
    """
    found: list[Answered] = []
    device = next(model.parameters()).device
    for source in sources:
        source.set_context(context)
        for index in range(samples):
            try:
                sample = source.sample(index)
            except ConfigError:
                return []
            ids = torch.from_numpy(sample.item.tokens).to(device)
            if eye is None:
                hidden = model.hidden(ids[None])
            else:
                hidden = model.hidden(None, embeddings=eye.embeddings(ids[None], sample.item.images))
            found += _judged(source.tokenizer, sample, ids, model.head(hidden[0, _places(sample, device)]).argmax(-1))
    return found


def _places(sample: LongSample, device: torch.device) -> Tensor:
    """Positions whose next token belongs to an answer."""
    return torch.cat([torch.arange(start - 1, start + length - 1, device=device) for start, length in (t.answer for t in sample.tasks)])


def _judged(tokenizer: Tokenizer, sample: LongSample, ids: Tensor, likeliest: Tensor) -> Iterable[Answered]:
    for placed, said in zip(sample.tasks, likeliest.split([task.answer[1] for task in sample.tasks]), strict=True):
        start, length = placed.answer
        wanted = ids[start : start + length]
        right = (said == wanted).tolist()
        yield Answered(kind=placed.task.kind, right=all(right), parts=_parts(tokenizer, placed, wanted.tolist(), right))


def _parts(tokenizer: Tokenizer, placed: Placed, wanted: list[int], right: list[bool]) -> tuple[tuple[int, bool], ...]:
    """Distance and success of each part that one piece of evidence decides."""
    ends = [len(tokenizer.decode(wanted[: place + 1])) - 1 for place in range(len(wanted))]  # an answer begins after a space
    starts = [-1, *ends[:-1]]
    found = []
    for (first, past), distance in zip(placed.task.parts, placed.distances, strict=False):
        touched = [ok for start, end, ok in zip(starts, ends, right, strict=True) if start < past and end > first]
        found.append((distance, all(touched)))
    return tuple(found)


def share(answers: Sequence[Answered]) -> float | None:
    """Share of questions that are answered right; none where none was asked."""
    return sum(answer.right for answer in answers) / len(answers) if answers else None


def by_kind(answers: Sequence[Answered]) -> dict[str, Share]:
    """Share of answers right and questions asked, by kind."""
    asked, right = Counter(answer.kind for answer in answers), Counter(answer.kind for answer in answers if answer.right)
    return {kind: (right[kind] / count, count) for kind, count in asked.items()}


def by_distance(answers: Sequence[Answered], bounds: Sequence[tuple[int, int]]) -> tuple[tuple[int, int, float, int], ...]:
    """Rows (nearest, past the farthest, share found, pieces) over distances in tokens."""
    pieces = [piece for answer in answers for piece in answer.parts]
    rows = []
    for low, high in bounds:
        inside = [right for distance, right in pieces if low <= distance < high]
        if inside:
            rows.append((low, high, sum(inside) / len(inside), len(inside)))
    return tuple(rows)
