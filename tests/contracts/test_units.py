"""Quantities are read as people write them and printed as people read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import ConfigError
from gnomon.units import (
    format_byte_rate,
    format_bytes,
    format_count,
    format_dollars,
    format_flops,
    format_seconds,
    parse_byte_rate,
    parse_bytes,
    parse_count,
    parse_dollar_rate,
    parse_flop_rate,
    parse_seconds,
)


@pytest.mark.parametrize(("text", "count"), [
    ("1.5 GiB", 1610612736), ("2GB", 2 * 10**9), ("512", 512), ("64 kib", 65536), ("1_000 B", 1000), ("1e3 MB", 10**9),
])
def test_bytes_are_parsed_in_both_systems(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("1.5h", 5400.0), ("250 ms", 0.25), ("2 min", 120.0), ("1d", 86400.0)])
def test_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(("text", "count"), [("2.78T", 2_780_000_000_000), ("64k", 64_000), ("896", 896), ("1,024", 1024)])
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1 GB", "1.5 GX", "1 2", "1.2.3"])
def test_what_is_no_quantity_is_an_error_that_lists_the_units(text: str) -> None:
    with pytest.raises(ConfigError, match="write a number and one of"):
        parse_bytes(text)


@pytest.mark.parametrize(("shown", "expected"), [
    (format_bytes(1610612736), "1.50 GiB"), (format_bytes(0), "0 B"), (format_bytes(1_560_860_324_864), "1.42 TiB"),
    (format_count(2_779_484_476_000), "2.78T"), (format_count(896), "896"), (format_flops(2.1e12), "2.1 TFLOP"),
    (format_dollars(1234.5), "$1,234.50"), (format_seconds(0.25), "250 ms"), (format_seconds(95), "1 min 35 s"),
    (format_seconds(7384), "2 h 3 min"), (format_seconds(12.34), "12.3 s"),
    (format_seconds(7 * 86400), "7.0 days"), (format_seconds(25e-6), "25 µs"),
])
def test_printing(shown: str, expected: str) -> None:
    assert shown == expected


@given(st.integers(min_value=0, max_value=2**60))
def test_printed_bytes_parse_back_within_their_digits(count: int) -> None:
    assert abs(parse_bytes(format_bytes(count)) - count) <= max(1, count * 0.005)


@pytest.mark.parametrize(("text", "rate"), [
    ("4.8 TB/s", 4.8e12), ("450GB/s", 4.5e11), ("1 GiB/s", 2.0**30), ("400 Gbit/s", 5e10), ("12 B/s", 12.0), ("1_000 kB/s", 1e6),
])
def test_bandwidths(text: str, rate: float) -> None:
    assert parse_byte_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["4.8 Tb/s", "4.8 TB", "4.8", "TB/s", "4.8 tb/s", "-1 TB/s"])
def test_bits_and_bytes_are_not_confused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a bandwidth"):
        parse_byte_rate(text)


def test_rates_of_computing_and_of_money() -> None:
    assert parse_flop_rate("989 TFLOP/s") == 989e12 and parse_flop_rate("90GFLOP/s") == 90e9
    assert parse_dollar_rate("2.95 $/h") == 2.95 and format_byte_rate(4.8e12) == "4.8 TB/s"
    for parse, text in ((parse_flop_rate, "989 TFLOPS"), (parse_flop_rate, "989"), (parse_dollar_rate, "$2.95")):
        with pytest.raises(ConfigError, match="is not a"):
            parse(text)


@given(st.integers(0, 10**18))
def test_a_terabyte_is_not_a_tebibyte(count: int) -> None:
    assert parse_bytes(f"{count} B") == count
    assert parse_bytes("1 TiB") - parse_bytes("1 TB") == 2**40 - 10**12
    assert format_bytes(10**12) == "931.32 GiB" and format_bytes(2**40) == "1.00 TiB"
