"""What a step moves, computes and sends: against the model's own counts, published volumes and what autograd keeps."""

from dataclasses import replace

import pytest
import torch

from gnomon.errors import ConfigError
from gnomon.model.config import preset
from gnomon.model.transformer import Transformer
from gnomon.plan.exchange import blocks_before, exchanges, optimiser_exchanges, pipeline_payload, sent
from gnomon.plan.footprint import weights
from gnomon.plan.learning import activation_bytes, optimiser_bytes, training_bytes, training_traffic
from gnomon.plan.traffic import flops, touched_experts, traffic
from gnomon.plan.workload import Layout, Precision

K3 = preset("k3-2.8t")
RELEASED = Precision.released(K3)
NAMES = ("tiny", "small", "kimi-linear-48b", "k3-2.8t")


def by_what(items: list, what: str) -> float:
    return sum(item.sent_bytes for item in items if item.what == what)


@pytest.mark.parametrize(("tokens", "experts"), [(1, 16), (16, 224), (64, 613)])
def test_experts_that_a_step_touches(tokens: int, experts: int) -> None:
    assert round(touched_experts(K3, tokens)) == experts


def test_experts_touched_are_the_mean_of_even_choices() -> None:
    torch.manual_seed(0)
    counts = [len(set(torch.stack([torch.randperm(896)[:16] for _ in range(16)]).flatten().tolist())) for _ in range(200)]
    assert touched_experts(K3, 16) == pytest.approx(sum(counts) / 200, rel=0.01)


def test_one_token_of_k3_reads_137_gigabytes() -> None:
    step = traffic(K3, RELEASED, tokens=1, sequences=1, context=8192)
    assert step.parts["routed"] == pytest.approx(25.8e9, rel=2e-3)
    assert step.weights - step.parts["routed"] == pytest.approx(111.1e9, rel=1e-3)
    assert step.cache == pytest.approx(8192 * 27_648 + 2 * (K3.state_bytes() + K3.conv_state_bytes()) + 27_648)
    assert step.bytes == step.weights + step.cache + step.parts["activations"]


def test_state_is_worth_31_thousand_tokens_of_latents() -> None:
    step = traffic(K3, RELEASED, tokens=1, sequences=1, context=0)
    assert (step.parts["state"] - 2 * K3.conv_state_bytes()) / 27_648 == pytest.approx(31_400, rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("context", [0, 1000])
def test_flops_are_the_models_own_count(name: str, context: int) -> None:
    config = preset(name)
    assert sum(flops(config, tokens=3, context=context).values()) == pytest.approx(3 * config.flops_per_token(context))
    shared = flops(config, Layout(tensor=2), tokens=3, context=context)
    assert sum(shared.values()) == pytest.approx(1.5 * config.flops_per_token(context))


def test_expert_ranks_beyond_a_copy_see_the_tokens_of_all_that_share_them() -> None:
    alone, shared = (traffic(K3, RELEASED, layout, tokens=4, sequences=4, context=0).parts["routed"]
                     for layout in (Layout(tensor=4), Layout(tensor=4, expert=64, data=16)))
    whole = weights(K3, RELEASED).whole["routed"]
    assert alone == pytest.approx(whole / 4 * touched_experts(K3, 4) / 896)
    assert shared == pytest.approx(whole / 64 * touched_experts(K3, 64) / 896)


def test_tensor_ranks_sum_two_sublayers_a_layer_and_the_embedding() -> None:
    """A ring sends each value twice, less one part in eight; latents are summed before their norm."""
    found = exchanges(K3, RELEASED, Layout(tensor=8), tokens=10)
    assert by_what(found, "sublayer outputs") == (2 * 93 + 1) * 10 * 7168 * 2 * 2 * 7 / 8
    assert by_what(found, "expert latents") == 92 * 10 * 3584 * 2 * 2 * 7 / 8
    assert {item.ranks for item in found} == {8}


def test_attending_in_the_latent_space_takes_more_flops_per_cached_token() -> None:
    absorbed, expanded = (flops(K3, tokens=1, context=8192, absorbed=a)["attention"] for a in (True, False))
    assert absorbed == 24 * 2 * 96 * (512 + 64 + 512) * 8192 and expanded == 24 * 2 * 96 * (192 + 128) * 8192


def test_prefill_takes_logits_of_one_token() -> None:
    assert flops(K3, tokens=8192, context=4096, logits=1)["head"] == 2 * 163_840 * 7168


def test_the_latent_halves_what_experts_are_sent() -> None:
    layout = Layout(expert=64, data=64)
    latent, full = (sent(exchanges(K3, RELEASED, layout, tokens=8192, latent=flag)) for flag in (True, False))
    assert full == 2 * latent
    # at most 16 rows of the latent width per token and layer, less what stays or goes to one rank twice; two bytes each way
    ceiling = 92 * 8192 * 16 * 3584 * 4
    assert 0.8 * ceiling < latent < ceiling
    assert not exchanges(K3, RELEASED, tokens=8192)


def test_context_ranks_send_12_6_megabytes_per_kda_layer_whatever_the_length() -> None:
    layout = Layout(context=2)
    for tokens in (16_384, 1_048_576):
        volume = by_what(exchanges(K3, RELEASED, layout, tokens=tokens), "segment transitions")
        assert volume / 69 == 96 * 128 * 256 * 4
    assert volume == pytest.approx(0.87e9, rel=5e-3)


def test_pipeline_payload_is_that_of_the_paper() -> None:
    """Every layer a block: C (C - 1) / 2 blocks without a cache; P (P - 1) / 2 + (V - 1) P^2 with one. A running sum goes with each hop;
    in the paper's second sum it is the newest block."""
    config = replace(preset("tiny"), num_hidden_layers=64, attn_res_block_size=1, moe=None)
    for virtual, naive, cached in ((1, 120, 120), (2, 496, 376), (4, 2016, 888)):
        chunks = 16 * virtual
        even = replace(config, num_hidden_layers=chunks, vocab_size=32)
        hops = chunks - 1
        assert pipeline_payload(even, Layout(pipeline=16), virtual, cached=False) == naive + hops
        assert pipeline_payload(even, Layout(pipeline=16), virtual) == cached + 15
    with pytest.raises(ConfigError, match="use 4 or less"):
        pipeline_payload(config, Layout(pipeline=16), 5)


@pytest.mark.parametrize("kind", ["block", "full", "off"])
def test_banked_blocks_are_the_sources_of_the_depth_reads(kind: str) -> None:
    config = replace(K3, attention_residuals=kind)
    sources = config.depth_sources()
    for layer in range(1, 93):
        # a layer's attention reads what is banked and the running sum, before it banks anything itself
        expected = blocks_before(config, layer) + 1
        assert not sources or sources[2 * layer - 1] == expected


def test_dealt_latents_cost_queries_and_merges() -> None:
    plain, dealt = (exchanges(K3, RELEASED, Layout(tensor=8, kv_shards=n), tokens=1) for n in (1, 8))
    assert sent(dealt) - sent(plain) == by_what(dealt, "queries and partial outputs") > 0


def test_zero_spares_copies_of_gradients_and_moments() -> None:
    base = Layout(data=8)
    volumes = {zero: optimiser_exchanges(K3, replace(base, zero=zero)) for zero in (0, 1)}
    count = K3.num_parameters()
    assert sent(volumes[0]) == pytest.approx(2 * count * 4 * 7 / 8) and sent(volumes[1]) == pytest.approx(count * (4 + 2) * 7 / 8)
    assert not optimiser_exchanges(K3, Layout())
    full, moments, gradients = (optimiser_bytes(K3, replace(base, zero=zero)) for zero in (0, 1, 2))
    assert full.bytes == pytest.approx(full.whole_bytes)
    assert moments.parts["momentum"] == pytest.approx(full.parts["momentum"] / 8) and moments.parts["gradients"] == full.parts["gradients"]
    assert gradients.bytes == pytest.approx(full.bytes / 8)
    assert weights(K3, RELEASED, replace(base, zero=3)).bytes == pytest.approx(K3.checkpoint_bytes() / 8)


def test_muon_keeps_one_momentum_of_matrices_and_two_moments_of_the_rest() -> None:
    muon, adamw = (optimiser_bytes(K3, optimiser=name) for name in ("muon", "adamw"))
    count = K3.num_parameters()
    assert adamw.whole["momentum"] == adamw.whole["second moment"] == muon.whole["momentum"] == 4 * count
    tables = 2 * K3.vocab_size * K3.hidden_size
    assert 4 * tables < muon.whole["second moment"] < 4 * tables * 1.01
    assert not optimiser_bytes(K3, optimiser="none").bytes


def test_muon_takes_what_the_trainer_gives_it() -> None:
    from gnomon.train.units import is_matrix

    config = preset("tiny")
    with torch.device("meta"):
        named = dict(Transformer(config).named_parameters())
    vectors = sum(p.numel() for name, p in named.items() if not is_matrix(name, p.shape))
    biases = sum(config.moe.num_experts for _ in range(config.num_moe_layers))
    assert optimiser_bytes(config).whole["second moment"] == 4 * (vectors + biases)


def test_activations_are_what_autograd_keeps() -> None:
    config, tokens = preset("tiny"), 256
    model = Transformer(config)
    model.initialise(0)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = model.hidden(torch.zeros(1, tokens, dtype=torch.long))
    fp32 = Precision(experts="fp32", rest="fp32", activations="fp32")
    assert activation_bytes(config, fp32, tokens=tokens, recompute="none").bytes == pytest.approx(sum(kept.values()), rel=0.25)
    assert output.requires_grad


def test_recomputation_pays_in_memory() -> None:
    none, some, full = (activation_bytes(K3, RELEASED, tokens=8192, recompute=r).bytes for r in ("none", "selective", "full"))
    assert none > 1.5 * some > 3 * full
    one, many = (activation_bytes(K3, RELEASED, Layout(pipeline=8), tokens=8192, micro_batches=n) for n in (1, 16))
    assert many.stage == 0 and 7 * one.bytes < many.bytes <= 8 * one.bytes


def test_training_sums_its_parts() -> None:
    layout = Layout(pipeline=8, expert=32, data=32, zero=1)
    precision = Precision(experts="bf16", rest="bf16")
    total = training_bytes(K3, precision, layout, tokens=8192, micro_batches=8)
    assert total.bytes == sum(total.parts.values()) and set(total.parts) == {"weights", "optimiser", "activations"}
    moved = training_traffic(K3, precision, layout, tokens=8192, context=4096)
    assert moved.parts["head"] == 2 * weights(K3, precision).whole["head"]
    assert training_traffic(K3, precision, layout, tokens=8192, context=4096, recompute="full").bytes > moved.bytes
    with pytest.raises(ConfigError, match="at least one token"):
        training_traffic(K3, precision, tokens=0, context=1)
