"""The inference model on checkpoints from an independent writer, against the oracle that knows only the specification."""

import pytest
import released
import torch
from test_random_checkpoint import VARIATIONS, prepare, relative

from gnomon.kernels import native
from gnomon.model.inference import InferenceModel
from gnomon.model.inference_state import PackedRows

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))


def logits(model, tokens, splits=()):
    """Logits of all positions, handed over in pieces that end at `splits`."""
    pool = model.new_pool(1, len(tokens), page_tokens=8)
    pages = torch.randperm(pool.pages).int()[None]  # the order of pages is the caller's
    edges, parts = [0, *splits, len(tokens)], []
    for start, stop in zip(edges, edges[1:], strict=False):
        rows = PackedRows(
            tokens=tokens[start:stop], bounds=torch.tensor([0, stop - start]), past=torch.tensor([start]), slots=torch.tensor([0]),
            pages=pages, wanted=torch.arange(stop - start),
        )
        parts.append(model.forward(rows, pool).logits)
    return torch.cat(parts).numpy()


QUICK = ("kimi_k3", "kimi_linear", "k3 without depth reads", "k3 without a query latent", "k3 without a latent", "k3 tied",
         "linear with a query latent")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in VARIATIONS])
def test_logits(name, tmp_path):
    tokens, expected = prepare(name, tmp_path)
    assert relative(logits(InferenceModel.load(tmp_path, "fp32"), tokens), expected) <= 1e-5


@pytest.mark.parametrize("name", ["kimi_k3", "kimi_linear"])
def test_logits_in_pieces_and_token_by_token(name, tmp_path):
    tokens, expected = prepare(name, tmp_path)
    model = InferenceModel.load(tmp_path, "fp32")
    assert relative(logits(model, tokens, (1, 2, 9, 17, 18, 33)), expected) <= 1e-5
    assert relative(logits(model, tokens, range(1, len(tokens))), expected) <= 1e-5


def test_what_stands_on_disk_is_what_runs(tmp_path):
    """Packed experts are not expanded: the model takes the memory of the file, not of its decoded weights."""
    config = released.config("kimi_k3")
    released.write(tmp_path, config)
    packed, expanded = InferenceModel.load(tmp_path), InferenceModel.load(tmp_path, "fp32")
    assert packed.weight_bytes < 0.45 * expanded.weight_bytes
