"""Sampling from a model, one token at a time over its states: enough to look at what was learned.

Serving many requests at once is the engine's work; this is the plain loop it must agree with.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gnomon.config import setting
from gnomon.errors import ConfigError, TrainingError
from gnomon.model.inference import InferenceModel
from gnomon.model.transformer import Transformer

FIRST = 64
"""Largest probabilities that are looked at first; where they do not reach top-p, sixteen times as many are, then all."""
ROUNDED = 1e-5
"""By more than this no sum of probabilities in fp32 is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is drawn; temperature 0 takes the most likely one."""

    temperature: float = setting(1.0, "divides the logits; 0 is greedy")
    top_p: float = setting(0.95, "smallest set of tokens with this much probability; 1 keeps all")
    max_tokens: int = setting(200, "stop after this many tokens")
    seed: int = setting(0, "the same seed and prompt give the same tokens")

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"'temperature' is {self.temperature}; use 0 for greedy or a positive number")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"'seed' is {self.seed}; use a number from 0 to 2^63 - 1")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"'top_p' is {self.top_p}; it must be in (0, 1]")
        if self.max_tokens < 1:
            raise ConfigError(f"'max_tokens' is {self.max_tokens}; ask for at least 1")


@torch.no_grad()
def generate(
    model: Transformer | InferenceModel, prompt: list[int], sampling: Sampling, stop: frozenset[int] = frozenset()
) -> Iterator[int]:
    """Yield token ids after `prompt` until one of `stop` (not yielded) or `max_tokens`.

    Raises `ConfigError` for an empty prompt or an id outside the vocabulary.
    """
    outside = [token for token in prompt if not 0 <= token < model.config.vocab_size]
    if not prompt or outside:
        problem = f"has ids outside the vocabulary: {outside[:5]}" if prompt else "is empty; give at least one token"
        raise ConfigError(f"prompt {problem}")
    capacity = len(prompt) + sampling.max_tokens
    extend = model.continuation(capacity).extend if isinstance(model, InferenceModel) else _extend(model, capacity)
    random: torch.Generator | None = None
    tokens = prompt
    for _ in range(sampling.max_tokens):
        logits = extend(tokens)
        random = random or torch.Generator(logits.device).manual_seed(sampling.seed)
        token = draw(logits.float(), sampling, random)
        if token in stop:
            return
        yield token
        tokens = [token]


def _extend(model: Transformer, capacity: int) -> Callable[[list[int]], Tensor]:
    """A sequence of its own: tokens to the logits that follow them."""
    device, states = model.model.embed_tokens.weight.device, model.new_states(1, capacity)
    return lambda tokens: model(torch.tensor([tokens], device=device), states=states, last_only=True)[0, -1]


def draw(logits: Float[Tensor, "V"], sampling: Sampling, random: torch.Generator) -> int:
    """One token id from fp32 logits: the id drawn is the one of a stable sort by probability and `torch.multinomial` over the kept ones.

    That draw is a race: the probability over a number from the exponential distribution, by rank, and the largest quotient wins. Ranks
    need the sorted values only, and of these as many as top-p keeps; the id of the winner is looked up afterwards, equal ones by id.
    Raises `TrainingError` for logits that are no finite numbers.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / sampling.temperature, -1)
    clocks = torch.empty_like(probabilities).exponential_(generator=random)  # one for each id, so that the next draw has its own
    largest = _largest(probabilities, sampling.top_p)
    before = largest.cumsum(-1) - largest
    race = torch.where(before < sampling.top_p, largest, 0.0) / clocks[: len(largest)]
    place = int(race.argmax())
    if not race[place] > 0:
        raise TrainingError("the model gives logits that are no finite numbers; use an earlier checkpoint")
    value = largest[place]
    return int((probabilities == value).nonzero()[place - int((largest > value).sum())])


def _largest(probabilities: Float[Tensor, "V"], top_p: float) -> Float[Tensor, "K"]:
    """Probabilities in falling order: so many that the others lie beyond `top_p` however sums are rounded, or all."""
    for size in FIRST, 16 * FIRST:
        if size < len(probabilities) and float((found := probabilities.topk(size).values).sum(dtype=torch.float64)) > top_p + ROUNDED:
            return found
    # Values without ids: NumPy's sort does it with vector instructions.
    return torch.from_numpy(-np.sort(-probabilities.cpu().numpy())).to(probabilities.device)
