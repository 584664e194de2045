"""An answer as a page that needs no other file: figures, roofline, map of walls, knobs, cost against speed, and what they rest on."""

import html
from pathlib import Path

from rich.table import Table
from rich.text import Text

from gnomon import whole
from gnomon.plan import curves, pictures
from gnomon.plan.answer import Answer
from gnomon.plan.effects import watched_metric
from gnomon.plan.outcome import Outcome
from gnomon.plan.quantity import Estimate, written
from gnomon.plan.report import (
    ORDER,
    TITLES,
    assumptions,
    band_words,
    describe,
    first_line,
    headline,
    knob_rows,
    knob_table,
    limits,
    stops,
    sureness,
)
from gnomon.plan.step import WALLS
from gnomon.train.canvas import PAGE, card, tile

TILES = 6


def write(answer: Answer, path: Path) -> Path:
    """Write the page; returns its path."""
    said = assumptions(answer)
    subtitle = (describe(answer.best) if answer.best else "not possible as asked") + (f" · assumed: {', '.join(said)}" if said else "")
    tiles = "".join(_tiles(answer.best)) if answer.best else ""
    page = PAGE.format(title=html.escape(headline(answer)), subtitle=html.escape(subtitle), tiles=tiles, cards="".join(_cards(answer)))
    path.parent.mkdir(parents=True, exist_ok=True)
    whole.write(path, page)
    return path


def _tiles(best: Outcome) -> list[str]:
    shown = [name for name in ORDER if name in best.metrics][:TILES]
    return [tile(TITLES[name], _short(best.metrics[name])) for name in shown]


def _cards(answer: Answer) -> list[str]:
    if answer.best is None:
        return [_refusal_card(answer), _sources_card(answer)]
    best, device = answer.best, answer.best.choice.cluster.device
    cards = [
        card("What stops you", first_line(answer).plain, _stops(answer)),
        card("Figures", "Value, 80 % band, and how it is known.", _figures(best)),
    ]
    marks = curves.marks(answer)
    if device.flops:
        text = f"One {device.title}. Points below a roof are held back by fixed times, messages, or rates that are not reached."
        cards.append(card("Roofline", text, pictures.roofline(dict(device.flops), device.bandwidth, marks)))
    found = curves.walls(answer)
    text = f"Layout {best.choice.layout}; the diamond is the plan. Grey: does not fit, or the batch cannot fill the devices."
    cards.append(card("Which wall binds", text, pictures.wall_map(found.rows, found.x, found.y, found.here)))
    bars = _bars(answer)
    if bars:
        text = "One notch of each knob, all else as it is; what changes the machines gets the best layout for them. Lines: 80 % bands."
        cards.append(card("Knobs", text, pictures.tornado(bars, watched_metric(answer.question).title), wide=True))
        cards.append(card("Knobs in numbers", "", _html(knob_table(knob_rows(answer.effects), answer)), wide=True))
    points, chosen, titles = curves.front(answer)
    if points:
        text = "Each grey dot is a layout and a load; nothing beats the blue line in both. The diamond is the plan."
        cards.append(card("Cost against speed", text, pictures.front(points, chosen, titles), wide=True))
    return [*cards, _sources_card(answer)]


def _bars(answer: Answer) -> list[pictures.Bar]:
    pairs: dict[str, dict[bool, float | None]] = {}
    bands = {(effect.knob.name, effect.up): effect.band for effect in answer.effects}
    doubtful = {effect.knob.name for effect in answer.effects if effect.knob.contested}
    labels = {}
    for effect in answer.effects:
        pairs.setdefault(effect.knob.name, {})[effect.up] = effect.change
        labels[effect.knob.name] = f"{effect.knob.name} ({effect.before})"
    return [pictures.Bar(label=labels[name], down=pair.get(False), up=pair.get(True), contested=name in doubtful,
                         down_band=bands.get((name, False)), up_band=bands.get((name, True)))
            for name, pair in pairs.items() if any(abs(value or 0.0) >= 1e-3 for value in pair.values())]


def _figures(best: Outcome) -> str:
    rows = [(TITLES[name], best.metrics[name]) for name in ORDER if name in best.metrics]
    cells = "".join(f"<tr><td>{html.escape(title)}</td><td>{html.escape(_value(e))}</td><td>{html.escape(band_words(e))}</td>"
                    f"<td>{e.badge}</td></tr>" for title, e in rows)
    memory = f"{written(best.memory.value, 'B')} of {written(best.usable_bytes, 'B')}"
    cells += f"<tr><td>memory of the fullest device</td><td>{memory}</td><td></td><td>{best.memory.badge}</td></tr>"
    return f"<table><tr><th></th><th>value</th><th>80 % band</th><th></th></tr>{cells}</table>"


def _refusal_card(answer: Answer) -> str:
    refusal = answer.plan.refusal
    assert refusal is not None
    remedies = "".join(f"<li>{html.escape(remedy)}</li>" for remedy in refusal.remedies)
    body = f"<p>Nearest: {html.escape(describe(refusal.nearest))}</p>" if refusal.nearest else ""
    return card("No, because", refusal.because, body + (f"<p>What would do:</p><ul>{remedies}</ul>" if remedies else ""), wide=True)


def _sources_card(answer: Answer) -> str:
    record, device = answer.record, answer.question.device
    priced = f"; prices: {device.price_source}, {device.price_date}" if device.price_source else ""
    lines = [f"times: {record.title}, {record.date}, {record.rows:,} measurements; {record.source}",
             f"hardware: {device.source}, {device.date}{priced}"]
    doubtful = [f"{name} of {device.name} has not been checked twice" for name in (*device.placeholder, *device.verify)]
    return card("What this rests on", sureness(answer), "".join(f"<p>{html.escape(line)}</p>" for line in (*lines, *doubtful)), wide=True)


def _value(estimate: Estimate) -> str:
    return written(estimate.value, estimate.unit).replace(" token/s", " tok/s")


def _short(estimate: Estimate) -> str:
    """The value for a tile: without units that its name says already."""
    return written(estimate.value, "" if estimate.unit in ("token", "nat/token", "1/day") else estimate.unit).replace(" token/s", " tok/s")


def _stops(answer: Answer) -> str:
    best = answer.best
    assert best is not None
    steps = [(name, {wall: getattr(step, wall).value for wall in WALLS}) for name, step in best.steps.items()]
    if best.phases:
        steps = [("iteration", {name: phase.value for name, phase in best.phases.items()})]
    lines = [line.plain.strip() for line in stops(answer).renderables if isinstance(line, Text)][1:]
    said = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    rooms = _html(limits(answer.plan.rooms, answer)) if answer.plan.rooms else ""
    return pictures.shares(steps) + said + rooms


def _html(table: Table) -> str:
    """A table of the terminal as one of the page."""
    columns = [list(column.cells) for column in table.columns]
    head = "".join(f"<th>{html.escape(str(column.header))}</th>" for column in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in zip(*columns, strict=True))
    return f"<table><tr>{head}</tr>{rows}</table>"
