"""Against flash-linear-attention's naive files, loaded by path: the package itself needs Triton to import."""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from gnomon.kernels import kda
from gnomon.kernels.kda import reference


@pytest.fixture(scope="module")
def naive() -> ModuleType:
    """`fla/ops/kda/naive.py` of the installed package, without importing the package."""
    pytest.importorskip("einops", reason="einops is not installed: pip install einops")
    package = PathFinder.find_spec("fla", [str(Path(sys.prefix) / "peers"), *sys.path])
    if package is None or not package.submodule_search_locations:
        pytest.skip("fla-core is not installed: make test puts it beside the environment's own packages")
    path = f"{next(iter(package.submodule_search_locations))}/ops/kda/naive.py"
    spec = importlib.util.spec_from_file_location("fla_naive_kda", path)
    if spec is None or spec.loader is None:
        pytest.skip(f"{path} is not there; the tests are written for fla-core 0.6.0")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_equals_the_naive_recurrence_and_its_gradients(naive: Any, form: str, bound: float | None) -> None:
    q, k = reference.prepare(torch.randn(2, 64, 3, 16), torch.randn(2, 64, 3, 16))
    v, beta, state = torch.randn(2, 64, 3, 8), torch.rand(2, 64, 3), torch.randn(2, 3, 16, 8)
    g = reference.decay(torch.randn(2, 64, 3, 16), torch.zeros(3), bound)
    ours = [x.clone().requires_grad_() for x in (q, k, v, g, beta, state)]
    theirs = [x.clone().requires_grad_() for x in (q, k, v, g, beta, state)]
    o, last = getattr(kda, form)(*ours)
    expected, expected_last = naive.naive_recurrent_kda(*theirs[:5], scale=1.0, initial_state=theirs[5], output_final_state=True)
    torch.testing.assert_close((o, last), (expected, expected_last), atol=2e-5, rtol=1e-5)
    weight = torch.randn_like(o)
    for a, b in zip(
        torch.autograd.grad((o * weight).sum() + last.sum(), ours),
        torch.autograd.grad((expected * weight).sum() + expected_last.sum(), theirs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-4)


def test_equals_the_naive_chunks(naive: Any) -> None:
    q, k = reference.prepare(torch.randn(1, 128, 2, 16), torch.randn(1, 128, 2, 16))
    v, beta = torch.randn(1, 128, 2, 16), torch.rand(1, 128, 2)
    g = reference.decay(torch.randn(1, 128, 2, 16) - 3, torch.zeros(2), -5.0)
    theirs = naive.naive_chunk_kda(q, k, v, g, beta, scale=1.0, output_final_state=True)
    torch.testing.assert_close(kda.chunk(q, k, v, g, beta, None, None, -5.0), theirs, atol=2e-5, rtol=1e-4)
