"""The time of one step: what it asks of each wall, times what a stack needs for it.

::

    T = latency       layers · t_layer + expert layers · t_experts + sequences · t_sequence
      + communication collectives · log2(ranks) · t_hop + link / e_link
      + reads         smooth maximum of (weights / e_read, products / e_compute), and of (cache / e_cache, attention / e_compute)
      + prefill       products of prompt tokens / e_compute

`Demand` holds the left factors: counts, and seconds at the data sheet's rates. `Coefficients` holds the right ones, from a record. The
formula also takes arrays, so that what is fitted is what predicts. Read next: `calibration.py`, then `cost.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from gnomon.config import setting
from gnomon.errors import ConfigError
from gnomon.plan.quantity import Badge, Estimate, banded

SHARPNESS = 4
"""Exponent of the smooth maximum: where two terms are equal, their joint time is 19 % above either."""

MOST_EFFICIENT = 1.2
"""Share of a data sheet's rate above which a coefficient is no longer believed: sheets round, and some collectives move fewer bytes."""

WALLS = ("latency", "bandwidth", "compute", "communication")
"""What a step can wait for; `capacity` is the wall that is met before any step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What a step asks for on the busiest device: counts, and seconds that each resource would take at its data sheet's rate."""

    layers: float = setting(doc="layers that run one after another")
    expert_layers: float = setting(0.0, "of these, layers with experts")
    sequences: float = setting(0.0, "sequences that the step advances, per attention group")
    hops: float = setting(0.0, "collectives times the base-2 logarithm of the ranks they join")
    link: float = setting(0.0, "seconds of the collectives' bytes at the fabric's rate")
    weights: float = setting(0.0, "seconds to read the weights that are touched")
    cache: float = setting(0.0, "seconds to read caches and to read and write states")
    products: float = setting(0.0, "seconds of the matrix products of decoded tokens")
    attention: float = setting(0.0, "seconds of attention over cached tokens")
    prefill: float = setting(0.0, "seconds of all products for prompt tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """What a stack makes of a demand: fixed times in seconds, and shares of the data sheet's rates."""

    layer_seconds: float = setting(doc="fixed time per layer: launches and small kernels")
    expert_layer_seconds: float = setting(doc="fixed time that experts add to a layer: routing, sorting, grouping")
    sequence_seconds: float = setting(doc="time per sequence of a step: scheduling and sampling")
    collective_seconds: float = setting(doc="latency of a collective per doubling of the ranks")
    link_efficiency: float = setting(doc="share of the fabric's rate")
    read_efficiency: float = setting(doc="share of the memory's rate when reading weights")
    cache_efficiency: float = setting(doc="share of the memory's rate when reading caches")
    compute_efficiency: float = setting(doc="share of the dense peak")

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigError(f"'{field.name}' is {value}; it must be positive")
            if field.name.endswith("efficiency") and value > MOST_EFFICIENT + 1e-9:
                raise ConfigError(f"'{field.name}' is {value}; it is a share of the data sheet's rate, {MOST_EFFICIENT} at most")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one step by wall, their sum (less than it where reads and products overlap), and the wall with the largest term."""

    latency: Estimate
    bandwidth: Estimate
    compute: Estimate
    communication: Estimate
    total: Estimate
    wall: str


def smooth_maximum(a: Any, b: Any) -> Any:
    """The larger of two times that overlap, and a little more where they are close."""
    return (a**SHARPNESS + b**SHARPNESS) ** (1 / SHARPNESS)


def walls(demand: Any, coefficients: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds at each wall taken by itself; fields may be numbers or arrays."""
    c = coefficients
    return {
        "latency": (c["layer_seconds"] * demand.layers + c["expert_layer_seconds"] * demand.expert_layers
                    + c["sequence_seconds"] * demand.sequences),
        "bandwidth": demand.weights / c["read_efficiency"] + demand.cache / c["cache_efficiency"],
        "compute": (demand.products + demand.attention + demand.prefill) / c["compute_efficiency"],
        "communication": c["collective_seconds"] * demand.hops + demand.link / c["link_efficiency"],
    }


def seconds(demand: Any, coefficients: Mapping[str, Any]) -> Any:
    """The step's time by the formula above; fields may be numbers or arrays."""
    c, parts = coefficients, walls(demand, coefficients)
    products = smooth_maximum(demand.weights / c["read_efficiency"], demand.products / c["compute_efficiency"])
    attention = smooth_maximum(demand.cache / c["cache_efficiency"], demand.attention / c["compute_efficiency"])
    return parts["latency"] + parts["communication"] + products + attention + demand.prefill / c["compute_efficiency"]


def as_table(coefficients: Any) -> dict[str, float]:
    """The fields of coefficients by name."""
    return {field.name: getattr(coefficients, field.name) for field in fields(coefficients)}


def step_time(demand: Demand, coefficients: Coefficients, spread: float, badge: Badge, because: str = "") -> StepTime:
    """A step's time with the band `spread` (0.25: within a factor of 1.25) of the record that the coefficients come from."""
    table = as_table(coefficients)
    parts = {name: banded(value, "s", spread, badge, because) for name, value in walls(demand, table).items()}
    wall = max(WALLS, key=lambda name: parts[name].value)
    return StepTime(**parts, total=banded(seconds(demand, table), "s", spread, badge, because), wall=wall)
