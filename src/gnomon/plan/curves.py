"""The numbers behind the pictures: where the work lands below the roofline, which wall binds where, and cost against speed.

Each costs many choices around a plan, so the page asks for them and the terminal does not. Read next: `pictures.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gnomon.errors import ConfigError
from gnomon.plan.answer import Answer, coster
from gnomon.plan.choice import Choice
from gnomon.plan.cost import decode, deployment
from gnomon.plan.knobs import with_devices
from gnomon.plan.outcome import Outcome
from gnomon.plan.pictures import Mark
from gnomon.plan.search import choices
from gnomon.plan.traffic import flops, traffic
from gnomon.plan.workload import RL, Serving, Training

CONCURRENCIES = tuple(2**n for n in range(11))
CONTEXTS = tuple(1024 * 2**n for n in range(11))
BATCHES = (1, 4, 16, 64, 256)
MOST_POINTS = 700  # choices of a front at most: a page takes seconds, not minutes


@dataclass(frozen=True, kw_only=True, slots=True)
class Map:
    """Walls over a grid: rows from the smallest `y`, and where the plan stands."""

    rows: list[list[str]]
    x: tuple[str, Sequence[float]]
    y: tuple[str, Sequence[float]]
    here: tuple[float, float]


def marks(answer: Answer) -> list[Mark]:
    """Decode steps of several batches (or the training step) as FLOPs per byte and FLOP/s of one device."""
    best = answer.best
    assert best is not None
    choice = best.choice
    plan = deployment(choice.model, choice.cluster, choice.layout, choice.precision, answer.record)
    if isinstance(choice.work, Training):
        step = best.steps["training"].total.value
        tokens = choice.work.global_batch_tokens / choice.layout.data
        done = 3 * sum(flops(choice.model, choice.layout, tokens=tokens, context=choice.work.context / 2).values()) / choice.layout.pipeline
        micro = choice.work.micro_batch * choice.work.context
        moved = 3 * traffic(choice.model, choice.precision, choice.layout, tokens=micro, sequences=1, context=0).bytes * tokens / micro
        return [Mark(label="training step", intensity=done / (moved / choice.layout.pipeline), rate=done / step)]
    context = _context(choice)
    found = []
    for batch in BATCHES:
        if plan.room.sequences(context) < batch:
            continue
        done = sum(flops(choice.model, choice.layout, tokens=batch, context=context, absorbed=True).values())
        moved = traffic(choice.model, choice.precision, choice.layout, tokens=batch, sequences=batch, context=context).bytes
        found.append(Mark(label=f"decode, {batch}", intensity=done / moved, rate=done / decode(plan, batch, context).total.value))
    return found


def walls(answer: Answer) -> Map:
    """Serving: the wall of a decode step by requests in flight and context. Training: that of a step by devices and batch."""
    best = answer.best
    assert best is not None
    choice = best.choice
    if isinstance(choice.work, Training):
        return _training_walls(answer, choice)
    plan = deployment(choice.model, choice.cluster, choice.layout, choice.precision, answer.record)
    rows = []
    for context in CONTEXTS:
        fits = plan.room.sequences(context)
        rows.append([decode(plan, n, context).wall if n <= fits else "capacity" for n in CONCURRENCIES])
    concurrency = choice.work.concurrency if isinstance(choice.work, (Serving, RL)) else 1
    here = (min(concurrency, CONCURRENCIES[-1]), min(max(_context(choice), CONTEXTS[0]), CONTEXTS[-1]))
    return Map(rows=rows, x=("requests in flight on one copy", CONCURRENCIES), y=("tokens of context", CONTEXTS), here=here)


def _training_walls(answer: Answer, choice: Choice) -> Map:
    cost = coster(answer.record)
    assert isinstance(choice.work, Training)
    copy = choice.layout.ranks // choice.layout.data
    devices = [copy * 2**n for n in range(11)]
    batches = [choice.work.context * 2**n for n in range(0, 15, 2)]
    rows = []
    for batch in batches:
        row = []
        for count in devices:
            try:
                there = with_devices(choice, count).changed("work", global_batch_tokens=batch)
                outcome = cost(there)
                row.append(outcome.steps["training"].wall if outcome.fits else "capacity")
            except ConfigError:  # more copies than sequences, or half a domain
                row.append("capacity")
        rows.append(row)
    here = (min(max(choice.cluster.count, devices[0]), devices[-1]), min(max(choice.work.global_batch_tokens, batches[0]), batches[-1]))
    return Map(rows=rows, x=("devices", devices), y=("tokens per optimiser step", batches), here=here)


def front(answer: Answer) -> tuple[list[tuple[float, float, str]], tuple[float, float] | None, tuple[str, str]]:
    """Points (cost, speed, label) of many plans, where the answer stands, and the titles of the axes.

    Serving: cost per million tokens (or seconds of a device, where there is no price) against the speed of one user, over requests in
    flight. Training: money (or device-hours) against one over time, over devices.
    """
    points: list[tuple[float, float, str]] = []
    best = answer.best
    assert best is not None
    for outcome in _around(answer, best):
        point = _point(outcome)
        if point is not None:
            points.append((*point, _label(outcome)))
    priced = best.choice.cluster.device.price_per_hour is not None
    serve = answer.question.phase == "serve"
    titles = (("$ per million tokens written" if priced else "device-seconds per thousand tokens") if serve
              else ("$ in all" if priced else "device-hours"), "token/s of one user" if serve else "runs per day")
    return points, _point(best), titles


def _around(answer: Answer, best: Outcome) -> Iterator[Outcome]:
    cost, question = coster(answer.record), replace(answer.question, layout={}, limits=())
    model, count = best.choice.model, best.choice.cluster.count
    if question.phase == "serve":
        variants = [(replace(question, work={**question.work, "concurrency": n}), count) for n in CONCURRENCIES]
    else:
        work = dict(question.work) if question.phase == "rl" else {**question.work, "tokens": int(best.metrics["tokens"].value)}
        sizes = sorted({max(1, int(count * factor)) for factor in (0.25, 0.5, 1, 2, 4, 8)})
        variants = [(replace(question, work=work), n) for n in sizes]
    tried: list[Choice] = []
    for asked, number in variants:
        try:
            tried += choices(asked, model, number)
        except ConfigError:
            continue
    for choice in tried[:: max(1, len(tried) // MOST_POINTS)]:
        outcome = cost(choice)
        if outcome.fits:
            yield outcome


def _point(outcome: Outcome) -> tuple[float, float] | None:
    metrics, devices = outcome.metrics, outcome.metrics["devices"].value
    if "speed" in metrics:
        paid = metrics["cost"].value if "cost" in metrics else 1000 * devices / metrics["throughput"].value
        return paid, metrics["speed"].value
    hours = metrics["time"].value / 3600
    return (metrics["budget"].value if "budget" in metrics else devices * hours), 24 / hours


def _label(outcome: Outcome) -> str:
    work, layout = outcome.choice.work, outcome.choice.layout
    if isinstance(work, Serving):
        return f"{work.users(layout.data)} at once, {layout}"
    return f"{outcome.choice.cluster.name}, {layout}"


def _context(choice: Choice) -> int:
    work = choice.work
    return work.mean_context if isinstance(work, Serving) else work.final_context if isinstance(work, RL) else 0
