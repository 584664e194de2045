"""The places where later parts plug in: each is replaced here, and the model must not notice.

Stages over an explicit stream, embeddings in place of tokens, taps of depth blocks, experts elsewhere, a sequence cut between ranks.
"""

from collections.abc import Iterator

import exported
import pytest
import torch
from torch import Tensor, nn

from gnomon.errors import ConfigError
from gnomon.kernels import experts, kda, mla
from gnomon.model.residuals import DepthStream
from gnomon.model.transformer import Pass, Transformer

TOKENS = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def model() -> Transformer:
    return exported.build("kimi_k3")


def gradients(model: nn.Module, out: Tensor) -> dict[str, Tensor]:
    """The gradients of a scalar that depends on every output."""
    model.zero_grad()
    out.square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Equal up to rounding of sums in another order."""
    assert got.keys() == want.keys()
    for name, gradient in got.items():
        assert (gradient - want[name]).abs().max() <= 1e-5 * want[name].abs().max() + 1e-9, name


def test_stages_over_an_explicit_stream_are_the_model(model):
    stream, context = DepthStream(partial=model.embed(TOKENS)), Pass()
    for start, stop in ((0, 2), (2, 3), (3, model.config.num_hidden_layers)):
        stream = model.run_layers(stream, start, stop, context)
    assert torch.equal(model.head(model.finish(stream)), model(TOKENS))


def test_embeddings_stand_in_for_tokens_and_receive_the_gradient(model):
    embeddings = model.embed(TOKENS).detach().requires_grad_()
    logits = model(None, embeddings=embeddings)
    assert torch.equal(logits, model(TOKENS))
    logits.square().mean().backward()
    assert embeddings.grad.abs().amax(-1).min() > 0


@pytest.mark.parametrize("recompute", [False, True])
def test_taps_give_the_read_after_each_block_the_last_one_too(model, recompute):
    model.activation_checkpointing = recompute
    last = model.num_blocks
    taps: dict[int, Tensor | None] = dict.fromkeys(range(1, last + 1))
    hidden = model.hidden(TOKENS, taps=taps)
    assert all(tap is not None for tap in taps.values())
    assert torch.equal(model.model.norm(taps[last]), hidden)
    assert not torch.allclose(taps[1], taps[last])
    assert torch.autograd.grad(taps[1].sum(), model.model.embed_tokens.weight)[0].abs().max() > 0


def test_a_tap_of_a_block_that_is_not_there_is_named(model):
    with pytest.raises(ConfigError, match=r"blocks \[9\].*1 to 3"):
        model.hidden(TOKENS, taps={1: None, 9: None})


def test_experts_may_be_looked_up_and_dispatched_elsewhere(model):
    logits = model(TOKENS)
    want, returned = gradients(model, logits), []

    class Fetch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *weights):
            return tuple(w.clone() for w in weights)

        @staticmethod
        def backward(ctx, *grads):
            returned.append(len(grads))
            return grads

    def shuffled(routed, z, ids, weights):
        order = torch.randperm(len(z))
        return routed.run(z[order], ids[order], weights[order])[order.argsort()]

    layers = [layer.block_sparse_moe.experts for layer in model.model.layers if layer.has_experts]
    for routed in layers:
        routed.lookup = lambda e=routed: Fetch.apply(e.w1, e.w3, e.w2)
        routed.dispatch = shuffled
    replaced = model(TOKENS)
    assert torch.allclose(replaced, logits, atol=1e-5)
    assert_same(gradients(model, replaced), want)
    assert returned == [3] * len(layers)


class Halves:
    """A segment exchange between two calls: the first keeps what the second, which has the later tokens, asks for."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.later: Iterator[Tensor] | None = None
        self.reached: Tensor | None = None

    def history(self, projected, history, cu_seqlens):
        if self.later is not None:
            return next(self.later)
        self.kept.append(projected[:, -3:])
        return history

    def initial_state(self, inputs, state, cu_seqlens):
        if self.later is not None:
            return self.reached
        self.reached = kda.transition(inputs.k, inputs.v, inputs.g, inputs.beta, cu_seqlens)[1]
        return state


def test_a_sequence_cut_in_two_is_whole_through_the_exchange(model):
    mixer, x = model.model.layers[0].self_attn, torch.randn(1, 24, model.config.hidden_size)
    whole = mixer(x)
    want = gradients(mixer, whole)
    mixer.exchange = halves = Halves()
    first = mixer(x[:, :13])
    halves.later = iter(halves.kept)
    joined = torch.cat([first, mixer(x[:, 13:])], 1)
    assert torch.allclose(joined, whole, atol=1e-5)
    assert_same(gradients(mixer, joined), want)


def test_a_pass_over_states_is_not_run_twice(model):
    """Recomputing a layer would start from the state that the first run left behind."""
    results = []
    for recompute in (False, True):
        model.activation_checkpointing = recompute
        states = model.new_states(2, 4)
        with torch.no_grad():
            model(TOKENS[:, :10], states=states)
        results.append(gradients(model, model(TOKENS[:, 10:], states=states)))
    assert_same(results[1], results[0])


def test_autocast_reaches_attention_and_experts(monkeypatch):
    """Queries, keys and values of one type, or no fast attention takes them; experts without a latent in bf16 like other products."""
    seen: list[torch.dtype] = []
    model = exported.build("kimi_linear")
    for operator in (mla.attention, experts.experts):
        choose = operator._choose
        monkeypatch.setattr(operator, "_choose", lambda device, args, kwargs, choose=choose: (
            seen.extend(a.dtype for a in args[:3]), choose(device, args, kwargs))[1])
    with torch.autocast("cpu", torch.bfloat16):
        model(TOKENS)
    assert set(seen) == {torch.bfloat16}
