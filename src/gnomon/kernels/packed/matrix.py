"""Packed weight matrices and stacks of experts: one owner of huge-page memory, many views.

A `PackedMatrix` is made from a tensor (fp32 or bf16) or from MXFP4 codes and scales, and cannot be changed. Where the C++ library is
absent it keeps the stored tensors instead, so that the reference still runs. Read next: `reference.py`, then csrc/matrix.h.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from gnomon.errors import KernelError
from gnomon.kernels import native
from gnomon.kernels.mxfp.reference import BLOCK, decode_mxfp4

F32, BF16, MXFP4 = 0, 1, 2  # enum Format in csrc/matrix.h
FORMATS = {F32: "fp32", BF16: "bf16", MXFP4: "mxfp4"}
ALIGNMENT = 64


class MatrixView(ctypes.Structure):
    """`gnomon_matrix` of csrc/gnomon.h; valid while the `PackedMatrix` that holds it lives."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("out", ctypes.c_int64), ("inner", ctypes.c_int64),
        ("format", ctypes.c_int32),
    )  # fmt: skip


class ExpertsView(ctypes.Structure):
    """`gnomon_experts` of csrc/gnomon.h; valid while the `PackedExperts` that holds it lives."""

    _fields_ = (
        ("gate", ctypes.c_void_p), ("up", ctypes.c_void_p), ("down", ctypes.c_void_p), ("count", ctypes.c_int64),
        ("beta1", ctypes.c_float), ("beta2", ctypes.c_float),
    )  # fmt: skip


class WeightBuffer:
    """Anonymous memory in huge pages where the system has them; matrices are placed in it one after another.

    Raises `KernelError` without the C++ library or without the memory.
    """

    def __init__(self, size: int):
        self.size, self.used = size, 0
        self._free = native.library().gnomon_buffer_free
        address = ctypes.c_void_p()
        native.library().gnomon_buffer_allocate(size, ctypes.addressof(address))
        self.address = address.value or 0
        if not self.address:
            raise KernelError(f"packed weights: the system has no {size} bytes of memory for them")

    def take(self, size: int) -> int:
        """The address of the next `size` bytes, 64-byte aligned; raises `KernelError` when the buffer is full."""
        start = self.used
        if start + size > self.size:
            raise KernelError(f"packed weights: {size} bytes do not fit, {self.size - start} of {self.size} are free")
        self.used = start + padded(size)
        return self.address + start

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self._free(self.address, self.size)


class PackedMatrix:
    """W `[out, inner]` for products `W x`; `format` is 0 fp32, 1 bf16, 2 MXFP4. Made by `of` and `of_mxfp4`."""

    def __init__(self, stored: tuple[Tensor, ...], out: int, inner: int, code: int, buffer: WeightBuffer | None):
        self.out, self.inner, self.format = out, inner, code
        self.stored: tuple[Tensor, ...] | None = None
        if native.unavailable():
            self.stored = tuple(t.clone() for t in stored)
            return
        data, scales = parts(out, inner, code)
        self.buffer = buffer or WeightBuffer(padded(data) + padded(scales))
        self.view = MatrixView(self.buffer.take(data), self.buffer.take(scales) if scales else None, out, inner, code)
        native.library().gnomon_matrix_pack(
            stored[0].data_ptr(), native.address(stored[1] if scales else None), ctypes.addressof(self.view), native.threads()
        )

    @classmethod
    def of(cls, w: Tensor, buffer: WeightBuffer | None = None) -> "PackedMatrix":
        """From a matrix `[out, inner]` in fp32 or bf16, kept in that type; `buffer` may hold many matrices."""
        if w.ndim != 2 or w.dtype not in (torch.float32, torch.bfloat16):
            raise KernelError(f"packed weights: {tuple(w.shape)} in {w.dtype}; a matrix in torch.float32 or torch.bfloat16 can be packed")
        return cls((_plain(w),), w.shape[0], w.shape[1], F32 if w.dtype == torch.float32 else BF16, buffer)

    @classmethod
    def of_mxfp4(cls, packed: Tensor, scale: Tensor, buffer: WeightBuffer | None = None) -> "PackedMatrix":
        """From stored codes `[out, inner / 2]` and scale bytes `[out, inner / 32]`, both uint8."""
        if packed.ndim != 2 or packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
            raise KernelError(f"packed weights: codes {tuple(packed.shape)} {packed.dtype}, scales {scale.dtype}; uint8 matrices expected")
        out, inner = packed.shape[0], packed.shape[1] * 2
        if inner % BLOCK or scale.shape != (out, inner // BLOCK):
            raise KernelError(f"packed weights: codes {tuple(packed.shape)} need scales {(out, inner // BLOCK)}, got {tuple(scale.shape)}")
        return cls((_plain(packed), _plain(scale)), out, inner, MXFP4, buffer)

    def __repr__(self) -> str:
        return f"PackedMatrix({self.out} x {self.inner}, {FORMATS[self.format]})"

    @property
    def bytes(self) -> int:
        """Memory that a product reads."""
        return sum(parts(self.out, self.inner, self.format)) if self.stored is None else sum(t.nbytes for t in self.stored)

    def values(self) -> Tensor:
        """The numbers that the weights stand for, `[out, inner]` in fp32."""
        if self.stored is not None:
            codes, *scales = self.stored
            return decode_mxfp4(codes, scales[0], dtype=torch.float32) if scales else codes.float()
        values = torch.empty(self.out, self.inner)
        native.library().gnomon_matrix_unpack(ctypes.addressof(self.view), values.data_ptr(), native.threads())
        return values


class PackedExperts:
    """All routed experts of a layer: `gate`, `up` `[inner, latent]` and `down` `[latent, inner]` of each, with one size.

    `mxfp8_activations` says that inputs are rounded to MXFP8, as in training with quantised activations (report §4.1.4).
    """

    def __init__(
        self, gate: Sequence[PackedMatrix], up: Sequence[PackedMatrix], down: Sequence[PackedMatrix], mxfp8_activations: bool = False
    ):
        self.gate, self.up, self.down = list(gate), list(up), list(down)
        shape = (self.gate[0].out, self.gate[0].inner) if self.gate else (0, 0)
        for name, stack, expected in (("gate", self.gate, shape), ("up", self.up, shape), ("down", self.down, shape[::-1])):
            if len(stack) != len(self.gate) or any((w.out, w.inner) != expected for w in stack):
                raise KernelError(f"packed experts: {name} holds {stack}; expected {len(self.gate)} of {expected[0]} x {expected[1]}")
        if len(formats := {w.format for w in (*self.gate, *self.up, *self.down)}) > 1:
            raise KernelError(f"packed experts: formats {[FORMATS[f] for f in sorted(formats)]} in one stack; all must have the same")
        self.inner, self.latent, self.mxfp8_activations = *shape, mxfp8_activations
        if mxfp8_activations and (self.inner % BLOCK or self.latent % BLOCK):
            raise KernelError(f"packed experts: {self.inner} x {self.latent} does not divide into blocks of {BLOCK} for MXFP8 activations")
        if not native.unavailable():
            self._arrays = [(MatrixView * len(stack))(*(w.view for w in stack)) for stack in (self.gate, self.up, self.down)]

    def __len__(self) -> int:
        return len(self.gate)

    @classmethod
    def of(cls, gate: Tensor, up: Tensor, down: Tensor) -> "PackedExperts":
        """From stacks `[E, inner, latent]`, `[E, inner, latent]`, `[E, latent, inner]` in fp32 or bf16, in one buffer."""
        return cls._placed([[(w,) for w in stack] for stack in (gate, up, down)])

    @classmethod
    def of_mxfp4(cls, gate: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]) -> "PackedExperts":
        """From stacks of (codes, scales) as stored, in one buffer."""
        return cls._placed([list(zip(*stack, strict=True)) for stack in (gate, up, down)])

    @classmethod
    def _placed(cls, stacks: Sequence[Sequence[tuple[Tensor, ...]]]) -> "PackedExperts":
        """An expert's three matrices stand next to one another, as they are read."""
        buffer = None if native.unavailable() else WeightBuffer(sum(_room(stored) for stack in stacks for stored in stack))
        packed: list[list[PackedMatrix]] = [[], [], []]
        for expert in zip(*stacks, strict=True):
            for place, stored in zip(packed, expert, strict=True):
                codes, *scales = stored
                place.append(PackedMatrix.of_mxfp4(codes, scales[0], buffer) if scales else PackedMatrix.of(codes, buffer))
        gate, up, down = packed
        return cls(gate, up, down)

    def view(self, beta1: float | None, beta2: float | None) -> ExpertsView:
        """What the library reads; a cap of `None` is none."""
        return ExpertsView(*(ctypes.addressof(array) for array in self._arrays), len(self), beta1 or 0.0, beta2 or 0.0)

    @property
    def bytes(self) -> int:
        """Memory of all experts."""
        return sum(w.bytes for stack in (self.gate, self.up, self.down) for w in stack)


def padded(size: int) -> int:
    """`size` rounded up to the alignment of a matrix."""
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def parts(out: int, inner: int, code: int) -> tuple[int, int]:
    """Bytes of a packed matrix: weights and scales."""
    data, scales = ctypes.c_int64(), ctypes.c_int64()
    native.library().gnomon_matrix_bytes(out, inner, code, ctypes.addressof(data), ctypes.addressof(scales))
    return data.value, scales.value


def room(out: int, inner: int, code: int) -> int:
    """Bytes that a matrix takes in a `WeightBuffer`."""
    return sum(padded(size) for size in parts(out, inner, code))


def _room(stored: tuple[Tensor, ...]) -> int:
    if len(stored) == 2:
        return room(stored[0].shape[0], stored[0].shape[1] * 2, MXFP4)
    return room(stored[0].shape[0], stored[0].shape[1], F32 if stored[0].dtype == torch.float32 else BF16)


def _plain(t: Tensor) -> Tensor:
    return t.detach().to("cpu").contiguous()
