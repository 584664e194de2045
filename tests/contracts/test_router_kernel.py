"""The router between scores and experts: choice, weights, cutoff, gradients and counts against slow plain code."""

import inspect

import pytest
import torch
from torch import Tensor

from gnomon.errors import KernelError
from gnomon.kernels import native
from gnomon.kernels.router import cpu, reference
from gnomon.kernels.router.reference import Choice

NEEDED = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
CHOICES = [(1, 1, Choice(1)), (5, 4, Choice(4)), (70, 9, Choice(3, renormalise=False, scaling=2.5)), (65, 12, Choice(3, 4, 2)),
           (40, 12, Choice(3, 4, 1)), (130, 97, Choice(16, scaling=2.446)), (0, 6, Choice(2))]


def by_hand(scores: Tensor, bias: Tensor, choice: Choice) -> tuple[list[list[int]], list[float]]:
    """Ids and cutoffs by sorting; of equal values the lowest index first."""
    ids, cutoffs, size = [], [], scores.shape[1] // choice.groups
    for row in (scores + bias).tolist():
        strength = [sum(sorted(row[g * size : (g + 1) * size])[-2:]) for g in range(choice.groups)]
        kept = sorted(range(choice.groups), key=lambda g: -strength[g])[: choice.kept_groups]
        order = sorted((e for e in range(len(row)) if e // size in kept), key=lambda e: (-row[e], e))
        ids.append(order[: choice.k])
        cutoffs.append(row[order[min(choice.k, len(order) - 1)]])
    return ids, cutoffs


@NEEDED
@pytest.mark.parametrize(("rows", "experts", "choice"), CHOICES)
def test_choice_cutoff_and_weights(rows: int, experts: int, choice: Choice) -> None:
    scores, bias = torch.rand(rows, experts), 0.3 * torch.randn(experts)
    ids, weights, cutoff = cpu.route(scores, bias, choice)
    wanted, edges = by_hand(scores, bias, choice)
    assert ids.tolist() == wanted
    assert torch.equal(cutoff, torch.tensor(edges))
    chosen = scores.double().gather(1, ids)
    total = chosen.sum(1, keepdim=True) if choice.renormalise else 1.0
    assert torch.allclose(weights.double(), chosen / total * choice.scaling, rtol=1e-6)


@NEEDED
@pytest.mark.parametrize(("rows", "experts", "choice"), CHOICES)
def test_only_raw_scores_of_the_chosen_get_a_gradient(rows: int, experts: int, choice: Choice) -> None:
    scores, bias, slope = torch.rand(rows, experts, requires_grad=True), 0.3 * torch.randn(experts), torch.randn(rows, choice.k)
    ids, weights, cutoff = cpu.route(scores, bias.requires_grad_(), choice)
    assert not cutoff.requires_grad
    found, none = torch.autograd.grad(weights, (scores, bias), slope, allow_unused=True)
    exact_scores = scores.detach().double().requires_grad_()
    exact = torch.autograd.grad(reference.weigh(exact_scores, ids, choice), exact_scores, slope.double())[0]
    assert none is None
    assert torch.allclose(found.double(), exact, rtol=1e-4, atol=1e-5)


def test_the_formula_of_the_weights_in_fp64() -> None:
    scores = torch.rand(6, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: reference.route(s, torch.zeros(7), Choice(3, scaling=1.7))[1], [scores])


@NEEDED
def test_equal_scores_take_the_lowest_index_and_what_is_not_a_number_is_seen() -> None:
    ids, weights, _ = cpu.route(torch.full((2, 9), 0.5), torch.zeros(9), Choice(3))
    assert ids.tolist() == [[0, 1, 2]] * 2
    scores = torch.rand(3, 9)
    scores[1, 4] = float("nan")
    ids, weights, _ = cpu.route(scores, torch.zeros(9), Choice(3))
    assert ids[1, 0] == 4
    assert weights[1].isnan().all()
    assert torch.isfinite(weights[[0, 2]]).all()


@NEEDED
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("rows", "experts"), [(0, 3), (1, 1), (300, 7), (500, 13)])
def test_counts_are_those_of_the_reference(rows: int, experts: int, masked: bool) -> None:
    scores, cutoff = torch.rand(rows, experts), 3.0 * torch.rand(rows) - 1.0  # some beyond both ends
    mask = torch.rand(rows) > 0.3 if masked else None
    arguments = (scores, cutoff, mask, -1.2, 0.0024, 1000)
    counts = cpu.required_bias_histogram(*arguments)
    assert torch.equal(counts, reference.required_bias_histogram(*arguments))
    assert counts.sum().item() == experts * (rows if mask is None else int(mask.sum()))


@NEEDED
def test_threads_strides_and_poisoned_memory_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, bias, found = torch.rand(12, 400).T, torch.randn(12), []
    new_empty, empty_like = Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(Tensor, "new_empty", lambda t, *size: new_empty(t, *size).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty_like", lambda t: empty_like(t).fill_(float("nan")))
    for threads in (1, 2):
        monkeypatch.setattr(native, "threads", lambda count=threads: count)
        leaf = scores.detach().requires_grad_()
        ids, weights, cutoff = cpu.route(leaf, bias, Choice(3))
        counts = cpu.required_bias_histogram(scores, cutoff, None, -1.0, 0.01, 300)
        found.append([ids, weights, cutoff, counts, torch.autograd.grad(weights.square().sum(), leaf)[0]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@NEEDED
def test_refuses_a_choice_that_cannot_be_made() -> None:
    with pytest.raises(KernelError, match="5 of 4 experts"):
        cpu.route(torch.rand(3, 4), torch.zeros(4), Choice(5))


@NEEDED
def test_refuses_counts_of_what_does_not_fit() -> None:
    count, scores = inspect.unwrap(cpu.required_bias_histogram), torch.rand(5, 4)
    for cutoff, mask in ((torch.rand(4), None), (torch.rand(5), torch.ones(4, dtype=torch.bool)), (torch.rand(5), torch.ones(5))):
        with pytest.raises(KernelError, match="do not fit together"):
            count(scores, cutoff, mask, -1.0, 0.01, 300)
