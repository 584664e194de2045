"""Laws from your own runs: loss against size and tokens, and a saturating curve for anything that has no published law.

For given exponents both are linear, so the exponents are searched on a grid and the rest solved with non-negative weights; intervals come
from a bootstrap over runs. What the runs cannot tell (too few sizes, too few lengths) is taken from the published law and named.
Read next: `laws.py`.
"""

import csv
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gnomon.errors import ConfigError, DataError
from gnomon.plan.laws import REFIT, Z80, additive
from gnomon.plan.quantity import Badge, Estimate
from gnomon.train import metrics, recipe

EXPONENTS = (0.05, 1.2)
"""The range in which exponents are sought."""

GRID, ZOOMS, RESAMPLES = 13, 3, 200
TAIL = 0.05  # share of a run's steps whose mean loss stands for its end, where no held-out loss was written
INSIDE = 1.5  # a prediction this factor beyond the runs is still called calibrated


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One finished training: active parameters, tokens, loss in nats per token."""

    name: str
    active: float
    tokens: float
    loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """loss = E + A / active^alpha + B / tokens^beta, fitted to runs. `borrowed` names exponents of the published law."""

    coefficients: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    borrowed: tuple[str, ...]
    runs: tuple[Run, ...]
    residual: float
    samples: tuple[dict[str, float], ...]

    def at(self, active: float, tokens: float) -> Estimate:
        """Loss of a model of so many active parameters after so many tokens; the band is the bootstrap's, widened by the residual."""
        value = additive(self.coefficients, active, tokens)
        spread = np.array([additive(sample, active, tokens) for sample in self.samples] or [value])
        low, high = np.quantile(spread, [0.1, 0.9])
        inside = all(min(values) / INSIDE <= x <= max(values) * INSIDE for x, values in (
            (active, [run.active for run in self.runs]), (tokens, [run.tokens for run in self.runs])))
        badge: Badge = "calibrated" if inside else "extrapolated"
        return Estimate(value=value, low=float(min(low, value)) - self.residual, high=float(max(high, value)) + self.residual,
                        unit="nat/token", badge=badge, because=f"fitted to {len(self.runs)} runs of yours")


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """y = level + reach · x^-exponent, fitted to a table: score against trajectory length, effort, or anything that saturates."""

    x: str
    y: str
    level: float
    reach: float
    exponent: float
    points: tuple[tuple[float, float], ...]
    residual: float
    samples: tuple[tuple[float, float, float], ...]

    def at(self, x: float) -> Estimate:
        """The curve at x; extrapolated outside the table."""
        value = self.level + self.reach * x**-self.exponent
        spread = np.array([level + reach * x**-exponent for level, reach, exponent in self.samples] or [value])
        low, high = np.quantile(spread, [0.1, 0.9])
        badge: Badge = "calibrated" if min(p[0] for p in self.points) <= x <= max(p[0] for p in self.points) else "extrapolated"
        return Estimate(value=value, low=float(min(low, value)) - self.residual, high=float(max(high, value)) + self.residual, unit=self.y,
                        badge=badge, because=f"fitted to {len(self.points)} points of {self.x}; no published law exists")


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The end of each run folder: active parameters from its recipe, loss held out where each run has it, else on training text.

    Raises `DataError` for a run without steps, and what reading a recipe or metrics raises.
    """
    ends: list[tuple[Path, int, float, Any, float]] = []
    for folder in folders:
        rows = metrics.read(folder)
        if not rows:
            raise DataError(f"{folder} has no finished step; train it first, or leave it out")
        model = recipe.load(folder / "recipe.toml").model
        tail = rows[-max(1, round(len(rows) * TAIL)):]
        held_out = next((row["held_out_loss"] for row in reversed(rows) if "held_out_loss" in row), None)
        ends.append((folder, model.activated_parameters(), rows[-1]["tokens"], held_out, sum(row["loss"] for row in tail) / len(tail)))
    use_held_out = all(end[3] is not None for end in ends)
    return [Run(name=folder.name, active=active, tokens=tokens, loss=float(held if use_held_out else trained))
            for folder, active, tokens, held, trained in ends]


def fit(runs: Sequence[Run], resamples: int = RESAMPLES, seed: int = 0) -> Fit:
    """Fit the law to runs that differ in size, in tokens, or in both.

    An exponent needs three different values of its axis; with two it is borrowed from the published law, with one the axis is left out.
    Raises `ConfigError` for too few runs, saying what is missing.
    """
    sizes, lengths = ({getattr(run, name) for run in runs} for name in ("active", "tokens"))
    axes = [(name, exponent, count) for name, exponent, count in (("active", "alpha", len(sizes)), ("tokens", "beta", len(lengths)))
            if count > 1]
    free = [exponent for _, exponent, count in axes if count > 2]
    needed = 1 + len(axes) + len(free) + 1
    if not axes or len(runs) < needed:
        raise ConfigError(f"{len(runs)} runs with {len(sizes)} sizes and {len(lengths)} lengths cannot fix a law: give at least "
                          f"{max(needed, 4)} that differ in parameters or tokens")
    table = np.array([[run.active, run.tokens, run.loss] for run in runs], dtype=float)
    borrowed = tuple(exponent for _, exponent, count in axes if count == 2)
    columns = [(0 if name == "active" else 1, REFIT[exponent] if exponent in borrowed else None) for name, exponent, _ in axes]
    names = [(name, exponent) for name, exponent, _ in axes]
    best = _named(_search(table, columns), names)
    random = np.random.default_rng(seed)
    samples = []
    for _ in range(resamples):
        chosen = table[random.integers(0, len(table), len(table))]
        if all(len(set(chosen[:, column])) > 1 for column, _ in columns):
            samples.append(_named(_search(chosen, columns, zooms=2), names))
    errors = np.array([run.loss - additive(best, run.active, run.tokens) for run in runs])
    spare = max(1, len(runs) - (needed - 1))
    residual = Z80 * float(np.sqrt(errors @ errors / spare))
    intervals = {}
    for name, value in best.items():
        low, high = np.quantile([sample[name] for sample in samples] or [value], [0.1, 0.9])
        intervals[name] = (float(low), float(high))
    return Fit(coefficients=best, intervals=intervals, borrowed=borrowed, runs=tuple(runs), residual=residual, samples=tuple(samples))


def read_table(path: Path) -> tuple[str, str, list[tuple[float, float]]]:
    """The first two columns of a CSV file with a header: x, y and their names. Raises `DataError` for what is not a number."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.reader(file) if row]
    if len(rows) < 2 or len(rows[0]) < 2:
        raise DataError(f"{path}: a header and rows of two numbers are needed, e.g. 'length,score' and '1000,0.31'")
    try:
        return rows[0][0].strip(), rows[0][1].strip(), [(float(row[0]), float(row[1])) for row in rows[1:]]
    except (ValueError, IndexError) as error:
        raise DataError(f"{path}: {error}; each row needs two numbers") from None


def fit_table(path: Path, resamples: int = RESAMPLES, seed: int = 0) -> Curve:
    """A saturating curve through a table of small runs. Raises `ConfigError` for fewer than four different x."""
    x, y, points = read_table(path)
    table = np.array([[px, 0.0, py] for px, py in points])
    if len({px for px, _ in points}) < 4 or min(px for px, _ in points) <= 0:
        raise ConfigError(f"{path}: a curve with three unknowns needs at least four different positive values of '{x}', "
                          f"got {len({px for px, _ in points})}")
    columns: list[tuple[int, float | None]] = [(0, None)]
    exponents, weights = _search(table, columns, signed=True)
    random = np.random.default_rng(seed)
    picks = [table[random.integers(0, len(table), len(table))] for _ in range(resamples)]
    samples = tuple((w[0], w[1], e[0]) for e, w in (_search(pick, columns, zooms=2, signed=True) for pick in picks
                                                    if len(set(pick[:, 0])) > 2))
    errors = np.array([py - (weights[0] + weights[1] * px ** -exponents[0]) for px, py in points])
    residual = Z80 * float(np.sqrt(errors @ errors / max(1, len(points) - 3)))
    return Curve(x=x, y=y, level=weights[0], reach=weights[1], exponent=exponents[0], points=tuple(points), residual=residual,
                 samples=samples)


Columns = Sequence[tuple[int, float | None]]
"""Which columns of a table carry a power, and its exponent where that is given."""


def _search(table: np.ndarray, columns: Columns, zooms: int = ZOOMS, signed: bool = False) -> tuple[list[float], list[float]]:
    """Exponents and weights (the constant first) with the least squared error; weights are not negative unless `signed`."""
    spans = [(given, given) if given is not None else EXPONENTS for _, given in columns]
    centres = [float(np.exp(np.log(table[:, column]).mean())) for column, _ in columns]
    best: tuple[np.ndarray, np.ndarray] = (np.zeros(0), np.zeros(0))
    for _ in range(zooms):
        axes = [np.array([low]) if low == high else np.linspace(low, high, GRID) for low, high in spans]
        grid = np.array(list(itertools.product(*axes)))
        powers = [(table[:, column] / centre)[None, :] ** -grid[:, index, None]
                  for index, ((column, _), centre) in enumerate(zip(columns, centres, strict=True))]
        basis = np.stack([np.ones((len(grid), len(table))), *powers], axis=2)
        weights, errors = _solve(basis, table[:, 2], signed)
        winner = int(errors.argmin())
        best = (grid[winner], weights[winner])
        steps = [(high - low) / (GRID - 1) for low, high in spans]
        spans = [(max(EXPONENTS[0], x - step), min(EXPONENTS[1], x + step)) if step else span
                 for x, step, span in zip(best[0], steps, spans, strict=True)]
    scaled = [float(best[1][0]), *(float(w * centre**x) for w, centre, x in zip(best[1][1:], centres, best[0], strict=True))]
    return [float(x) for x in best[0]], scaled


def _solve(basis: np.ndarray, target: np.ndarray, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Least squares for each of a stack of bases [G, N, k]: weights [G, k] and squared errors [G].

    Not-negative weights by trying every subset of columns, of which there are at most seven.
    """
    count, _, width = basis.shape
    weights, errors = np.zeros((count, width)), np.full(count, np.inf)
    subsets = [tuple(range(width))] if signed else [s for k in range(1, width + 1) for s in itertools.combinations(range(width), k)]
    for subset in subsets:
        part = basis[:, :, subset]
        square = part.transpose(0, 2, 1) @ part + 1e-10 * np.eye(len(subset))
        solved = np.linalg.solve(square, (part * target[None, :, None]).sum(axis=1)[:, :, None])[:, :, 0]
        error = ((np.einsum("gnk,gk->gn", part, solved) - target) ** 2).sum(axis=1)
        better = (error < errors) & (signed | (solved >= 0).all(axis=1))
        errors = np.where(better, error, errors)
        full = np.zeros((count, width))
        full[:, subset] = solved
        weights = np.where(better[:, None], full, weights)
    return weights, errors


def _named(found: tuple[list[float], list[float]], names: Sequence[tuple[str, str]]) -> dict[str, float]:
    exponents, weights = found
    result = {"E": weights[0], "A": 0.0, "alpha": REFIT["alpha"], "B": 0.0, "beta": REFIT["beta"]}
    for (axis, name), exponent, weight in zip(names, exponents, weights[1:], strict=True):
        result |= {name: exponent, "A" if axis == "active" else "B": weight}
    return result
