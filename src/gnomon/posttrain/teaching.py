"""What a teacher says about a document, and what a teacher is to those who ask. Read next: `teachers.py`, which routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from jaxtyping import Float, Int
from torch import Tensor

from gnomon.posttrain.learner import Document

Mode = Literal["sampled", "topk", "full"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Said:
    """What a teacher says about a document: log-probabilities of its sampled ids; with `topk` also the likeliest `ids` [n, k] of each
    place with their `scores`; with `full` `scores` [n, V] of the whole vocabulary."""

    logprobs: Float[Tensor, "n"]
    scores: Float[Tensor, "n k"] | None = None
    ids: Int[Tensor, "n k"] | None = None

    @property
    def nbytes(self) -> int:
        """What is held."""
        return sum(t.nbytes for t in (self.logprobs, self.scores, self.ids) if t is not None)


class Teacher(Protocol):
    """Somebody who says how likely ids are. `name` names the very weights: what was said under a name is not asked again."""

    name: str

    def ask(self, documents: Sequence[Document], mode: Mode, k: int, temperature: float) -> list[Said]:
        """What it says about each document."""
        ...
