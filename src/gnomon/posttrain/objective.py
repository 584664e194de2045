"""What reinforcement learning and distillation minimise, token by token (report §4.1; Kimi K2.5 §4.4.2).

With rho = pi / pi_old for each sampled token and A its advantage, the report's objective is

    loss = sum_tokens ( -1[rho inside the window] rho A + penalty (log rho)^2 ) / tokens,     A = reward - mean of the group

where the window does not look at the sign of A, and the mean is not divided by a deviation. `grpo` and `dapo` are there to compare with.
Distillation from several teachers puts A = clip(log pi_T - log pi, +-R) in the place of the advantage (report eq. 15), or takes the
divergence over the teacher's likeliest ids, corrected so that its least value stays at pi = pi_T, or over the whole vocabulary.
Advantages carry no gradient. Read next: `learner.py`, which feeds it; `rl.py`, `distill.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gnomon.config import setting
from gnomon.errors import ConfigError

PAIR = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """The policy's objective. The formula in print leaves open whether the window is on rho or log rho and whether it spares the penalty:
    `window_on` and `penalise_outside` choose."""

    kind: Literal["k25", "grpo", "dapo"] = setting("k25", "the report's objective, or one of two comparators")
    window: tuple[float, ...] = setting((-0.7, 0.7), "k25: a token counts while its ratio is inside; in the unit of window_on")
    window_on: Literal["log", "ratio"] = setting("log", "k25: the window bounds log rho, or rho itself")
    penalty: float = setting(1e-3, "k25: weight of the squared log-ratio")
    penalise_outside: bool = setting(True, "k25: the penalty also acts on tokens outside the window")
    clip: tuple[float, ...] = setting((0.2, 0.2), "grpo, dapo: rho is clipped to [1 - first, 1 + second]; dapo's own is 0.2, 0.28")

    def __post_init__(self) -> None:
        if len(self.window) != PAIR or self.window[0] >= self.window[1]:
            raise ConfigError(f"'window' is {list(self.window)}; give its lower and its upper end")
        inside = self.window[0] <= (0.0 if self.window_on == "log" else 1.0) <= self.window[1]
        if not inside:
            raise ConfigError(f"'window' {list(self.window)} on {self.window_on} leaves out the unchanged policy; nothing would be learnt")
        if len(self.clip) != PAIR or min(self.clip) < 0 or self.penalty < 0:
            raise ConfigError(f"'clip' {list(self.clip)} and 'penalty' {self.penalty} must not be negative; 'clip' has two numbers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A loss and what to watch: `kept` is the share of tokens inside the window, `log_ratio` the mean of |log rho|."""

    loss: Float[Tensor, ""]
    kept: float
    log_ratio: float


def group_advantages(rewards: Float[Tensor, "G K"], config: ObjectiveConfig) -> Float[Tensor, "G K"]:
    """Advantage of each rollout of each group; NaN marks one that failed through no fault of the policy, and gets 0.

    Raises `ConfigError` for groups of one, whose mean is their only reward.
    """
    if rewards.shape[1] < PAIR:
        raise ConfigError(f"'group_size' is {rewards.shape[1]}; a group's mean needs at least 2 rollouts")
    valid = rewards.isfinite()
    count = valid.sum(1, keepdim=True).clamp(min=1)
    known = rewards.nan_to_num(0.0)
    centred = torch.where(valid, known - known.sum(1, keepdim=True) / count, 0.0)
    if config.kind == "k25":
        return centred
    deviation = (centred.square().sum(1, keepdim=True) / count).sqrt()
    return centred / (deviation + 1e-6)


def token_weights(lengths: Int[Tensor, "R"], config: ObjectiveConfig) -> Float[Tensor, "R"]:
    """What one token of each rollout weighs: all alike, or (grpo) so that each rollout weighs the same. They sum to 1 over tokens."""
    if config.kind == "grpo":
        return 1.0 / (lengths.clamp(min=1).double() * max(1, int((lengths > 0).sum())))
    return torch.full(lengths.shape, 1.0 / max(1, int(lengths.sum())), dtype=torch.float64)


def policy_loss(
    logprobs: Float[Tensor, "N"], behaviour: Float[Tensor, "N"], advantages: Float[Tensor, "N"], weights: Float[Tensor, "N"],
    config: ObjectiveConfig,
) -> Outcome:
    """The objective over sampled tokens, weighted by `weights`; `behaviour` are the log-probabilities they were sampled with."""
    advantages = advantages.detach()
    log_ratio = logprobs - behaviour.detach()
    ratio = log_ratio.exp()
    if config.kind == "k25":
        inside = in_window(log_ratio, config)
        penalised = torch.ones_like(inside) if config.penalise_outside else inside
        each = config.penalty * torch.where(penalised, log_ratio, 0.0).square() - torch.where(inside, ratio, 0.0) * advantages
    else:
        clipped = ratio.clamp(1.0 - config.clip[0], 1.0 + config.clip[1])
        inside = clipped == ratio
        each = -torch.minimum(ratio * advantages, clipped * advantages)
    return Outcome(loss=(weights.to(each.dtype) * each).sum(), **_watched(inside, log_ratio))


def in_window(log_ratio: Float[Tensor, "N"], config: ObjectiveConfig) -> Bool[Tensor, "N"]:
    """Whether a token counts: its ratio is inside, whatever the sign of its advantage."""
    measured = log_ratio.detach() if config.window_on == "log" else log_ratio.detach().exp()
    return (measured >= config.window[0]) & (measured <= config.window[1])


def _watched(inside: Tensor, log_ratio: Tensor) -> dict[str, float]:
    if not len(inside):
        return {"kept": 1.0, "log_ratio": 0.0}
    return {"kept": inside.double().mean().item(), "log_ratio": log_ratio.detach().abs().double().mean().item()}


def teacher_advantages(teacher: Float[Tensor, "N"], student: Float[Tensor, "N"], limit: float) -> Float[Tensor, "N"]:
    """clip(sg[log pi_T - log pi], +-limit): the dense reward of distillation (report eq. 15), without gradient."""
    return (teacher - student).detach().clamp(-limit, limit)


def reverse_kl(student: Float[Tensor, "N V"], teacher: Float[Tensor, "N V"]) -> Float[Tensor, "N"]:
    """KL(pi || pi_T) over the vocabulary, from log-probabilities."""
    return (student.exp() * (student - teacher.detach())).sum(-1)


def corrected_top_k(student: Float[Tensor, "N k"], teacher: Float[Tensor, "N k"]) -> Float[Tensor, "N"]:
    """sum over the teacher's k likeliest ids of p log(p / p_T) - p + p_T, from both log-probabilities of those ids.

    Each term is at least 0 and 0 only where p = p_T, so leaving ids out moves no minimum; with all ids it is the reverse KL.
    """
    p, fixed = student.exp(), teacher.detach()
    return (p * (student - fixed) - p + fixed.exp()).sum(-1)
