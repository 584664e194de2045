"""A row's result does not depend on the other rows, on their number or order, or on the number of threads: to the last bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.kernels import mxfp, native, packed
from gnomon.kernels.packed.matrix import PackedExperts, PackedMatrix

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
SEEDS = st.integers(0, 2**31)
FORMATS = st.sampled_from(["fp32", "bf16", "mxfp4"])


def pack(name: str, w: torch.Tensor) -> PackedMatrix:
    """The matrix in one of the formats."""
    return PackedMatrix.of_mxfp4(*mxfp.encode_mxfp4(w)) if name == "mxfp4" else PackedMatrix.of(w if name == "fp32" else w.bfloat16())


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, name=FORMATS, out=st.integers(1, 150), blocks=st.integers(1, 9), rows=st.integers(1, 70), threads=st.integers(1, 3))
def test_a_row_of_a_product_stands_alone(seed: int, name: str, out: int, blocks: int, rows: int, threads: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    w = pack(name, torch.randn(out, 32 * blocks, generator=draw))
    x = torch.randn(rows, 32 * blocks, generator=draw)
    alone = torch.cat([packed.multiply(row[None], w) for row in x])
    torch.set_num_threads(threads)
    order = torch.randperm(rows, generator=draw)
    assert torch.equal(packed.multiply(x, w), alone)
    assert torch.equal(packed.multiply(x[order], w), alone[order])


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, name=FORMATS, tokens=st.integers(1, 70), chosen=st.integers(1, 4), threads=st.integers(1, 3))
def test_a_token_of_routed_experts_stands_alone(seed: int, name: str, tokens: int, chosen: int, threads: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    parts = [[pack(name, torch.randn(*shape, generator=draw) / 8) for _ in range(5)] for shape in ((96, 64), (96, 64), (64, 96))]
    stack = PackedExperts(*parts)
    z, weights = torch.randn(tokens, 64, generator=draw), torch.rand(tokens, chosen, generator=draw)
    ids = torch.rand(tokens, 5, generator=draw).topk(chosen, dim=-1).indices
    alone = torch.cat([packed.experts(z[i : i + 1], stack, ids[i : i + 1], weights[i : i + 1], 4.0, 25.0) for i in range(tokens)])
    torch.set_num_threads(threads)
    order = torch.randperm(tokens, generator=draw)
    assert torch.equal(packed.experts(z, stack, ids, weights, 4.0, 25.0), alone)
    assert torch.equal(packed.experts(z[order], stack, ids[order], weights[order], 4.0, 25.0), alone[order])
