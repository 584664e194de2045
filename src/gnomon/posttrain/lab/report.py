"""The lab's report: `report.json` for programs, `report.html` and figures for people, over all seeds that have begun.

A number that was promised and not reached stands there as missed. Read next: `findings.py`, `drawn.py`.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gnomon import whole
from gnomon.errors import ConfigError
from gnomon.posttrain.lab import drawn
from gnomon.posttrain.lab.findings import Findings, every
from gnomon.posttrain.lab.recipe import LabRecipe
from gnomon.train.canvas import PAGE, card, tile
from gnomon.units import format_bytes, format_count, format_seconds


def write(recipe: LabRecipe) -> Path:
    """Write the report of what there is so far; returns the page's path. Raises `ConfigError` where there is nothing."""
    begun = sorted((int(path.name.removeprefix("seed-")), path) for path in recipe.run.glob("seed-*") if path.name[5:].isdigit())
    if not begun:
        raise ConfigError(f"'run' is '{recipe.run}', where no seed has begun; name the folder of a run of the lab, or start one")
    found = every(recipe, begun)
    table = {"tasks": recipe.tasks, "seeds": [each.to_json() for each in found]}
    whole.write(recipe.run / "report.json", json.dumps(table, indent=1))
    pictures = drawn.figures(recipe, found)
    for name, (_, picture) in pictures.items():
        whole.write(recipe.run / f"{name}.png", picture)
    whole.write(recipe.run / "report.html", page(recipe, found, {name: text for name, (text, _) in pictures.items()}))
    return recipe.run / "report.html"


def page(recipe: LabRecipe, found: Sequence[Findings], pictures: dict[str, str]) -> str:
    """The page; `pictures` are inline SVG by name."""
    claims = [claim for each in found for claim in each.claims]
    judged = [claim for claim in claims if claim.met is not None]
    missed = sum(claim.met is False for claim in judged)
    cpu = sum(row["cpu_seconds"] for each in found for row in each.costs())
    tiles = "".join(tile(name, value) for name, value in (
        ("seeds", ", ".join(str(each.seed) for each in found)), ("parameters", format_count(recipe.model.num_parameters())),
        ("promised numbers reached", f"{len(judged) - missed} of {len(judged)}"), ("processor time", format_seconds(cpu))))
    parts = [card("Promised and found", "Each number that was promised, for each seed; what is not reached is said to be missed. Intervals "
                  "are over the problems of one seed: what training with other draws would give, only other seeds tell.",
                  "".join(_claims(each) for each in found), wide=True)]
    for name, title, text in drawn.TITLES:
        if name in pictures:
            parts.append(card(title, text, pictures[name], wide=True))
    for each in found:
        for title, text, body, wide in (
            ("Cells", "Score: right and within the budget, with its 95 % interval. Tokens: the mean that counts.", _cells(each), True),
            ("One model for all cells", "Mean score over cells. Compute: tokens of a forward pass; the trainer's count three times, "
             "teachers' once; the student's is without its experts'.", _seesaw(each), True),
            ("Cost", "Processor seconds depend little on what else the machine does; wall seconds do.", _costs(each), False),
            ("Quantisation", "The last phase of the cold start, trained three ways; each result served as trained, in MXFP4 and in two "
             "bits.", _quantisation(each), False),
            ("Warnings", "Steps at which a run was warned about: collapse, panic, a gap to the sampler.", _alarms(each), False),
        ):
            parts.append(card(f"{title}, seed {each.seed}", text, body, wide=wide))
    return PAGE.format(title="Post-training in miniature", subtitle=html.escape(
        f"{recipe.tasks}: {len(recipe.domains)} domains × 3 efforts, experts, one student, the file that is served"),
        tiles=tiles, cards="".join(parts))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(each)}</th>" for each in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(each)}</td>" for each in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>" if rows else "<p>Not done yet.</p>"


def _claims(found: Findings) -> str:
    words = {True: "reached", False: "missed", None: ""}
    rows = [(each.what, each.asked, each.found, words[each.met]) for each in found.claims]
    return _table((f"seed {found.seed}", "promised", "found", ""), rows)


def _cells(found: Findings) -> str:
    rows, divergences = [], found.done.get("student", {}).get("divergences", {})
    matrix = found.matrix
    for cell in found.cells:
        shown = ["/".join(cell)]
        for name in ("gate", "teacher", "student", "export"):
            each = found.scores(name, cell)
            low, high = each.interval() if each else (0.0, 0.0)
            shown += [f"{each.score:.2f} ({low:.2f}–{high:.2f})", f"{each.accuracy:.2f}", f"{each.tokens:.1f}"] if each else ["", "", ""]
        expert = found.scores("teacher", cell)
        ratio = matrix.get(cell)
        shown += [f"{expert.in_budget:.2f}" if expert else "", f"{ratio[0]:.0%} ({ratio[1]:.0%}–{ratio[2]:.0%})" if ratio else "",
                  f"{divergences['/'.join(cell)]:.3f}" if "/".join(cell) in divergences else ""]
        rows.append(shown)
    names = [f"{who}: {what}" for who in ("cold", "expert", "student", "file") for what in ("score", "right", "tokens")]
    return _table(("cell", *names, "expert in budget", "student ÷ expert", "divergence"), rows)


def _seesaw(found: Findings) -> str:
    rows = []
    for row in found.seesaw:
        share, work = row["share"], row["work"]
        rows.append((row["name"], f"{row['mean']:.3f} ({row['interval'][0]:.3f}–{row['interval'][1]:.3f})",
                     f"{share[0]:.0%} ({share[1]:.0%}–{share[2]:.0%})" if share else "", format_count(work) if work else "",
                     f"{row['compute']:.0%}" if row["compute"] is not None else "",
                     format_seconds(row["cpu_seconds"]) if row["cpu_seconds"] else "", _said(row["alarms"])))
    return _table(("model", "mean score", "of the teachers'", "compute", "of experts and student", "processor time", "warnings"), rows)


def _costs(found: Findings) -> str:
    rows = [(row["stage"], str(row["jobs"]), format_seconds(row["cpu_seconds"]), format_seconds(row["wall_seconds"]),
             format_count(row["tokens"]), format_bytes(row["peak_bytes"])) for row in found.costs()]
    return _table(("stage", "jobs", "processor", "wall, added up", "tokens", "memory of a process"), rows)


def _quantisation(found: Findings) -> str:
    rows = []
    for row in found.done.get("quantisation", {}).get("rows", []):
        cells: dict[str, Any] = row["cells"]
        rows.append((row["trained"], row["served"], f"{row['loss']:.4f}", *(
            f"{each['accuracy']:.2f} ({each['accuracy_interval'][0]:.2f}–{each['accuracy_interval'][1]:.2f})" for each in cells.values())))
    return _table(("trained in", "served in", "held-out loss", *(each.name for each in found.recipe.domains)), rows)


def _said(alarms: dict[str, int]) -> str:
    return ", ".join(f"{name} {steps} steps" for name, steps in alarms.items())


def _alarms(found: Findings) -> str:
    rows = [(name, _said(alarms)) for name, alarms in found.alarms().items()]
    return _table(("run", "warned about"), rows) if rows else "<p>None.</p>"
