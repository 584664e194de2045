"""Calibration records: what a software stack makes of a machine, with its date, its source and how far it missed.

A record holds the coefficients of `step.py` and, where trainings were measured, shares of peak that whole training steps reach. Its
spread is the 80 % band of its own misses on rows that it was not fitted to: one figure inside the range that was measured, one beyond.
Built-in records are `records/*.toml`; a user's own go by path, or by name from the configuration folder. `fit` makes new ones.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gnomon import config as toml
from gnomon.config import setting
from gnomon.errors import ConfigError
from gnomon.extend import suggestion
from gnomon.plan.hardware import Device, user_folder
from gnomon.plan.quantity import Badge
from gnomon.plan.step import MOST_EFFICIENT, Coefficients, as_table, seconds

FOLDER = Path(__file__).parent / "records"
"""The records that come with the package."""

DEFAULT = "default"
"""The record for stacks nobody has measured: the global fit, with a wide band."""

EXPECTED = Coefficients(layer_seconds=4e-5, expert_layer_seconds=4e-5, sequence_seconds=1e-5, collective_seconds=5e-6,
                        link_efficiency=0.6, read_efficiency=0.8, cache_efficiency=0.8, compute_efficiency=0.6)
"""What one would expect of a stack before any measurement: some twenty launches per layer, and the usual shares of data sheets."""

EXPECTED_SPREAD = Coefficients(layer_seconds=1.0, expert_layer_seconds=1.0, sequence_seconds=1.0, collective_seconds=1.0,
                               link_efficiency=0.5, read_efficiency=0.3, cache_efficiency=0.3, compute_efficiency=0.4)
"""How far that may be off: standard deviations of the logarithms."""

NOISE = 0.15
"""Standard deviation of the logarithm of one measured time that is beyond any model: versions, clocks, drafting switched on unsaid."""

BEYOND = 1.35
"""Power by which a band widens beyond the measured range: published K3 and DeepSeek figures against the global fit (planner_anchors)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Where a record was measured; beyond it a figure is extrapolated."""

    ranks: int = setting(8, "most devices per copy")
    sequences: int = setting(512, "most sequences in flight")
    context: int = setting(9216, "longest context")
    active: int = setting(0, "fewest active parameters of a model")


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstToken:
    """What stands between a request and its first token beside the queue."""

    base_seconds: float = setting(0.1, "tokenising, scheduling and sending")
    wait_steps: float = setting(4.0, "decode steps that pass until a prompt is taken up")
    compute_efficiency: float = setting(0.5, "share of dense peak in prefill")
    link_efficiency: float = setting(0.2, "share of the fabric's rate in prefill, where messages do not hide")
    spread: float = setting(1.5, "80 % band of the time to the first token")

    def __post_init__(self) -> None:
        for name in ("compute_efficiency", "link_efficiency", "spread"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"'{name}' is {getattr(self, name)}; it must be positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStep:
    """A training step in parts: a fixed time per layer and pass, and shares of the data sheet's rates."""

    layer_seconds: float = setting(5e-3, "fixed time per layer of a micro-batch, forward and backward")
    product_efficiency: float = setting(0.8, "share of peak in products with weights")
    optimiser_efficiency: float = setting(0.8, "share of peak when matrices are orthogonalised")
    activation_efficiency: float = setting(0.2, "share of the memory's rate for what passes between products")
    attention_efficiency: float = setting(0.4, "share of peak in attention, recurrences and depth reads")

    def __post_init__(self) -> None:
        for name, value in as_table(self).items():
            if not value > 0:
                raise ConfigError(f"'training_step.{name}' is {value}; it must be positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One stack on one kind of fabric."""

    title: str = setting(doc="name for reading")
    stack: str = setting("any", "software, e.g. 'sglang'; any: a fit over several")
    fabric: str = setting("any", "first word of a device's fabric, e.g. 'NVLink'; any: whichever")
    devices: tuple[str, ...] = setting((), "devices that were measured; empty: none in particular")
    date: str = setting(doc="when it was measured, YYYY-MM or YYYY-MM-DD: software moves")
    source: str = setting(doc="which measurements, and the command that fitted them")
    rows: int = setting(0, "measurements behind it")
    spread: float = setting(doc="80 % band within the range: 0.25 is a factor of 1.25 either way")
    spread_beyond: float = setting(doc="80 % band beyond the range")
    range: Range = setting(factory=Range, doc="what was measured")
    coefficients: Coefficients = setting(EXPECTED, "what the stack makes of a step")
    drift: float = setting(0.0, "rate per year at which fixed times shrank among the measurements: software moves")
    first_token: FirstToken = setting(factory=FirstToken, doc="prefill and what comes before it")
    training: dict[str, float] = setting(factory=dict, doc="share of dense peak that a whole training step reaches, by arithmetic")
    training_spread: float = setting(0.6, "80 % band of that share")
    machine: str = setting("", "fingerprint of the machine, for records of one's own")
    drawing: dict[str, float] = setting(factory=dict, doc="seconds to draw a token on the host, by vocabulary size; empty: in the steps")
    training_step: TrainingStep | None = setting(None, "what the stack makes of a whole training step, where that was measured in parts")

    def __post_init__(self) -> None:
        for name in ("spread", "spread_beyond", "training_spread"):
            if not 0 < getattr(self, name) < 10:
                raise ConfigError(f"'{name}' is {getattr(self, name)}; it is a band such as 0.25, above 0: no record is exact")
        for name in ("source", "date"):
            if not getattr(self, name).strip():
                raise ConfigError(f"'{name}' is empty; a record says what was measured and when")
        for arithmetic, share in self.training.items():
            if not 0 < share <= 0.8:
                raise ConfigError(f"'training.{arithmetic}' is {share}; whole training steps reach a share of peak between 0 and 0.8")

    def at(self, date: str) -> "Record":
        """The record with fixed times as they would stand at a date (YYYY-MM), had software gone on as it did; a year on at most."""
        years = max(-1.0, min(1.0, _years(date) - _years(self.date)))
        factor = math.exp(-self.drift * years)
        return scaled(self, {name: factor for name in as_table(self.coefficients) if name.endswith("_seconds")})

    def draw_seconds(self, vocabulary: int) -> float:
        """Time to draw a token from a vocabulary of this size: along lines between measured sizes, and on beyond the last."""
        known = sorted((int(size), taken) for size, taken in self.drawing.items())
        if not known or vocabulary <= known[0][0] or len(known) == 1:
            return known[0][1] if known else 0.0
        below, above = next(((a, b) for a, b in zip(known, known[1:]) if vocabulary <= b[0]), (known[-2], known[-1]))
        return below[1] + (above[1] - below[1]) / (above[0] - below[0]) * (vocabulary - below[0])

    def covers(self, device: Device, ranks: int, sequences: float, context: float, active: float = math.inf) -> bool:
        """Whether a step of a model with so many active parameters lies inside what was measured."""
        return (not self.devices or device.name in self.devices) and ranks <= self.range.ranks and \
            sequences <= self.range.sequences and context <= self.range.context and active >= self.range.active

    def trust(self, device: Device, ranks: int, sequences: float, context: float, active: float = math.inf) -> tuple[float, Badge, str]:
        """The band, the badge and the reason for a step."""
        if not self.covers(device, ranks, sequences, context, active):
            return self.spread_beyond, "extrapolated", f"beyond what '{self.title}' measured"
        return self.spread, "validated" if self.stack == "any" else "calibrated", f"record '{self.title}' of {self.date}"


def _years(date: str) -> float:
    year, _, rest = date.partition("-")
    if not year.isdigit() or not rest[:2].isdigit():
        raise ConfigError(f"'{date}' is not a date; write YYYY-MM")
    return int(year) + (int(rest[:2]) - 1) / 12


def record_names() -> list[str]:
    """The records that come with the package, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def record(name: str) -> Record:
    """A record by name, by path, or by its name in the user's folder; `ConfigError` lists the choices."""
    if name.endswith(".toml"):
        return read_record(Path(name))
    for folder in (FOLDER, user_folder() / "records"):
        if (folder / f"{name}.toml").is_file():
            return read_record(folder / f"{name}.toml")
    raise ConfigError(f"unknown calibration record '{name}'{suggestion(name, record_names())} (known: {', '.join(record_names())}; "
                      "or a file ending in .toml; `gnomon plan --calibrate` makes one for this machine)")


def read_record(path: Path) -> Record:
    """A record from its file; raises one `ConfigError` for what is missing, unknown or impossible."""
    return toml.load(Record, path)


def best_record(device: Device, stack: str | None = None) -> Record:
    """The record of a stack that was measured on the device or else its fabric; without a stack the machine's own, else the global one."""
    if stack is None:
        own = [read_record(path) for path in sorted((user_folder() / "records").glob("*.toml"))]
        return next((item for item in own if device.name in item.devices), None) or record(DEFAULT)
    found = [item for item in map(record, record_names()) if item.stack != "any"]
    known = sorted({item.stack for item in found})
    if stack not in known:
        raise ConfigError(f"no record for stack '{stack}'{suggestion(stack, known)} (known: {', '.join(known)}; or none: the global fit)")
    fabric = device.fabric.split()[0] if device.fabric else ""
    matching = [item for item in found if item.stack == stack and item.fabric in (fabric, "any")]
    return max(matching, key=lambda item: (device.name in item.devices, item.date), default=None) or record(DEFAULT)


def fit(demand: Any, measured: Any, prior: Coefficients = EXPECTED, looseness: Coefficients | float = EXPECTED_SPREAD,
        weight: float = 9.0) -> Coefficients:
    """The coefficients that bring `step.seconds(demand)` closest to measured seconds, without leaving `prior` for little gain.

    `demand` has arrays for fields. `looseness` are standard deviations of the logarithms of coefficients.
    """
    names = list(as_table(prior))
    allowed = [looseness] * len(names) if isinstance(looseness, float) else list(as_table(looseness).values())
    most = [MOST_EFFICIENT if name.endswith("efficiency") else math.inf for name in names]
    found = fit_logarithms(lambda values: seconds(demand, dict(zip(names, values, strict=True))), measured,
                           list(as_table(prior).values()), allowed, most=most, weight=weight)
    return Coefficients(**dict(zip(names, found, strict=True)))


def fit_logarithms(predict: Callable[[Any], Any], measured: Any, centre: Sequence[float], allowed: Sequence[float], *,
                   most: Sequence[float] | None = None, weight: float = 1.0) -> list[float]:
    """Positive values for which `predict(values)` comes closest to positive measurements, by damped Gauss-Newton steps.

    Misses are those of logarithms, bounded so that single rows cannot lead (soft L1 at `NOISE`). Each value is drawn to its `centre`, with
    `allowed` as the standard deviation of its logarithm and `weight` as the strength of that pull; `most` bounds it.
    """
    import numpy as np

    middle, width = np.log(np.array(centre, float)), np.array(allowed, float)
    target = np.log(np.asarray(measured, float))
    upper = np.full(len(width), np.inf) if most is None else np.log(np.array(most, float))

    def misses(point: Any) -> Any:
        return (np.log(predict(np.exp(point))) - target) / NOISE

    def cost(point: Any) -> float:
        return float(2 * np.sum(np.sqrt(1 + misses(point) ** 2) - 1) + weight * np.sum(((point - middle) / width) ** 2))

    point, best, damping = middle.copy(), cost(middle), 1e-2
    for _ in range(100):
        miss = misses(point)
        slope = np.stack([(misses(point + 1e-4 * unit) - miss) / 1e-4 for unit in np.eye(len(width))], axis=1)
        trust = 1 / np.sqrt(1 + miss**2)
        gradient = slope.T @ (trust * miss) + weight * (point - middle) / width**2
        curvature = slope.T @ (trust[:, None] * slope) + np.diag(weight / width**2)
        trial = np.minimum(point + np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient), upper)
        value = cost(trial)
        if value < best:
            gain, point, best, damping = best - value, trial, value, damping / 3
            if gain < 1e-9 * best:
                break
        else:
            damping *= 4
            if damping > 1e8:
                break
    return [float(value) for value in np.exp(point)]


def wider(spread: float) -> float:
    """The band beyond the measured range of a record with this band inside it."""
    return round(math.expm1(BEYOND * math.log1p(spread)), 3)


def band(misses: Sequence[float], pooled: float | None = None, strength: float = 10.0) -> float:
    """The 80 % band of misses, which are logarithms of predicted over measured; few rows lean on a `pooled` band."""
    if not misses and pooled is None:
        raise ConfigError("no misses to take a band from; measure at least one row that was not fitted to")
    if not misses:
        return float(pooled or 0.0)
    ordered = sorted(map(abs, misses))
    place = 0.8 * (len(ordered) + 1) - 1
    low, high = math.floor(place), math.ceil(place)
    inside = max(0, min(low, len(ordered) - 1)), max(0, min(high, len(ordered) - 1))
    own = ordered[inside[0]] + (place - low) * (ordered[inside[1]] - ordered[inside[0]])
    if pooled is not None:
        own = (len(ordered) * own + strength * math.log1p(pooled)) / (len(ordered) + strength)
    return math.expm1(own)


def calibrated(base: Record, coefficients: Coefficients, **changes: Any) -> Record:
    """A record with other coefficients and whatever else changes, e.g. `title`, `stack`, `date`, `source`, `spread`."""
    return replace(base, coefficients=coefficients, **changes)


def scaled(base: Record, factors: Mapping[str, float]) -> Record:
    """A record with some coefficients multiplied, for what-if questions: `{"layer_seconds": 0.5}` halves the launches."""
    table = as_table(base.coefficients)
    unknown = [name for name in factors if name not in table]
    if unknown:
        raise ConfigError(f"no coefficient '{unknown[0]}'{suggestion(unknown[0], list(table))} (known: {', '.join(table)})")
    return replace(base, coefficients=Coefficients(**{name: value * factors.get(name, 1.0) for name, value in table.items()}))
