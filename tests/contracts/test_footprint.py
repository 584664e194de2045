"""Memory: the planner's sums are those of the modules that run, and of published figures."""

from dataclasses import replace

import pytest
import torch

from gnomon.errors import CapacityError, ConfigError
from gnomon.model.config import preset
from gnomon.model.state import KDAState, MLACache
from gnomon.model.transformer import Transformer
from gnomon.plan.footprint import capacity, fewest_devices, kv_bytes_per_token, page_tokens, parameters, state_bytes, weights
from gnomon.plan.hardware import device
from gnomon.plan.inventory import stages
from gnomon.plan.traffic import traffic
from gnomon.plan.workload import Layout, Precision

K3 = preset("k3-2.8t")
RELEASED = Precision.released(K3)
NAMES = ("tiny", "small", "kimi-linear-48b", "k3-2.8t")
PART_OF = (("self_attn.", None), (".experts.", "routed"), ("shared_experts.", "shared"), ("routed_expert_", "latent"), (".gate.", "router"),
           ("mlp.", "dense"), ("embed_tokens", "embedding"), ("lm_head", "head"), ("attn_res_", "depth"), ("attention_res_", "depth"),
           ("mlp_res_", "depth"), ("norm", "norms"))


@pytest.mark.parametrize("name", NAMES)
def test_parts_are_those_of_the_modules(name: str) -> None:
    config = preset(name)
    with torch.device("meta"):
        model = Transformer(config)
    counted: dict[str, int] = {}
    tensors = [*model.named_parameters(), *(item for item in model.named_buffers() if item[0].endswith("e_score_correction_bias"))]
    for path, tensor in tensors:
        part = next(part for mark, part in PART_OF if mark in path)
        part = part or config.layers[int(path.split(".")[2])]
        counted[part] = counted.get(part, 0) + tensor.numel()
    assert counted == dict(parameters(config).without("vision").whole)


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_caches_are_those_that_a_model_hands_out(name: str) -> None:
    config, tokens, sequences = preset(name), 7, 2
    states = Transformer(config).new_states(sequences, capacity=tokens)
    fp32 = Precision(experts="bf16", rest="bf16", kv="fp32", activations="fp32")
    latents = sum(s.rows.numel() * s.rows.element_size() for s in states if isinstance(s, MLACache))
    assert latents == sequences * tokens * kv_bytes_per_token(config, fp32)
    recurrent = sum(s.conv.numel() * s.conv.element_size() + s.matrix.numel() * s.matrix.element_size() for s in states
                    if isinstance(s, KDAState))
    assert recurrent == state_bytes(config, fp32, sequences=sequences)


def test_k3_is_its_checkpoint() -> None:
    assert weights(K3, RELEASED).whole_bytes == K3.checkpoint_bytes() == 1_560_860_324_864
    narrow = Precision(experts="mxfp4", rest="fp8")
    assert weights(K3, narrow).without("vision").whole_bytes == pytest.approx(1503e9, rel=1e-3)
    assert weights(K3, Precision(experts="bf16", rest="bf16")).without("vision").whole_bytes == pytest.approx(5559e9, rel=1e-4)


def test_latents_stand_on_every_tensor_rank_unless_dealt() -> None:
    assert kv_bytes_per_token(K3, RELEASED) == kv_bytes_per_token(K3, RELEASED, Layout(tensor=8)) == 27_648
    assert kv_bytes_per_token(K3, RELEASED, Layout(tensor=8, kv_shards=8)) == 27_648 / 8
    assert kv_bytes_per_token(K3, RELEASED, Layout(context=4)) == 27_648 / 4


def test_what_no_head_divides_stands_on_every_rank() -> None:
    parts = parameters(K3, Layout(tensor=8)).parts
    inner = 69 * 128 * 7168  # f_a, and the norm over one head's width
    assert parts["kda"] == (30_618_086_496 - inner - 69 * 128) / 8 + inner + 69 * 128
    assert parts["norms"] == parameters(K3).parts["norms"] and parts["router"] == 92 * (896 * 7168 / 8 + 896)
    assert parts["routed"] == parameters(K3, Layout(tensor=2, expert=8, data=4)).parts["routed"] == 2_722_740_830_208 / 8


def test_only_the_last_stage_of_zero_shares_weights_out() -> None:
    sizes = [weights(K3, RELEASED, Layout(data=8, zero=zero)).bytes for zero in range(4)]
    assert sizes[0] == sizes[1] == sizes[2] == K3.checkpoint_bytes() and sizes[3] == pytest.approx(sizes[0] / 8)


def test_the_fullest_stage_is_the_limit() -> None:
    """The stage that holds the head, or one more layer, has less room: a pipeline takes what its tightest stage takes."""
    room = capacity(K3, RELEASED, Layout(tensor=2, pipeline=4), device("gb300"))
    assert len(set(room.left)) > 1
    for context in (1, 100_000):
        each = [left / (context * token + state) for left, token, state in zip(room.left, room.per_token, room.per_sequence)]
        assert room.sequences(context) == pytest.approx(min(each))
    assert room.tokens() == pytest.approx(min(left / token for left, token in zip(room.left, room.per_token)))


def test_state_with_drafts_is_what_an_engine_allocates() -> None:
    eight = Layout(tensor=8)
    assert state_bytes(K3, RELEASED, eight, draft_tokens=2) / 2**20 == pytest.approx(54.78, abs=0.005)
    assert state_bytes(K3, RELEASED) == K3.state_bytes() + K3.conv_state_bytes()
    assert state_bytes(K3, RELEASED, eight, sequences=16) == 2 * state_bytes(K3, RELEASED)


def test_pages_grow_with_the_state() -> None:
    assert page_tokens(K3, Precision(experts="mxfp4", rest="bf16", kv="fp8"), Layout(tensor=8)) == 1536
    assert page_tokens(K3, RELEASED) == 6144 and page_tokens(K3, RELEASED, Layout(tensor=8)) == 1024


def test_stages_end_where_blocks_do() -> None:
    assert [span.start for span in stages(K3, Layout(pipeline=8))] == list(range(0, 93, 12))
    for count in (1, 2, 5, 31, 92, 93):
        spans = stages(K3, Layout(pipeline=count))
        assert len(spans) == count and min(map(len, spans)) >= 1
        assert [layer for span in spans for layer in span] == list(range(93))


def test_a_tied_table_stands_on_the_first_and_the_last_stage() -> None:
    tied = replace(K3, tie_word_embeddings=True)
    table = K3.vocab_size * K3.hidden_size
    ends = [parameters(tied, Layout(pipeline=8), stage).parts.get("embedding", 0) for stage in range(8)]
    assert ends == [table, 0, 0, 0, 0, 0, 0, table] and parameters(tied).bytes == parameters(K3).bytes - table
    assert traffic(tied, RELEASED, tokens=1, sequences=1, context=0).parts["head"] == 2 * table


def test_a_stage_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="there is no stage 2; the layout has 2"):
        weights(K3, RELEASED, Layout(pipeline=2), stage=2)


@pytest.mark.parametrize(("name", "count"), [("b300", 8), ("gb300", 8), ("mi355x", 8), ("b200", 16), ("h200", 16), ("m3-ultra", 4)])
def test_fewest_devices_for_k3(name: str, count: int) -> None:
    assert fewest_devices(K3, RELEASED, device(name))[0] == count


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(CapacityError, match="does not fit on NVIDIA RTX 4090: a rank still lacks"):
        fewest_devices(K3, RELEASED, device("rtx-4090"), most=16)
    with pytest.raises(ConfigError, match="'utilisation' is"):
        capacity(K3, RELEASED, Layout(tensor=8), device("b300"), utilisation=1.5)


def test_room_is_a_cliff() -> None:
    room = capacity(K3, RELEASED, Layout(tensor=8), device("b300"))
    assert room.fits and room.tokens(0) > room.tokens(64) > 0
    many = room.sequences(131_072)
    assert many * 131_072 <= room.tokens(many) * (1 + 1e-9)
    assert not capacity(K3, RELEASED, Layout(tensor=8), device("b200")).fits
    assert capacity(K3, RELEASED, Layout(tensor=8), device("b200")).sequences(1) == 0
    dealt = capacity(K3, RELEASED, Layout(tensor=8, kv_shards=8), device("b300"))
    assert dealt.tokens() == pytest.approx(8 * room.tokens())


def test_sixteen_workstation_cards_hold_k3_only_when_filled_to_the_brim() -> None:
    card = device("rtx-pro-6000")
    assert fewest_devices(K3, RELEASED, card)[0] == 32
    assert fewest_devices(K3, RELEASED, card, utilisation=0.97, reserve_bytes=0)[0] == 16
