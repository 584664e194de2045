"""Our export, read by llama.cpp: an F32 GGUF gives the same tokens; how far its MXFP4 path drifts is reported, not judged.

Needs `GNOMON_LLAMA_CPP`, a Python that imports llama_cpp (default: this one), and `GNOMON_LLAMA_CPP_SOURCES`, the folder with
convert_hf_to_gguf.py; docs/export.md says how to get both.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import exported
import numpy as np
import pytest
import torch

from gnomon.data.tokenizer import train_tokenizer
from gnomon.model.inference import InferenceModel
from gnomon.model.weights import load_pretrained, save_pretrained

HERE = Path(__file__).parent
PYTHON = os.environ.get("GNOMON_LLAMA_CPP", sys.executable)
SOURCES = os.environ.get("GNOMON_LLAMA_CPP_SOURCES", "")
HAS_PYTHON = "GNOMON_LLAMA_CPP" in os.environ or importlib.util.find_spec("llama_cpp") is not None
TEXT = "def read(path): return 3.14159 # naïve, 東京 it's\n\n  x"
# A vocabulary of 320 with the reserved block of 32; llama.cpp norms MLA's latents with `rms_norm_eps`, the release with 1e-6: here equal.
FIELDS = {"bos_token_id": 288, "eos_token_id": 290, "pad_token_id": 319, "rms_norm_eps": 1e-6}

pytestmark = [
    pytest.mark.skipif(not HAS_PYTHON, reason="llama_cpp is not importable; GNOMON_LLAMA_CPP names a Python that has it"),
    pytest.mark.skipif(not SOURCES, reason="GNOMON_LLAMA_CPP_SOURCES does not name llama.cpp's sources, which have the converter"),
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT * 3, Path(__file__).read_text(encoding="utf-8")], 320)


def llama_cpp(folder, prompt):
    """Convert a checkpoint and run it there: (logits [T, V], greedy continuation, ids of TEXT)."""
    gguf, out = folder / "model.gguf", folder / "out.npz"
    convert = [sys.executable, HERE / "convert_to_gguf.py", SOURCES, folder, "--outtype", "f32", "--outfile", gguf]
    run = [PYTHON, HERE / "llama_cpp_peer.py", gguf, out, exported.CONTINUATION, TEXT, *prompt]
    for command in (convert, run):
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    results = np.load(out)
    return results["logits"], results["continuation"].tolist(), results["ids"].tolist()


def log_probabilities(logits):
    """fp64 log-softmax."""
    return torch.log_softmax(torch.from_numpy(np.asarray(logits)).double(), -1).numpy()


def rms(ours, theirs):
    return float(np.sqrt(np.mean((log_probabilities(ours) - log_probabilities(theirs)) ** 2)))


@torch.no_grad()
def engine(model, tokens):
    """Logits of every position by the inference model, which is what a server runs."""
    one = InferenceModel.from_transformer(model, "fp32").continuation(len(tokens))
    return np.stack([one.extend([token]).numpy() for token in tokens])


def test_f32_export_gives_the_same_tokens(tmp_path, tokenizer):
    """Every weight as trained: two implementations that share nothing agree to rounding."""
    model = exported.build("kimi_k3", **FIELDS)
    save_pretrained(model, tmp_path, quantize=False, tokenizer=tokenizer)
    prompt = exported.prompt(vocabulary=288)
    theirs, continuation, ids = llama_cpp(tmp_path, prompt)
    assert ids == tokenizer.encode(TEXT)
    _, ours, gap = exported.greedy(load_pretrained(tmp_path), prompt)
    assert gap > 1e-3, "a near tie would make the comparison of tokens meaningless"
    assert continuation == ours
    assert rms(engine(model, prompt + continuation), theirs) < 3e-5


def test_mxfp4_export_runs_and_its_drift_is_reported(tmp_path, tokenizer, capsys):
    """llama.cpp rounds the activations before MXFP4 experts to 8 bits, so it drifts from the weights that both read."""
    model = exported.build("kimi_k3", **FIELDS)
    save_pretrained(model, tmp_path, quantize=True, tokenizer=tokenizer)
    prompt = exported.prompt(vocabulary=288)
    theirs, continuation, _ = llama_cpp(tmp_path, prompt)
    drift = rms(engine(load_pretrained(tmp_path, dtype=torch.float32), prompt + continuation), theirs)
    _, ours, _ = exported.greedy(load_pretrained(tmp_path, dtype=torch.float32), prompt)
    same = next((i for i, (a, b) in enumerate(zip(ours, continuation, strict=True)) if a != b), len(ours))
    with capsys.disabled():
        print(f"\nllama.cpp, MXFP4 experts: log-probabilities drift by {drift:.3g} rms; {same} of {len(ours)} greedy tokens are the same")
    assert np.isfinite(theirs).all()
