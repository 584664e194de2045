"""The objectives of post-training, against arithmetic by hand and against autograd."""

import math

import pytest
import torch
from torch import Tensor

from gnomon.errors import ConfigError
from gnomon.posttrain import objective
from gnomon.posttrain.objective import ObjectiveConfig, corrected_top_k, group_advantages, policy_loss, reverse_kl, teacher_advantages

EVEN = torch.full((4,), 0.25, dtype=torch.float64)


def doubles(*values: float) -> Tensor:
    """A tensor of doubles."""
    return torch.tensor(values, dtype=torch.float64)


def test_the_advantage_is_reward_minus_mean() -> None:
    """Without division; a failed machine is in neither mean nor loss; equal rewards teach nothing."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, math.nan, 0.0, math.nan], [1.0, 1.0, 1.0, 1.0]])
    found = group_advantages(rewards, ObjectiveConfig())
    assert found.tolist() == [[0.75, -0.25, -0.25, -0.25], [0.5, 0.0, -0.5, 0.0], [0.0] * 4]
    scaled = group_advantages(rewards, ObjectiveConfig(kind="grpo"))
    assert scaled[0].tolist() == pytest.approx([3**0.5] + [-(3**-0.5)] * 3, abs=1e-4)
    assert scaled[2].tolist() == [0.0] * 4
    with pytest.raises(ConfigError, match="'group_size' is 1"):
        group_advantages(torch.ones(3, 1), ObjectiveConfig())


def test_the_window_does_not_look_at_the_sign() -> None:
    """A ratio outside [alpha, beta] has no gradient but the penalty's, for either sign of the advantage."""
    old = doubles(0.0, 0.0, 0.0, 0.0)
    new = doubles(0.3, 0.9, 0.9, -0.9).requires_grad_()
    advantages = doubles(1.0, 1.0, -1.0, 1.0)
    result = policy_loss(new, old, advantages, EVEN, ObjectiveConfig(penalty=0.0))
    result.loss.backward()
    assert new.grad is not None and new.grad.tolist() == pytest.approx([-0.25 * math.exp(0.3), 0, 0, 0])
    assert result.kept == 0.25 and result.log_ratio == pytest.approx(0.75)
    new.grad = None
    policy_loss(new, old, advantages, EVEN, ObjectiveConfig(penalty=0.1)).loss.backward()
    assert new.grad.tolist() == pytest.approx([-0.25 * math.exp(0.3) + 0.015, 0.045, 0.045, -0.045])
    new.grad = None
    policy_loss(new, old, advantages, EVEN, ObjectiveConfig(penalty=0.1, penalise_outside=False)).loss.backward()
    assert new.grad.tolist() == pytest.approx([-0.25 * math.exp(0.3) + 0.015, 0, 0, 0])


def test_both_readings_of_the_window() -> None:
    """On the ratio, [0.5, 2] is another set than on its logarithm."""
    ratios = doubles(math.log(0.4), math.log(0.6), math.log(1.9), math.log(2.1))
    assert objective.in_window(ratios, ObjectiveConfig(window=(0.5, 2.0), window_on="ratio")).tolist() == [False, True, True, False]
    assert objective.in_window(ratios, ObjectiveConfig(window=(-0.5, 0.7))).tolist() == [False, False, True, False]
    with pytest.raises(ConfigError, match="leaves out the unchanged policy"):
        ObjectiveConfig(window=(-0.7, 0.7), window_on="ratio")


def test_comparators_clip_by_sign() -> None:
    """PPO's rule: a ratio that went too far in the wanted direction has no gradient, in the unwanted one it has."""
    new = doubles(0.5, 0.5, -0.5, -0.5).requires_grad_()
    policy_loss(new, torch.zeros(4).double(), doubles(1, -1, 1, -1), EVEN, ObjectiveConfig(kind="dapo", clip=(0.2, 0.28))).loss.backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0, 0.25 * math.exp(0.5), -0.25 * math.exp(-0.5), 0])


def test_what_a_token_weighs() -> None:
    """All tokens of the batch alike, or each rollout alike."""
    lengths = torch.tensor([2, 6, 0])
    assert objective.token_weights(lengths, ObjectiveConfig()).tolist() == [0.125] * 3
    grpo = objective.token_weights(lengths, ObjectiveConfig(kind="grpo"))
    assert grpo[:2].tolist() == pytest.approx([0.25, 1 / 12]) and (grpo * lengths).sum().item() == pytest.approx(1.0)


def test_an_advantage_carries_no_gradient() -> None:
    """Not the reward's, and not the teacher's, of which the student is a part."""
    student = doubles(-1.0, -2.0, -3.0, -0.5).requires_grad_()
    advantages = teacher_advantages(doubles(-1.0, -1.0, -9.0, -0.5), student, 5.0)
    assert advantages.tolist() == [0.0, 1.0, -5.0, 0.0] and not advantages.requires_grad
    policy_loss(student, student.detach(), student * 2, EVEN, ObjectiveConfig(penalty=0.0)).loss.backward()
    assert student.grad is not None and student.grad.tolist() == pytest.approx((-0.25 * 2 * student.detach()).tolist())


def test_a_teacher_that_is_the_student_teaches_nothing() -> None:
    """Zero gradient in all three modes."""
    logits = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    student = logits.log_softmax(-1)
    teacher = student.detach()
    ids = torch.arange(5) % 7
    own = student.gather(1, ids[:, None])[:, 0]
    advantages = teacher_advantages(own.detach(), own, 5.0)
    modes = [policy_loss(own, own.detach(), advantages, torch.full((5,), 0.2).double(), ObjectiveConfig()).loss,
             reverse_kl(student, teacher).mean()]
    top, places = teacher.topk(3, -1)
    modes.append(corrected_top_k(student.gather(1, places), top).mean())
    for loss in modes:
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert loss.abs() < 1e-12 and gradient.abs().max() < 1e-12


def test_corrected_top_k() -> None:
    """With k = V it is the full divergence; with fewer ids its minimum is still at the teacher, which it is not without correction."""
    random = torch.Generator().manual_seed(1)
    student, teacher = (torch.randn(6, 9, dtype=torch.float64, generator=random).log_softmax(-1) for _ in range(2))
    assert torch.allclose(corrected_top_k(student, teacher), reverse_kl(student, teacher))
    logits = torch.zeros(1, 9, dtype=torch.float64, requires_grad=True)
    target = torch.linspace(0, 4, 9, dtype=torch.float64)[None].log_softmax(-1)
    values, places = target.topk(3, -1)
    optimizer = torch.optim.LBFGS([logits], max_iter=400, tolerance_grad=1e-12, tolerance_change=1e-14, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = corrected_top_k(logits.log_softmax(-1).gather(1, places), values).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    found = logits.detach().log_softmax(-1).gather(1, places)
    assert torch.allclose(found, values, atol=1e-4), "the ids that are looked at agree with the teacher"


@pytest.mark.parametrize("fields", [{"window": (0.7, -0.7)}, {"window": (0.1,)}, {"penalty": -1.0}, {"clip": (0.2,)}])
def test_impossible_settings(fields: dict) -> None:
    """Each is named."""
    with pytest.raises(ConfigError, match=f"'{next(iter(fields))}'"):
        ObjectiveConfig(**fields)
