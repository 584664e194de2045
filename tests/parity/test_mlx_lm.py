"""What gnomon writes, read and run by mlx-lm (`kimi_k3`, `kimi_linear`) on the CPU: the same logits, the same greedy text.

mlx-lm strips the prefix, stacks the experts and keeps them packed; it runs its own quantised products.
"""

import exported
import numpy as np
import pytest
import torch

from gnomon.kernels import native
from gnomon.model.generate import Sampling, generate
from gnomon.model.inference import InferenceModel
from gnomon.model.inference_state import PackedRows

mx = pytest.importorskip("mlx.core", reason="mlx and mlx-cpu are not installed")
utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # the peer's own deprecations

# mlx-lm's `kimi_linear` norms its latents with rms_norm_eps; the release uses 1e-6 there, so one row makes the two equal.
CASES = {
    "k3": ("kimi_k3", {}),
    "linear": ("kimi_linear", {}),
    "k3, plain experts": ("kimi_k3", {"quantize": False}),
    "k3, other seed, blocks of two": ("kimi_k3", {"seed": 1, "attn_res_block_size": 2}),
    "k3, no query latent, no attention gate": ("kimi_k3", {"q_lora_rank": None, "mla_use_output_gate": False}),
    "k3, no latent experts, two dense layers": ("kimi_k3", {"routed_expert_hidden_size": None, "first_k_dense_replace": 2}),
    "k3, tied, linear up branch": ("kimi_k3", {"tie_word_embeddings": True, "activation_situ_linear_beta": None}),
    "linear, eps 1e-6": ("kimi_linear", {"rms_norm_eps": 1e-6}),
    "linear, no renormalisation, no shared experts": ("kimi_linear", {"moe_renormalize": False, "num_shared_experts": 0}),
}


@pytest.fixture(autouse=True)
def no_compilation():
    """Compiling the fused functions costs more than running them once."""
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    yield
    mx.enable_compile()


def run(folder, tokens):
    """(logits of the prompt, greedy continuation) of mlx-lm."""
    model, _ = utils.load_model(folder)
    cache = model.make_cache()
    logits = model(mx.array([tokens]), cache=cache)[0]
    row, continuation = logits[-1], []
    for _ in range(exported.CONTINUATION):
        continuation.append(int(mx.argmax(row)))
        row = model(mx.array([[continuation[-1]]]), cache=cache)[0, -1]
    return np.array(logits), continuation


def rows(cases, quick):
    """The first few in the default run, the others with `-m slow`."""
    return [pytest.param(name, marks=() if index < quick else pytest.mark.slow) for index, name in enumerate(cases)]


@pytest.mark.parametrize("name", rows(CASES, 2))
def test_logits_and_greedy_text(name, tmp_path, record_property):
    arch, options = CASES[name]
    ours, continuation, gap = exported.greedy(exported.export(tmp_path / "out", arch, **options), exported.prompt())
    theirs, their_continuation = run(tmp_path / "out", exported.prompt())
    error = exported.relative(ours, theirs)
    record_property("relative_error", error)
    print(f"mlx-lm, {name}: relative error {error:.1e}, smallest gap between choices {gap:.1e}")
    assert error <= 1e-5
    assert continuation == their_continuation


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
@pytest.mark.parametrize("name", ["k3", "linear"])
def test_the_inference_twin(name, tmp_path):
    """The same for the model that serves: fp32 weights, so that both compute the same function."""
    arch, options = CASES[name]
    exported.export(tmp_path / "out", arch, **options)
    twin, tokens = InferenceModel.load(tmp_path / "out", "fp32"), torch.tensor(exported.prompt())
    rows = PackedRows(tokens=tokens, bounds=torch.tensor([0, len(tokens)]), past=torch.tensor([0]), slots=torch.tensor([0]),
                      pages=torch.tensor([[0]], dtype=torch.int32), wanted=torch.arange(len(tokens)))
    ours = twin.forward(rows, twin.new_pool(1, 64)).logits
    theirs, continuation = run(tmp_path / "out", exported.prompt())
    assert exported.relative(ours.numpy(), theirs) <= 1e-5
    sampling = Sampling(temperature=0.0, max_tokens=exported.CONTINUATION)
    assert list(generate(twin, exported.prompt(), sampling)) == continuation
