"""MXFP4 and MXFP8 against compressed-tensors, bit for bit: its scales, its compressor, its decompressor."""

import pytest
import torch
from torch import Tensor

from gnomon.kernels import mxfp

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed: no independent MXFP4 oracle")


def compressor(bits: int):
    """The package's compressor for MX weights of this width, its scheme, and the function that makes its scales."""
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    weights = QuantizationArgs(num_bits=bits, type="float", strategy="group", symmetric=True, dynamic=False, group_size=32,
                               scale_dtype=torch.uint8)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    return (MXFP4PackedCompressor if bits == 4 else MXFP8QuantizationCompressor), scheme, compute_dynamic_scales_and_zp


def theirs(w: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """(stored, scale bytes, decompressed) of the package."""
    kind, scheme, scales = compressor(bits)
    state = kind.compress({"weight": w, "weight_scale": scales(w, scheme.weights, None)[0]}, scheme)
    stored = state["weight_packed" if bits == 4 else "weight"]
    return stored, state["weight_scale"], kind.decompress(state, scheme)["weight"]


def hard_weights(dtype: torch.dtype) -> Tensor:
    """Random blocks from 2^-140 to 2^120, and rows of zeros, signed zeros, subnormals, ties and saturating values."""
    w = torch.randn(64, 40, 32) * torch.exp2(torch.randint(-140, 120, (64, 40, 1)).float())
    w[0, 0], w[1, 0], w[2, 0] = 0.0, -0.0, 1e-45
    edges = [6.0, -0.25, 0.25, -0.1, -0.0, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 5.99, -6.0, 3.49, 0.1]
    for row, factor in enumerate((1.0, 1.01, 1.16, 1.1667, 0.5833, 0.584, 2.0**-60, 2.0**60), start=3):
        w[row] = torch.tensor(edges * 2) * factor
    return w.flatten(1).to(dtype)


def bits_of(x: Tensor) -> Tensor:
    """The raw bits, so that -0 and NaN count."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "encode", "decode"), [
    (4, mxfp.encode_mxfp4, mxfp.decode_mxfp4), (8, mxfp.encode_mxfp8, mxfp.decode_mxfp8),
])  # fmt: skip
def test_encoding_and_decoding_are_theirs(dtype: torch.dtype, bits: int, encode, decode) -> None:
    w = hard_weights(dtype)
    stored, scale, value = theirs(w, bits)
    our_stored, our_scale = encode(w)
    assert torch.equal(our_scale, scale)
    assert torch.equal(bits_of(our_stored), bits_of(stored))
    assert torch.equal(bits_of(decode(our_stored, our_scale, value.dtype)), bits_of(value))


def test_all_bytes_decode_as_theirs_except_the_nan_scale() -> None:
    """Scale byte 255 is NaN in the OCP specification and here; the package reads it as infinity. No released block has it."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    kind, scheme, _ = compressor(4)
    value = kind.decompress({"weight_packed": packed, "weight_scale": scale}, scheme)["weight"]
    ours = mxfp.decode_mxfp4(packed, scale, value.dtype)
    assert torch.equal(bits_of(ours[:255]), bits_of(value[:255]))
    assert ours[255].isnan().all()
    assert value[255].isinf().any()


def test_all_mxfp8_codes_decode_as_theirs_except_the_nan_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(255, 1).view(torch.float8_e4m3fn)
    scale = torch.arange(255, dtype=torch.uint8)[:, None].repeat(1, 8)
    kind, scheme, _ = compressor(8)
    value = kind.decompress({"weight": codes, "weight_scale": scale}, scheme)["weight"]
    ours = mxfp.decode_mxfp8(codes, scale, value.dtype)
    assert torch.equal(ours.isnan(), value.isnan())
    assert torch.equal(bits_of(ours.nan_to_num(0.0)), bits_of(value.nan_to_num(0.0)))
