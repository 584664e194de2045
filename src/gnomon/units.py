"""Bytes, FLOPs, seconds, counts: parse what people write, print what people read.

Bytes are printed in binary units (KiB, MiB …) and parsed in both (`MB` is 10⁶, `MiB` is 2²⁰), so that no figure is ambiguous.
"""

import math
import re
from collections.abc import Mapping
from fractions import Fraction

from gnomon.errors import ConfigError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "K", "M", "B", "T", "Q")
_SI = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
_BYTE_FACTORS = {"": 1, "b": 1, **{f"{p}b": 1000 ** (i + 1) for i, p in enumerate("kmgtp")},
                 **{f"{p}ib": 1024 ** (i + 1) for i, p in enumerate("kmgtp")}}
_SECOND_FACTORS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_COUNT_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_NUMBER = re.compile(r"\s*([0-9][0-9_,]*\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)

_PLAIN = r"\s*([0-9][0-9_,]*\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*"
_RATE = re.compile(_PLAIN + r"((?:[kKMGTP]i?)?B|(?:[kMGTP])?bit)/s\s*")
_FLOP_RATE = re.compile(_PLAIN + r"([kMGTPE]?)FLOP/s\s*")
_DOLLAR_RATE = re.compile(_PLAIN + r"\$/h\s*")


def _parse(text: str, factors: Mapping[str, float], what: str) -> Fraction:
    """The exact value: a count of bytes may have more digits than a float."""
    match = _NUMBER.fullmatch(text)
    number = "inf" if match is None else match[1].replace(",", "").replace("_", "")
    if match is None or match[2].lower() not in factors or math.isinf(float(number) * factors[match[2].lower()]):
        known = ", ".join(unit for unit in factors if unit)
        raise ConfigError(f"'{text}' is not {what}; write a number and one of: {known}")
    return Fraction(number) * Fraction(str(factors[match[2].lower()]))


def parse_bytes(text: str) -> int:
    """`"1.5 GiB"` → 1610612736, `"2GB"` → 2000000000; raises `ConfigError` for anything else."""
    return round(_parse(text, _BYTE_FACTORS, "a size"))


def parse_seconds(text: str) -> float:
    """`"90"`, `"1.5h"`, `"250 ms"` → seconds; raises `ConfigError` for anything else."""
    return float(_parse(text, _SECOND_FACTORS, "a duration"))


def parse_count(text: str) -> int:
    """`"2.78T"` → 2780000000000, `"64k"` → 64000; raises `ConfigError` for anything else."""
    return round(_parse(text, _COUNT_FACTORS, "a count"))


def parse_byte_rate(text: str) -> float:
    """`"4.8 TB/s"` → 4.8e12, `"400 Gbit/s"` → 5e10 bytes per second; `Gb/s`, which could be either, is a `ConfigError`."""
    match = _RATE.fullmatch(text)
    if match is None:
        raise ConfigError(f"'{text}' is not a bandwidth; write a number and a unit such as GB/s, TB/s, GiB/s or Gbit/s (bits)")
    factor = 1 if match[2] == "B" else _BYTE_FACTORS[match[2].removesuffix("bit").removesuffix("B").lower() + "b"]
    return float(match[1].replace(",", "").replace("_", "")) * factor / (8 if match[2].endswith("bit") else 1)


def parse_flop_rate(text: str) -> float:
    """`"989 TFLOP/s"` → 9.89e14; raises `ConfigError` for anything else."""
    match = _FLOP_RATE.fullmatch(text)
    if match is None:
        raise ConfigError(f"'{text}' is not a computing rate; write a number and a unit such as GFLOP/s, TFLOP/s or PFLOP/s")
    return float(match[1].replace(",", "").replace("_", "")) * 1000 ** _SI.index(match[2])


def parse_dollar_rate(text: str) -> float:
    """`"2.95 $/h"` → 2.95 dollars per hour; raises `ConfigError` for anything else."""
    match = _DOLLAR_RATE.fullmatch(text)
    if match is None:
        raise ConfigError(f"'{text}' is not a price per hour; write it like '2.95 $/h'")
    return float(match[1].replace(",", "").replace("_", ""))


def _scaled(value: float, step: float, suffixes: tuple[str, ...]) -> tuple[float, str]:
    index = 0
    while abs(value) >= step and index < len(suffixes) - 1:
        value /= step
        index += 1
    return value, suffixes[index]


def format_bytes(count: float) -> str:
    """1610612736 → `"1.50 GiB"`."""
    value, suffix = _scaled(float(count), 1024.0, _BINARY)
    return f"{value:.0f} {suffix}" if suffix == "B" else f"{value:.2f} {suffix}"


def format_count(count: float) -> str:
    """2779484476000 → `"2.78T"`: thousands, millions, billions, trillions."""
    value, suffix = _scaled(float(count), 1000.0, _DECIMAL)
    return f"{value:.0f}" if suffix == "" else f"{value:.3g}{suffix}"


def format_flops(count: float) -> str:
    """2.1e12 → `"2.1 TFLOP"`."""
    value, suffix = _scaled(float(count), 1000.0, _SI)
    return f"{value:.3g} {suffix}FLOP"


def format_byte_rate(rate: float) -> str:
    """4.8e12 → `"4.8 TB/s"`: decimal, as vendors state bandwidths."""
    value, suffix = _scaled(float(rate), 1000.0, _SI)
    return f"{value:.3g} {suffix}B/s"


def format_dollars(amount: float) -> str:
    """1234.5 → `"$1,234.50"`."""
    return f"${amount:,.2f}"


def format_seconds(seconds: float) -> str:
    """0.25 → `"250 ms"`, 95 → `"1 min 35 s"`, 7384 → `"2 h 3 min"`, two days and more in days."""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:,.1f} days"
    if 0 < seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
