"""What a served row may depend on: its own sequence, and nothing else."""

from itertools import chain

import inference_models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.kernels import native
from gnomon.model.inference import InferenceModel
from gnomon.model.inference_state import PackedRows

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

NETWORK = inference_models.model()
PAGE = 8
LONGEST = 24
TWINS: dict[str, InferenceModel] = {}

sequences = st.lists(st.lists(st.integers(0, 60), max_size=LONGEST), min_size=1, max_size=5)


def twin(weights: str) -> InferenceModel:
    """One packed model per kind of weights, made when it is first used."""
    if weights not in TWINS:
        TWINS[weights] = InferenceModel.from_transformer(NETWORK, weights)
    return TWINS[weights]


def run(model: InferenceModel, whole: list[list[int]], cuts: list[list[int]], threads: int) -> list[torch.Tensor]:
    """Hidden vectors of every token of every sequence, handed over in as many calls as the longest list of cuts asks for."""
    each = -(-LONGEST // PAGE)
    pool = model.new_pool(len(whole), len(whole) * each * PAGE, PAGE)
    pages = torch.arange(len(whole) * each, dtype=torch.int32).view(len(whole), each)
    done, results = [0] * len(whole), [[] for _ in whole]
    torch.set_num_threads(threads)
    for step in range(max(map(len, cuts)) + 1):
        stops = [cut[step] if step < len(cut) else len(ids) for ids, cut in zip(whole, cuts, strict=True)]
        pieces = [ids[a:b] for ids, a, b in zip(whole, done, stops, strict=True)]
        bounds = torch.tensor([0, *map(len, pieces)]).cumsum(0)
        rows = PackedRows(tokens=torch.tensor(list(chain(*pieces)), dtype=torch.int64), bounds=bounds, past=torch.tensor(done),
                          slots=torch.arange(len(whole)), pages=pages, wanted=torch.arange(int(bounds[-1])))
        out = model.forward(rows, pool, logits=False).hidden
        for own, part in zip(results, out.split([len(p) for p in pieces]), strict=True):
            own.append(part)
        done = stops
    torch.set_num_threads(1)
    return [torch.cat(parts) for parts in results]


@settings(max_examples=25, deadline=None)
@given(whole=sequences, weights=st.sampled_from(["fp32", "bf16", "mxfp4"]), threads=st.sampled_from([1, 2]))
def test_company_and_threads_change_no_bit(whole: list[list[int]], weights: str, threads: int) -> None:
    model = twin(weights)
    together = run(model, whole, [[] for _ in whole], threads)
    for ids, result in zip(whole, together, strict=True):
        assert torch.equal(run(model, [ids], [[]], 1)[0], result)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), whole=sequences)
def test_any_split_gives_what_one_pass_gives(data: st.DataObject, whole: list[list[int]]) -> None:
    cuts = [sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4))) for ids in whole]
    model = twin("fp32")
    for split, one in zip(run(model, whole, cuts, 1), run(model, whole, [[] for _ in whole], 1), strict=True):
        torch.testing.assert_close(split, one, atol=1e-4, rtol=1e-4)
