"""How well does the planner's step formula predict measured decoding, on models and configurations that it was not fitted to?

Two questions over about 3,500 measured rows (see `silicon_rows.py`). *Another model*: each of ten models is predicted from a fit on the
other nine. *Another configuration*: one fit per (model, system, backend) on half of the configurations predicts the other half, both ways
round, repetitions of a configuration never on both sides. The peer, in the same run and with the same fitting, is a plain roofline with
three coefficients. Bands come from misses inside the fitting rows alone.

`python benchmarks/planner_silicon.py [--package WHEEL] [--write]`; the package is `aiconfigurator-core==0.12.0`, installed or as a
downloaded wheel. `--write` renews the planner's default record.
"""

import argparse
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from machine import save
from silicon_rows import Row, columns, read

from gnomon.config import to_toml
from gnomon.plan.calibration import DEFAULT, EXPECTED, EXPECTED_SPREAD, FOLDER, Range, Record, band, fit
from gnomon.plan.step import Coefficients, Demand, as_table, seconds

TARGETS = {"another model": 0.25, "another configuration": 0.12}
COVERAGE = (0.75, 0.85)
SEEDS = (0, 1)
LOOSE = {"looseness": 1.0, "weight": 0.5}     # a group's own fit may leave the global one freely: it has rows of its own
FOLDS = 4


@dataclass(frozen=True)
class Sample:
    """Rows, their demands as arrays, and the measured seconds per token."""

    rows: list[Row]
    demand: Any
    measured: Any

    def part(self, chosen: Any) -> "Sample":
        """Some of the rows."""
        demand = Demand(**{f.name: getattr(self.demand, f.name)[chosen] for f in fields(Demand)})
        return Sample([self.rows[i] for i in chosen], demand, self.measured[chosen])

    def misses(self, coefficients: Coefficients) -> Any:
        """Logarithms of predicted over measured."""
        return np.log(seconds(self.demand, as_table(coefficients)) / self.measured)

    def fitted(self, **how: Any) -> Coefficients:
        """The coefficients that fit these rows."""
        return fit(self.demand, self.measured, **how)


def plain(demand: Any) -> Any:
    """The roofline's demand: one latency per layer, bytes, FLOPs of decoded tokens; no prompts, ranks, experts or overlap."""
    nothing = np.zeros_like(demand.layers)
    return replace(demand, expert_layers=nothing, sequences=nothing, hops=nothing, link=nothing, prefill=nothing)


def split(sample: Sample, parts: int, seed: int) -> list[Any]:
    """Row numbers in `parts` folds, all repetitions of a configuration in one."""
    configurations = sorted({row.configuration for row in sample.rows}, key=repr)
    random.Random(seed).shuffle(configurations)
    fold = {configuration: i % parts for i, configuration in enumerate(configurations)}
    return [np.array([i for i, row in enumerate(sample.rows) if fold[row.configuration] == part], int) for part in range(parts)]


def rest(sample: Sample, chosen: Any) -> Any:
    """Row numbers that are not among the chosen."""
    return np.setdiff1d(np.arange(len(sample.rows)), chosen)


def by(sample: Sample, name: Callable[[Row], Any]) -> dict[Any, Any]:
    """Row numbers by a property of their rows."""
    found = defaultdict(list)
    for i, row in enumerate(sample.rows):
        found[name(row)].append(i)
    return {key: np.array(places, int) for key, places in sorted(found.items())}


def other_models(sample: Sample, bands: bool = True) -> tuple[Any, Any]:
    """Misses on each model from a fit on the others, and whether each row fell into a band from misses among those others."""
    missed, covered = np.zeros(len(sample.rows)), np.zeros(len(sample.rows), bool)
    for places in by(sample, lambda row: row.model).values():
        known = sample.part(rest(sample, places))
        missed[places] = sample.part(places).misses(known.fitted())
        if bands:
            among = [known.part(inner).misses(known.part(rest(known, inner)).fitted())
                     for inner in by(known, lambda row: row.model).values()]
            covered[places] = abs(missed[places]) <= math.log1p(band(list(np.concatenate(among))))
    return missed, covered


def other_configurations(sample: Sample, seed: int) -> tuple[Any, Any]:
    """Misses on each half of the configurations from fits per group on the other half, and whether rows fell into their bands."""
    missed, covered = np.zeros(len(sample.rows)), np.zeros(len(sample.rows), bool)
    for held_out in split(sample, 2, seed):
        known, asked = sample.part(rest(sample, held_out)), sample.part(held_out)
        base = known.fitted()
        groups, own = by(known, lambda row: row.group), {}
        for group, places in groups.items():
            part = known.part(places)
            folds = [fold for fold in split(part, FOLDS, seed) if len(fold) and len(fold) < len(places)]
            own[group] = [miss for fold in folds
                          for miss in part.part(fold).misses(part.part(rest(part, fold)).fitted(prior=base, **LOOSE))]
        pooled = band([miss for misses in own.values() for miss in misses])
        for group, places in by(asked, lambda row: row.group).items():
            fitted = known.part(groups[group]).fitted(prior=base, **LOOSE) if group in groups else base
            misses = asked.part(places).misses(fitted)
            missed[held_out[places]] = misses
            covered[held_out[places]] = abs(misses) <= math.log1p(band(own.get(group, []), pooled, strength=100))
    return missed, covered


def errors(misses: Iterable[float]) -> dict[str, float]:
    """Mean and median absolute relative error, and the median ratio of predicted over measured."""
    ratio = np.exp(np.asarray(list(misses)))
    return {"mape": float(np.mean(abs(ratio - 1))), "median": float(np.median(abs(ratio - 1))), "bias": float(np.median(ratio))}


def default_record(sample: Sample, missed: Any) -> Record:
    """The global fit as the planner's default record; its band within the range is that of models it had not seen."""
    return Record(
        title="global fit over ten models", date="2026-04", rows=len(sample.rows), fabric="any",
        devices=tuple(sorted({row.device.name for row in sample.rows})),
        source="aiconfigurator-core 0.12.0, systems/silicon_sample.csv (2025-09 to 2026-04); benchmarks/planner_silicon.py --write",
        spread=round(band(list(missed)), 3), spread_beyond=round(math.expm1(1.6 * math.log1p(band(list(missed)))), 3),
        range=Range(ranks=8, sequences=512, context=9216),
        coefficients=Coefficients(**{name: float(f"{value:.4g}") for name, value in as_table(sample.fitted()).items()}))


def main() -> None:
    """Print both tables, save them, and with `--write` renew the default record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, help="a downloaded wheel of aiconfigurator-core 0.12.0")
    parser.add_argument("--write", action="store_true", help="renew the default record")
    arguments = parser.parse_args()
    rows = read(arguments.package)
    sample = Sample(rows, columns(rows), np.array([row.seconds_per_token for row in rows]))
    roofline = Sample(rows, plain(sample.demand), sample.measured)
    configurations = len({row.configuration for row in rows})
    print(f"{len(rows)} rows, {configurations} configurations; prior {EXPECTED} within {EXPECTED_SPREAD}")
    missed, covered = other_models(sample)
    result: dict[str, Any] = {"rows": len(rows), "configurations": configurations}
    result["another model"] = {**errors(missed), "coverage": float(np.mean(covered)), "roofline": errors(other_models(roofline, False)[0])}
    result["models"] = {model: {**errors(missed[places]), "rows": len(places), "coverage": float(np.mean(covered[places]))}
                        for model, places in by(sample, lambda row: row.model).items()}
    halves = [other_configurations(sample, seed) for seed in SEEDS]
    plain_halves = [other_configurations(roofline, seed)[0] for seed in SEEDS]
    result["another configuration"] = {**errors(np.concatenate([miss for miss, _ in halves])),
                                       "coverage": float(np.mean([inside for _, inside in halves])),
                                       "roofline": errors(np.concatenate(plain_halves))}
    result["coefficients"] = as_table(sample.fitted())
    for model, found in result["models"].items():
        print(f"  {model:16s} {found['rows']:5d} rows  MAPE {found['mape']:6.1%}  median {found['median']:6.1%}  "
              f"bias {found['bias']:5.2f}  in band {found['coverage']:4.0%}")
    met = True
    for name, target in TARGETS.items():
        found = result[name]
        inside = COVERAGE[0] <= found["coverage"] <= COVERAGE[1]
        met &= found["mape"] <= target and inside
        print(f"{name:22s} MAPE {found['mape']:.1%} (target {target:.0%}, roofline {found['roofline']['mape']:.1%})  median "
              f"{found['median']:.1%}  80 % bands hold {found['coverage']:.1%}")
    result["targets"] = {"mape": TARGETS, "coverage": COVERAGE, "met": met}
    save("planner_silicon", result)
    if arguments.write:
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{DEFAULT}.toml").write_text(to_toml(default_record(sample, missed)), encoding="utf-8")
        print(f"wrote {FOLDER / DEFAULT}.toml")


if __name__ == "__main__":
    main()
