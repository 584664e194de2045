"""What does the planner say of speeds, times and costs that others have published?

Three verdicts. *R* rows: the right side of a limit, and within 30 %. *C* rows with no measurement of K3 in use: the global record alone,
with fixed times moved to the row's date, and for trainings the share of peak of the *other* rows. *C* rows with one calibration record per
stack and fabric: records are fitted to the rows marked so, and judged on the rest of their groups. Rows that stand alone in their group
have nothing to be calibrated with and are left out there. X rows are printed and not judged.

`python benchmarks/planner_anchors.py [--write]`; `--write` renews the planner's K3 records.
"""

import argparse
import math
import re
from collections import defaultdict
from dataclasses import fields, replace
from statistics import geometric_mean, median
from typing import Any

import numpy as np
from anchor_rows import CHAT, EIGHT, FP8KV, K3, Anchor, anchors
from machine import save

from gnomon.config import to_toml
from gnomon.plan.calibration import DEFAULT, FOLDER, Range, Record, band, fit, record, wider
from gnomon.plan.cost import decode_demand, deployment
from gnomon.plan.hardware import Cluster
from gnomon.plan.step import Coefficients, Demand, as_table

TARGETS = {"R": 0.30, "C": 0.25, "calibrated": 0.12}
LOOSE = 0.7


def shares(rows: list[Anchor], base: Record) -> dict[str, dict[str, float]]:
    """The share of peak that each training row reached, by arithmetic: what was measured over what a share of 1 would give."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.group.startswith(("Megatron", "AutoModel")) and row.id.startswith("T"):
            arithmetic = "bf16" if "BF16" in row.what else "fp8"
            # predictions are proportional to the share
            found[arithmetic][row.what] = row.measured / row.predict(base) * base.training[arithmetic]
    return found


def uncalibrated(row: Anchor, base: Record, found: dict[str, dict[str, float]]) -> float:
    """The prediction from records that saw neither K3 nor this row."""
    others = {arithmetic: geometric_mean([share for what, share in rows.items() if what != row.what]) for arithmetic, rows in found.items()}
    return row.predict(replace(base.at(row.date), training=others))


def decode_rows(rows: list[Anchor], base: Record) -> tuple[list[Demand], list[float]]:
    """Demands and seconds of the decode steps that a group is calibrated with."""
    cluster = {"sglang NVLink": "b300:8", "Infera Infinity": "mi355x:8", "vllm NVLink": "gb300:8"}
    demands, measured = [], []
    for row in rows:
        if row.calibrates not in ("decode", "drafted"):
            continue
        plan = deployment(K3, Cluster.parse(cluster[row.group]), EIGHT, FP8KV, base)
        demand, factor = _step_of(row, plan)
        demands.append(demand)
        measured.append(row.measured / 1e3 if row.unit == "ms" else factor / row.measured)
    return demands, measured


def _step_of(row: Anchor, plan: Any) -> tuple[Demand, float]:
    if row.calibrates == "drafted":     # 7 drafts of which 4.73 tokens come; drafting takes 12 % of a step
        return decode_demand(plan, 1, 1536, 8.0), 4.73 / 1.12
    in_flight = int(re.search(r"(\d+) in flight", row.what)[1])
    if row.group == "Infera Infinity":
        return decode_demand(plan, in_flight, 1088, prompt_tokens=0 if "apart" in row.what else in_flight * 1024 / 128), 1.0
    return decode_demand(plan, in_flight, CHAT.mean_context, prompt_tokens=in_flight * CHAT.prompt / CHAT.output / 2), 1.0


def calibrated_record(group: str, rows: list[Anchor], base: Record) -> Record | None:
    """The record of a group from its marked rows; none where no row is marked."""
    marked = [row for row in rows if row.calibrates]
    if not marked:
        return None
    made = base
    demands, measured = decode_rows(rows, base)
    if demands:
        joined = Demand(**{f.name: np.array([getattr(d, f.name) for d in demands], float) for f in fields(Demand)})
        made = replace(made, coefficients=fit(joined, measured, prior=base.coefficients, looseness=LOOSE, weight=0.05))
    for row in marked:
        if row.calibrates == "collective":
            coefficients = made.coefficients
            made = replace(made, coefficients=replace(coefficients, collective_seconds=coefficients.collective_seconds
                                                      * row.measured / row.predict(made)))
        if row.calibrates == "first":
            made = _first(made, row)
        if row.calibrates == "training":
            arithmetic = "bf16" if "BF16" in row.what else "fp8"
            scale = geometric_mean([r.measured / r.predict(made) for r in marked])
            made = replace(made, training={**made.training, arithmetic: made.training[arithmetic] * scale})
            break
    return replace(made, title=f"K3 under {group}", stack=group.split(maxsplit=1)[0], fabric=group.split()[1])


def _first(made: Record, row: Anchor) -> Record:
    """The record with the shares that prefill reaches scaled so that its first token comes when it was measured."""
    low, high = 0.2, 5.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        first = made.first_token
        trial = replace(made, first_token=replace(first, compute_efficiency=first.compute_efficiency * middle,
                                                  link_efficiency=first.link_efficiency * middle))
        low, high = (middle, high) if row.predict(trial) > row.measured else (low, middle)
    return trial


def judged(rows: list[tuple[Anchor, float]], print_rows: bool = True) -> list[float]:
    """Print rows beside what was measured; returns the relative errors."""
    errors = []
    for row, predicted in rows:
        low, high = row.band or (row.measured, row.measured)
        errors.append(predicted / min(max(predicted, low), high) - 1)
        if print_rows:
            print(f"  {row.id:4s} {row.what[:58]:58s} {row.measured:11.4g} {predicted:11.4g} {row.unit:8s} {errors[-1]:+5.0%}"
                  + (f"  [{row.taken}]" if row.taken else ""))
    return errors


def written_records(made: dict[str, Record], misses: dict[str, list[float]], pooled: float) -> None:
    """Renew the K3 records; their bands lean on the misses of all calibrated groups."""
    names = {"sglang NVLink": ("sglang-k3", ("b300",), "sgl-project/sglang pull 37878 (0.5.18)"),
             "Infera Infinity": ("infera-k3", ("mi355x",), "AMD-AGI/Infera pull 74")}
    for group, (name, devices, source) in names.items():
        spread, first = max(0.05, band(misses[group], pooled)), made[group].first_token
        rounded = Coefficients(**{key: float(f"{value:.4g}") for key, value in as_table(made[group].coefficients).items()})
        found = replace(made[group], coefficients=rounded, devices=devices, date="2026-07", drift=0.0, training={},
                        source=f"{source}; benchmarks/planner_anchors.py --write", rows=3 if name == "sglang-k3" else 2,
                        first_token=replace(first, compute_efficiency=round(first.compute_efficiency, 3),
                                            link_efficiency=round(first.link_efficiency, 3)),
                        spread=round(spread, 3), spread_beyond=wider(spread),
                        range=Range(ranks=8, sequences=64, context=9216))
        (FOLDER / f"{name}.toml").write_text(to_toml(found), encoding="utf-8")
        print(f"wrote {FOLDER / name}.toml")


def main() -> None:
    """Print the three tables, save them, and with `--write` renew the K3 records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="renew the K3 records")
    arguments = parser.parse_args()
    base = replace(record(DEFAULT), training=record("training").training)
    rows = anchors()
    reached = shares(rows, base)
    plain = [(row, uncalibrated(row, base, reached)) for row in rows]
    result: dict[str, Any] = {"rows": {}}
    print("R rows: the right side, within 30 %")
    right = judged([pair for pair in plain if pair[0].test == "R"])
    print("C rows, no measurement of K3 in use")
    open_errors = judged([pair for pair in plain if pair[0].test == "C"])
    groups = defaultdict(list)
    for row in rows:
        if row.test == "C":
            groups[row.group].append(row)
    made = {group: calibrated_record(group, members, base.at(members[0].date)) for group, members in groups.items()}
    print("X rows: reported, not judged; what they leave open decides the figure")
    judged([pair for pair in plain if pair[0].test == "X"])
    checked = [(row, row.predict(found)) for group, found in made.items() if found is not None
               for row in groups[group] if not row.calibrates]
    print("C rows with one record per stack and fabric, rows it was not fitted to")
    closed = judged(checked)
    outside = [(row, predicted) for row, predicted in plain if row.test == "R" and abs(predicted / row.measured - 1) > TARGETS["R"]]
    result["R"] = {"rows": len(right), "within": len(right) - len(outside), "outside": [row.what for row, _ in outside]}
    result["C"] = {"rows": len(open_errors), "median": median(map(abs, open_errors)), "80 %": float(np.quantile(np.abs(open_errors), 0.8))}
    result["calibrated"] = {"rows": len(closed), "median": median(map(abs, closed)), "80 %": float(np.quantile(np.abs(closed), 0.8))}
    result["rows"] = [{"id": row.id, "what": row.what, "test": row.test, "measured": row.measured, "predicted": predicted, "unit": row.unit,
                       "taken": row.taken} for row, predicted in plain]
    result["calibrated rows"] = [{"id": row.id, "what": row.what, "group": row.group, "measured": row.measured, "predicted": predicted}
                                 for row, predicted in checked]
    result["targets"] = TARGETS
    print(f"R: {result['R']['within']} of {len(right)} within 30 %; C: median {result['C']['median']:.1%} (target {TARGETS['C']:.0%}); "
          f"calibrated: median {result['calibrated']['median']:.1%} on {len(closed)} rows (target {TARGETS['calibrated']:.0%})")
    save("planner_anchors", result)
    if arguments.write:
        misses = defaultdict(list)
        for row, predicted in checked:
            misses[row.group].append(math.log(predicted / row.measured))
        written_records({group: found for group, found in made.items() if found}, misses,
                        band([miss for found in misses.values() for miss in found]))


if __name__ == "__main__":
    main()
