"""Calibration records: what a software stack makes of a machine, with its date, its source and how far it missed.

A record holds the coefficients of `step.py` and, where trainings were measured, shares of peak that whole training steps reach. Its
spread is the 80 % band of its own misses on rows that it was not fitted to: one figure inside the range that was measured, one beyond.
Built-in records are `records/*.toml`; a user's own go by path, or by name from the configuration folder. `fit` makes new ones.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gnomon import config as toml
from gnomon.config import setting
from gnomon.errors import ConfigError
from gnomon.extend import suggestion
from gnomon.plan.hardware import Device
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Where a record was measured; beyond it a figure is extrapolated."""

    ranks: int = setting(8, "most devices per copy")
    sequences: int = setting(512, "most sequences in flight")
    context: int = setting(9216, "longest context")


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
    training: dict[str, float] = setting(factory=dict, doc="share of dense peak that a whole training step reaches, by arithmetic")
    training_spread: float = setting(0.6, "80 % band of that share")
    machine: str = setting("", "fingerprint of the machine, for records of one's own")
    local: dict[str, float] = setting(factory=dict, doc="further measurements of one's own machine")

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

    def covers(self, device: Device, ranks: int, sequences: float, context: float) -> bool:
        """Whether a step lies inside what was measured."""
        return (not self.devices or device.name in self.devices) and ranks <= self.range.ranks and \
            sequences <= self.range.sequences and context <= self.range.context

    def trust(self, device: Device, ranks: int, sequences: float, context: float) -> tuple[float, Badge, str]:
        """The band, the badge and the reason for a step."""
        if not self.covers(device, ranks, sequences, context):
            return self.spread_beyond, "extrapolated", f"beyond what '{self.title}' measured"
        return self.spread, "validated" if self.stack == "any" else "calibrated", f"record '{self.title}' of {self.date}"


def user_folder() -> Path:
    """Where a user's own records and hardware files live: `$XDG_CONFIG_HOME/gnomon`, else `~/.config/gnomon`."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "gnomon"


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
    """The record measured on this device and stack, else on this fabric and stack, else the default one."""
    found = [record(name) for name in record_names() if name != DEFAULT]
    if stack is not None and stack not in {item.stack for item in found}:
        known = sorted({item.stack for item in found} - {"any"})
        raise ConfigError(f"no record for stack '{stack}'{suggestion(stack, known)} (known: {', '.join(known)}; or none: the global fit)")
    fabric = device.fabric.split()[0] if device.fabric else ""
    matching = [item for item in found if stack is not None and item.stack == stack and item.fabric in (fabric, "any")]
    matching.sort(key=lambda item: (device.name in item.devices, item.date), reverse=True)
    own = [item for item in found if stack is None and item.devices == (device.name,)]
    return next(iter(matching or own), None) or record(DEFAULT)


def fit(demand: Any, measured: Any, prior: Coefficients = EXPECTED, looseness: Coefficients | float = EXPECTED_SPREAD,
        weight: float = 9.0) -> Coefficients:
    """The coefficients that bring `step.seconds(demand)` closest to measured seconds, without leaving `prior` for little gain.

    `demand` has arrays for fields. The misses are those of logarithms, bounded so that single rows cannot lead (soft L1); `looseness`
    are standard deviations of the logarithms of coefficients, `weight` multiplies the prior.
    """
    import numpy as np

    names = list(as_table(prior))
    centre = np.log(np.array(list(as_table(prior).values())))
    allowed = np.full(len(names), looseness) if isinstance(looseness, float) else np.array(list(as_table(looseness).values()))
    target = np.log(np.asarray(measured, float))
    most = np.array([math.log(MOST_EFFICIENT) if name.endswith("efficiency") else math.inf for name in names])

    def misses(point: Any) -> Any:
        return (np.log(seconds(demand, dict(zip(names, np.exp(point), strict=True)))) - target) / NOISE

    def cost(point: Any) -> float:
        return float(2 * np.sum(np.sqrt(1 + misses(point) ** 2) - 1) + weight * np.sum(((point - centre) / allowed) ** 2))

    point, best, damping = centre.copy(), cost(centre), 1e-2
    for _ in range(100):
        miss = misses(point)
        slope = np.stack([(misses(point + 1e-4 * unit) - miss) / 1e-4 for unit in np.eye(len(names))], axis=1)
        trust = 1 / np.sqrt(1 + miss**2)
        gradient = slope.T @ (trust * miss) + weight * (point - centre) / allowed**2
        curvature = slope.T @ (trust[:, None] * slope) + np.diag(weight / allowed**2)
        step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
        trial = np.minimum(point + step, most)
        value = cost(trial)
        if value < best:
            gain, point, best, damping = best - value, trial, value, damping / 3
            if gain < 1e-9 * best:
                break
        else:
            damping *= 4
            if damping > 1e8:
                break
    return Coefficients(**{name: float(value) for name, value in zip(names, np.exp(point), strict=True)})


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
