"""An answer for the terminal: short lines, each figure with its band and its badge; "no, because" with the nearest thing that works.

Read next: `page.py` for the same with pictures.
"""

import math
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gnomon.plan.answer import Answer
from gnomon.plan.effects import Effect, watched_metric
from gnomon.plan.outcome import Outcome
from gnomon.plan.quantity import Estimate, written
from gnomon.plan.solve import Refusal, Room
from gnomon.plan.step import WALLS, StepTime
from gnomon.plan.workload import Training
from gnomon.units import format_bytes, format_count

BADGE_STYLE = {"exact": "green", "validated": "cyan", "calibrated": "blue", "extrapolated": "yellow"}
SHOWN_GAINS, SHOWN_LOSSES = 8, 4
LEAST_WORTH = 5e-4
SMALLEST_CHANGE = 0.005  # below half a percent a knob is not listed
TITLES = {
    "speed": "speed of one user", "throughput": "tokens, all users", "first_token": "time to the first token",
    "cost": "cost per million tokens", "tasks_per_day": "tasks per day", "time": "time", "budget": "money in all", "loss": "expected loss",
    "bill": "money per hour", "tokens": "tokens", "devices": "devices", "step": "one optimiser step", "share_of_peak": "share of peak",
}
ORDER = ("tokens", "speed", "throughput", "first_token", "cost", "loss", "time", "budget", "tasks_per_day", "bill", "share_of_peak")
WORDS = {"free": "nothing", "retraining": "a new training", "money": "money", "another question": "another question"}


UNSAID = {
    "serve": (("cached_share", "nothing cached"), ("speculation", "no drafts")), "train": (),
    "rl": (("turns", "one turn"), ("sandbox_seconds", "no sandbox"), ("length_spread", "lengths spread log-normally by 0.6")),
}
"""Fields of the work that change answers a lot, and what their defaults mean."""


def show(answer: Answer, console: Console) -> None:
    """Print an answer."""
    console.print(*render(answer), sep="\n")


def render(answer: Answer) -> list[RenderableType]:
    """An answer as things to print."""
    best = answer.best
    parts: list[RenderableType] = [Text(headline(answer), style="bold")]
    said = assumptions(answer)
    if said:
        parts.append(Text(f"assumed: {', '.join(said)}", style="dim"))
    if best is None:
        return [*parts, "", *_refused(answer.plan.refusal, answer)]
    parts += [Text(f"plan: {describe(best)}"), "", figures(best), "", stops(answer)]
    if answer.plan.rooms:
        parts += ["", limits(answer.plan.rooms, answer)]
    listed = knob_rows(answer.effects)
    if listed:
        parts += ["", knob_table(listed, answer)]
    parts += ["", first_line(answer), Text(sureness(answer), style="dim")]
    return parts


def headline(answer: Answer) -> str:
    """What was asked, in one line."""
    question = answer.question
    device = question.device.title if question.devices is None else f"{question.devices} x {question.device.title}"
    name = question.name if question.model is not None else "any size of the family"
    return f"{question.phase} {name} on {device}: {goal_words(answer)}"


def assumptions(answer: Answer) -> list[str]:
    """What was taken where nothing was said: about the question, and about the plan that came out."""
    question, found = answer.question, list(answer.question.assumptions)
    work = answer.best.choice.work if answer.best is not None else None
    if isinstance(work, Training):
        for word, field in (("context", "context"), ("batch", "global_batch_tokens")):
            if field not in question.work:
                found.append(f"{word}={getattr(work, field)}")
        found += [f"{field}={getattr(work, field)}" for field in ("optimiser", "recompute") if field not in question.work]
    found += [words for field, words in UNSAID[question.phase] if field not in question.work]
    if question.phase == "serve" and not question.precision:
        found.append("formats as released")
    return found


def goal_words(answer: Answer) -> str:
    """What is pushed, and what must hold."""
    question, goal = answer.question, answer.question.goal.metric
    bounds = [f"{limit.metric.title} {'at least' if limit.metric.more_is_better else 'at most'} {written(limit.bound, limit.metric.unit)}"
              for limit in question.limits]
    return f"{'highest' if goal.more_is_better else 'lowest'} {goal.title}" + (f"; {', '.join(bounds)}" if bounds else "")


def describe(outcome: Outcome) -> str:
    """Model, machines, layout and formats of an outcome."""
    choice = outcome.choice
    precision = choice.precision
    model = f"{choice.name} ({format_count(outcome.total)} parameters, {format_count(outcome.active)} active)"
    formats = f"experts {precision.experts}, rest {precision.rest}" if choice.model.moe is not None else f"weights {precision.rest}"
    cache = f", cache {precision.kv}" if choice.phase == "serve" else ""
    return f"{model} on {choice.cluster.name}, {choice.layout}, {formats}{cache}"


def figures(outcome: Outcome) -> Table:
    """The figures of an outcome: value, 80 % band, badge."""
    table = _plain("", "", "80 % band", "")
    for name in ORDER:
        if name in outcome.metrics:
            table.add_row(TITLES[name], *_cells(outcome.metrics[name]))
    table.add_row("memory of the fullest device", f"{format_bytes(outcome.memory.value)} of {format_bytes(outcome.usable_bytes)}", "",
                  _badge(outcome.memory))
    return table


def stops(answer: Answer) -> Group:
    """Which wall each kind of step waits for, with its shares."""
    best = answer.best
    assert best is not None
    lines = [Text("what stops you", style="bold")]
    for name, step in best.steps.items():
        lines.append(Text.assemble(f"  {name}: ", (step.wall, "bold"), f" ({_shares(step)}), {written(step.total.value, 's')} a step"))
    if best.phases:
        whole = sum(phase.value for phase in best.phases.values())
        shares = ", ".join(f"{name} {phase.value / whole:.0%}" for name, phase in sorted(best.phases.items(), key=lambda i: -i[1].value))
        lines.append(Text.assemble("  iteration: ", (max(best.phases, key=lambda name: best.phases[name].value), "bold"), f" ({shares})"))
    gains = ", ".join(f"{name} by {worth.share:.1%} ({ends(worth.low, worth.high)})"
                      for name, worth in answer.hardware_worth.items() if worth.share >= LEAST_WORTH)
    if gains:
        lines.append(Text(f"  a tenth more of the device's betters {watched_metric(answer.question).name}: {gains}"))
    lines += [Text(f"  {note}") for note in best.notes]
    binding = answer.plan.binding
    if binding is not None:
        found = binding.limit.metric
        lines.append(Text.assemble("  limit: ", (found.name, "bold"), f" at {written(binding.value, found.unit)}"))
    return Group(*lines)


def _shares(step: StepTime) -> str:
    parts = sorted(((getattr(step, wall).value, wall) for wall in WALLS), reverse=True)
    total = sum(value for value, _ in parts)
    return ", ".join(f"{wall} {value / total:.0%}" for value, wall in parts if value >= 0.005 * total)


def limits(rooms: Iterable[Room], answer: Answer) -> Table:
    """Limits with what is reached, the room that is left, and what a little more of each buys."""
    goal = answer.question.goal.metric
    table = _plain("limit", "bound", "reached", "room", f"one more buys ({goal.name})")
    for room in rooms:
        unit = room.limit.metric.unit
        buys = "nothing"
        if room.binds:
            per, name = (3600, "h") if unit == "s" else (1, unit or "device")
            band = "" if room.price_band is None else f" ({per * room.price_band[0]:.2g} to {per * room.price_band[1]:.2g})"
            buys = f"{room.price * per:.3g}{band} {goal.unit} per {name}"
        elif room.next_bound is not None:
            buys = f"nothing until {written(room.next_bound, unit)}, then {written(room.next_gain, goal.unit)} better"
        table.add_row(room.limit.metric.name, written(room.limit.bound, unit), written(room.value, unit), f"{abs(room.slack):.0%}", buys)
    return table


def knob_rows(effects: Iterable[Effect]) -> list[Effect]:
    """The notches worth listing: the largest gains, then the largest losses."""
    moved = [e for e in effects if e.change is not None and abs(e.change) >= SMALLEST_CHANGE]
    gains = sorted((e for e in moved if (e.change or 0) > 0), key=lambda e: -(e.change or 0))[:SHOWN_GAINS]
    losses = sorted((e for e in moved if (e.change or 0) < 0), key=lambda e: e.change or 0)[:SHOWN_LOSSES]
    return [*gains, *losses]


def knob_table(effects: Iterable[Effect], answer: Answer) -> Table:
    """What a notch of each knob does to the goal, the bill, the memory and the expected quality."""
    table = _plain("knob", "notch", f"{watched_metric(answer.question).name} better by", "$/h", "memory", "quality", "costs")
    for effect in effects:
        style = "green" if effect.counts else "red" if (effect.change or 0) < 0 else ""
        contested = " ?" if effect.knob.contested else ""
        table.add_row(
            effect.knob.name + contested, f"{effect.before} → {effect.after}",
            Text(f"{effect.change:+.1%}{change_band(effect)}", style=style, no_wrap=True),
            f"{effect.bill_change:+.2f}" if effect.bill_change else "", _signed_bytes(effect.memory_change),
            f"x {effect.quality.value:.2f}" if effect.quality else "",
            WORDS[effect.knob.costs] + ("" if effect.keeps_limits else "; breaks a limit"))
    return table


def change_band(effect: Effect) -> str:
    """The band of a change, in percent and in brackets; nothing where it has none or is exact."""
    if effect.band is None or effect.band[0] == effect.band[1]:
        return ""
    return f" ({ends(*effect.band)})"


def ends(low: float, high: float) -> str:
    """Two shares in percent, without the sign: `+9 to +49`; with a decimal where they are small."""
    digits = 0 if max(abs(low), abs(high)) >= 0.1 else 1
    return " to ".join("any" if math.isinf(share) else f"{100 * share:+.{digits}f}" for share in (low, high))


def first_line(answer: Answer) -> Text:
    """The knob to turn first, in a sentence."""
    first = answer.first
    goal = watched_metric(answer.question)
    if first is None:
        return Text.assemble(("turn first: ", "bold"), "no single knob gains 3 % within the limits")
    worth = f"{(first.change or 0) * (1 if goal.more_is_better else -1):+.0%} {goal.title}"
    worth += change_band(first).replace("(", "(better by ").replace(")", " %)")
    paid = f"costs {WORDS[first.knob.costs]}"
    if first.knob.costs == "money" and first.bill_change:
        paid = f"{'+' if first.bill_change > 0 else '-'}${abs(first.bill_change):,.2f} per hour"
    doubt = f" (contested: {first.knob.contested})" if first.knob.contested else ""
    return Text.assemble(("turn first: ", "bold"), (f"{first.knob.name} {first.before} → {first.after}", "bold green"),
                         f": {worth}, {paid}{doubt}")


def sureness(answer: Answer) -> str:
    """What the figures rest on."""
    record = answer.record
    asked = f"{len(answer.plan.weighed):,} choices weighed in {answer.seconds:.2f} s"
    return (f"record: {record.title}, {record.date}; {asked}; bands hold 80 %; `?` marks knobs whose effect on quality "
            "is contested")


def _refused(refusal: Refusal | None, answer: Answer) -> list[RenderableType]:
    assert refusal is not None
    lines: list[RenderableType] = [Text.assemble(("no, because ", "bold red"), refusal.because)]
    nearest = refusal.nearest
    if nearest is not None and nearest.metrics:
        lines += [Text(f"nearest: {describe(nearest)}"), figures(nearest)]
    elif nearest is not None:
        lines.append(Text(f"nearest: {describe(nearest)}"))
    if refusal.remedies:
        lines.append(Text("what would do:", style="bold"))
        lines += [Text(f"  {remedy}") for remedy in refusal.remedies]
    else:
        lines.append(Text("no number of these devices up to sixteen times as many does it either"))
    lines.append(Text(sureness(answer), style="dim"))
    return lines


def _plain(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if name and index in (1, 2) and columns[0] == "" else "left", no_wrap=index == 0)
    return table


def _cells(estimate: Estimate) -> tuple[str, str, Text]:
    value = format_count(estimate.value) if estimate.unit == "token" else written(estimate.value, estimate.unit)
    return value, band_words(estimate), _badge(estimate)


def band_words(estimate: Estimate) -> str:
    """The ends of the 80 % band, with a unit only where it scales with the number; nothing for exact figures."""
    if estimate.low == estimate.high:
        return ""
    unit = estimate.unit if estimate.unit.partition("/")[0] in ("B", "s", "$", "FLOP") else ""
    return f"{written(estimate.low, unit)} to {written(estimate.high, unit)}"


def _badge(estimate: Estimate) -> Text:
    return Text(estimate.badge, style=BADGE_STYLE[estimate.badge])


def _signed_bytes(change: float) -> str:
    return "" if abs(change) < 1e6 else ("+" if change > 0 else "-") + format_bytes(abs(change))
