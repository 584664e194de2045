"""The policy in process: many rollouts at once on the inference model, each with its own random numbers, worlds answering in between.

A draw is a pure function of (rollout's seed, how many ids it has sampled), and a row's logits do not depend on its neighbours, so a
rollout is the same whatever runs beside it, however it is cut, and the order in which rollouts finish follows their lengths and not the
clock. After new weights an unfinished rollout is read again from its first id: nothing that old weights computed is kept but the ids.
Read next: `slots.py`, which does it step by step; `rollout.py`, `partial.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gnomon.errors import ConfigError
from gnomon.model.transformer import Transformer
from gnomon.posttrain.rollout import Rollout
from gnomon.posttrain.slots import PAGE_TOKENS, Finished, Work
from gnomon.serve.runner import Runner, runner_for

WORLD_SECONDS = 600.0
"""What a world may take for one answer where nobody says otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """What a call of `Sampler.sample` left: finished ones in the order in which they ended, the others as far as they came.

    `steps` are calls of the model, `tokens` the ids that were sampled, `set_back` how often one gave way because the cache was full.
    """

    finished: tuple[Rollout, ...]
    unfinished: tuple[Rollout, ...]
    steps: int
    tokens: int
    set_back: int = 0


class AnySampler(Protocol):
    """Whatever samples rollouts: `Sampler` here, servers in `remote.py`."""

    @property
    def version(self) -> int:
        """Of the weights that it samples from."""
        ...

    def load(self, model: Transformer, version: int) -> None:
        """Take the weights that the model has now; spans sampled from here on carry `version`."""
        ...

    def sample(self, rollouts: Sequence[Rollout], *, enough: int | None = None, on_finished: Finished | None = None) -> Sampled:
        """Let the rollouts grow until `enough` of them have finished (None: all)."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class Sampler:
    """Samples rollouts from one model's weights; `load` puts newer weights in their place.

    At most `slots` rollouts are in work, and at most `cache_tokens` ids of theirs: what does not fit waits, and the next one begins while
    the cache is not fuller than `cache_share`. `temperature` 0 takes the likeliest id. Log-probabilities are those of the distribution that
    was drawn from (at temperature 0, of temperature 1). A world that fails, or takes longer than `world_seconds` for an answer, ends its
    rollout with a score that says so and has no reward. While `record` is set, rollouts keep the experts that their ids went to.
    """

    def __init__(self, model: Transformer, *, slots: int = 256, cache_tokens: int = 65_536, temperature: float = 1.0, version: int = 0,
                 world_seconds: float = WORLD_SECONDS, cache_share: float = 0.9) -> None:
        if not 0 < cache_share <= 1:
            raise ConfigError(f"'cache_share' is {cache_share}; it must be above 0 and at most 1")
        if slots < 1 or cache_tokens < 1 or temperature < 0 or world_seconds <= 0:
            raise ConfigError(f"'slots' {slots}, 'cache_tokens' {cache_tokens} and 'world_seconds' {world_seconds} must be positive, "
                              f"'temperature' {temperature} not negative")
        self.slots, self.cache_tokens, self.temperature, self.world_seconds = slots, cache_tokens, temperature, world_seconds
        self.cache_share, self.record = cache_share, False
        self.runner: Runner
        self.load(model, version)
        self.pool = self.runner.new_pool(slots, cache_tokens, PAGE_TOKENS)

    def load(self, model: Transformer, version: int) -> None:
        """Take the weights that the model has now; spans sampled from here on carry `version`."""
        self.runner = runner_for(model)
        self.version = version

    def sample(self, rollouts: Sequence[Rollout], *, enough: int | None = None, on_finished: Finished | None = None) -> Sampled:
        """Let the rollouts grow until `enough` of them have finished (None: all), earlier ones of the list first.

        `on_finished` is given each at once with its open world, for grading beside the sampling, and must close that world; without it
        worlds are closed here. Raises `CapacityError` for one that can never fit, `TrainingError` for logits that are no numbers and for an
        engine that fails; then all open worlds are closed.
        """
        work = Work(self, rollouts, on_finished)
        wanted = len(rollouts) if enough is None else min(enough, len(rollouts))
        try:
            while len(work.finished) < wanted and work.step():
                pass
            return Sampled(finished=tuple(work.finished), unfinished=work.put_aside(), steps=work.steps, tokens=work.tokens,
                           set_back=work.set_back)
        finally:
            work.close()

    def close(self) -> None:
        """There is nothing to give back."""

    @property
    def pages(self) -> int:
        """Pages of the cache."""
        return self.pool.pages
