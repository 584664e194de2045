"""MXFP4 and MXFP8: 32 neighbours share one power-of-two scale; each keeps a tiny float (OCP MX v1.0, report §4.1.4).

MXFP4 is E2M1 with magnitudes 0 .5 1 1.5 2 3 4 6, two codes per byte, the low nibble being the even column. MXFP8 is E4M3 (up
to 448). A scale byte e means 2^(e-127); 0 is 2^-127 and 255 is NaN, so a block with a value that is not finite stays visible.

Which power of two is a choice of the encoder, and decoders do not care:
* `even` (default): round the block maximum to one mantissa bit, then take its exponent. Maximum/scale lies in [3.5, 7) for
  MXFP4, where (6, 7) saturates to 6, and in [224, 448) for MXFP8. This is what compressed-tensors computes, bit for bit.
* `ceil`: the smallest power that saturates nothing. Maximum/scale lies in (3, 6] for MXFP4 and (224, 448] for MXFP8.
The two differ in one quarter of the binades' length: for a maximum of 6..7 times a power of two. Re-encoding decoded values
by either rule gives the same values back.

Read next: `gnomon/kernels/experts`, whose weights are stored so.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from gnomon.errors import KernelError

BLOCK = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NAN_SCALE = 255  # OCP MX v1.0: the E8M0 code for "not a number"

# Added to the fp32 bits of the block maximum before its exponent is read: carries into the exponent from this mantissa on.
CARRY_FP4 = {"even": 0x200000, "ceil": 0x3FFFFF}  # from 1.75 on; above 1.5 = 6/4
CARRY_FP8 = {"even": 0x200000, "ceil": 0x1FFFFF}  # from 1.75 on; above 1.75 = 448/256
EXPONENT_FP4 = 2  # floor(log2(6))
EXPONENT_FP8 = 8  # floor(log2(448))


def encode_mxfp4(
    w: Float[Tensor, "*S I"], rule: str = "even"
) -> tuple[UInt8[Tensor, "*S I2"], UInt8[Tensor, "*S I32"]]:
    """Quantise rows in blocks of 32 to (packed codes [.., I/2], scale bytes [.., I/32]).

    Elements round to nearest, ties to the even code; a negative value that rounds to zero keeps its sign (code 8).
    A block with a value that is not finite gets the scale byte 255 and decodes to NaN.
    Raises `KernelError` for a row length that is no multiple of 32 or an unknown rule.
    """
    scaled, scale = _scale_blocks(w, CARRY_FP4, EXPONENT_FP4, rule)
    magnitude = scaled.abs().clamp_(max=6.0)
    # Twice the magnitude is an integer up to 4 (codes 0..4); beyond, the steps are 1 and 2 (codes 4..6 and 6..7).
    code = torch.where(
        magnitude < 2.0, (magnitude * 2.0).round_(),
        torch.where(magnitude < 4.0, magnitude.round() + 2.0, (magnitude * 0.5).round_() + 4.0),
    ).nan_to_num_(0.0).to(torch.uint8)
    code |= (scaled < 0).to(torch.uint8) << 3
    code = code.reshape(*w.shape[:-1], -1, 2)
    return code[..., 0] | (code[..., 1] << 4), scale


def decode_mxfp4(
    packed: UInt8[Tensor, "*S I2"], scale: UInt8[Tensor, "*S I32"], dtype: torch.dtype = torch.bfloat16
) -> Float[Tensor, "*S I"]:
    """The stored values, exact in bf16 and fp32 for every scale byte up to 252 (beyond, 6 * 2^(e-127) overflows to infinity)."""
    check_blocks(packed, scale, 2)
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float32, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)  # [.., I]
    return _apply_scale(table[codes.int()], scale).to(dtype)


def fake_mxfp4(w: Float[Tensor, "*S I"], rule: str = "even") -> Float[Tensor, "*S I"]:
    """decode(encode(w)) in the dtype of `w`, with the identity as gradient (straight-through)."""
    with torch.no_grad():
        rounded = decode_mxfp4(*encode_mxfp4(w, rule), dtype=w.dtype)
    return StraightThrough.apply(w, rounded)


def encode_mxfp8(
    x: Float[Tensor, "*S I"], rule: str = "even"
) -> tuple[Float[Tensor, "*S I"], UInt8[Tensor, "*S I32"]]:
    """Quantise rows in blocks of 32 to (E4M3 values [.., I] as `torch.float8_e4m3fn`, scale bytes [.., I/32]).

    Round to nearest even, saturating at 448. A block with a value that is not finite gets the scale byte 255.
    Raises `KernelError` for a row length that is no multiple of 32 or an unknown rule.
    """
    scaled, scale = _scale_blocks(x, CARRY_FP8, EXPONENT_FP8, rule)
    return scaled.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn).reshape(x.shape), scale


def decode_mxfp8(
    values: Float[Tensor, "*S I"], scale: UInt8[Tensor, "*S I32"], dtype: torch.dtype = torch.bfloat16
) -> Float[Tensor, "*S I"]:
    """The stored values: E4M3 times 2^(e-127), multiplied in fp32 and cast once."""
    check_blocks(values, scale, 1)
    return _apply_scale(values.to(torch.float32), scale).to(dtype)


def fake_mxfp8(x: Float[Tensor, "*S I"], rule: str = "even") -> Float[Tensor, "*S I"]:
    """decode(encode(x)) in the dtype of `x`, with the identity as gradient (straight-through)."""
    with torch.no_grad():
        rounded = decode_mxfp8(*encode_mxfp8(x, rule), dtype=x.dtype)
    return StraightThrough.apply(x, rounded)


class StraightThrough(torch.autograd.Function):
    """Value of the second argument, gradient of the first; w + (rounded - w).detach() would round a second time."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, value: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _scale_blocks(w: Tensor, carries: dict[str, int], exponent: int, rule: str) -> tuple[Tensor, Tensor]:
    """fp32 values divided by their block's scale [.., I/32, 32], and the scale bytes [.., I/32]."""
    if rule not in carries:
        raise KernelError(f"mxfp: unknown scale rule {rule!r}; choose 'even' or 'ceil'")
    if w.shape[-1] % BLOCK:
        raise KernelError(f"mxfp: rows of {w.shape[-1]} values do not divide into blocks of {BLOCK}")
    blocks = w.detach().to(torch.float32).unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(dim=-1)
    scale = (((largest.view(torch.int32) + carries[rule]) >> 23) - exponent).clamp_(min=0)
    scale = scale.masked_fill_(~largest.isfinite(), NAN_SCALE)
    inverse = _powers_of_two(w.device)[torch.where(scale == NAN_SCALE, NAN_SCALE, 254 - scale)]  # 2^(127-e)
    return blocks * inverse.unsqueeze(-1), scale.to(torch.uint8)


def _powers_of_two(device: torch.device) -> Tensor:
    """2^(e-127) for every scale byte e, exact (subnormal at 0), NaN at 255."""
    return torch.tensor([2.0 ** (e - 127) for e in range(NAN_SCALE)] + [torch.nan], device=device)


def _apply_scale(values: Tensor, scale: Tensor) -> Tensor:
    factor = _powers_of_two(scale.device)[scale.int()]
    return (values.unflatten(-1, (-1, BLOCK)) * factor.unsqueeze(-1)).flatten(-2)


def check_blocks(stored: Tensor, scale: Tensor, per_byte: int) -> None:
    """Raise `KernelError` unless the scales cover the stored elements, of which a byte holds `per_byte`."""
    columns = stored.shape[-1] * per_byte
    if stored.shape[:-1] != scale.shape[:-1] or columns != scale.shape[-1] * BLOCK:
        raise KernelError(
            f"mxfp: {tuple(stored.shape)} stored bytes hold {columns} columns, {tuple(scale.shape)} scales cover {scale.shape[-1] * BLOCK}"
        )
