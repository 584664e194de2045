"""Comparators and variants: shapes give published sizes, sparse reads are bounded, turning one knob gives the study's columns."""

from dataclasses import replace

import pytest

from gnomon.errors import ConfigError
from gnomon.model.config import preset
from gnomon.model.parts import KDAConfig
from gnomon.plan.families import CompressedConfig, all_mla, at_equal_active, compare, families, family, layered_sparse
from gnomon.plan.footprint import capacity, kv_bytes_per_token
from gnomon.plan.hardware import device
from gnomon.plan.traffic import flops, traffic
from gnomon.plan.variants import TURNS, variants
from gnomon.plan.workload import Layout, Precision

K3 = preset("k3-2.8t")

STUDY = {  # total T, active B, weights GB, KV KiB per token, state MB
    "as it is": (2.78, 104.2, 1560, 27, 434), "experts x2, same top-k": (5.50, 104.8, 3008, 27, 434),
    "top-k x2, same pool": (2.78, 152.8, 1560, 27, 434), "top-k /2": (2.78, 79.9, 1560, 27, 434),
    "depth +10 %": (3.05, 114.2, 1712, 29, 478), "all-MLA (no KDA)": (2.76, 89.6, 1531, 105, 0),
    "MLA 1:7 instead of 1:3": (2.78, 106.7, 1565, 14, 510), "fp8 KV": (2.78, 104.2, 1560, 14, 434),
    "fp8 non-expert weights": (2.78, 104.2, 1503, 27, 434), "experts at bf16": (2.78, 104.2, 5559, 27, 434),
    "twice the ranks": (2.78, 104.2, 1560, 27, 434),
}


def test_knobs_of_k3_one_turn_each() -> None:
    rows = {v.name: v.row for v in variants(K3)}
    assert list(rows) == list(TURNS) and set(rows) == set(STUDY)
    for name, (total, active, held, latents, state) in STUDY.items():
        row = rows[name]
        assert (round(row.total / 1e12, 2), round(row.active / 1e9, 1), round(row.weight_bytes / 1e9)) == (total, active, held), name
        assert (round(row.kv_bytes_per_token / 1024), round(row.state_bytes / 1e6)) == (latents, state), name


STEPS = {  # milliseconds per token of the study's time model: 1 x 8k, 16 x 8k, 64 x 8k, 16 x 256k, 4 x 1M
    "as it is": (8.53, 18.52, 37.78, 21.69, 13.99), "experts x2, same top-k": (8.56, 19.24, 45.56, 22.42, 14.06),
    "top-k x2, same pool": (9.26, 26.32, 46.71, 29.50, 16.69), "top-k /2": (8.16, 13.74, 27.65, 16.91, 12.59),
    "depth +10 %": (9.35, 20.32, 41.47, 23.75, 15.30), "all-MLA (no KDA)": (7.70, 17.61, 36.64, 29.91, 22.50),
    "MLA 1:7 instead of 1:3": (8.67, 18.68, 37.98, 20.26, 12.51), "fp8 KV": (8.52, 18.46, 37.57, 20.05, 12.35),
    "fp8 non-expert weights": (6.95, 16.95, 36.21, 20.12, 12.42), "experts at bf16": (10.55, 46.86, 115.23, 50.03, 21.86),
    "twice the ranks": (6.57, 11.57, 21.20, 13.16, 9.31),
}


def test_bytes_moved_are_the_studys_in_all_fifty_five_cells() -> None:
    """T = 4.62 ms L/93 + bytes / (ranks 7.75 TB/s 0.57): the bytes are what is tested."""
    cells = ((1, 8192), (16, 8192), (64, 8192), (16, 262_144), (4, 1_048_576))
    for variant in variants(K3, layout=Layout(tensor=8)):
        for (sequences, context), expected in zip(cells, STEPS[variant.name]):
            step = traffic(variant.config, variant.precision, tokens=sequences, sequences=sequences, context=context)
            rate = variant.layout.tensor * 7.75e12 * 0.57
            ours = 4.62 * variant.config.num_hidden_layers / 93 + 1e3 * (step.weights + step.cache) / rate
            assert ours == pytest.approx(expected, rel=0.003), (variant.name, sequences, context)


def test_twice_the_ranks_deals_latents() -> None:
    last = variants(K3, layout=Layout(tensor=8))[-1]
    assert last.layout == Layout(tensor=16, kv_shards=16)


def test_a_dense_model_has_no_rows_about_experts() -> None:
    names = [v.name for v in variants(replace(K3, moe=None))]
    assert "fp8 KV" in names and not [name for name in names if name.startswith("top-k") or name.startswith("experts x2")]


@pytest.mark.parametrize("name", list(families()))
def test_families_lay_out_and_fit_like_any_model(name: str) -> None:
    found = family(name)
    layout = Layout(tensor=8).check(found.config)
    room = capacity(found.config, Precision.released(found.config), layout, device("gb300"), draft_tokens=2)
    assert room.fits and room.sequences(131_072) > 0 and found.source
    assert sum(flops(found.config, tokens=1, context=500).values()) == pytest.approx(found.config.flops_per_token(500))


def test_unknown_family() -> None:
    with pytest.raises(ConfigError, match="did you mean 'deepseek-v3'"):
        family("deepseek-v33")


def test_sparse_attention_reads_less_than_it_keeps() -> None:
    v32 = family("deepseek-v3.2").config
    precision = Precision.released(v32)
    kept = kv_bytes_per_token(v32, precision)
    for context in (1024, 131_072):
        read = traffic(v32, precision, tokens=1, sequences=1, context=context).read["kv"]
        assert read == 61 * 2 * (128 * context + 576 * min(2048, context)) <= kept * context


def test_layers_of_the_fourth_generation() -> None:
    layers = family("deepseek-v4-pro").config.layers
    assert (len(layers), layers.count("csa"), layers.count("hca"), layers[:4]) == (61, 30, 31, ("hca", "hca", "csa", "hca"))
    assert family("deepseek-v4-flash").config.layers.count("window") == 2


def test_entries_of_compressed_attention() -> None:
    shape = {"num_attention_heads": 16, "head_dim": 512}
    assert CompressedConfig(ratio=128, **shape).entries(1_048_576) == 128 + 8192
    assert CompressedConfig(ratio=4, index_topk=1024, **shape).entries(1_048_576) == 128 + 1024
    assert CompressedConfig(ratio=0, **shape).entries(64) == 64
    assert CompressedConfig(ratio=4, index_topk=1024, **shape).cached_values_per_token() == (512 + 128) / 4
    with pytest.raises(ConfigError, match="divides the 12 heads"):
        CompressedConfig(ratio=4, num_attention_heads=12)


def test_families_at_equal_cost() -> None:
    active = K3.activated_parameters()
    models = {"kda": K3, "mla": at_equal_active(all_mla(K3), active), "sparse": at_equal_active(layered_sparse(K3), active)}
    for config in models.values():
        assert config.activated_parameters() == pytest.approx(active, rel=0.005)
    rows = {(row.name, row.context): row for row in compare(models)}
    for context in (131_072, 1_048_576):
        kda, mla, sparse = (rows[name, context] for name in models)
        assert mla.kv_bytes > 3 * kda.kv_bytes > 3 * sparse.kv_bytes
        assert mla.cache_traffic > kda.cache_traffic > sparse.cache_traffic and mla.flops > kda.flops > sparse.flops
    short = rows["kda", 8192]
    assert short.cache_traffic > rows["mla", 8192].cache_traffic  # a state costs more than 8192 latents
    with pytest.raises(ConfigError, match="no feed-forward is narrow enough"):
        at_equal_active(K3, 10**9)


def test_a_model_without_latent_attention_has_no_shape_to_borrow() -> None:
    config = replace(preset("tiny"), layer_pattern=("kda",), final_mixer=None, mixers={"kda": KDAConfig(num_heads=4, head_dim=32)})
    with pytest.raises(ConfigError, match="no latent attention"):
        all_mla(config)


def test_kimi_linear_spares_three_quarters_of_the_cache() -> None:
    linear = family("kimi-linear").config
    precision = Precision.released(linear)
    kept = kv_bytes_per_token(linear, precision) / kv_bytes_per_token(all_mla(linear), precision)
    assert kept == pytest.approx(7 / 27) and round(100 * (1 - kept)) == 74
