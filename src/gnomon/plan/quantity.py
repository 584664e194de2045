"""`Estimate`: a number with its unit, its 80 % band and a badge that says how far to trust it; arithmetic that keeps all three honest.

Sums, products and quotients take errors to move together, which is the widest band that the parts allow; `independent_sum` is for parts
that are known not to. A result is never better than the worst of its parts. Read next: `hardware.py`.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from gnomon.units import format_bytes, format_count, format_dollars, format_flops, format_seconds

Badge = Literal["exact", "validated", "calibrated", "extrapolated"]
"""How a figure is known: by arithmetic, checked against published figures, fitted to measurements, or beyond any."""

BADGES: tuple[Badge, ...] = get_args(Badge)
"""The badges, best first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A figure: `low` and `high` are its 80 % band (all three equal when exact), `unit` is like `"B"`, `"token/s"` or `"$/h"`.

    Raises `ValueError` for a band that does not hold its value, and for units that do not go together.
    """

    value: float
    low: float
    high: float
    unit: str
    badge: Badge
    because: str = ""

    def __post_init__(self) -> None:
        if self.badge not in BADGES:
            raise ValueError(f"badge '{self.badge}' is not one of {', '.join(BADGES)}")
        if not self.low <= self.value <= self.high:
            raise ValueError(f"the band {self.low}…{self.high} {self.unit} does not hold its value {self.value}")
        if self.badge == "exact" and not self.low == self.high:
            raise ValueError(f"an exact figure has no band, this one has {self.low}…{self.high} {self.unit}")

    def __add__(self, other: "Estimate | float") -> "Estimate":
        other = _as_estimate(other, self.unit)
        _same_unit(self, other, "add")
        return _combined(self, other, (self.value + other.value, self.low + other.low, self.high + other.high), self.unit)

    def __sub__(self, other: "Estimate | float") -> "Estimate":
        other = _as_estimate(other, self.unit)
        _same_unit(self, other, "subtract")
        return _combined(self, other, (self.value - other.value, self.low - other.high, self.high - other.low), self.unit)

    def __mul__(self, other: "Estimate | float") -> "Estimate":
        other = _as_estimate(other, "")
        corners = [a * b for a in (self.low, self.high) for b in (other.low, other.high)]
        return _combined(self, other, (self.value * other.value, min(corners), max(corners)), unit_product(self.unit, other.unit))

    def __truediv__(self, other: "Estimate | float") -> "Estimate":
        return self * _inverse(_as_estimate(other, ""))

    def __radd__(self, other: float) -> "Estimate":
        return self + other

    def __rsub__(self, other: float) -> "Estimate":
        return _as_estimate(other, self.unit) - self

    def __rmul__(self, other: float) -> "Estimate":
        return self * other

    def __rtruediv__(self, other: float) -> "Estimate":
        return _as_estimate(other, "") * _inverse(self)

    def __float__(self) -> float:
        return float(self.value)

    def __str__(self) -> str:
        if self.badge == "exact":
            return f"{written(self.value, self.unit)} (exact)"
        return f"{written(self.value, self.unit)} ({written(self.low, self.unit)} to {written(self.high, self.unit)}, {self.badge})"

    @property
    def spread(self) -> float:
        """The larger of the two ratios between the value and an end of its band, less one: 0.25 means "within 25 %"."""
        if self.low == self.high:
            return 0.0
        if self.low <= 0 or self.value <= 0:
            return math.inf
        return max(self.high / self.value, self.value / self.low) - 1

    def explained(self, because: str) -> "Estimate":
        """The same figure with another reason."""
        return replace(self, because=because)

    def as_dict(self) -> dict[str, Any]:
        """The figure for JSON; a number that is not finite becomes `None`, which JSON has."""
        numbers = {name: number if math.isfinite(number) else None
                   for name, number in (("value", self.value), ("low", self.low), ("high", self.high))}
        return {**numbers, "unit": self.unit, "badge": self.badge, "because": self.because}


def exact(value: float, unit: str, because: str = "") -> Estimate:
    """A figure that follows by arithmetic alone."""
    return Estimate(value=value, low=value, high=value, unit=unit, badge="exact", because=because)


def banded(value: float, unit: str, spread: float, badge: Badge, because: str = "") -> Estimate:
    """A figure within a factor of `1 + spread` either way: `spread=0.25` is a band from value / 1.25 to value · 1.25."""
    if spread < 0:
        raise ValueError(f"a band of {spread} is narrower than nothing")
    ends = sorted((value / (1 + spread), value * (1 + spread)))
    return Estimate(value=value, low=ends[0], high=ends[1], unit=unit, badge=badge, because=because)


def independent_sum(parts: Iterable[Estimate]) -> Estimate:
    """A sum of parts whose errors have nothing to do with each other: half-widths add as squares, below and above apart."""
    items = list(parts)
    if not items:
        raise ValueError("a sum of no estimates has no unit")
    total = items[0]
    for item in items[1:]:
        total = total + item
    below = math.sqrt(sum((item.value - item.low) ** 2 for item in items))
    above = math.sqrt(sum((item.high - item.value) ** 2 for item in items))
    if total.badge == "exact":
        return total
    return replace(total, low=total.value - below, high=total.value + above)


def largest(*parts: Estimate) -> Estimate:
    """The largest of several figures of one unit, e.g. of the times that overlap; its reason is the winner's."""
    winner = max(parts, key=lambda part: part.value)
    for part in parts:
        _same_unit(winner, part, "compare")
    low, high = max(part.low for part in parts), max(part.high for part in parts)
    return replace(winner, low=low, high=high, badge=weakest(*(part.badge for part in parts)))


def weakest(*badges: Badge) -> Badge:
    """The badge of a result that rests on all of these."""
    return BADGES[max(map(BADGES.index, badges))]


def unit_product(a: str, b: str) -> str:
    """The unit of a product: `unit_product("B", "1/s")` is `"B/s"`, `unit_product("B/s", "s")` is `"B"`."""
    powers = _powers(a)
    for name, power in _powers(b).items():
        powers[name] += power
    return _unit(powers)


def written(value: float, unit: str) -> str:
    """A number for reading, scaled to its size: bytes in binary units, seconds, dollars, FLOPs, and counts."""
    if not math.isfinite(value):
        return f"{value} {unit}".strip()
    kinds = {"B": format_bytes, "s": format_seconds, "$": format_dollars, "FLOP": format_flops}
    head, slash, rest = unit.partition("/")
    if unit == "s" and 0 < value < 1:
        return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"
    if head in kinds and value >= 0:
        return kinds[head](value) + slash + rest
    number = format_count(value) if abs(value) >= 10_000 else f"{value:.4g}"
    return f"{number} {unit}".strip()


def _powers(unit: str) -> Counter[str]:
    powers: Counter[str] = Counter()
    for sign, name in re.findall(r"(^|[*/])([^*/]+)", unit):
        if name != "1":
            powers[name] += -1 if sign == "/" else 1
    return powers


def _unit(powers: Mapping[str, int]) -> str:
    above = [name for name, power in powers.items() for _ in range(power)]
    below = [name for name, power in powers.items() for _ in range(-power)]
    if not above and not below:
        return ""
    return "*".join(above or ["1"]) + "".join(f"/{name}" for name in below)


def _as_estimate(value: "Estimate | float", unit: str) -> Estimate:
    return value if isinstance(value, Estimate) else exact(float(value), unit)


def _same_unit(a: Estimate, b: Estimate, verb: str) -> None:
    if _powers(a.unit) != _powers(b.unit):
        raise ValueError(f"cannot {verb} '{a.unit or 'a plain number'}' and '{b.unit or 'a plain number'}'")


def _inverse(x: Estimate) -> Estimate:
    if x.low <= 0 <= x.high:
        raise ValueError(f"cannot divide by a figure whose band ({x.low}…{x.high} {x.unit}) holds zero")
    ends = sorted((1 / x.low, 1 / x.high))
    return Estimate(value=1 / x.value, low=ends[0], high=ends[1], unit=_unit({name: -power for name, power in _powers(x.unit).items()}),
                    badge=x.badge, because=x.because)


def _combined(a: Estimate, b: Estimate, numbers: tuple[float, float, float], unit: str) -> Estimate:
    value, low, high = numbers
    reason = "; ".join(dict.fromkeys(text for text in (a.because, b.because) if text))
    return Estimate(value=value, low=min(low, value), high=max(high, value), unit=unit, badge=weakest(a.badge, b.badge), because=reason)
