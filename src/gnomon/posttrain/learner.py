"""The trainer's side: rollouts laid end to end, their log-probabilities under the weights as they are now, one update of the weights.

Every loop of this package learns through `Learner`; what it minimises is in `objective.py`. Rollouts lie in one stream, each a document of
its own, so there is no padding. Under torchrun all ranks know the whole batch, each computes its `share` of it, and gradients are added
over ranks: a loss is therefore a share of the whole batch's loss, whichever rank it is of. Read next: `rl.py`, `distill.py`, `sft.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gnomon.config import setting
from gnomon.errors import ConfigError, TrainingError
from gnomon.model.router import recorded, replayed
from gnomon.model.transformer import Transformer
from gnomon.parallel.axes import TOKENS
from gnomon.parallel.gradients import added
from gnomon.parallel.mesh import Mesh
from gnomon.posttrain.rollout import Rollout
from gnomon.train.muon import Muon
from gnomon.train.schedule import Schedule
from gnomon.train.settings import MuonConfig
from gnomon.train.units import head_rows

T = TypeVar("T")
Routes = Sequence[Tensor]
"""For each layer with experts, in order, those of each token of a stream [N, k]."""
SCORES = 1 << 24
"""Logits alive at a time: above that many, they are computed again for the backward pass instead of kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """The optimiser of post-training and its batches."""

    optimizer: MuonConfig = setting(MuonConfig(learning_rate=1e-3, matrices=False, weight_decay=0.0, clip_logits=None),
                                    "AdamW by default; matrices = true takes Muon")
    schedule: Schedule = setting(Schedule(kind="wsd", warmup=0.0, decay=0.5, final=0.3), "learning rate over the run")
    micro_tokens: int = setting(16_384, "tokens of one forward pass; changes memory, not results")

    def __post_init__(self) -> None:
        if self.micro_tokens < 1:
            raise ConfigError(f"'micro_tokens' is {self.micro_tokens}; it must be positive")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stream:
    """Rollouts end to end. `places` are the positions whose next id was sampled, `targets` those ids, `owner` the rollout of each.

    `behaviour` are the log-probabilities of sampling, NaN where nobody noted any.
    """

    tokens: Int[Tensor, "1 N"]
    bounds: Int[Tensor, "R1"]
    places: Int[Tensor, "n"]
    targets: Int[Tensor, "n"]
    owner: Int[Tensor, "n"]
    behaviour: Float[Tensor, "n"]

    @property
    def lengths(self) -> Int[Tensor, "R"]:
        """Sampled ids of each rollout."""
        return torch.bincount(self.owner, minlength=len(self.bounds) - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """Ids, which of them are learnt, their log-probabilities where they were sampled, and the experts that they went to, where known."""

    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...] = ()
    experts: NDArray[np.int16] | None = None


def document(rollout: Rollout) -> Document:
    """A rollout as the trainer takes it."""
    return Document(token_ids=rollout.token_ids, mask=rollout.mask, logprobs=rollout.logprobs, experts=rollout.experts)


def sampled_routes(documents: Sequence[Document], device: torch.device | str = "cpu") -> Routes:
    """The experts that the sampler sent the ids of a stream to; empty where it wrote down those of some document only, or of none.

    Ids that it never read are behind all that is learnt from, so where they go changes nothing: with the one before them.
    """
    found = []
    for each in documents:
        if each.experts is None or not len(each.experts):
            return ()
        places = np.minimum(np.arange(len(each.token_ids) - 1), len(each.experts) - 1)
        found.append(torch.from_numpy(each.experts[places].astype(np.int64)))
    return tuple(torch.cat(found).to(device).unbind(1)) if found else ()


def stream(documents: Sequence[Document], device: torch.device | str = "cpu") -> Stream:
    """Lay documents end to end; the first id of each is only read. Raises `ConfigError` for a mask that does not fit."""
    tokens: list[int] = []
    bounds, places, targets, owner, behaviour = [0], list[int](), list[int](), list[int](), list[float]()
    for index, each in enumerate(documents):
        if len(each.mask) != len(each.token_ids) or len(each.token_ids) < 2 or each.mask[0]:
            raise ConfigError(f"document {index}: {len(each.token_ids)} ids, {len(each.mask)} flags; it needs two ids or more, and the "
                              "first is read")
        found = [i for i, learnt in enumerate(each.mask) if learnt]
        places += [bounds[-1] + i - 1 for i in found]
        targets += [each.token_ids[i] for i in found]
        owner += [index] * len(found)
        behaviour += each.logprobs or [math.nan] * len(found)
        tokens += each.token_ids[:-1]
        bounds.append(len(tokens))
    if len(behaviour) != len(places):
        raise ConfigError(f"{len(behaviour)} log-probabilities for {len(places)} sampled ids; there is one for each")
    return Stream(tokens=torch.tensor([tokens], device=device), bounds=torch.tensor(bounds, dtype=torch.int32, device=device),
                  places=torch.tensor(places, dtype=torch.int64, device=device),
                  targets=torch.tensor(targets, dtype=torch.int64, device=device),
                  owner=torch.tensor(owner, dtype=torch.int64, device=device),
                  behaviour=torch.tensor(behaviour, dtype=torch.float64, device=device).float())


def in_pieces(documents: Sequence[T], lengths: Sequence[int], most: int) -> Iterator[list[T]]:
    """Consecutive documents of at most `most` ids together; a longer one stands alone."""
    piece: list[T] = []
    size = 0
    for each, length in zip(documents, lengths, strict=True):
        if piece and size + length > most:
            yield piece
            piece, size = [], 0
        piece.append(each)
        size += length
    if piece:
        yield piece


def hidden_states(model: Transformer, piece: Stream) -> Float[Tensor, "n D"]:
    """What the head sees where the next id was sampled."""
    return model.hidden(piece.tokens, cu_seqlens=piece.bounds)[0, piece.places]


def token_logprobs(model: Transformer, piece: Stream, temperature: float = 1.0) -> Float[Tensor, "n"]:
    """Log-probability of each sampled id, in fp32, with gradient; `temperature` is the sampler's."""
    hidden, weight = hidden_states(model, piece), model.head_weight
    rows = max(1, SCORES // weight.shape[0])
    if len(piece.targets) <= rows:
        return _scores(hidden, weight, piece.targets, temperature)
    parts = zip(hidden.split(rows), piece.targets.split(rows), strict=True)
    return torch.cat([checkpoint(_scores, h, weight, t, temperature, use_reentrant=False) for h, t in parts])


def _scores(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    logits = functional.linear(hidden, weight.to(hidden.dtype))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -functional.cross_entropy(logits / temperature if temperature else logits, targets, reduction="none")


class Learner:
    """A model, its optimiser, and how many updates it has had of how many."""

    def __init__(self, model: Transformer, config: LearnerConfig, total_updates: int, mesh: Mesh | None = None) -> None:
        self.model, self.config, self.total, self.mesh = model.train(), config, max(1, total_updates), mesh or Mesh()
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._routers, several = model.routers(), self.mesh.world > 1
        self._exchange = added([(p, self.mesh.group(*TOKENS)) for _, p in trained]) if several else None
        self.optimizer = Muon(trained, config.optimizer, head_rows(model.config))

    @property
    def updates(self) -> int:
        """Updates so far."""
        return self.optimizer.steps

    def rate(self) -> float:
        """The learning rate of the next update."""
        return self.config.optimizer.learning_rate * self.config.schedule.factor(min(self.updates, self.total - 1), self.total)

    def share(self, batch: Sequence[T]) -> list[T]:
        """What this rank computes of a batch that all ranks know."""
        return list(batch[self.mesh.rank :: self.mesh.world])

    def total_of(self, own: float) -> float:
        """The sum over ranks."""
        total = torch.tensor(own, dtype=torch.float64, device=self.mesh.device)
        self.mesh.sum(total)
        return total.item()

    def update(self, pieces: Sequence[T], loss: Callable[[T], Tensor], routes: Callable[[T], Routes] = lambda _: ()) -> float:
        """One update from the summed losses of the pieces of all ranks; returns the norm of the gradient before it was clipped.

        `routes` gives the experts that a piece's tokens go to, as `routes_of` found them; empty: those that the weights choose now.

        Raises `TrainingError` for a gradient that is not finite, before the weights change.
        """
        self.optimizer.zero_grad()
        self._backward(pieces, loss, routes)
        if not any(p.grad is not None for p in self.optimizer.parameters()):
            return 0.0
        norm = self.optimizer.clip_gradient().item()
        if not math.isfinite(norm):
            raise TrainingError(f"update {self.updates + 1}: the gradient's norm is {norm}; lower 'learning_rate', then start the same "
                                "command again")
        self.optimizer.step(self.rate())
        return norm

    def _backward(self, pieces: Sequence[T], loss: Callable[[T], Tensor], routes: Callable[[T], Routes]) -> None:
        """The gradient of the summed losses; what other ranks have is added while the last pass runs."""
        if self._exchange is not None and not pieces:  # the others may have some
            self._exchange.arm()
        for number, piece in enumerate(pieces, 1):
            with replayed(self._routers, routes(piece)):
                value = loss(piece)
                if self._exchange is not None and number == len(pieces):
                    self._exchange.arm()
                value.backward()
        if self._exchange is not None:
            self._exchange.finish()

    @torch.no_grad()
    def routes_of(self, documents: Sequence[Document]) -> Routes:
        """The experts that the weights as they are now choose for documents which lie in one stream."""
        with recorded(self._routers) as found:
            hidden_states(self.model, stream(documents, self.mesh.device))
            return tuple(calls[0] for calls in found)

    @torch.no_grad()
    def logprobs(self, documents: Sequence[Document], temperature: float = 1.0) -> list[Tensor]:
        """Log-probabilities of the sampled ids of each document under the weights as they are now."""
        lengths = [len(each.token_ids) for each in documents]
        found: list[Tensor] = []
        for part in in_pieces(list(documents), lengths, self.config.micro_tokens):
            piece = stream(part, self.mesh.device)
            found += token_logprobs(self.model, piece, temperature).split(piece.lengths.tolist())
        return found


def shifted(piece: Stream, by: int) -> Stream:
    """The same stream with its targets moved against its places: what a mistake of alignment looks like, for tests of alarms."""
    return replace(piece, targets=piece.targets.roll(by))
