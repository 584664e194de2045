"""Adapters to other packages' GPU kernels: what they refuse, their arithmetic where PyTorch has a CPU path, and parity on a GPU.

The tests marked `gpu` need a CUDA device, and flash-linear-attention for KDA: `pytest -m gpu`.
"""

import pytest
import torch

from gnomon.kernels import experts, kda, mla
from gnomon.kernels.experts import grouped_mm, reference
from gnomon.kernels.kda import fla
from gnomon.kernels.mla import flex

BF16 = torch.bfloat16


def near(ours: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    """Relative to the whole tensor: matrix units round their operands."""
    assert ours.shape == exact.shape
    assert float((ours.double() - exact.double()).norm()) <= tolerance * float(exact.double().norm())


def expert_inputs(device: str, tokens: int = 37, latent: int = 64, inner: int = 32) -> list:
    """Six experts, one of which nobody visits."""
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(tokens, latent, generator=draw)
    gate, up = (torch.randn(6, inner, latent, generator=draw) * latent**-0.5 for _ in range(2))
    down = torch.randn(6, latent, inner, generator=draw) * inner**-0.5
    ids = torch.rand(tokens, 5, generator=draw).topk(3, dim=-1).indices
    floats = [x.to(device, BF16) for x in (z, gate, up, down)]
    return [*floats, ids.to(device), torch.rand(tokens, 3, generator=draw).to(device), 4.0, 25.0]


def compare_experts(device: str) -> None:
    """Values and gradients of the grouped product against the reference, which computes expert by expert."""
    results = []
    for run in (grouped_mm.experts, reference.experts):
        arguments = expert_inputs(device)
        inputs = [x.requires_grad_() for x in (*arguments[:4], arguments[5])]
        out = run(*arguments)
        (out.float() * torch.arange(out.shape[1], device=device).cos()).sum().backward()
        results.append([out.detach(), *(x.grad for x in inputs)])
    for ours, exact in zip(*results, strict=True):
        near(ours, exact, 2e-2)


def test_the_grouped_product_computes_the_experts() -> None:
    """PyTorch runs the same call on a CPU, slowly; so the adapter's arithmetic is tested everywhere."""
    compare_experts("cpu")


CALLS = {
    "queries in the middle": ((2, 5), 9, None, 3),
    "all queries": ((1, 130), 130, None, 0),
    "documents": ((1, 131), 131, [0, 5, 5, 70, 71, 131], 0),
}


def compare_attention(device: str, dtype: torch.dtype, name: str, tolerance: float) -> None:
    """FlexAttention against explicit scores in fp64."""
    (batch, tokens), keys, borders, offset = CALLS[name]
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, n, 3, width, generator=draw).to(device, dtype) for n, width in ((tokens, 24), (keys, 24), (keys, 16)))
    bounds = None if borders is None else torch.tensor(borders, dtype=torch.int32, device=device)
    near(flex.attention(q, k, v, 0.2, bounds, offset), mla.attention.reference(q.double(), k.double(), v.double(), 0.2, bounds, offset),
         tolerance)


@pytest.mark.slow  # PyTorch loads its compiler for the call
@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_the_mask_of_flex_attention_says_who_sees_whom(name: str) -> None:
    """On a CPU PyTorch writes the scores out; the mask and the call are those of a GPU."""
    with torch.no_grad():
        compare_attention("cpu", torch.float32, name, 1e-5)


def test_reasons_name_the_input() -> None:
    arguments = expert_inputs("cpu")
    assert "z is torch.bfloat16 on cpu" in str(grouped_mm.refuse_experts(*arguments))
    q = torch.zeros(1, 4, 2, 8)
    assert "q is torch.float32 on cpu" in str(fla.refuse_chunk(q, q, q, q, q[..., 0]))
    assert "q is torch.float32 on cpu" in str(flex.refuse_attention(q, q, q, 1.0))


@pytest.mark.gpu
def test_the_grouped_product_on_a_gpu() -> None:
    assert grouped_mm.refuse_experts(*expert_inputs("cuda")) is None
    assert experts.experts.choices(*expert_inputs("cuda"))[0] == ("grouped_mm", None)
    compare_experts("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("lengths", [[128], [1, 200, 63]], ids=str)
def test_kda_on_a_gpu(bounded: bool, lengths: list[int]) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, sum(lengths), 4, 64, generator=draw).cuda() for _ in range(3))
    q, k = kda.prepare(q, k)
    g = (-4.9 if bounded else -9.0) * torch.rand(q.shape, generator=draw).cuda()
    beta = torch.rand(q.shape[:3], generator=draw).cuda()
    state = torch.randn(len(lengths), 4, 64, 64, generator=draw).cuda()
    bounds = torch.tensor([0, *lengths]).cumsum(0).cuda() if len(lengths) > 1 else None
    arguments = (q, k, v, g, beta, state, bounds, -5.0 if bounded else -torch.inf)
    if (reason := fla.refuse_chunk(*arguments)) is not None:
        pytest.skip(reason)
    for ours, exact in zip(fla.chunk(*arguments), kda.chunk.reference(*(x.double() if isinstance(x, torch.Tensor) and x.is_floating_point()
                                                                         else x for x in arguments)), strict=True):
        near(ours, exact, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_attention_on_a_gpu(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    bounds = torch.tensor([0, 5, 5, 300, 301], device="cuda")
    q, k = (torch.randn(1, 301, 4, 96, generator=draw).to("cuda", dtype) for _ in range(2))
    v = torch.randn(1, 301, 4, 64, generator=draw).to("cuda", dtype)
    wide = mla.attention.reference(q.double(), k.double(), v.double(), 0.1, bounds)
    near(mla.attention(q, k, v, 0.1, bounds), wide, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_flex_attention_on_a_gpu(dtype: torch.dtype, name: str) -> None:
    q = torch.zeros(1, 8, 3, 24, dtype=dtype, device="cuda")
    if (reason := flex.refuse_attention(q, q, q[..., :16], 0.2)) is not None:
        pytest.skip(reason)
    compare_attention("cuda", dtype, name, 1e-2)
