"""Shared by all tests: shape checking, determinism, and where the repository is.

The jaxtyping hook checks the shape and type of every annotated tensor argument and result of `gnomon` while the tests run: a
`[B, T, H, K]` that is not one fails here, and costs nothing in use.
"""

import os
import re
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; what tests start and interrupt would ignore it as well
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jaxtyping
import pytest
from beartype import BeartypeConf, beartype
from hypothesis import settings
from jaxtyping import install_import_hook

_decorate = beartype(conf=BeartypeConf(is_pep484_tower=True))
_tensor = re.compile(r"\bTensor\b")


def _speaks(hint: Any) -> bool:
    """Whether a hint is of tensors."""
    return bool(_tensor.search(hint if isinstance(hint, str) else repr(hint)))


def _check(function: Any) -> Any:
    """Check the hints that speak of tensors; the rest is for mypy, and not all of it can be checked while running."""
    hints = getattr(function, "__annotations__", {})
    hints.update({name: object for name, hint in hints.items() if not _speaks(hint)})
    return _decorate(function)


def _where_tensors(*, typechecker: Any) -> Callable[[Any], Any]:
    """`jaxtyped` for functions and classes with hints that speak of tensors. Around others it would check nothing, and take its time at
    each call and each definition, those inside functions too."""
    shaped = _jaxtyped(typechecker=typechecker)
    return lambda target: shaped(target) if any(map(_speaks, target.__annotations__.values())) else target


def speak_of_tensors() -> list[str]:
    """The modules that have tensors to check."""
    package = Path(__file__).resolve().parents[1] / "src" / "gnomon"
    files = [path for path in package.rglob("*.py") if path.name != "__init__.py" and _tensor.search(path.read_text(encoding="utf-8"))]
    return [".".join(("gnomon", *path.relative_to(package).with_suffix("").parts)) for path in files]


# The hook takes the checker by a dotted name, and `jaxtyped` from its package.
checker = types.ModuleType("gnomon_shape_checker")
checker.check = _check  # type: ignore[attr-defined]
sys.modules[checker.__name__] = checker
_jaxtyped, jaxtyping.jaxtyped = jaxtyping.jaxtyped, _where_tensors  # type: ignore[assignment]
install_import_hook(speak_of_tensors(), f"{checker.__name__}.check")


# A shared machine may stop for a second in the middle of an example. Where a run decides (GNOMON_SAME_EXAMPLES, set by .ci/run), the
# examples are the same each time; elsewhere each run looks at new ones.
settings.register_profile("house", deadline=None, derandomize=bool(os.environ.get("GNOMON_SAME_EXAMPLES")))
settings.load_profile("house")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout that is under test."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def deterministic() -> None:
    """Each test starts from the same random state, on one thread, whatever ran before it."""
    import numpy as np
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
