"""The MX formats in C++ equal the reference to the last bit, for any bits that go in, on every instruction set."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from gnomon.errors import KernelError
from gnomon.kernels import mxfp, native
from gnomon.kernels.mxfp import cpu, reference

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))


def any_bits(rows: int, seed: int = 0) -> Tensor:
    """Blocks of arbitrary fp32 bit patterns: all magnitudes, subnormals, zeros of both signs, some NaN and infinities."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (rows, 64), generator=draw).to(torch.int32).view(torch.float32)


def one_magnitude(rows: int, seed: int = 0) -> Tensor:
    """Blocks whose values lie near one another, with many exact ties, at every exponent of fp32."""
    draw = torch.Generator().manual_seed(seed)
    size = torch.linspace(-149, 125, rows).round().view(-1, 1)
    steps = torch.randint(-64, 65, (rows, 64), generator=draw).float() / 8
    return torch.ldexp(steps, size)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bits; NaN equals NaN."""
    nan = a.isnan() & b.isnan()
    whole = {torch.float32: torch.int32, torch.float8_e4m3fn: torch.uint8}.get(a.dtype, a.dtype)
    return bool((nan | (a.view(whole) == b.view(whole))).all())


def check_all() -> None:
    """Encoding, decoding and rounding against the reference."""
    for x in (any_bits(3000), one_magnitude(3000), torch.randn(50, 96), torch.zeros(2, 32), -torch.zeros(2, 32)):
        for rule in ("even", "ceil"):
            for bits in ("4", "8"):
                ours, theirs = (getattr(m, f"encode_mxfp{bits}")(x, rule) for m in (cpu, reference))
                assert torch.equal(ours[1], theirs[1])
                known = (theirs[1] != 255).repeat_interleave(32 if bits == "8" else 16, dim=-1)
                assert torch.equal(ours[0].view(torch.uint8)[known], theirs[0].view(torch.uint8)[known])
                decode = [getattr(m, f"decode_mxfp{bits}") for m in (cpu, reference)]
                assert same_bits(decode[0](*theirs, torch.float32), decode[1](*theirs, torch.float32))
                assert same_bits(*(getattr(m, f"fake_mxfp{bits}")(x, rule) for m in (cpu, reference)))


def test_any_values_give_the_bits_of_the_reference(poisoned: None) -> None:
    check_all()


def test_every_code_at_every_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8).view(-1, 1)
    assert same_bits(*(m.decode_mxfp4(codes, scale.expand(256, 16), torch.float32) for m in (cpu, reference)))
    floats = codes.view(torch.float8_e4m3fn)
    assert same_bits(*(m.decode_mxfp8(floats, scale.expand(256, 8), torch.float32) for m in (cpu, reference)))


def test_other_instruction_sets_give_the_same_bits() -> None:
    script = "import sys; sys.path.insert(0, sys.argv[1]); import test_mxfp_cpu; test_mxfp_cpu.check_all()"
    folder = os.path.dirname(__file__)
    environments = [{**os.environ, "GNOMON_INSTRUCTION_SET": wanted, "OMP_NUM_THREADS": "1"} for wanted in ("3", "0")]
    running = [subprocess.Popen([sys.executable, "-c", script, folder], env=environment) for environment in environments]
    assert [process.wait() for process in running] == [0, 0]


def test_rows_need_not_be_contiguous_and_threads_do_not_matter() -> None:
    x = torch.randn(64, 4096)
    expected = reference.fake_mxfp4(x.T)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert torch.equal(mxfp.fake_mxfp4(x.T), expected)


def test_the_gradient_passes_straight_through() -> None:
    for fake in (cpu.fake_mxfp4, cpu.fake_mxfp8):
        x = torch.randn(3, 64, requires_grad=True)
        upstream = torch.randn(3, 64)
        fake(x).backward(upstream)
        assert x.grad is not None and torch.equal(x.grad, upstream)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(KernelError, match="rows of 33 values"):
        cpu.fake_mxfp4(torch.randn(2, 33))
    with pytest.raises(KernelError, match="unknown scale rule 'odd'"):
        cpu.encode_mxfp8(torch.randn(2, 32), "odd")
    codes, scale = mxfp.encode_mxfp4(torch.randn(2, 64))
    with pytest.raises(KernelError, match="hold 64 columns"):
        cpu.decode_mxfp4(codes, scale[:, :1], torch.float32)
    assert mxfp.fake_mxfp4.choices(torch.randn(2, 32).bfloat16())[0][1] is not None
    assert mxfp.decode_mxfp4.choices(codes, scale)[0][1] is not None
    assert mxfp.decode_mxfp4.choices(codes, scale, torch.float32)[0][1] is None
    assert mxfp.decode_mxfp4.choices(codes, scale.int(), torch.float32)[0][1] is not None
    assert mxfp.encode_mxfp4(torch.randn(0, 64))[0].shape == (0, 32)
