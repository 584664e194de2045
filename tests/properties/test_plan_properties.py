"""The planner's arithmetic over many shapes and layouts: parts add up, more of anything never takes less, ranks hold at least the whole."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import ConfigError
from gnomon.model.config import ModelConfig, preset
from gnomon.plan.exchange import exchanges, sent
from gnomon.plan.footprint import kv_bytes_per_token, parameters, state_bytes, weights
from gnomon.plan.inventory import stages
from gnomon.plan.learning import activation_bytes, optimiser_bytes
from gnomon.plan.traffic import flops, touched_experts, traffic
from gnomon.plan.workload import BITS, Layout, Precision

formats = st.sampled_from(sorted(BITS))
precisions = st.builds(Precision, experts=formats, rest=formats, kv=formats, activations=st.sampled_from(["bf16", "fp8", "fp32"]),
                       state=st.sampled_from(["fp32", "bf16"]))
powers = st.sampled_from([1, 2, 4])


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    config = preset(draw(st.sampled_from(["tiny", "small", "kimi-linear-48b"])))
    pool = 4 * draw(st.integers(2, 12))
    moe = replace(config.moe, num_experts=pool, num_experts_per_token=draw(st.integers(1, min(8, pool)))) if draw(st.booleans()) else None
    return replace(config, moe=moe, num_hidden_layers=draw(st.integers(4, 20)), layer_pattern=draw(st.sampled_from(
        [("kda", "kda", "kda", "mla"), ("mla",), ("kda",), ("kda", "mla")])), final_mixer=draw(st.sampled_from(["mla", None])),
        attention_residuals=draw(st.sampled_from(["block", "full", "off"])))


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[ModelConfig, Layout]:
    config = draw(models())
    tensor, context, data = draw(powers), draw(powers), draw(powers)
    stage = tensor * context * data
    expert = draw(st.sampled_from([n for n in (1, 2, 4) if stage % n == 0])) if config.moe else 1
    return config, Layout(tensor=tensor, context=context, data=data, expert=expert, pipeline=draw(st.sampled_from([1, 2, 4])),
                          zero=draw(st.integers(0, 3)), kv_shards=draw(st.sampled_from([n for n in (1, 2, 4) if tensor % n == 0])))


@settings(max_examples=40, deadline=None)
@given(laid_out(), precisions)
def test_ranks_together_hold_at_least_the_whole(given_layout: tuple[ModelConfig, Layout], precision: Precision) -> None:
    config, layout = given_layout
    ranks = layout.tensor * layout.context * layout.data
    for figure in (lambda s: weights(config, precision, layout, s), lambda s: parameters(config, layout, s)):
        each = [figure(stage) for stage in range(layout.pipeline)]
        assert ranks * sum(f.bytes for f in each) >= each[0].whole_bytes * (1 - 1e-9)
        assert figure(None).bytes == pytest.approx(max(f.bytes for f in each))
    latents = ranks * sum(kv_bytes_per_token(config, precision, layout, s) for s in range(layout.pipeline)) / layout.data
    assert latents >= kv_bytes_per_token(config, precision) * (1 - 1e-9)
    states = layout.tensor * sum(state_bytes(config, precision, layout, 1, 0, s) for s in range(layout.pipeline))
    assert states == pytest.approx(state_bytes(config, precision))


@settings(max_examples=40, deadline=None)
@given(models(), precisions)
def test_parts_add_up(config: ModelConfig, precision: Precision) -> None:
    counted = parameters(config)
    assert counted.without("vision").whole_bytes == config.num_parameters() == counted.bytes - counted.parts.get("vision", 0)
    held = weights(config, precision)
    assert held.bytes == pytest.approx(sum(held.parts.values())) and held.whole == held.parts
    assert sum(flops(config, tokens=1, context=100).values()) == pytest.approx(config.flops_per_token(100))
    by_layers = [weights(config, precision, Layout(pipeline=2), stage).bytes for stage in (0, 1)]
    assert sum(by_layers) == pytest.approx(held.bytes)
    keeping = Layout(pipeline=2)
    assert [layer for span in stages(config, keeping) for layer in span] == list(range(config.num_hidden_layers))


@settings(max_examples=40, deadline=None)
@given(laid_out(), precisions, st.integers(1, 64), st.integers(0, 4096))
def test_more_never_takes_less(given_layout: tuple[ModelConfig, Layout], precision: Precision, sequences: int, context: int) -> None:
    config, layout = given_layout

    def step(tokens: int, over: int) -> float:
        return traffic(config, precision, layout, tokens=tokens, sequences=tokens, context=over).bytes

    assert step(sequences, context) < step(sequences + 1, context)
    assert step(sequences, context) <= step(sequences, context + 1)
    for size in (lambda n: sum(flops(config, layout, tokens=n, context=context).values()),
                 lambda n: sent(exchanges(config, precision, layout, tokens=n)),
                 lambda n: activation_bytes(config, precision, layout, tokens=n).bytes):
        assert size(sequences) <= size(sequences + 1)
    deeper = replace(config, num_hidden_layers=config.num_hidden_layers + 1)
    assert weights(deeper, precision).whole_bytes > weights(config, precision).whole_bytes
    if BITS[precision.rest] < 32:
        assert weights(config, replace(precision, rest="fp32")).whole_bytes > weights(config, precision).whole_bytes


@settings(max_examples=40, deadline=None)
@given(laid_out())
def test_sharing_out_never_takes_more(given_layout: tuple[ModelConfig, Layout]) -> None:
    config, layout = given_layout
    sizes = [optimiser_bytes(config, replace(layout, zero=zero)).bytes for zero in range(4)]
    assert sizes == sorted(sizes, reverse=True)
    precision = Precision(experts="bf16", rest="bf16")
    assert weights(config, precision, replace(layout, zero=3)).bytes <= weights(config, precision, replace(layout, zero=0)).bytes


@given(st.integers(1, 5000))
def test_experts_touched_are_bounded(tokens: int) -> None:
    config = preset("k3-2.8t")
    touched = touched_experts(config, tokens)
    assert 16 - 1e-9 <= touched <= min(896, 16 * tokens) + 1e-9
    assert touched <= touched_experts(config, tokens + 1)


@given(st.sampled_from(["tensor", "expert", "pipeline", "context", "data", "kv_shards"]), st.integers(-3, 0))
def test_no_layout_has_less_than_one_rank(name: str, size: int) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is {size}"):
        Layout(**{name: size})
