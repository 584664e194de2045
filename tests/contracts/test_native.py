"""The C++ library: found beside the package, absent with a reason."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gnomon
from gnomon.errors import KernelError
from gnomon.kernels import kda, native


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in place of the package's, as after an install without a compiler."""
    monkeypatch.setattr(gnomon, "__path__", [str(tmp_path)])
    native._load.cache_clear()
    yield tmp_path
    native._load.cache_clear()


def library_name() -> str:
    return "libgnomon.dylib" if sys.platform == "darwin" else "libgnomon.so"


def test_without_a_compiler_everything_runs_and_says_why(package: Path) -> None:
    assert "without a C++ compiler" in str(native.unavailable())
    with pytest.raises(KernelError, match="without a C\\+\\+ compiler"):
        native.library()
    x = [torch.randn(1, 5, 1, 4) for _ in range(3)]
    g, beta = -torch.rand(1, 5, 1, 4), torch.rand(1, 5, 1)
    (_, reason), *_ = kda.chunk.choices(*x, g, beta)
    assert "without a C++ compiler" in str(reason)
    for ours, exact in zip(kda.chunk(*x, g, beta), kda.recurrent(*x, g, beta), strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5)


def test_a_damaged_library_is_a_reason_not_a_crash(package: Path) -> None:
    (package / library_name()).write_bytes(b"not a library")
    assert "cannot be loaded" in str(native.unavailable())
    assert "reinstall gnomon" in str(native.unavailable())


def test_a_library_of_other_sources_is_refused(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    native._load.cache_clear()
    if native.unavailable():
        pytest.skip(str(native.unavailable()))
    native._load.cache_clear()
    monkeypatch.setattr(native, "ABI", -1)
    assert "was built from other sources" in str(native.unavailable())


def test_the_interface_number_is_the_header_s(repository: Path) -> None:
    assert f"#define GNOMON_ABI {native.ABI}\n" in (repository / "csrc" / "gnomon.h").read_text()


def test_every_function_of_the_header_is_declared(repository: Path) -> None:
    header = "".join(path.read_text() for path in sorted((repository / "csrc").glob("*.h")))
    for name, arguments in native._SIGNATURES.items():
        declaration = header.split(f"void {name}(")[1].split(")")[0]
        assert len(declaration.split(",")) == len(arguments), name
    assert header.count("GNOMON_API void ") == len(native._SIGNATURES)
