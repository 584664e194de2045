"""Routed experts against a loop over tokens and slots; gradients; edge cases of routing."""

import pytest
import torch
from torch import Tensor

from gnomon.errors import KernelError
from gnomon.kernels import experts as folder
from gnomon.kernels.experts import reference

OPERATOR = folder.experts
IMPLEMENTATIONS = pytest.mark.parametrize("name", ["reference", *OPERATOR.candidates["cpu"]])


def implementation(name: str):
    """One implementation by name; it skips, with its reason, what it refuses."""
    module = OPERATOR.module(name)
    run, refuse = getattr(module, OPERATOR.name), getattr(module, f"refuse_{OPERATOR.name}", lambda *_: None)

    def checked(*arguments):
        if (reason := refuse(*arguments)) is not None:
            pytest.skip(f"{name}: {reason}")
        return run(*arguments)

    return checked


def by_hand(z: Tensor, stacks: list[Tensor], ids: Tensor, weights: Tensor) -> Tensor:
    """Token by token, slot by slot."""
    out = torch.zeros_like(z)
    w_gate, w_up, w_down = stacks
    for n in range(len(z)):
        for slot, e in enumerate(ids[n].tolist()):
            g, u = w_gate[e] @ z[n], w_up[e] @ z[n]
            hidden = 4.0 * torch.tanh(g / 4.0) / (1.0 + torch.exp(-g)) * 25.0 * torch.tanh(u / 25.0)
            out[n] += weights[n, slot] * (w_down[e] @ hidden)
    return out


def some(dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """Nine tokens, four experts of which the last is never chosen, two slots."""
    z = torch.randn(9, 5, dtype=torch.float64).to(dtype)
    stacks = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in ((4, 3, 5), (4, 3, 5), (4, 5, 3))]
    ids = torch.rand(9, 3).topk(2, dim=-1).indices
    return z, stacks, ids, torch.rand(9, 2, dtype=torch.promote_types(dtype, torch.float32))


@IMPLEMENTATIONS
def test_equals_the_loop(name: str) -> None:
    experts = implementation(name)
    z, stacks, ids, weights = some()
    torch.testing.assert_close(experts(z, *stacks, ids, weights, 4.0, 25.0), by_hand(z, stacks, ids, weights), rtol=1e-12, atol=1e-12)


@IMPLEMENTATIONS
@pytest.mark.parametrize("betas", [(4.0, 25.0), (None, None)], ids=str)
def test_gradients_are_those_of_the_function(name: str, betas: tuple[float | None, float | None]) -> None:
    experts = implementation(name)
    z, stacks, ids, weights = some()
    inputs = [x.requires_grad_() for x in (z, *stacks, weights)]
    assert torch.autograd.gradcheck(lambda z, a, b, c, w: experts(z, a, b, c, ids, w, *betas), inputs)


@IMPLEMENTATIONS
def test_an_expert_without_tokens_gets_a_zero_gradient(name: str) -> None:
    experts = implementation(name)
    z, stacks, ids, weights = some()
    for stack in stacks:
        stack.requires_grad_()
    experts(z, *stacks, ids, weights, 4.0, 25.0).sum().backward()
    for stack in stacks:
        assert not stack.grad[3].any()
        assert stack.grad[:3].any()


@IMPLEMENTATIONS
def test_one_token_does_not_depend_on_the_others(name: str) -> None:
    """What expert parallelism and batching rely on: the same token gives the same sum, in the same order."""
    experts = implementation(name)
    z, stacks, ids, weights = some()
    whole = experts(z, *stacks, ids, weights, 4.0, 25.0)
    alone = torch.cat([experts(z[n : n + 1], *stacks, ids[n : n + 1], weights[n : n + 1], 4.0, 25.0) for n in range(len(z))])
    torch.testing.assert_close(whole, alone, rtol=1e-13, atol=1e-13)


@IMPLEMENTATIONS
def test_all_tokens_at_one_expert_twice(name: str) -> None:
    """The same expert in both slots is legal and counts twice."""
    experts = implementation(name)
    z, stacks, _, weights = some()
    ids = torch.ones(9, 2, dtype=torch.int64)
    torch.testing.assert_close(experts(z, *stacks, ids, weights, 4.0, 25.0), by_hand(z, stacks, ids, weights))


@IMPLEMENTATIONS
def test_no_tokens(name: str) -> None:
    experts = implementation(name)
    z, stacks, ids, weights = some()
    leaf = z[:0].requires_grad_()
    out = experts(leaf, *stacks, ids[:0], weights[:0], 4.0, 25.0)
    out.sum().backward()
    assert out.shape == leaf.grad.shape == (0, 5)


@IMPLEMENTATIONS
def test_bf16_rounds_each_expert_output_and_sums_in_fp32(name: str) -> None:
    experts = implementation(name)
    z, stacks, ids, weights = some(torch.bfloat16)
    out = experts(z, *stacks, ids, weights, 4.0, 25.0)
    assert out.dtype == torch.bfloat16
    exact = by_hand(z.double(), [s.double() for s in stacks], ids, weights.double())
    assert float((out.double() - exact).norm() / exact.norm()) < 2e-2
    single = [experts(z, *stacks, ids[:, j : j + 1], torch.ones(9, 1), 4.0, 25.0).float() for j in range(2)]
    by_slot = weights[:, :1] * single[0] + weights[:, 1:] * single[1]
    torch.testing.assert_close(out, by_slot.bfloat16(), rtol=2.0**-8, atol=0.0)


@IMPLEMENTATIONS
@pytest.mark.parametrize("wrong", [-1, 4])
def test_refuses_an_expert_that_does_not_exist(name: str, wrong: int) -> None:
    experts = implementation(name)
    z, stacks, ids, weights = some()
    ids[4, 1] = wrong
    with pytest.raises(KernelError, match=r"stacks hold experts 0\.\.3"):
        experts(z, *stacks, ids, weights, 4.0, 25.0)


@IMPLEMENTATIONS
def test_fp32_values_and_gradients_are_those_of_fp64(name: str) -> None:
    z, stacks, ids, weights = some(torch.float32)
    projection = torch.randn(9, 5, dtype=torch.float64)
    results = []
    for dtype, experts in ((torch.float64, reference.experts), (torch.float32, implementation(name))):
        inputs = [x.to(dtype).requires_grad_() for x in (z, *stacks, weights)]
        out = experts(*inputs[:4], ids, inputs[4], 4.0, 25.0)
        results.append([out.detach(), *torch.autograd.grad((out * projection.to(dtype)).sum(), inputs)])
    for exact, found in zip(*results, strict=True):
        assert float((found.double() - exact).abs().max()) <= 1e-5 * float(exact.abs().max())
