"""What every mixer owes the model: causality to the last bit, one answer for every split, documents apart, honest costs.

Kinds are found by their file; a new one needs a small shape below, and the rest of this page applies to it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gnomon.extend import find, kinds
from gnomon.model.config import MIXERS
from gnomon.model.layers import initialise
from gnomon.model.parts import KDAConfig, MLAConfig

HIDDEN, EPS = 32, 1e-5
SHAPES: dict[str, list[Any]] = {
    "kda": [
        KDAConfig(num_heads=2, head_dim=16),
        KDAConfig(num_heads=2, head_dim=16, gate_lower_bound=None, use_full_rank_gate=False),
    ],
    "mla": [
        MLAConfig(num_attention_heads=2, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16),
        MLAConfig(num_attention_heads=2, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=0, v_head_dim=8, mla_use_output_gate=False),
    ],
}
CASES = [pytest.param(kind, shape, id=f"{kind}-{i}") for kind in kinds(MIXERS) for i, shape in enumerate(SHAPES.get(kind, []))]
each_mixer = pytest.mark.parametrize(("kind", "shape"), CASES)


@pytest.fixture
def build() -> Callable[[str, Any], nn.Module]:
    """Makes a mixer with weights large enough for every part to matter."""

    def make(kind: str, shape: Any) -> nn.Module:
        mixer = find(MIXERS, kind, "Mixer")(shape, HIDDEN, EPS)
        initialise(mixer, 0, 0.3)
        return mixer.eval()

    return make


def states_of(mixer: nn.Module, sequences: int = 1) -> Any:
    """A fresh state, with little room so that growth is exercised."""
    return mixer.new_state(sequences, 2, torch.float32, torch.device("cpu"))


def close(got: Tensor, want: Tensor) -> None:
    """Equal up to fp32 rounding of sums in another order."""
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_every_kind_has_a_shape_here() -> None:
    assert sorted(SHAPES) == kinds(MIXERS)


@each_mixer
def test_later_tokens_do_not_change_a_bit_of_earlier_outputs(kind: str, shape: Any, build: Callable[..., nn.Module]) -> None:
    mixer, x = build(kind, shape), torch.randn(2, 70, HIDDEN)
    changed = x.clone()
    changed[:, 41:] = 3.0 * torch.randn(2, 29, HIDDEN)
    with torch.no_grad():
        before, after = mixer(x), mixer(changed)
    assert torch.equal(before[:, :41], after[:, :41])
    assert not torch.allclose(before[:, 41:], after[:, 41:])


@each_mixer
@pytest.mark.parametrize("split", [(20,), (1,) * 20, (7, 1, 12), (19, 1), (1, 19)], ids=str)
def test_any_split_gives_what_one_pass_gives(kind: str, shape: Any, split: tuple[int, ...], build: Callable[..., nn.Module]) -> None:
    mixer, x = build(kind, shape), torch.randn(3, 20, HIDDEN)
    with torch.no_grad():
        whole, state = mixer(x), states_of(mixer, 3)
        parts = torch.cat([mixer(part, state) for part in x.split(split, dim=1)], dim=1)
    close(parts, whole)


@each_mixer
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_a_state_of_another_type_serves_and_keeps_its_type(kind: str, shape: Any, autocast: bool, build: Callable[..., nn.Module]) -> None:
    mixer, x = build(kind, shape), torch.randn(2, 12, HIDDEN)
    state = mixer.new_state(2, 2, torch.float32 if autocast else torch.bfloat16, torch.device("cpu"))
    kept = {name: value.dtype for name, value in vars(state).items()}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        parts = torch.cat([mixer(part, state) for part in x.split((7, 1, 1, 3), dim=1)], dim=1)
        whole = mixer(x)
    assert (parts - whole).norm() <= 0.02 * whole.norm()
    assert {name: value.dtype for name, value in vars(state).items()} == kept


@each_mixer
def test_packed_documents_do_not_see_each_other(kind: str, shape: Any, build: Callable[..., nn.Module]) -> None:
    mixer, lengths = build(kind, shape), [5, 1, 1, 33, 2]
    documents = [torch.randn(1, n, HIDDEN) for n in lengths]
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    with torch.no_grad():
        packed = mixer(torch.cat(documents, dim=1), None, borders)
        alone = torch.cat([mixer(document) for document in documents], dim=1)
    close(packed, alone)


@each_mixer
def test_packed_documents_go_on_from_their_own_states(kind: str, shape: Any, build: Callable[..., nn.Module]) -> None:
    mixer, documents = build(kind, shape), [torch.randn(1, n, HIDDEN) for n in (9, 4, 6)]
    cuts = (5, 1, 4)
    with torch.no_grad():
        state, alone = states_of(mixer, 3), [mixer(document) for document in documents]
        for take in (lambda d, c: d[:, :c], lambda d, c: d[:, c:]):
            parts = [take(d, c) for d, c in zip(documents, cuts)]
            borders = torch.tensor([0, *(p.shape[1] for p in parts)]).cumsum(0).int()
            got = mixer(torch.cat(parts, dim=1), state, borders)
            close(got, torch.cat([take(whole, c) for whole, c in zip(alone, cuts)], dim=1))


@each_mixer
def test_a_copied_or_selected_state_is_independent(kind: str, shape: Any, build: Callable[..., nn.Module]) -> None:
    mixer, x = build(kind, shape), torch.randn(2, 6, HIDDEN)
    with torch.no_grad():
        state = states_of(mixer, 2)
        mixer(x, state)
        fork, swapped = state.copy(), state.select(torch.tensor([1, 0, 1]))
        new = torch.randn(2, 1, HIDDEN)
        first = mixer(new, state)
        assert torch.equal(mixer(new, fork), first)
        close(mixer(new[[1, 0, 1]], swapped), first[[1, 0, 1]])


@each_mixer
def test_costs_are_those_of_the_module(kind: str, shape: Any, build: Callable[..., nn.Module]) -> None:
    mixer = build(kind, shape)
    listed = {spec.name: spec.shape for spec in shape.tensors(HIDDEN)}
    assert listed == {name: tuple(tensor.shape) for name, tensor in mixer.state_dict().items()}
    with torch.no_grad():
        state = states_of(mixer)
        mixer(torch.randn(1, 11, HIDDEN), state)
    assert state.bytes() == 11 * 4 * shape.cached_values_per_token() + 4 * shape.conv_state_values() + shape.state_bytes()
    assert shape.flops_per_token(HIDDEN, 64) >= 2 * sum(t.numel() for t in mixer.parameters() if t.dim() == 2)


@each_mixer
def test_every_parameter_gets_a_finite_gradient(kind: str, shape: Any, build: Callable[..., nn.Module]) -> None:
    mixer = build(kind, shape).train()
    mixer(torch.randn(2, 19, HIDDEN)).square().sum().backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name
