"""What holds for every C++ operator: other instruction sets, inputs that do not fit, the floating-point mode left alone.

The operators are found by looking, so a new one is covered on the day it is written.
"""

import ctypes
import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gnomon.errors import GnomonError
from gnomon.kernels import native
from gnomon.kernels.operator import Operator, all_operators
from gnomon.kernels.survey import sample

NATIVE = [(o, name) for o in tuple(all_operators()) for name in o.candidates["cpu"] if "native" in vars(o.module(name))]
OPERATORS = pytest.mark.parametrize(("operator", "name"), NATIVE, ids=str)
DEFAULT_MXCSR = 0x1F80  # all exceptions masked, round to nearest, denormals kept

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a nested result or argument list."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, (list, tuple)) else []


def change(value: Any, how: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The arguments with every floating-point tensor changed."""
    if isinstance(value, torch.Tensor):
        return how(value) if value.is_floating_point() else value
    return type(value)(change(item, how) for item in value) if type(value) in (list, tuple) else value


def functions(operator: Operator, name: str) -> tuple[Callable[..., Any], Callable[..., str | None]]:
    """An implementation and its refusal."""
    module = operator.module(name)
    return getattr(module, operator.name), getattr(module, f"refuse_{operator.name}")


def offset_by_one(x: torch.Tensor) -> torch.Tensor:
    """The same values one element further on: aligned for an element and for nothing more."""
    wide = torch.empty(x.numel() + 1, dtype=x.dtype)
    wide[1:] = x.flatten()
    return wide[1:].view(x.shape)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values, every other element of memory."""
    return torch.stack((x, torch.full_like(x, torch.nan)), dim=-1)[..., 0]


@OPERATORS
@pytest.mark.parametrize("how", [offset_by_one, strided])
def test_where_the_inputs_stand_in_memory_does_not_matter(operator: Operator, name: str, how, poisoned) -> None:
    run, refuse = functions(operator, name)
    arguments = sample(operator, "cpu")
    if (reason := refuse(*arguments)) is not None:
        pytest.skip(reason)
    moved = change(arguments, how)
    if (reason := refuse(*moved)) is not None:
        assert how is strided and "stride" in reason
        return
    with torch.no_grad():
        for a, b in zip(tensors(run(*moved)), tensors(run(*arguments)), strict=True):
            assert torch.equal(a, b)


@OPERATORS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_types_are_refused_by_name_or_computed(operator: Operator, name: str, dtype: torch.dtype) -> None:
    """Nothing is read as what it is not: a refusal names the type, and what is not refused agrees with the reference."""
    run, refuse = functions(operator, name)
    arguments = change(sample(operator, "cpu"), lambda x: x.to(dtype) if x.dtype == torch.float32 else x)
    if not tensors(change(sample(operator, "cpu"), torch.zeros_like)):
        pytest.skip("no floating-point inputs")
    if (reason := refuse(*arguments)) is not None:
        assert str(dtype) in reason or "bfloat16" in reason or "float32" in reason
        return
    with torch.no_grad():
        ours = tensors(run(*arguments))
        wide = tensors(operator.reference(*change(arguments, torch.Tensor.float)))
    for a, b in zip(ours, wide, strict=True):
        assert float((a.double() - b.double()).abs().max()) <= 0.05 * max(1.0, float(b.double().abs().max()))


@OPERATORS
def test_every_argument_of_another_type_alone_is_refused_or_computed(operator: Operator, name: str) -> None:
    """A mix of types must not slip through a check that looks at the first tensor alone."""
    run, refuse = functions(operator, name)
    arguments = sample(operator, "cpu")
    if (reason := refuse(*arguments)) is not None:
        pytest.skip(reason)
    floats = [t for t in tensors(arguments) if t.dtype == torch.float32]
    for chosen in floats:
        mixed = change(arguments, lambda x, chosen=chosen: x.double() if x is chosen else x)
        if refuse(*mixed) is None:
            try:
                with torch.no_grad():
                    ours, exact = tensors(run(*mixed)), tensors(run(*arguments))
            except (GnomonError, TypeError, RuntimeError):
                continue
            for a, b in zip(ours, exact, strict=True):
                torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-5)


# ---- instruction sets


SURVEY = """
import os, sys, torch
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import test_operators as t
from gnomon.kernels import native
torch.set_num_threads(1)
print(native.instruction_set())
for device, operator, module in t.PAIRS:
    if device == "cpu" and "native" in vars(operator.module(module)):
        try:
            t.test_implementation_equals_the_reference(device, operator, module)
        except BaseException as error:
            if type(error).__name__ != "Skipped":
                raise SystemExit(f"{operator} {module}: {error}")
"""


@pytest.mark.parametrize(("wanted", "name"), [("4-nobf16", "x86-64-v4"), ("3", "x86-64-v3"), ("0", "portable")])
def test_every_operator_on_other_instruction_sets(wanted: str, name: str) -> None:
    """The choice is made once per process, hence a process for each."""
    if native.instruction_set() == "portable" or (wanted.startswith("4") and not native.instruction_set().startswith("x86-64-v4")):
        pytest.skip(f"this machine runs {native.instruction_set()}")
    environment = {**os.environ, "GNOMON_INSTRUCTION_SET": wanted, "OMP_NUM_THREADS": "1"}
    here = str(Path(__file__).resolve())
    done = subprocess.run([sys.executable, "-c", SURVEY, here], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == name


# ---- the floating-point mode


def mxcsr_reader() -> Callable[[], int]:
    """A function that returns the control and status word of the SSE unit, made of four instructions in executable memory."""
    code = bytes.fromhex("0fae5c24fc8b4424fcc3")  # stmxcsr [rsp-4]; mov eax, [rsp-4]; ret
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    function = ctypes.CFUNCTYPE(ctypes.c_uint32)(address)
    function.memory = memory  # type: ignore[attr-defined]
    return function


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64") or os.name != "posix", reason="reads the mode with x86 instructions")
def test_the_floating_point_mode_is_left_alone() -> None:
    """Denormals stay denormals and rounding stays to nearest, after each operator and each direction, on the calling thread."""
    mode = mxcsr_reader()
    flags = 0x3F  # sticky exception flags may change
    before = mode() & ~flags
    assert before == DEFAULT_MXCSR
    for operator, name in NATIVE:
        run, refuse = functions(operator, name)
        for training in (False, True):
            arguments = sample(operator, "cpu", training=training)
            if refuse(*arguments) is None:
                results = [t for t in tensors(run(*arguments)) if t.requires_grad]
                if results:
                    sum(t.sum() for t in results).backward()
            assert mode() & ~flags == before, (operator, name)
    assert float(torch.tensor(1e-40) * 1.0) > 0.0


def test_a_chosen_library_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.LIBRARY, "/nowhere/libgnomon.so")
    native._load.cache_clear()
    try:
        assert "GNOMON_LIBRARY='/nowhere/libgnomon.so': there is no such file" in str(native.unavailable())
    finally:
        native._load.cache_clear()
