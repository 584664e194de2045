"""MXFP4 and MXFP8 against exhaustive tables, both scale rules, and the straight-through gradient."""

import math

import pytest
import torch

from gnomon.errors import KernelError
from gnomon.kernels import mxfp

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
ALL_SCALES = torch.arange(256, dtype=torch.uint8)
RULES = pytest.mark.parametrize("rule", ["even", "ceil"])


def test_every_byte_decodes_at_every_scale() -> None:
    """256 packed bytes under each of 256 scale bytes: low nibble first, 2^(e-127), 0 is 2^-127, 255 is NaN."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)  # [256 scales, 256 bytes]
    out = mxfp.decode_mxfp4(packed, ALL_SCALES[:, None].expand(256, 16), torch.float64)
    codes = torch.tensor([[b & 15, b >> 4] for b in range(256)]).flatten()
    values = torch.tensor([math.copysign(E2M1[c & 7], -1.0 if c & 8 else 1.0) for c in codes.tolist()], dtype=torch.float64)
    for e in range(255):
        expected = (values * 2.0 ** (e - 127)).float().double()  # fp32 products: 6 * 2^126 and beyond overflow
        assert torch.equal(out[e], expected)
        assert torch.equal(out[e].signbit(), expected.signbit())
    assert out[255].isnan().all()


def test_decoding_is_exact_in_bf16_up_to_scale_byte_252() -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat(253, 1)
    scale = ALL_SCALES[:253, None].expand(253, 16)
    assert torch.equal(mxfp.decode_mxfp4(packed, scale).double(), mxfp.decode_mxfp4(packed, scale, torch.float64))


@RULES
def test_each_code_survives_an_encoding_of_its_value(rule: str) -> None:
    """Values first: another scale may hold the same values (3 = 6 * 2^-1), so codes may move but values may not."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    rows = torch.stack([codes[torch.randperm(32)] for _ in range(40)] + [codes * 0 + code for code in range(16)])
    packed = rows[:, 0::2] | (rows[:, 1::2] << 4)
    scale = torch.randint(2, 250, (len(rows), 1)).to(torch.uint8)
    values = mxfp.decode_mxfp4(packed, scale, torch.float32)
    again = mxfp.decode_mxfp4(*mxfp.encode_mxfp4(values, rule), torch.float32)
    assert torch.equal(again, values)


def test_ties_round_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    block = torch.cat((ties, -ties, torch.tensor([6.0]).repeat(18)))
    packed, scale = mxfp.encode_mxfp4(block)
    assert scale.item() == 127
    out = mxfp.decode_mxfp4(packed, scale, torch.float32)
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert torch.equal(out[:7], expected)
    assert torch.equal(out[7:14], -expected)
    assert packed[3] >> 4 == 8  # -0.25 becomes -0, code 8, in the high nibble of byte 3 (column 7)


@pytest.mark.parametrize(("rule", "low", "high"), [("even", 3.5, 7.0), ("ceil", 3.0, 6.0)])
def test_the_block_maximum_over_the_scale_has_the_range_of_the_rule(rule: str, low: float, high: float) -> None:
    w = torch.exp2(torch.linspace(-20.0, 20.0, 4001, dtype=torch.float64)).float()[:, None].expand(-1, 32)
    _, scale = mxfp.encode_mxfp4(w, rule)
    ratio = w[:, 0].double() / torch.exp2(scale[:, 0].double() - 127.0)
    inside = (ratio >= low) & (ratio < high) if rule == "even" else (ratio > low) & (ratio <= high)
    assert inside.all()
    assert float(ratio.min()) < low * 1.01
    assert float(ratio.max()) > high * 0.99


def test_rules_differ_exactly_for_maxima_between_six_and_seven() -> None:
    ratio = torch.arange(3.5, 7.0, 1.0 / 64)
    even, ceil = (mxfp.encode_mxfp4(ratio[:, None].expand(-1, 32).contiguous(), rule)[1][:, 0] for rule in ("even", "ceil"))
    assert torch.equal(even != ceil, ratio > 6.0)


@RULES
def test_the_error_is_at_most_half_a_step(rule: str) -> None:
    w = torch.randn(200, 64)
    packed, scale = mxfp.encode_mxfp4(w, rule)
    unit = torch.exp2(scale.float() - 127.0).repeat_interleave(32, dim=-1)
    magnitude = w.abs() / unit
    half_step = torch.where(magnitude < 2.0, 0.25, torch.where(magnitude < 4.0, 0.5, 1.0))
    assert ((mxfp.decode_mxfp4(packed, scale, torch.float32) - w).abs() / unit <= half_step).all()


@pytest.mark.parametrize(("encode", "decode"), [(mxfp.encode_mxfp4, mxfp.decode_mxfp4), (mxfp.encode_mxfp8, mxfp.decode_mxfp8)])
def test_a_value_that_is_not_finite_marks_its_block_only(encode, decode) -> None:
    w = torch.randn(3, 96)
    w[1, 40], w[2, 0] = torch.nan, -torch.inf
    stored, scale = encode(w)
    assert (scale == 255).nonzero().tolist() == [[1, 1], [2, 0]]
    bad = decode(stored, scale, torch.float32).isnan().unflatten(-1, (-1, 32))
    assert torch.equal(bad.all(-1), scale == 255)
    assert torch.equal(bad.any(-1), scale == 255)


@pytest.mark.parametrize(("encode", "decode"), [(mxfp.encode_mxfp4, mxfp.decode_mxfp4), (mxfp.encode_mxfp8, mxfp.decode_mxfp8)])
@pytest.mark.parametrize("size", [0.0, 1e-45, 2.0**-126, 2.0**-120, 2.5e38])
def test_the_ends_of_the_range(encode, decode, size: float) -> None:
    """Zero, subnormals and values near the largest of fp32 encode to something finite that is not larger than the next power of two."""
    w = torch.full((1, 32), size)
    stored, scale = encode(w)
    out = decode(stored, scale, torch.float64)
    assert out.isfinite().all()
    assert float((out - w.double()).abs().max()) <= max(size / 4.0, 2.0**-128)


@RULES
def test_mxfp8_keeps_three_mantissa_bits(rule: str) -> None:
    x = torch.randn(50, 64)
    values, scale = mxfp.encode_mxfp8(x, rule)
    assert values.dtype == torch.float8_e4m3fn
    unit = torch.exp2(scale.float() - 127.0).repeat_interleave(32, dim=-1)
    error = (mxfp.decode_mxfp8(values, scale, torch.float32) - x).abs()
    assert (error <= torch.maximum(x.abs() * 2.0**-4, unit * 2.0**-10)).all()
    assert float((x.abs() / unit).max()) <= 448.0


@pytest.mark.parametrize(("fake", "encode", "decode"), [
    (mxfp.fake_mxfp4, mxfp.encode_mxfp4, mxfp.decode_mxfp4), (mxfp.fake_mxfp8, mxfp.encode_mxfp8, mxfp.decode_mxfp8),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fake_is_a_round_trip_with_the_identity_as_gradient(fake, encode, decode, dtype: torch.dtype) -> None:
    w = torch.randn(2, 3, 64).to(dtype).requires_grad_()
    out = fake(w)
    assert torch.equal(out, decode(*encode(w), dtype))
    assert not torch.equal(out, w)
    incoming = torch.randn_like(w)
    out.backward(incoming)
    assert torch.equal(w.grad, incoming)
    assert torch.equal(fake(out), out)


def test_refusals_name_the_value() -> None:
    with pytest.raises(KernelError, match="48 values do not divide into blocks of 32"):
        mxfp.encode_mxfp4(torch.zeros(2, 48))
    with pytest.raises(KernelError, match="unknown scale rule 'floor'"):
        mxfp.encode_mxfp8(torch.zeros(2, 32), "floor")
    with pytest.raises(KernelError, match="hold 64 columns"):
        mxfp.decode_mxfp4(torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8))
