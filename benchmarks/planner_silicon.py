"""How well does the planner's step formula predict measured decoding, on models and configurations that it was not fitted to?

Four questions over about 3,500 measured rows (see `silicon_rows.py`). *Another model*: each of ten models is predicted from a fit on the
other nine. *Another configuration*: one fit per (model, system, backend) on half of the configurations predicts the other half, both ways
round, repetitions of a configuration never on both sides. *First tokens*: each model's time to first token from a fit on the others, with
each stack's own fixed time; reported, not a target. *A change*: of two rows that differ in one thing only, is the measured ratio inside the
band that the planner gives a turned knob, on models that the fit has not seen? The peer, in the same run and with the same fitting, is a
plain roofline with three coefficients. Bands come from misses inside the fitting rows alone; those of a change rest on two shares that were
fitted to these pairs.

`python benchmarks/planner_silicon.py [--package WHEEL] [--write]`; the package is `aiconfigurator-core==0.12.0`, installed or as a
downloaded wheel. `--write` renews the planner's default record and one per stack.
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
from silicon_rows import Row, columns, demand, prompt_demand, read

from gnomon.config import to_toml
from gnomon.plan import certainty
from gnomon.plan.calibration import DEFAULT, FOLDER, NOISE, FirstToken, Range, Record, band, fit, fit_logarithms, wider
from gnomon.plan.step import Coefficients, Demand, as_table, seconds, walls

TARGETS = {"another model": 0.25, "another configuration": 0.12}
COVERAGE = (0.75, 0.85)
SEEDS = (0, 1)
LOOSE = {"looseness": 1.0, "weight": 0.5}     # a group's own fit may leave the global one freely: it has rows of its own
FOLDS = 4
STACKS = ("sglang", "trtllm", "vllm")
CHANGES = {"concurrency": ("concurrency",), "ranks": ("tensor", "devices"), "device": ("device",), "formats": ("formats",),
           "lengths": ("prompt", "output")}
MEASURED = ("seconds_per_token", "seconds_to_first")
WAVES = 10      # these benchmarks send ten prompts per request in flight, the first of them all at once


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


def neighbours(sample: Sample) -> dict[str, Any]:
    """Pairs of rows that differ in one thing only, by what they differ in: row numbers [N, 2]."""
    found = {}
    for name, of in CHANGES.items():
        groups = by(sample, lambda row, of=of: tuple(str(getattr(row, f.name)) for f in fields(Row) if f.name not in (*of, *MEASURED)))
        pairs = []
        for places in groups.values():
            ordered = sorted(places, key=lambda i, of=of: [_order(getattr(sample.rows[i], part)) for part in of])
            pairs += [(a, b) for a, b in zip(ordered, ordered[1:])
                      if any(getattr(sample.rows[a], part) != getattr(sample.rows[b], part) for part in of)]
        found[name] = np.array(pairs, int).reshape(-1, 2)
    return found


def _order(value: Any) -> tuple[float, str]:
    return (float(value), "") if isinstance(value, int | float) else (0.0, str(value))


def changes(sample: Sample, missed: Any) -> dict[str, Any]:
    """Share of pairs whose measured ratio lies in the band of a turned knob, over all and by what was turned."""
    table = as_table(sample.fitted())
    base = np.log(seconds(sample.demand, table))
    slopes = [(np.log(seconds(sample.demand, {**table, name: table[name] * math.exp(certainty.SMALL)})) - base) / certainty.SMALL
              for name in table]
    width = math.log1p(band(list(missed)))
    inside, off = {}, []
    for name, pairs in neighbours(sample).items():
        a, b = pairs[:, 0], pairs[:, 1]
        apart = sum((slope[a] - slope[b]) ** 2 for slope in slopes)
        half = width * np.sqrt(certainty.ALIKE.get(name, certainty.ALIKE["other"]) ** 2 + certainty.APART**2 * apart)
        off.append(abs(missed[a] - missed[b]) / half)
        inside[name] = {"pairs": len(pairs), "coverage": float(np.mean(off[-1] <= 1))}
    every = np.concatenate(off)
    return {"pairs": len(every), "coverage": float(np.mean(every <= 1)), "by": inside}


def errors(misses: Iterable[float]) -> dict[str, float]:
    """Mean and median absolute relative error, and the median ratio of predicted over measured."""
    ratio = np.exp(np.asarray(list(misses)))
    return {"mape": float(np.mean(abs(ratio - 1))), "median": float(np.median(abs(ratio - 1))), "bias": float(np.median(ratio))}


def drift(sample: Sample) -> float:
    """Yearly rate at which fixed times shrank, from servers of one layout that were measured at several dates.

    Within each layout the misses of the global fit are set against time, weighted by the share of fixed times in the step, so that models
    and machines fall out. DeepSeek under TensorRT-LLM is left out: some of its rows draft tokens, and newer ones more often.
    """
    table = as_table(sample.fitted())
    fixed = walls(sample.demand, table)["latency"] + table["collective_seconds"] * sample.demand.hops
    misses, share = -sample.misses(sample.fitted()), fixed / seconds(sample.demand, table)
    when = np.array([int(row.date[:4]) + int(row.date[5:]) / 12 if row.date else math.nan for row in sample.rows])
    across, along = [], []
    layouts = by(sample, lambda row: (row.model, row.backend, row.device.name, row.formats, row.devices, row.tensor))
    for (model, backend, *_), places in layouts.items():
        dated = places[~np.isnan(when[places])]
        if (model, backend) == ("deepseek-v3", "trtllm") or not len(dated) or np.ptp(when[dated]) < 0.05:
            continue
        weighted = (when[dated] - when[dated].mean()) * share[dated]
        along.append(weighted - weighted.mean())
        across.append(misses[dated] - misses[dated].mean())
    x, y, slope = np.concatenate(along), np.concatenate(across), 0.0
    for _ in range(50):
        trust = 1 / np.sqrt(1 + ((y - slope * x) / NOISE) ** 2)
        slope = float(np.sum(trust * x * y) / np.sum(trust * x * x))
    return -slope


class Prompts:
    """Times to first tokens of a sample, given the coefficients that decode it."""

    def __init__(self, sample: Sample, coefficients: Coefficients) -> None:
        self.rows, self.table = sample.rows, as_table(coefficients)
        self.demand = columns([prompt_demand(row) for row in sample.rows])
        self.pace = seconds(sample.demand, self.table)
        self.queue = np.array([max(0.0, row.concurrency * row.tensor / row.devices - 1) for row in sample.rows]) / (2 * WAVES)
        self.stack = np.array([STACKS.index(row.backend) for row in sample.rows])
        self.measured = np.array([row.seconds_to_first for row in sample.rows])

    def predict(self, values: Any, chosen: Any) -> Any:
        """Seconds for rows; `values` are three stacks' fixed times, steps waited, and shares of peak and of the fabric."""
        part = Demand(**{f.name: getattr(self.demand, f.name)[chosen] for f in fields(Demand)})
        reading = seconds(part, {**self.table, "compute_efficiency": values[4], "link_efficiency": values[5]})
        return values[self.stack[chosen]] + values[3] * self.pace[chosen] + reading * (1 + self.queue[chosen])

    def fitted(self, chosen: Any) -> list[float]:
        """The six values that fit some rows."""
        expected = FirstToken()
        centre = [*[expected.base_seconds] * len(STACKS), expected.wait_steps, expected.compute_efficiency, expected.link_efficiency]
        return fit_logarithms(lambda values: self.predict(values, chosen), self.measured[chosen], centre, [1, 1, 1, 0.5, 0.3, 0.5],
                              most=[math.inf] * 4 + [1, 1])

    def misses(self, values: list[float], chosen: Any) -> Any:
        """Logarithms of predicted over measured."""
        return np.log(self.predict(np.array(values), chosen) / self.measured[chosen])


def other_prompts(sample: Sample) -> Any:
    """Misses of times to first tokens on each model from fits on the others."""
    missed = np.zeros(len(sample.rows))
    for places in by(sample, lambda row: row.model).values():
        known = rest(sample, places)
        prompts = Prompts(sample, sample.part(known).fitted())
        missed[places] = prompts.misses(prompts.fitted(known), places)
    return missed


def records(sample: Sample, missed: Any, first_missed: Any) -> dict[str, Record]:
    """The global fit as the planner's default record, and one per stack; bands within the range are those of unseen models."""
    every = sample.fitted()
    prompts = Prompts(sample, every)
    values, shrinking = prompts.fitted(np.arange(len(sample.rows))), drift(sample)
    found = {}
    for name in (DEFAULT, *STACKS):
        own = np.array([i for i, row in enumerate(sample.rows) if name in (DEFAULT, row.backend)], int)
        coefficients = every if name == DEFAULT else sample.part(own).fitted(prior=every, looseness=0.3)
        base = float(np.exp(np.mean(np.log(values[:3])))) if name == DEFAULT else values[STACKS.index(name)]
        spread, first = band(list(missed[own])), band(list(first_missed[own]))
        found[name] = Record(
            title="global fit over ten models" if name == DEFAULT else f"fit over the models measured under {name}",
            stack="any" if name == DEFAULT else name, rows=len(own), drift=round(shrinking, 2),
            date=sorted(row.date for row in sample.rows if row.date)[sum(bool(row.date) for row in sample.rows) // 2],
            devices=tuple(sorted({sample.rows[i].device.name for i in own})),
            source="aiconfigurator-core 0.12.0, systems/silicon_sample.csv (2025-07 to 2026-04); benchmarks/planner_silicon.py --write",
            spread=round(spread, 3), spread_beyond=wider(spread),
            range=Range(ranks=8, sequences=512, context=9216, active=5 * 10**9),
            coefficients=Coefficients(**{key: float(f"{value:.4g}") for key, value in as_table(coefficients).items()}),
            first_token=FirstToken(base_seconds=round(max(base, 1e-3), 4), wait_steps=round(values[3], 2), spread=round(first, 3),
                                   compute_efficiency=round(values[4], 3), link_efficiency=round(values[5], 3)))
    return found


def main() -> None:
    """Print both tables, save them, and with `--write` renew the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, help="a downloaded wheel of aiconfigurator-core 0.12.0")
    parser.add_argument("--write", action="store_true", help="renew the records")
    arguments = parser.parse_args()
    rows = read(arguments.package)
    sample = Sample(rows, columns([demand(row) for row in rows]), np.array([row.seconds_per_token for row in rows]))
    roofline = Sample(rows, plain(sample.demand), sample.measured)
    configurations = len({row.configuration for row in rows})
    print(f"{len(rows)} rows, {configurations} configurations")
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
    first_missed = other_prompts(sample)
    result["first token"] = errors(first_missed)
    print(f"{'first token':22s} MAPE {result['first token']['mape']:.1%}  median {result['first token']['median']:.1%} (no target)")
    result["a change"] = changes(sample, missed)
    print(f"{'a change':22s} {result['a change']['pairs']} pairs, 80 % bands hold {result['a change']['coverage']:.1%}: "
          + ", ".join(f"{name} {found['coverage']:.0%}" for name, found in result["a change"]["by"].items()))
    result["drift per year"] = drift(sample)
    print(f"fixed times shrank by {1 - math.exp(-result['drift per year']):.0%} a year")
    result["targets"] = {"mape": TARGETS, "coverage": COVERAGE, "met": met}
    save("planner_silicon", result)
    if arguments.write:
        FOLDER.mkdir(exist_ok=True)
        for name, found in records(sample, missed, first_missed).items():
            (FOLDER / f"{name}.toml").write_text(to_toml(found), encoding="utf-8")
            print(f"wrote {FOLDER / name}.toml")


if __name__ == "__main__":
    main()
