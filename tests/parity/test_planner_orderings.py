"""What the planner says of K3's knobs against an independent model of the same steps: one latency per layer, and bytes over bandwidth.

The reference is a hand calculation on eight devices of 7.75 TB/s at 57 %: 4.62 ms for 93 layers, every expert that is touched, all other
weights, latents and states. Its signs and orderings are what a plan's reader acts on.
"""

from dataclasses import replace

import pytest

from gnomon.model.config import ModelConfig, preset
from gnomon.plan.calibration import Record, record
from gnomon.plan.cost import decode_step, deployment
from gnomon.plan.families import all_mla
from gnomon.plan.footprint import weights
from gnomon.plan.hardware import Cluster
from gnomon.plan.step import Coefficients
from gnomon.plan.workload import Layout, Precision

K3 = preset("k3-2.8t")
AS_RELEASED = Precision.released(K3)
MACHINE = Cluster.parse("b300:8")
COLUMNS = ((1, 8192), (16, 8192), (64, 8192), (16, 262_144), (4, 1_048_576))


def experts(**changes: int) -> ModelConfig:
    """K3 with other experts."""
    return replace(K3, moe=replace(K3.moe, **changes))


TURNS = {
    "experts x2": (experts(num_experts=1792), AS_RELEASED),
    "top-k x2": (experts(num_experts_per_token=32), AS_RELEASED),
    "top-k /2": (experts(num_experts_per_token=8), AS_RELEASED),
    "depth +10 %": (replace(K3, num_hidden_layers=102), AS_RELEASED),
    "all-MLA": (all_mla(K3), AS_RELEASED),
    "MLA 1:7": (replace(K3, layer_pattern=("kda",) * 7 + ("mla",)), AS_RELEASED),
    "fp8 KV": (K3, replace(AS_RELEASED, kv="fp8")),
    "fp8 rest": (K3, replace(AS_RELEASED, rest="fp8")),
    "bf16 experts": (K3, replace(AS_RELEASED, experts="bf16")),
}
REFERENCE = {     # ms; b1/8k, b16/8k, b64/8k, b16/256k, b4/1M
    "as it is": (8.53, 18.52, 37.78, 21.69, 13.99), "experts x2": (8.56, 19.24, 45.56, 22.42, 14.06),
    "top-k x2": (9.26, 26.32, 46.71, 29.50, 16.69), "top-k /2": (8.16, 13.74, 27.65, 16.91, 12.59),
    "depth +10 %": (9.35, 20.32, 41.47, 23.75, 15.30), "all-MLA": (7.70, 17.61, 36.64, 29.91, 22.50),
    "MLA 1:7": (8.67, 18.68, 37.98, 20.26, 12.51), "fp8 KV": (8.52, 18.46, 37.57, 20.05, 12.35),
    "fp8 rest": (6.95, 16.95, 36.21, 20.12, 12.42), "bf16 experts": (10.55, 46.86, 115.23, 50.03, 21.86),
}


def milliseconds(config: ModelConfig, precision: Precision, found: Record, column: tuple[int, int], tensor: int = 8) -> float:
    """A decode step with latents dealt over as many ranks as serves best."""
    cluster = MACHINE if tensor == 8 else Cluster.parse("gb300:16")
    return min(1e3 * decode_step(config, cluster, Layout(tensor=tensor, kv_shards=shards), precision, *column, found).total.value
               for shards in (1, 2, 4, tensor))


def change(turn: str, found: Record, column: int) -> float:
    """What a turn does to a step, as a share."""
    return milliseconds(*TURNS[turn], found, COLUMNS[column]) / milliseconds(K3, AS_RELEASED, found, COLUMNS[column]) - 1


@pytest.fixture(scope="module", params=["default", "sglang-k3"])
def found(request: pytest.FixtureRequest) -> Record:
    """The global record, and the one fitted to K3."""
    return record(request.param)


@pytest.mark.parametrize("turn", list(REFERENCE))
def test_under_the_references_assumptions_all_columns_agree(turn: str) -> None:
    """With one latency per layer, one share of bandwidth, and messages that cost nothing, the planner gives the reference's times."""
    share = 7.75 * 0.57 / 8.0
    free = replace(record("default"), coefficients=Coefficients(
        layer_seconds=4.62e-3 / 93, expert_layer_seconds=1e-12, sequence_seconds=1e-12, collective_seconds=1e-12, link_efficiency=1.2,
        read_efficiency=share, cache_efficiency=share, compute_efficiency=1.2))
    config, precision = TURNS.get(turn, (K3, AS_RELEASED))
    for column, (reference, base) in zip(COLUMNS, zip(REFERENCE[turn], REFERENCE["as it is"], strict=True), strict=True):
        ours, start = (1e3 * decode_step(model, MACHINE, Layout(tensor=8, kv_shards=8), formats, *column, free).total.value
                       for model, formats in ((config, precision), (K3, AS_RELEASED)))
        assert ours == pytest.approx(reference, rel=0.05)
        if abs(reference / base - 1) > 0.005:
            assert (ours / start - 1) * (reference / base - 1) > 0, (turn, column)


def test_pool_is_a_matter_of_capacity_and_top_k_of_bandwidth(found: Record) -> None:
    assert change("experts x2", found, 0) < 0.02 and change("experts x2", found, 1) < 0.06
    more = weights(TURNS["experts x2"][0], AS_RELEASED).whole_bytes - weights(K3, AS_RELEASED).whole_bytes
    assert more > 1.4e12
    assert not deployment(TURNS["experts x2"][0], MACHINE, Layout(tensor=8), AS_RELEASED).room.fits
    assert change("top-k x2", found, 1) > 5 * change("experts x2", found, 1)
    assert decode_step(TURNS["top-k x2"][0], MACHINE, Layout(tensor=8), AS_RELEASED, 16, 8192, found).wall == "bandwidth"


def test_narrower_weights_are_the_cheapest_single_stream_knob(found: Record) -> None:
    gains = {turn: -change(turn, found, 0) for turn in ("top-k /2", "MLA 1:7", "fp8 KV", "fp8 rest")}
    assert max(gains, key=lambda turn: gains[turn]) == "fp8 rest"
    sixteen = milliseconds(K3, AS_RELEASED, found, COLUMNS[0], 16) / milliseconds(K3, AS_RELEASED, found, COLUMNS[0]) - 1
    assert gains["fp8 rest"] > -sixteen > -0.25


def test_kda_pays_for_long_contexts_only(found: Record) -> None:
    """One chat of 8k is faster without KDA; many are within a few per cent either way, as the messages of dealt latents are counted."""
    assert change("all-MLA", found, 0) < -0.02
    assert all(abs(change("all-MLA", found, column)) < 0.08 for column in (1, 2))
    assert change("all-MLA", found, 3) > 0.25 and change("all-MLA", found, 4) > 0.35


def test_narrow_experts_are_the_largest_serving_lever(found: Record) -> None:
    changes = {turn: change(turn, found, 2) for turn in TURNS}
    assert max(changes, key=lambda turn: changes[turn]) == "bf16 experts" and changes["bf16 experts"] > 1.0
