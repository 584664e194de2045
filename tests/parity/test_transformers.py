"""What gnomon writes, read and run by transformers' `kimi_linear`: the same logits, the same greedy text."""

import exported
import numpy as np
import pytest
import torch

from gnomon.model.weights import load_pretrained

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # the peer's own deprecations

CASES = {
    "linear": {},
    "linear, other seed, three dense layers": {"seed": 1, "first_k_dense_replace": 3},
    "linear, query latent": {"q_lora_rank": 24},
    "linear, no renormalisation": {"moe_renormalize": False},
    "linear, mostly attention": {"linear_attn_config": {
        "kda_layers": [1, 4], "full_attn_layers": [2, 3, 5, 6, 7, 8, 9], "head_dim": 16, "num_heads": 6, "short_conv_kernel_size": 3}},
}


@pytest.fixture(scope="module")
def auto():
    """The class that reads any folder; absent in versions before `kimi_linear`."""
    if "kimi_linear" not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no kimi_linear")
    return transformers.AutoModelForCausalLM


def rows(cases, quick):
    """The first few in the default run, the others with `-m slow`."""
    return [pytest.param(name, marks=() if index < quick else pytest.mark.slow) for index, name in enumerate(cases)]


@pytest.mark.parametrize("name", rows(CASES, 1))
def test_logits_and_greedy_text(name, auto, tmp_path, record_property):
    model = exported.export(tmp_path / "out", "kimi_linear", **CASES[name])
    ours, continuation, gap = exported.greedy(model, exported.prompt())
    peer, report = auto.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = torch.tensor([exported.prompt()])
    with torch.no_grad():
        theirs = peer.eval()(tokens).logits[0].numpy()
        text = peer.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=exported.CONTINUATION,
                             min_new_tokens=exported.CONTINUATION, eos_token_id=-1, temperature=None)
    error = exported.relative(ours, theirs)
    record_property("relative_error", error)
    print(f"transformers, {name}: relative error {error:.1e}, smallest gap between choices {gap:.1e}")
    assert error <= 1e-5
    assert continuation == np.array(text[0, tokens.shape[1]:]).tolist()


def test_what_transformers_saves_is_read(auto, tmp_path):
    """A fine-tuned checkpoint comes back from its writer with the same tensors, under the names that writer gives them."""
    ours = exported.export(tmp_path / "ours", "kimi_linear")
    auto.from_pretrained(tmp_path / "ours", dtype=torch.float32).save_pretrained(tmp_path / "theirs")
    theirs = load_pretrained(tmp_path / "theirs").state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.state_dict().items())
