"""Saved tensors under each policy: the same gradients where nothing is rounded, near ones where it is, parameters never touched."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from gnomon.errors import ConfigError
from gnomon.model.config import preset
from gnomon.model.transformer import Transformer
from gnomon.train import activations
from gnomon.train.activations import Blocks, Ledger, Spill, attach
from gnomon.train.settings import ActivationRule

OVERRIDES = ("num_hidden_layers=2", "vocab_size=64", "hidden_size=64", "intermediate_size=96")


def run(*rules: tuple[str, str]) -> tuple[float, dict[str, Tensor], Ledger, Transformer]:
    """Loss, gradients and account of one pass under these rules."""
    model = Transformer(preset("tiny", OVERRIDES)).initialise(3)
    for router in model.routers():
        router.start_observing()
    ledger = attach(model, [ActivationRule(modules=modules, policy=policy) for modules, policy in rules])
    tokens = torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(1))
    loss = model(tokens).logsumexp(-1).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, ledger, model


def counted(model: Transformer) -> list[list[int]]:
    """What the routers counted."""
    return [router.load.tolist() for router in model.routers()]


@pytest.fixture(scope="module")
def kept() -> tuple[float, dict[str, Tensor], Ledger, Transformer]:
    return run()


EXACT = [
    [("*.self_attn", "recompute")], [("*.block_sparse_moe", "recompute")], [("*.experts", "recompute")], [("*", "keep")],
    [("*.self_attn", "offload")], [("model.layers.?", "offload")], [("model.layers.*", "quantise"), ("*", "keep")],
    [("model.layers.?", "recompute"), ("*.self_attn", "offload")],
]


@pytest.mark.parametrize("rules", EXACT, ids=[" ".join(f"{policy}:{modules}" for modules, policy in rules) for rules in EXACT])
def test_policies_that_round_nothing_change_nothing(rules: Sequence[tuple[str, str]], kept: tuple) -> None:
    loss, gradients, ledger, model = run(*rules)
    assert loss == kept[0] and gradients.keys() == kept[1].keys()
    assert all(torch.equal(gradients[name], kept[1][name]) for name in gradients)
    assert counted(model) == counted(kept[3])  # tokens are counted once, also where a layer ran twice
    offloaded = any(policy == "offload" for _, policy in rules)
    assert (ledger.taken > 0) == offloaded and ledger.left == 0


def test_quantised_tensors_take_a_quarter_and_give_near_gradients(kept: tuple) -> None:
    loss, gradients, ledger, _ = run(("*_proj", "quantise"), ("*.experts", "quantise"), ("*.mlp", "quantise"))
    assert loss == kept[0]  # the forward pass is untouched
    assert ledger.taken > 100_000 and ledger.left <= ledger.taken * (1 / 4 + 1 / 128) * 1.01
    for name, gradient in gradients.items():
        error = float((gradient - kept[1][name]).norm() / kept[1][name].norm().clamp(min=1e-12))
        assert error < 0.1 or kept[1][name].norm() < 1e-6, name
    assert any(not torch.equal(gradient, kept[1][name]) for name, gradient in gradients.items())


def test_what_is_saved_twice_is_packed_once() -> None:
    ledger = Ledger()
    hooks = activations._Hooks(Blocks.of, ledger)
    x = torch.randn(128, 128)
    assert hooks.pack(x) is not x
    first, second = hooks.pack(x), hooks.pack(x)
    assert first is second and ledger.taken == 2 * x.nbytes  # the very first was not held by anybody
    weight = torch.nn.Parameter(torch.randn(128, 128))
    assert hooks.pack(weight) is weight
    with torch.no_grad():
        assert hooks.pack(torch.zeros(10_000, dtype=torch.int64)).dtype == torch.int64


def test_blocks_round_to_a_sixteenth_of_each_value_or_of_the_smallest_step() -> None:
    x = torch.randn(33, 70, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 70)
    for values in (x, x.bfloat16(), torch.zeros(5000), torch.full((300,), 1e-42)):
        packed = Blocks.of(values)
        back = packed.tensor()
        assert back.shape == values.shape and back.dtype == values.dtype and bool(back.isfinite().all())
    flat = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % 128)).view(-1, 128)
    steps = flat.abs().amax(1, keepdim=True) / 448 * 2**-9
    error = torch.nn.functional.pad((Blocks.of(x).tensor() - x).flatten(), (0, -x.numel() % 128)).view(-1, 128).abs()
    assert bool((error <= torch.maximum(flat.abs() / 16, steps / 2) * 1.0001).all())


def test_the_file_is_gone_when_nothing_is_in_it() -> None:
    spill = Spill()
    values = [torch.randn(10, 7), torch.randn(3).bfloat16(), torch.arange(5.0)]
    held = [activations.Away(value, spill) for value in values]
    assert spill.end == sum(value.nbytes for value in values)
    for value, away in zip(values, held, strict=True):
        assert torch.equal(away.tensor(), value) and away.tensor().dtype == value.dtype
    del held, away
    assert spill.live == spill.end == 0 and spill.file is None


def test_a_rule_that_names_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'activations\.modules' is 'model\.layers\.9', which names no part of the model"):
        run(("model.layers.9", "offload"))
