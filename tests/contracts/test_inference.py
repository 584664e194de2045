"""The inference model against `Transformer`, its meaning: every shape of model, every way to hand over rows, every wrong input."""

import copy
import ctypes
from itertools import pairwise

import pytest
import torch
from inference_models import bf16, config, model, relative, round_activations, round_weights, tokens

from gnomon.errors import ConfigError, KernelError
from gnomon.kernels import native
from gnomon.model import inference_layout as layout
from gnomon.model.generate import Sampling, generate
from gnomon.model.inference import Arena, InferenceModel, refuse
from gnomon.model.inference_state import PackedRows

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

SHAPES = {
    "K3": {},
    "Kimi Linear": {
        "family": "kimi_linear", "attention_residuals": "off", "hidden_act": "silu",
        "kda": {"gate_lower_bound": None, "use_full_rank_gate": False}, "mla": {"q_lora_rank": None, "mla_use_output_gate": False},
        "moe": {"routed_expert_hidden_size": None, "num_shared_experts": 1, "routed_scaling_factor": 2.4},
    },
    "every sublayer a source": {"attention_residuals": "full"},
    "one block": {"attn_res_block_size": 9},
    "dense": {"moe": "none"},
    "experts in every second layer": {"moe": {"moe_layer_freq": 2, "first_k_dense_replace": 0}},
    "no shared experts, no norm": {"moe": {"num_shared_experts": 0, "latent_moe_use_norm": False}},
    "no renormalisation": {"moe": {"moe_renormalize": False}},
    "groups of experts": {"moe": {"num_expert_group": 3, "topk_group": 2}},
    "only KDA": {"layer_pattern": ("kda",)},
    "only MLA": {"layer_pattern": ("mla",)},
    "no shared key": {"mla": {"qk_rope_head_dim": 0}},
    "tied, linear up branch": {"tie_word_embeddings": True, "activation_situ_linear_beta": None},
    "odd widths": {"kda": {"num_heads": 5, "head_dim": 12, "short_conv_kernel_size": 3}, "vocab_size": 59, "intermediate_size": 75,
                   "mla": {"q_lora_rank": 17, "kv_lora_rank": 19, "qk_nope_head_dim": 11, "qk_rope_head_dim": 3, "v_head_dim": 7}},
}


FP32 = 3e-5  # what rounding may cost these random models over all their layers; on the machines seen it costs up to 8e-6


def exact(network, ids, precision=torch.float64):
    """Logits of `Transformer` for one sequence: in double precision, so that only the rounding of the twin is seen."""
    with torch.no_grad():
        return copy.deepcopy(network).to(precision)(ids[None])[0]


def poison(pool):
    """What was never written must never be read."""
    for x in (pool.matrices, pool.conv, pool.latents):
        x.fill_(torch.nan)
    return pool


def rows_of(pieces, past, slots, pages, **more):
    """Rows of several sequences, one tensor of ids each."""
    bounds = torch.tensor([0, *(len(p) for p in pieces)]).cumsum(0)
    return PackedRows(tokens=torch.cat(pieces), bounds=bounds, past=torch.tensor(past), slots=torch.tensor(slots),
                      pages=torch.tensor(pages, dtype=torch.int32), **more)


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_the_transformer(name, poisoned):
    network = model(config(**SHAPES[name]))
    twin, ids = InferenceModel.from_transformer(network, "fp32"), tokens(37, vocabulary=59)
    pool = poison(twin.new_pool(2, 48, page_tokens=8))
    expected = exact(network, ids)
    first = twin.forward(rows_of([ids[:21]], [0], [1], [[5, 0, 3, 1, 4]], wanted=torch.arange(21)), pool)
    assert relative(first.logits, expected[:21]) <= FP32
    rest = [twin.forward(rows_of([ids[i:i + 1]], [i], [1], [[5, 0, 3, 1, 4]]), pool).logits for i in range(21, 37)]
    assert relative(torch.cat(rest), expected[21:]) <= FP32


@pytest.mark.parametrize(("pattern", "weights", "bound"), [("kda", "bf16", 5e-3), ("kda", "mxfp4", 5e-3), ("mla", "bf16", 3e-2)])
def test_rounded_weights_meet_activations_that_are_rounded_once(pattern, weights, bound, monkeypatch):
    """Two things are compared: fp32 with the same rounded weights, and the same with products that read rounded activations.

    What is left between the latter and the inference model is a rounding that falls the other way, and attention's own operands.
    """
    network = model(config(layer_pattern=(pattern,)), bias=20.0)
    twin, ids = InferenceModel.from_transformer(network, weights), tokens(40)
    out = twin.forward(rows_of([ids], [0], [0], [[0]], wanted=torch.arange(40)), twin.new_pool(1, 40))
    round_weights(network, weights)
    assert relative(out.logits, exact(network, ids, torch.float32)) <= 6e-2
    round_activations(network, monkeypatch)
    with torch.no_grad():
        hidden = network.hidden(ids[None])[0]
        assert relative(out.logits, network.head(bf16(hidden))) <= bound


def test_many_sequences_of_any_length_in_one_call(poisoned):
    network = model()
    twin = InferenceModel.from_transformer(network, "fp32")
    whole = [tokens(n, seed=n) for n in (30, 1, 9, 17)]
    pool = poison(twin.new_pool(5, 160, page_tokens=8))
    pages = torch.randperm(20).view(4, 5).tolist()
    done, slots = [0, 0, 0, 0], [3, 0, 4, 1]
    for step in ((12, 1, 0, 17), (0, 0, 1, 0), (1, 0, 8, 0), (17, 0, 0, 0)):
        pieces = [ids[a:a + n] for ids, a, n in zip(whole, done, step, strict=True)]
        wanted = torch.arange(sum(step))
        out = twin.forward(rows_of(pieces, done, slots, pages, wanted=wanted), pool)
        for ids, a, n, got in zip(whole, done, step, out.logits.split(step), strict=True):
            if n:
                assert relative(got, exact(network, ids)[a:a + n]) <= FP32
        done = [a + n for a, n in zip(done, step, strict=True)]


def test_results_are_the_last_rows_unless_others_are_wanted():
    twin = InferenceModel.from_transformer(model(), "fp32")
    pieces, pages = [tokens(5), tokens(0), tokens(3, seed=1)], [[0], [1], [2]]
    every = twin.forward(rows_of(pieces, [0] * 3, [0, 1, 2], pages, wanted=torch.arange(8)), twin.new_pool(3, 192))
    last = twin.forward(rows_of(pieces, [0] * 3, [0, 1, 2], pages), twin.new_pool(3, 192))
    none = twin.forward(rows_of(pieces, [0] * 3, [0, 1, 2], pages), twin.new_pool(3, 192), logits=False)
    assert torch.equal(last.logits, every.logits[[4, 7]]) and torch.equal(last.hidden, every.hidden[[4, 7]])
    assert none.logits is None and torch.equal(none.hidden, last.hidden)
    assert torch.equal(twin.head(none.hidden), last.logits)
    nothing = twin.forward(rows_of([tokens(0)], [0], [0], [[0]]), twin.new_pool(1, 64))
    assert nothing.logits.shape == (0, 61)


def test_a_long_prompt_needs_no_more_memory_and_is_exact():
    """Rows are taken in stretches of 512 of a sequence; a second sequence rides along, and copies and wanted rows fall where they fall."""
    network = model(config(num_hidden_layers=3))
    twin = InferenceModel.from_transformer(network, "fp32")
    long, short = tokens(1300), tokens(7, seed=1)
    pool = poison(twin.new_pool(4, 1344 + 64))
    pages = [list(range(21)), [21] * 21]
    wanted = torch.tensor([0, 511, 512, 1100, 1299, 1303, 1306])
    out = twin.forward(rows_of([long, short], [0, 0], [0, 2], pages, wanted=wanted, copies=torch.tensor([[0, 1024, 3], [1, 4, 1]])), pool)
    expected = torch.cat([exact(network, long), exact(network, short)])[wanted]
    assert relative(out.logits, expected) <= FP32
    again = twin.forward(rows_of([long[1024:], short[4:]], [1024, 4], [3, 1], pages), pool)
    assert torch.equal(again.logits, out.logits[[4, 6]])
    sizes = []
    for count in (2048, 65536):
        ids, size = torch.zeros(count, dtype=torch.int64), ctypes.c_int64()
        call = layout.Rows(sequences=1, bounds=ids.data_ptr())
        native.library().gnomon_model_arena(twin._address, ctypes.addressof(call), count, ctypes.addressof(size))
        sizes.append(size.value)
    assert sizes[0] == sizes[1]


def test_states_are_copied_on_the_way():
    twin = InferenceModel.from_transformer(model(), "fp32")
    ids, pages = tokens(40), [[0]]
    pool, other = poison(twin.new_pool(4, 64)), poison(twin.new_pool(4, 64))
    twin.forward(rows_of([ids], [0], [0], pages, copies=torch.tensor([[0, 1, 1], [0, 32, 2], [0, 40, 3]])), pool)
    for count, slot in ((1, 1), (32, 2), (40, 3), (40, 0)):
        twin.forward(rows_of([ids[:count]], [0], [0], pages), other)
        assert torch.equal(pool.matrices[slot], other.matrices[0]) and torch.equal(pool.conv[slot], other.conv[0])


@pytest.mark.parametrize("accepted", [(0, 5), (3, 1), (5, 0), (4, 4)])
def test_drafts_are_held_and_advanced_by_any_prefix(accepted, poisoned):
    network = model()
    twin = InferenceModel.from_transformer(network, "fp32")
    prompts, drafts, other = [tokens(9), tokens(0)], [tokens(5, seed=1), tokens(5, seed=2)], tokens(6, seed=3)
    pool = poison(twin.new_pool(3, 192))
    pages = [[0], [1], [2]]
    twin.forward(rows_of(prompts, [0, 0], [1, 2], pages[1:]), pool)
    rows = rows_of([other, *drafts], [0, 9, 0], [0, 1, 2], pages, wanted=torch.arange(16), held=2)
    before = pool.matrices[1].clone()
    out = twin.forward(rows, pool)
    assert torch.equal(before, pool.matrices[1])
    assert relative(out.logits[:6], exact(network, other)) <= FP32
    whole = [torch.cat([p, d]) for p, d in zip(prompts, drafts, strict=True)]
    for got, ids in zip(out.logits[6:].split(5), whole, strict=True):
        assert relative(got, exact(network, ids)[-5:]) <= FP32
    twin.advance(rows, out, torch.tensor(accepted), pool)
    now = [len(p) + n for p, n in zip(prompts, accepted, strict=True)]
    then = [torch.cat([ids[:n], tokens(2, seed=7)]) for ids, n in zip(whole, now, strict=True)]
    rest = twin.forward(rows_of([tokens(2, seed=7)] * 2, now, [1, 2], pages[1:], wanted=torch.arange(4)), pool)
    for got, ids in zip(rest.logits.split(2), then, strict=True):
        assert relative(got, exact(network, ids)[-2:]) <= FP32


def test_a_fork_shares_pages_and_copies_its_slot():
    network = model()
    twin = InferenceModel.from_transformer(network, "fp32")
    trunk, left, right = tokens(16), tokens(5, seed=1), tokens(4, seed=2)
    pool = poison(twin.new_pool(2, 32, page_tokens=8))
    twin.forward(rows_of([trunk], [0], [0], [[0, 1]]), pool)
    pool.copy(0, 1)
    out = twin.forward(rows_of([left, right], [16, 16], [0, 1], [[0, 1, 2], [0, 1, 3]]), pool)
    for got, branch in zip(out.logits, (left, right), strict=True):
        assert relative(got, exact(network, torch.cat([trunk, branch]))[-1]) <= FP32


def test_embeddings_in_place_of_tokens():
    network = model()
    twin, ids = InferenceModel.from_transformer(network, "fp32"), tokens(12)
    common = {"bounds": torch.tensor([0, 12]), "past": torch.tensor([0]), "slots": torch.tensor([0]), "pages": torch.tensor([[0]]).int()}
    looked_up = twin.forward(PackedRows(tokens=ids, **common), twin.new_pool(1, 64))
    given = twin.forward(PackedRows(embeddings=network.embed(ids[None])[0].detach(), **common), twin.new_pool(1, 64))
    assert torch.equal(looked_up.logits, given.logits)


def test_latents_in_bf16_cost_their_rounding():
    network = model()
    twin, ids = InferenceModel.from_transformer(network, "fp32"), tokens(40)
    out = twin.forward(rows_of([ids], [0], [0], [[0]], wanted=torch.arange(40)), twin.new_pool(1, 64, dtype=torch.bfloat16))
    assert relative(out.logits, exact(network, ids)) <= 2e-2


def test_latents_in_bf16_cost_nothing_where_attention_rounds_them_anyway():
    twin, ids = InferenceModel.from_transformer(model(), "bf16"), tokens(40)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        pool = twin.new_pool(1, 64, dtype=dtype)
        steps = [(0, 30), (30, 31), (31, 33), (33, 40)]
        results.append([twin.forward(rows_of([ids[a:b]], [a], [0], [[0]]), pool).logits for a, b in steps])
    assert all(torch.equal(exact, rounded) for exact, rounded in zip(*results, strict=True))


def test_a_step_crosses_into_c_twice(monkeypatch):
    """Whatever the number of layers: once for the size of the scratch memory, once for the step."""
    twin = InferenceModel.from_transformer(model(), "fp32")
    pool, library, calls = twin.new_pool(1, 64), native.library(), []

    class Counting:
        def __getattr__(self, name):
            calls.append(name)
            return getattr(library, name)

    monkeypatch.setattr(native, "library", Counting)
    twin.forward(rows_of([tokens(4)], [0], [0], [[0]]), pool)
    calls.clear()
    twin.forward(rows_of([tokens(1)], [4], [0], [[0]]), pool)
    assert calls == ["gnomon_model_arena", "gnomon_model_forward"]


def test_sampling_gives_the_same_tokens():
    network = model()
    twin = InferenceModel.from_transformer(network, "fp32")
    for sampling in (Sampling(temperature=0.0, max_tokens=30), Sampling(seed=3, max_tokens=30)):
        assert list(generate(twin, [1, 2, 3], sampling)) == list(generate(network, [1, 2, 3], sampling))


def test_structures_are_those_of_the_library():
    sizes = (ctypes.c_int64 * 4)()
    native.library().gnomon_model_sizes(ctypes.addressof(sizes))
    assert list(sizes) == [ctypes.sizeof(s) for s in (layout.Layer, layout.Model, layout.Pools, layout.Rows)]


def test_what_cannot_run_says_why(monkeypatch):
    assert refuse(config()) is None
    monkeypatch.setenv("GNOMON_KERNELS", "reference")
    with pytest.raises(KernelError, match="GNOMON_KERNELS=reference"):
        InferenceModel.from_transformer(model())


GOOD = {"bounds": torch.tensor([0, 2, 3]), "past": torch.tensor([0, 4]), "slots": torch.tensor([0, 1]),
        "pages": torch.tensor([[0], [1]], dtype=torch.int32), "tokens": torch.tensor([1, 2, 3])}
WRONG = {
    "either 'tokens' or 'embeddings'": {"tokens": None},
    "outside the vocabulary of 61": {"tokens": torch.tensor([1, 61, 3])},
    "'tokens' must be a contiguous": {"tokens": torch.tensor([1.0, 2.0, 3.0])},
    "rows are 64 wide": {"tokens": None, "embeddings": torch.zeros(3, 65)},
    "'bounds' must rise from 0 to the 3 rows": {"bounds": torch.tensor([0, 2, 4])},
    "'bounds' must rise": {"bounds": torch.tensor([0, 4, 3])},
    "'past' has 1 entries for 2": {"past": torch.tensor([0])},
    "cannot be negative": {"past": torch.tensor([0, -1])},
    "'slots' names": {"slots": torch.tensor([0, 9])},
    "name a slot twice": {"slots": torch.tensor([1, 1])},
    "sequence 1 reaches 9 tokens and needs 2 pages of 8; 'pages' has 1": {"past": torch.tensor([0, 8])},
    "outside the 6 of the pool": {"pages": torch.tensor([[0], [7]], dtype=torch.int32)},
    "sequences .0, 1. write page 1": {"pages": torch.tensor([[1], [1]], dtype=torch.int32)},
    "write page 2 more than once": {"pages": torch.tensor([[2, 2], [1, 0]], dtype=torch.int32), "bounds": torch.tensor([0, 9, 10]),
                                    "tokens": torch.zeros(10, dtype=torch.int64)},
    "'pages' must be a contiguous torch.int32": {"pages": torch.tensor([[0], [1]])},
    "'wanted' must ascend": {"wanted": torch.tensor([1, 1])},
    "'wanted' must ascend within": {"wanted": torch.tensor([3])},
    "'held' is 3": {"held": 3},
    "sequence 1 after 2 new tokens": {"copies": torch.tensor([[1, 2, 2]])},
    "sequence 1 after 1 new tokens": {"copies": torch.tensor([[1, 1, 2]]), "held": 1},
    "'copies' names slot 3": {"copies": torch.tensor([[1, 1, 3]])},
    "name a slot twice: ": {"copies": torch.tensor([[1, 1, 0]])},
    "sorted by sequence": {"copies": torch.tensor([[1, 1, 2], [0, 1, 3]])},
}


@pytest.mark.parametrize("message", WRONG)
def test_rows_that_do_not_fit_are_refused_before_anything_runs(message):
    twin = InferenceModel.from_transformer(model(config(num_hidden_layers=2)), "fp32")
    pool = twin.new_pool(4 if "sorted" in message else 3, 48, page_tokens=8)
    twin.forward(PackedRows(**GOOD), pool)
    with pytest.raises(ConfigError, match=message):
        twin.forward(PackedRows(**GOOD | WRONG[message]), pool)


def test_other_bad_input_is_named():
    twin = InferenceModel.from_transformer(model(config(num_hidden_layers=2)), "fp32")
    with pytest.raises(ConfigError, match="0 slots"):
        twin.new_pool(0, 64)
    with pytest.raises(ConfigError, match=r"latents is torch\.float16"):
        twin.new_pool(1, 64, dtype=torch.float16)
    pool = twin.new_pool(1, 1024)
    for call in (lambda: pool.copy(0, 1), lambda: pool.copy_page(0, 99)):
        with pytest.raises(ConfigError, match="does not exist"):
            call()
    held = rows_of([tokens(600)], [0], [0], [list(range(10))], held=1)
    with pytest.raises(ConfigError, match="more than 512"):
        twin.forward(held, pool)
    rows = rows_of([tokens(3)], [0], [0], [[0]], held=1)
    out = twin.forward(rows, pool)
    with pytest.raises(ConfigError, match=r"'accepted' is \[4\]"):
        twin.advance(rows, out, torch.tensor([4]), pool)
    with pytest.raises(ConfigError, match="recorded 3 held rows where 'rows' brings 2"):
        twin.advance(rows_of([tokens(2)], [0], [0], [[0]], held=1), out, torch.tensor([1]), pool)
    larger = InferenceModel.from_transformer(model(config(num_hidden_layers=3)), "fp32")
    with pytest.raises(ConfigError, match="another model"):
        larger.forward(rows, pool)
    with pytest.raises(ConfigError, match="'hidden' has shape"):
        twin.head(torch.randn(2, 3))
    with pytest.raises(KernelError, match="the model is on meta"):
        InferenceModel.from_transformer(model(config(num_hidden_layers=2)).to("meta"))
    with pytest.raises(ConfigError, match="'tokens' is empty"):
        twin.continuation(8).extend([])


def test_a_call_without_memory_leaves_nothing_behind():
    arena = Arena()
    arena.reserve(1000)
    with pytest.raises(ConfigError, match="no memory"):
        arena.reserve(9_000_000_000_000_000)
    assert arena.size == 0
    ctypes.memset(arena.reserve(1000), 1, 1000)


@pytest.mark.parametrize("weights", ["fp32", "bf16", "mxfp4"])
def test_a_steady_model_gives_the_same_bits_however_a_sequence_is_cut(weights):
    """Whole, in pieces, token by token, held and advanced: what caches and schedulers may do to a sequence."""
    twin, ids = InferenceModel.from_transformer(model(), weights), tokens(650)
    assert twin.steady(True)

    def run(cuts, held=False):
        pool, table = poison(twin.new_pool(1, 704)), [list(range(11))]
        parts = []
        for start, stop in pairwise(cuts):
            rows = rows_of([ids[start:stop]], [start], [0], table, wanted=torch.arange(stop - start), held=int(held))
            parts.append(twin.forward(rows, pool))
            if held:
                twin.advance(rows, parts[-1], torch.tensor([stop - start]), pool)
        return torch.cat([part.logits for part in parts]), pool.matrices, pool.conv

    whole = run([0, 650])
    for other in (run([0, 64, 576, 640, 650]), run([0, 512, 600, 650]), run([0, *range(590, 651)]),
                  run([0, 300, 600, 650], held=True)):
        for ours, theirs in zip(other, whole, strict=True):
            assert torch.equal(ours, theirs)
