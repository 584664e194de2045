"""KDA against flash-linear-attention's Triton kernels, forward and backward, in Triton's interpreter where there is no GPU.

These are the kernels that models of this family are trained with. Both sides compute in fp32; the judge of both is the recurrence in fp64.
`make test` does not install Triton, which is large: `pip install --no-deps --target .venv/peers triton==3.9.0`.
"""

import subprocess
import sys
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gnomon.kernels import kda, native
from gnomon.kernels.kda import reference

pytestmark = pytest.mark.slow

NAMES = ("q", "k", "v", "g", "beta")


@dataclass
class Case:
    """A call of the package's function and the same computation in ours."""

    function: str
    lengths: list[int]
    bound: float | None = None
    raw: bool = False  # norms and gate inside the kernel, as the released model calls it
    keys: int = 32
    values: int = 16
    seed: int = 0
    inputs: dict[str, Tensor] = field(init=False)
    weights: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.seed)
        tokens, heads = sum(self.lengths), 2
        shape = (1, tokens, heads)
        q, k, g = (torch.randn(*shape, self.keys, generator=draw) for _ in range(3))
        v, beta = torch.randn(*shape, self.values, generator=draw), torch.rand(shape, generator=draw)
        self.inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        if self.raw:
            self.inputs |= {"A_log": torch.randn(heads, generator=draw) / 2, "dt_bias": torch.randn(heads * self.keys, generator=draw)}
        else:
            self.inputs["q"], self.inputs["k"] = kda.prepare(q, k)
            self.inputs["g"] = kda.decay(2 * g, torch.zeros(heads), self.bound)
        state = (len(self.lengths), heads, self.keys, self.values)
        self.inputs["initial_state"] = torch.randn(state, generator=draw)
        self.weights = torch.randn(*shape, self.values, generator=draw), torch.randn(state, generator=draw)

    @property
    def borders(self) -> Tensor | None:
        """Documents, if there are several."""
        return torch.tensor([0, *self.lengths]).cumsum(0) if len(self.lengths) > 1 else None

    def call(self) -> tuple[Any, ...]:
        """What the interpreting program reads."""
        others: dict[str, Any] = {"cu_seqlens": self.borders, "scale": self.keys**-0.5 if self.raw else 1.0}
        others["safe_gate"] = self.bound is not None
        if self.raw:
            others |= {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "lower_bound": self.bound}
        return self.function, self.inputs, others, self.weights

    def ours(self, form: Any, dtype: torch.dtype) -> list[Tensor]:
        """Both results and the gradients of their weighted sum, by `form` of the recurrence."""
        asking = {name: x.detach().to(dtype).requires_grad_() for name, x in self.inputs.items()}
        q, k, v, g, beta = (asking[name] for name in NAMES)
        if self.raw:
            q, k = reference.prepare(q, k) if dtype == torch.float64 else kda.prepare(q, k)
            decay = reference.decay if dtype == torch.float64 else kda.decay
            g = decay(g, asking["A_log"], self.bound, asking["dt_bias"])
        least = () if form is reference.recurrent or self.bound is None else (self.bound,)
        results = form(q, k, v, g, beta, asking["initial_state"], self.borders, *least)
        loss = sum((r * w.to(dtype)).sum() for r, w in zip(results, self.weights, strict=True))
        return [x.detach() for x in (*results, *torch.autograd.grad(loss, list(asking.values())))]


CASES = {
    "chunks": Case("chunk_kda", [70]),
    "bounded gate": Case("chunk_kda", [70], bound=-5.0, seed=1),
    "documents": Case("chunk_kda", [1, 66, 3], bound=-5.0, seed=2),
    "norms and gate inside": Case("chunk_kda", [70], bound=-5.0, raw=True, seed=3),
    "norms and softplus gate inside": Case("chunk_kda", [1, 40], raw=True, seed=4),
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tensor]]:
    """What the kernels give for each case; one process for all, since the package takes seconds to load."""
    pytest.importorskip("einops", reason="einops is not installed: pip install einops")
    peers = Path(sys.prefix) / "peers"
    for package, install in {"fla": "fla-core==0.6.0", "triton": "triton==3.9.0"}.items():
        if PathFinder.find_spec(package, [str(peers)]) is None:
            pytest.skip(f"{package} does not stand apart: pip install --no-deps --target {peers} {install}")
    folder = tmp_path_factory.mktemp("interpreted")
    torch.save([case.call() for case in CASES.values()], folder / "cases.pt")
    program = Path(__file__).with_name("fla_interpreted.py")
    command = [sys.executable, str(program), str(peers), str(folder / "cases.pt"), str(folder / "results.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(CASES, torch.load(folder / "results.pt", weights_only=True), strict=True))


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("implementation", ["cpu", "fused"])
def test_equals_the_triton_kernels(theirs: dict[str, list[Tensor]], name: str, implementation: str) -> None:
    """Both are as near to fp64 as fp32 allows: the norm of the difference against the norm of the tensor."""
    if implementation == "cpu" and (why := native.unavailable()):
        pytest.skip(why)
    case = CASES[name]
    exact = case.ours(reference.recurrent, torch.float64)
    ours = case.ours(kda.chunk.module(implementation).chunk, torch.float32)
    for what, wide, mine, other in zip(["o", "state", *case.inputs], exact, ours, theirs[name], strict=True):
        assert mine.shape == other.shape == wide.shape, what
        size = float(wide.norm())
        assert float((mine.double() - wide).norm()) <= 2e-5 * size, f"{what}: ours"
        assert float((other.double() - wide).norm()) <= 2e-5 * size, f"{what}: theirs"
