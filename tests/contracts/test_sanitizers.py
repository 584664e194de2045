"""The C++ library under AddressSanitizer and UndefinedBehaviorSanitizer, driven by the contract tests of the operators.

`make sanitize` runs this, and so does continuous integration. Any finding ends the process under test; a deliberate one shows that.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gnomon.kernels import native

DRIVEN = [
    "test_operators", "test_paged_attention", "test_depth_read", "test_kda", "test_kda_decode", "test_kda_gradients", "test_kda_segments",
    "test_inference", "test_linear", "test_packed", "test_experts", "test_grouped_experts", "test_gated_norm", "test_short_conv",
    "test_situ", "test_objective", "test_muon", "test_mxfp_cpu", "test_router_kernel", "test_newton_schulz_cpu", "test_cross_entropy",
]  # fmt: skip
NOT_HERE = "not never_all_in_memory"  # an instrumented process has memory of its own
BEYOND_THE_END = """
import ctypes, torch
from gnomon.kernels import native
x = torch.ones(4)
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
y = libc.malloc(ctypes.c_size_t(12))
native.library().gnomon_situ_forward(x.data_ptr(), x.data_ptr(), 1, 4, 4.0, 25.0, y, 1)
"""

pytestmark = pytest.mark.slow


def ask(*command: str) -> str:
    """What a command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def instrumented(repository: Path) -> dict[str, str]:
    """The environment in which Python loads an instrumented library."""
    if sys.platform != "linux" or native.unavailable():
        pytest.skip("needs Linux and a C++ compiler")
    build = repository / "build" / "sanitize"
    subprocess.run(["cmake", "-S", str(repository), "-B", str(build), "-DGNOMON_SANITIZE=ON"], check=True, capture_output=True)
    made = subprocess.run(["cmake", "--build", str(build), "-j2"], check=False, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    cache = (build / "CMakeCache.txt").read_text().splitlines()
    compiler = next(line.split("=", 1)[1] for line in cache if line.startswith("CMAKE_CXX_COMPILER:"))
    runtimes = [ask(compiler, f"-print-file-name={name}") for name in ("libasan.so", "libubsan.so")]
    if not all(Path(path).is_absolute() for path in runtimes):
        pytest.skip(f"{compiler} has no shared sanitizer runtimes")
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes),
        "GNOMON_LIBRARY": str(build / "libgnomon.so"),
        "OMP_NUM_THREADS": "1",
        # Python's own memory is not freed at exit; torch looks for its libraries in ways that the link order check dislikes
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0:detect_odr_violation=2",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }


@pytest.mark.parametrize("instructions", ["", "3", "0"], ids=["best", "v3", "portable"])
def test_the_operators_have_no_findings(instrumented: dict[str, str], repository: Path, instructions: str) -> None:
    folder = repository / "tests" / "contracts"
    files = [str(folder / f"{name}.py") for name in DRIVEN]
    environment = instrumented if not instructions else {**instrumented, "GNOMON_INSTRUCTION_SET": instructions}
    chosen = files if not instructions else files[:3]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", NOT_HERE, "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=repository, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_a_write_beyond_the_end_is_found(instrumented: dict[str, str]) -> None:
    """The tests above would be worth nothing if the runtime were not really there."""
    done = subprocess.run([sys.executable, "-c", BEYOND_THE_END], capture_output=True, text=True, env=instrumented, check=False)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
