"""The MX formats in C++ (csrc/mxfp.cpp): the reference's codes and values to the last bit, in one pass over memory.

Takes fp32 values and gives fp32 values; other types take the reference. Read next: `reference.py`.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from gnomon.errors import KernelError
from gnomon.kernels import native
from gnomon.kernels.mxfp.reference import BLOCK, StraightThrough, check_blocks
from gnomon.kernels.operator import needs_grad

RULES = ("even", "ceil")


def refuse_encode_mxfp4(w: Tensor, rule: str = "even") -> str | None:
    """Needs the library, fp32 on the CPU and no gradient."""
    return _refuse_gradient(w) or native.refuse(w=w)


def encode_mxfp4(
    w: Float[Tensor, "*S I"], rule: str = "even"
) -> tuple[UInt8[Tensor, "*S I2"], UInt8[Tensor, "*S I32"]]:
    """As the reference."""
    return _encode(w, rule, 4)


def refuse_encode_mxfp8(x: Tensor, rule: str = "even") -> str | None:
    """Needs the library, fp32 on the CPU and no gradient."""
    return _refuse_gradient(x) or native.refuse(x=x)


def encode_mxfp8(
    x: Float[Tensor, "*S I"], rule: str = "even"
) -> tuple[Float[Tensor, "*S I"], UInt8[Tensor, "*S I32"]]:
    """As the reference; in a block that is NaN the codes are those of NaN."""
    codes, scale = _encode(x, rule, 8)
    return codes.view(torch.float8_e4m3fn), scale


def refuse_decode_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Needs the library, codes on the CPU and fp32 values."""
    return _refuse_codes(packed, scale, torch.uint8, dtype)


def decode_mxfp4(
    packed: UInt8[Tensor, "*S I2"], scale: UInt8[Tensor, "*S I32"], dtype: torch.dtype = torch.bfloat16
) -> Float[Tensor, "*S I"]:
    """As the reference."""
    return _decode(packed, scale, 4)


def refuse_decode_mxfp8(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Needs the library, codes on the CPU and fp32 values."""
    return _refuse_codes(values, scale, torch.float8_e4m3fn, dtype)


def decode_mxfp8(
    values: Float[Tensor, "*S I"], scale: UInt8[Tensor, "*S I32"], dtype: torch.dtype = torch.bfloat16
) -> Float[Tensor, "*S I"]:
    """As the reference."""
    return _decode(values, scale, 8)


def refuse_fake_mxfp4(w: Tensor, rule: str = "even") -> str | None:
    """Needs the library and fp32 on the CPU."""
    return native.refuse(w=w)


def fake_mxfp4(w: Float[Tensor, "*S I"], rule: str = "even") -> Float[Tensor, "*S I"]:
    """As the reference, without the codes in memory."""
    return StraightThrough.apply(w, _rounded(w, rule, 4))


def refuse_fake_mxfp8(x: Tensor, rule: str = "even") -> str | None:
    """Needs the library and fp32 on the CPU."""
    return native.refuse(x=x)


def fake_mxfp8(x: Float[Tensor, "*S I"], rule: str = "even") -> Float[Tensor, "*S I"]:
    """As the reference, without the codes in memory."""
    return StraightThrough.apply(x, _rounded(x, rule, 8))


def _encode(x: Tensor, rule: str, bits: int) -> tuple[Tensor, Tensor]:
    values, ceil = _checked(x, rule)
    codes = torch.empty(*x.shape[:-1], x.shape[-1] * bits // 8, dtype=torch.uint8)
    scale = torch.empty(*x.shape[:-1], x.shape[-1] // BLOCK, dtype=torch.uint8)
    native.library().gnomon_mxfp_encode(
        values.data_ptr(), scale.numel(), bits, ceil, codes.data_ptr(), scale.data_ptr(), native.threads()
    )
    return codes, scale


def _decode(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    check_blocks(codes, scale, 8 // bits)
    codes, scale = codes.contiguous(), scale.contiguous()
    x = torch.empty(*scale.shape[:-1], scale.shape[-1] * BLOCK)
    native.library().gnomon_mxfp_decode(codes.data_ptr(), scale.data_ptr(), scale.numel(), bits, x.data_ptr(), native.threads())
    return x


def _rounded(x: Tensor, rule: str, bits: int) -> Tensor:
    values, ceil = _checked(x, rule)
    rounded = torch.empty_like(values)
    native.library().gnomon_mxfp_round(values.data_ptr(), values.numel() // BLOCK, bits, ceil, rounded.data_ptr(), native.threads())
    return rounded


def _checked(x: Tensor, rule: str) -> tuple[Tensor, int]:
    if rule not in RULES:
        raise KernelError(f"mxfp: unknown scale rule {rule!r}; choose 'even' or 'ceil'")
    if x.shape[-1] % BLOCK:
        raise KernelError(f"mxfp: rows of {x.shape[-1]} values do not divide into blocks of {BLOCK}")
    return x.detach().contiguous(), RULES.index(rule)


def _refuse_gradient(x: Tensor) -> str | None:
    return "codes have no gradient, and the input asks for one" if needs_grad(x) else None


def _refuse_codes(codes: Tensor, scale: Tensor, stored: torch.dtype, dtype: torch.dtype) -> str | None:
    if codes.dtype != stored or codes.device.type != "cpu" or dtype != torch.float32:
        return f"{codes.dtype} codes on {codes.device} to {dtype}; the C++ kernel takes {stored} to torch.float32 on the CPU"
    if scale.dtype != torch.uint8:
        return f"scales are {scale.dtype}; the C++ kernel takes torch.uint8"
    return native.unavailable()
