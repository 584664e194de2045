"""Runs flash-linear-attention's Triton kernels for KDA on a CPU, in Triton's interpreter: `python fla_interpreted.py PEERS CASES RESULTS`.

A program of its own, because Triton decides at import whether it interprets, and because other packages behave differently beside Triton.
PEERS is the folder of fla-core and Triton. CASES holds a list of (function, tensors that ask for gradients, other arguments, weights of the
results); RESULTS receives for each the two results and the gradients of their weighted sum.

What the interpreter needs that a GPU does not: a loop counter of a kernel is a Python integer and has no method `to`; a built-in function
of Triton under another name has to be a kernel's own function; it knows no products of three bf16 parts, and multiplies in fp32 whatever
is asked for; and among several tunings the first is taken, since nothing can be timed. The files are changed in a copy.
"""

import importlib
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

CHANGES = {
    "fla/ops/kda/chunk_intra.py": ("tl.constexpr('bf16x3' if TRITON_ABOVE_3_6_0 and not IS_NPU else 'ieee')", "tl.constexpr('ieee')"),
    "fla/ops/common/chunk_delta_h.py": ("i_t_int64 = i_t.to(tl.int64)", "i_t_int64 = i_t"),
    "fla/ops/utils/op.py": (
        "    gather = tl.gather\n",
        "    @triton.jit\n    def gather(src, index, axis):\n        return tl.gather(src, index, axis)\n",
    ),
}


def copied(peers: Path, to: Path) -> None:
    """The package without what would import other packages, changed for the interpreter."""
    shutil.copytree(peers / "fla", to / "fla", ignore=shutil.ignore_patterns("__pycache__", "layers", "models"))
    for name, (before, after) in CHANGES.items():
        path = to / name
        text = path.read_text(encoding="utf-8")
        if before not in text:
            raise SystemExit(f"{name} does not say {before!r}; this program is written for fla-core 0.6.0")
        path.write_text(text.replace(before, after), encoding="utf-8")


def first_tunings() -> None:
    """Every tuned kernel keeps its first tuning."""
    from triton.runtime.autotuner import Autotuner

    for module in [m for name, m in sys.modules.items() if name.startswith("fla.")]:
        for value in list(vars(module).values()):
            while value is not None and not isinstance(value, (Autotuner, type)):
                value = getattr(value, "fn", None)
            if isinstance(value, Autotuner):
                value.configs = value.configs[:1]


def run(function: Any, inputs: dict[str, Any], others: dict[str, Any], weights: tuple[Any, Any]) -> list[Any]:
    """Both results, then the gradients of their weighted sum in the order of the inputs."""
    import torch

    asking = {name: x.requires_grad_() for name, x in inputs.items()}
    results = function(**asking, **others, output_final_state=True)
    loss = sum((r.float() * w).sum() for r, w in zip(results, weights, strict=True))
    gradients = torch.autograd.grad(loss, list(asking.values())) if loss.requires_grad else []
    return [x.detach() for x in (*results, *gradients)]


def main(peers: str, cases: str, results: str) -> None:
    """Run all cases."""
    os.environ["TRITON_INTERPRET"] = "1"
    warnings.filterwarnings("ignore", message="Triton is not supported on current platform")
    with tempfile.TemporaryDirectory() as folder:
        copied(Path(peers), Path(folder))
        sys.path[:0] = [folder, peers]
        import torch

        torch.set_num_threads(1)
        kda = importlib.import_module("fla.ops.kda")
        first_tunings()
        done = [run(getattr(kda, name), *arguments) for name, *arguments in torch.load(cases, weights_only=True)]
        torch.save(done, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
