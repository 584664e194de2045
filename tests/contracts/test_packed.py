"""Packed products against exact sums: values, the order of additions, every instruction set, refusals, and what memory holds."""

import ctypes
import inspect
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from gnomon.errors import KernelError
from gnomon.kernels import mxfp, native, packed
from gnomon.kernels.packed.matrix import PackedExperts, PackedMatrix, WeightBuffer

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
UNIT = 2.0**-24  # half a unit in the last place of fp32
SHAPES = [(1, 32), (16, 64), (23, 96), (64, 32), (130, 160)]
FORMATS = ["fp32", "bf16", "mxfp4"]
formats, shapes = pytest.mark.parametrize("name", FORMATS), pytest.mark.parametrize(("out", "inner"), SHAPES)


def make(name: str, out: int, inner: int) -> tuple[PackedMatrix, Tensor]:
    """A packed matrix of small random values and its exact values in fp64, decoded here."""
    w = torch.randn(out, inner)
    if name == "fp32":
        return PackedMatrix.of(w), w.double()
    if name == "bf16":
        return PackedMatrix.of(w.bfloat16()), w.bfloat16().double()
    codes = torch.randint(0, 256, (out, inner // 2), dtype=torch.uint8)
    scale = torch.randint(118, 132, (out, inner // 32), dtype=torch.uint8)
    table = torch.tensor(E2M1 + [-v for v in E2M1], dtype=torch.float64)
    values = table[torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()]
    return PackedMatrix.of_mxfp4(codes, scale), values * (2.0 ** (scale.double() - 127)).repeat_interleave(32, dim=1)


def rounded(x: Tensor, name: str) -> Tensor:
    return x.double() if name == "fp32" else x.bfloat16().double()


@formats
@shapes
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 7, 13, 40])
def test_products_are_exact_sums_within_rounding(name: str, out: int, inner: int, rows: int, poisoned: None) -> None:
    """The bound of one chain of n additions per output; leaving the rounding of x out, or dropping one input, breaks it."""
    w, exact = make(name, out, inner)
    x = torch.randn(rows, inner)
    y = packed.multiply(x, w)
    bound = (inner + 2) * UNIT * (rounded(x, name).abs() @ exact.abs().T)
    assert y.shape == (rows, out) and y.dtype == torch.float32
    assert ((y.double() - rounded(x, name) @ exact.T).abs() <= bound).all()
    if rows:
        fewer = rounded(x, name).index_fill(1, torch.tensor([inner - 1]), 0.0) @ exact.T
        assert not ((y.double() - fewer).abs() <= bound).all()
        if name != "fp32":
            assert not ((y.double() - x.double() @ exact.T).abs() <= bound).all()


@pytest.mark.parametrize("name", ["bf16", "mxfp4"])
def test_an_output_is_one_chain_of_additions(name: str) -> None:
    """The odd input of a pair first; MXFP4 sums a block in the codes' values and multiplies once by the scale."""
    w, exact = make(name, 5, 96)
    x = torch.randn(3, 96)
    scale = torch.ones(5, 3, dtype=torch.float64)
    if name == "mxfp4":  # any power of two that all values of a block are multiples of serves as its scale
        scale = exact.unflatten(1, (3, 32)).abs().amax(dim=-1).log2().floor().exp2() / 8
    size = 96 if name == "bf16" else 32
    for row in range(3):
        for out in range(5):
            total = np.float32(0.0)
            for block in range(96 // size):
                values = exact[out, block * size : (block + 1) * size] / scale[out, block]
                inputs, dot = rounded(x, name)[row, block * size : (block + 1) * size], np.float32(0.0)
                for pair in range(0, size, 2):
                    for i in (pair + 1, pair):
                        dot = np.float32(np.float64(dot) + float(values[i]) * float(inputs[i]))
                total = dot if name == "bf16" else np.float32(np.float64(total) + np.float64(dot) * float(scale[out, block]))
            assert packed.multiply(x, w)[row, out].item() == float(total)


@formats
def test_values_are_those_that_were_packed(name: str) -> None:
    for out, inner in SHAPES:
        w, exact = make(name, out, inner)
        assert torch.equal(w.values().double(), exact)
        assert w.bytes >= out * inner * {"fp32": 4, "bf16": 2, "mxfp4": 17 / 32}[name]


@pytest.mark.parametrize("inner", [1, 7, 51])
def test_odd_row_lengths(inner: int) -> None:
    for w in (torch.randn(19, inner), torch.randn(19, inner).bfloat16()):
        x = torch.randn(9, inner)
        expected = (x if w.dtype == torch.float32 else x.bfloat16()).double() @ w.double().T
        torch.testing.assert_close(packed.multiply(x, PackedMatrix.of(w)).double(), expected, rtol=1e-5, atol=1e-5)


@formats
def test_strided_and_batched_inputs(name: str) -> None:
    w, _ = make(name, 23, 64)
    x = torch.randn(2, 3, 64)
    assert torch.equal(packed.multiply(x, w), packed.multiply(x.reshape(6, 64), w).view(2, 3, 23))
    wide, turned = torch.zeros(6, 200), torch.zeros(64, 6)
    wide[:, 100:164], turned[:] = x.view(6, 64), x.view(6, 64).T
    for other in (wide[:, 100:164], turned.T):
        assert torch.equal(packed.multiply(other, w), packed.multiply(x.view(6, 64), w))


@formats
def test_what_is_not_finite_stays_in_its_row(name: str) -> None:
    w, _ = make(name, 40, 64)
    x = torch.randn(15, 64)
    clean = packed.multiply(x, w)
    for value in (torch.nan, torch.inf):
        dirty = x.clone()
        dirty[4, 9] = value
        y = packed.multiply(dirty, w)
        assert not y[4].isfinite().all()
        assert torch.equal(y[torch.arange(15) != 4], clean[torch.arange(15) != 4])


def test_every_code_at_every_scale() -> None:
    """Scale byte 0 is 2^-127 and 255 is NaN, for few rows and for many."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(16, 1)
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1)
    w = PackedMatrix.of_mxfp4(codes, scale)
    for rows in (1, 40):
        y = packed.multiply(torch.eye(32).repeat(-(-rows // 32), 1)[:rows], w)
        expected = mxfp.decode_mxfp4(codes, scale, torch.float32).T[:rows]
        assert y[:, 255].isnan().all()
        assert torch.equal(y[: len(expected), :255], expected[:, :255])


SCRIPT = """
import hashlib, torch
from gnomon.kernels import mxfp, packed
from gnomon.kernels.packed.matrix import PackedMatrix
digest, draw = hashlib.md5(), torch.Generator().manual_seed(3)
for out, inner in ((1, 32), (37, 64), (130, 544)):
    w, x = torch.randn(out, inner, generator=draw), torch.randn(61, inner, generator=draw)
    for p in (PackedMatrix.of(w.bfloat16()), PackedMatrix.of(w[:, 1:].bfloat16()), PackedMatrix.of_mxfp4(*mxfp.encode_mxfp4(w))):
        whole = packed.multiply(x[:, : p.inner], p)
        assert all(torch.equal(packed.multiply(x[:n, : p.inner], p), whole[:n]) for n in range(1, 30))
        digest.update(whole.numpy().tobytes())
print(digest.hexdigest())
"""


def test_every_instruction_set_gives_the_same_bits() -> None:
    """Products of bf16 values are exact in fp32, so with one order of additions nothing is left to the processor."""
    running = {}
    for wanted in ("4", "4-nobf16", "3", "0"):
        environment = {**os.environ, "GNOMON_INSTRUCTION_SET": wanted, "OMP_NUM_THREADS": "1"}
        running[wanted] = subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE, text=True)
    results = {wanted: process.communicate()[0] for wanted, process in running.items()}
    assert all(process.returncode == 0 for process in running.values())
    assert len(set(results.values())) == 1, results


def test_adding_to_what_is_there() -> None:
    w, _ = make("bf16", 37, 64)
    for rows in (2, 30):
        x, before = torch.randn(rows, 64), torch.randn(rows, 50)
        y = before.clone()
        native.library().gnomon_matrix_multiply(ctypes.addressof(w.view), x.data_ptr(), rows, 64, y.data_ptr(), 50, 1, 1)
        assert torch.equal(y[:, :37], before[:, :37] + packed.multiply(x, w))
        assert torch.equal(y[:, 37:], before[:, 37:])


def test_wrong_inputs_are_refused_with_a_reason() -> None:
    w, _ = make("bf16", 8, 32)
    with pytest.raises(KernelError, match="rows of 31 values meet PackedMatrix"):
        packed.multiply(torch.randn(2, 31), w)
    with pytest.raises(KernelError, match=r"torch\.float16"):
        PackedMatrix.of(torch.randn(4, 4).half())
    with pytest.raises(KernelError, match="a matrix in"):
        PackedMatrix.of(torch.randn(4))
    codes = torch.zeros(4, 16, dtype=torch.uint8)
    with pytest.raises(KernelError, match=r"need scales \(4, 1\)"):
        PackedMatrix.of_mxfp4(codes, torch.zeros(4, 2, dtype=torch.uint8))
    with pytest.raises(KernelError, match="uint8"):
        PackedMatrix.of_mxfp4(codes.int(), torch.zeros(4, 1, dtype=torch.uint8))
    assert packed.multiply.choices(torch.randn(2, 32, dtype=torch.float64), w)[0][1] is not None
    with torch.enable_grad():
        x = torch.randn(2, 32, requires_grad=True)
        assert "inference" in str(packed.multiply.choices(x, w)[0][1])
        packed.multiply(x, w).sum().backward()
    assert x.grad is not None


def test_many_matrices_share_one_buffer() -> None:
    a, b = torch.randn(5, 7), torch.randn(20, 7).bfloat16()
    buffer = WeightBuffer(2000)
    first, second = PackedMatrix.of(a, buffer), PackedMatrix.of(b, buffer)
    assert torch.equal(first.values(), a) and torch.equal(second.values(), b.float())
    assert first.view.data % 64 == second.view.data % 64 == 0
    with pytest.raises(KernelError, match="do not fit"):
        buffer.take(4000)
    with pytest.raises(KernelError, match="no 9000000000000000 bytes"):
        WeightBuffer(9 * 10**15)


def test_a_forked_process_multiplies() -> None:
    script = """
import os, torch
from gnomon.kernels import packed
from gnomon.kernels.packed.matrix import PackedMatrix
torch.set_num_threads(4)
w, x = PackedMatrix.of(torch.randn(4000, 64)), torch.randn(64, 64)
y = packed.multiply(x, w)
child = os.fork()
same = torch.equal(packed.multiply(x, w), y)
if child == 0: os._exit(0 if same else 3)
assert same and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_lack_of_memory_is_said() -> None:
    """No machine has what this product asks for; the process ends with a line about it instead of a write to address zero."""
    script = """
import ctypes, torch
from gnomon.kernels import native
from gnomon.kernels.packed.matrix import PackedMatrix
w, x = PackedMatrix.of(torch.randn(16, 64).bfloat16()), torch.randn(64)
native.library().gnomon_matrix_multiply(ctypes.addressof(w.view), x.data_ptr(), 2**52, 0, x.data_ptr(), 0, 0, 1)
"""
    told = {**os.environ, "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":allocator_may_return_null=1"}  # `make sanitize`
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=600, env=told)
    assert done.returncode == -signal.SIGABRT
    assert re.search(r"gnomon: out of memory: an operator asked for \d{18,} bytes of scratch", done.stderr)


def test_callers_on_several_threads_do_not_disturb_each_other() -> None:
    """The pool serves one caller at a time; another works alone meanwhile, with the same result."""
    w, _ = make("bf16", 1000, 64)
    inputs = [torch.randn(20, 64) for _ in range(4)]
    expected = [packed.multiply(x, w) for x in inputs]

    def repeatedly(i: int) -> bool:
        torch.set_num_threads(3)
        return all(torch.equal(packed.multiply(inputs[i], w), expected[i]) for _ in range(50))

    with ThreadPoolExecutor(4) as several:
        assert all(several.map(repeatedly, range(4)))


def stack(name: str, experts: int, inner: int, latent: int) -> tuple[PackedExperts, list[list[Tensor]]]:
    """A stack of random experts and their exact values."""
    made = [[make(name, *shape) for _ in range(experts)] for shape in ((inner, latent), (inner, latent), (latent, inner))]
    packs = PackedExperts(*([w for w, _ in part] for part in made))
    return packs, [[exact for _, exact in part] for part in made]


@formats
@pytest.mark.parametrize(("tokens", "threads"), [(1, 1), (1, 2), (5, 8), (150, 2)])
def test_experts_against_exact_sums(name: str, tokens: int, threads: int, poisoned: None) -> None:
    """Expert 3 gets no token. The rounding of the intermediate may fall either way where it is a tie within fp32: hence two bounds."""
    torch.set_num_threads(threads)
    packs, (gate, up, down) = stack(name, 6, 32, 64)
    z, weights = torch.randn(tokens, 64) / 8, torch.rand(tokens, 3)
    ids = torch.rand(tokens, 5).topk(3, dim=-1).indices
    ids[ids == 3] = 5
    u = packed.experts(z, packs, ids, weights, 4.0, 25.0)
    expected = torch.zeros(tokens, 64, dtype=torch.float64)
    for n in range(tokens):
        for e, p in zip(ids[n].tolist(), weights[n].tolist(), strict=True):
            x = rounded(z[n], name)
            g, v = gate[e] @ x, up[e] @ x
            hidden = (4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(v / 25)).float()
            expected[n] += p * (down[e] @ rounded(hidden, name))
    error = (u.double() - expected).abs() / expected.abs().max()
    assert error.max() < (2e-6 if name == "fp32" else 2e-3)
    assert error.median() < 3e-7


@pytest.mark.parametrize("tokens", [1, 60])
def test_mxfp8_activations_are_those_of_the_format(tokens: int) -> None:
    """Inputs that are already MXFP8 values change nothing; rounding the intermediate too is what the reference does."""
    packs, _ = stack("mxfp4", 4, 96, 64)
    coarse = PackedExperts(packs.gate, packs.up, packs.down, mxfp8_activations=True)
    z, weights = torch.randn(tokens, 64), torch.rand(tokens, 2)
    ids = torch.rand(tokens, 4).topk(2, dim=-1).indices
    u = packed.experts(z, coarse, ids, weights, 4.0, 25.0)
    assert torch.equal(packed.experts(mxfp.fake_mxfp8(z), coarse, ids, weights, 4.0, 25.0), u)
    expected = packed.experts.reference(z, coarse, ids, weights, 4.0, 25.0)
    error = (u - expected).abs() / expected.abs().max()
    assert error.median() < 1e-6 and error.max() < 2e-2
    unrounded = packed.experts.reference(mxfp.fake_mxfp8(z), packs, ids, weights, 4.0, 25.0)
    assert (u - unrounded).abs().median() / expected.abs().max() > 1e-4
    with pytest.raises(KernelError, match="blocks of 32"):
        PackedExperts(*([PackedMatrix.of(torch.randn(*shape))] for shape in ((40, 64), (40, 64), (64, 40))), mxfp8_activations=True)


def test_experts_refuse_what_does_not_fit() -> None:
    packs, _ = stack("bf16", 3, 32, 64)
    ids, weights = torch.tensor([[0, 2]]), torch.rand(1, 2)
    with pytest.raises(KernelError, match=r"an id is 3, the stacks hold experts 0\.\.2"):
        packed.experts(torch.randn(1, 64), packs, ids + 1, weights, None, None)
    with pytest.raises(KernelError, match=r"an id is -1"):
        packed.experts(torch.randn(1, 64), packs, ids - 1, weights, None, None)
    with pytest.raises(KernelError, match=r"an id is 4294967296"):
        packed.experts(torch.randn(1, 64), packs, ids + (1 << 32), weights, None, None)
    with pytest.raises(KernelError, match="do not fit together"):
        inspect.unwrap(packed.experts.module("cpu").experts)(torch.randn(2, 64), packs, ids, weights, None, None)
    with pytest.raises(KernelError, match="latent width 64"):
        packed.experts(torch.randn(1, 32), packs, ids, weights, None, None)
    with pytest.raises(KernelError, match="3 of 64 x 32"):
        PackedExperts(packs.gate, packs.up, packs.gate)
    with pytest.raises(KernelError, match="formats"):
        PackedExperts(packs.gate, packs.up, [PackedMatrix.of(w.values()) for w in packs.down])
    assert packed.experts(torch.randn(0, 64), packs, ids[:0], weights[:0], None, None).shape == (0, 64)
