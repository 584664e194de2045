"""The routed experts in C++ beyond small samples: many tiles, skewed choices, threads, poisoned memory, strides."""

import inspect

import pytest
import torch
from torch import Tensor

from gnomon.errors import KernelError
from gnomon.kernels import native
from gnomon.kernels.experts import grouped, reference

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))


def some(tokens: int, latent: int, inner: int, experts: int, k: int) -> tuple[list[Tensor], Tensor]:
    """`[z, w_gate, w_up, w_down, weights]` that ask for gradients, and ids: half of the tokens have expert 0 first, expert 1 has none."""
    made = [torch.randn(tokens, latent), torch.randn(experts, inner, latent), torch.randn(experts, inner, latent),
            torch.randn(experts, latent, inner), torch.rand(tokens, k)]
    scores = torch.rand(tokens, experts)
    scores[: tokens // 2, 0], scores[:, 1] = 2.0, -1.0
    return [t.requires_grad_() for t in made], scores.topk(k, dim=-1).indices


def run(function, inputs: list[Tensor], ids: Tensor, slope: Tensor) -> list[Tensor]:
    """The result and the gradients of its projection on `slope`."""
    *first, weights = inputs
    y = function(*first, ids, weights, 4.0, 25.0)
    return [y.detach(), *torch.autograd.grad(y, inputs, slope)]


@pytest.mark.parametrize(("tokens", "latent", "inner", "experts", "k"), [(1, 3, 2, 3, 1), (97, 65, 33, 5, 3), (1700, 24, 40, 6, 2)])
def test_values_and_gradients_are_those_of_fp64(tokens: int, latent: int, inner: int, experts: int, k: int) -> None:
    inputs, ids = some(tokens, latent, inner, experts, k)
    slope = torch.randn(tokens, latent)
    exact = run(reference.experts, [t.detach().double().requires_grad_() for t in inputs], ids, slope.double())
    for found, wanted in zip(run(grouped.experts, inputs, ids, slope), exact, strict=True):
        assert float((found.double() - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


def test_one_and_two_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, ids = some(900, 24, 40, 6, 2)
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(native, "threads", lambda count=threads: count)
        found.append(run(grouped.experts, inputs, ids, torch.ones(900, 24)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("latent", "inner"), [(24, 40), (40, 24), (8, 56), (64, 33), (97, 48), (48, 130)])
def test_a_token_has_the_same_bits_whatever_the_others_chose(latent: int, inner: int) -> None:
    """Whatever the rows and columns of a tile: the widths are those of one to four vectors, whole and in part."""
    inputs, ids = some(300, latent, inner, 6, 2)
    z, w_gate, w_up, w_down, weights = (t.detach() for t in inputs)
    whole = grouped.experts(z, w_gate, w_up, w_down, ids, weights, 4.0, 25.0)
    part = grouped.experts(z[113:127], w_gate, w_up, w_down, ids[113:127], weights[113:127], 4.0, 25.0)
    assert torch.equal(whole[113:127], part)


def test_every_output_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds anything; here it holds what would be seen."""
    inputs, ids = some(200, 24, 40, 6, 2)
    empty_like, new_empty = torch.empty_like, Tensor.new_empty
    monkeypatch.setattr(torch, "empty_like", lambda t: empty_like(t).fill_(float("nan")))
    monkeypatch.setattr(Tensor, "new_empty", lambda t, *size: new_empty(t, *size).fill_(float("nan") if t.is_floating_point() else -7))
    for result in run(grouped.experts, inputs, ids, torch.ones(200, 24)):
        assert torch.isfinite(result).all()


def test_strided_inputs() -> None:
    inputs, ids = some(120, 24, 40, 6, 2)
    slope = torch.randn(24, 120).T
    strided = [torch.stack([t.detach(), torch.randn_like(t)], -1)[..., 0].requires_grad_() for t in inputs]
    plain, odd = run(grouped.experts, inputs, ids, slope.contiguous()), run(grouped.experts, strided, ids.T.contiguous().T, slope)
    assert all(torch.equal(a, b) for a, b in zip(plain, odd, strict=True))


def test_what_is_not_a_number_stays_so_for_its_token_alone() -> None:
    inputs, ids = some(50, 24, 40, 6, 2)
    z, w_gate, w_up, w_down, weights = (t.detach() for t in inputs)
    z[7, 3] = float("nan")
    y = grouped.experts(z, w_gate, w_up, w_down, ids, weights, 4.0, 25.0)
    assert y[7].isnan().all()
    assert torch.isfinite(y[torch.arange(50) != 7]).all()


def test_tokens_and_ids_must_be_as_many() -> None:
    (z, *stacks, weights), ids = some(20, 24, 40, 6, 2)
    run_unchecked = inspect.unwrap(grouped.experts)
    for tokens, chosen, by in ((z[:19], ids, weights), (z, ids[:19], weights[:19]), (z, ids[:, :1], weights), (z[0], ids[0], weights[0])):
        with pytest.raises(KernelError, match="do not fit together"):
            run_unchecked(tokens, *stacks, chosen, by, 4.0, 25.0)
