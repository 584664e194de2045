"""What the planner knows, as tables: devices, knobs, laws, calibration records; and a law that was fitted. `gnomon plan --list …`."""

from collections.abc import Iterable, Mapping

from rich.console import Group, RenderableType
from rich.table import Table

from gnomon.plan.calibration import record, record_names
from gnomon.plan.fit import Curve, Fit
from gnomon.plan.hardware import device, device_names
from gnomon.plan.knobs import KNOBS
from gnomon.plan.laws import LAWS
from gnomon.units import format_byte_rate, format_count


def table(what: str) -> RenderableType:
    """One of the lists: `hardware`, `knobs`, `laws` or `records`; figures in columns, and long texts below each other."""
    return {"hardware": _hardware, "knobs": _knobs, "laws": _laws, "records": _records}[what]()


def _hardware() -> RenderableType:
    result = _titled("device", "memory", "reads", "bf16", "fp8", "fp4", "joins", "$/h")
    result.caption, result.caption_justify = "bf16, fp8, fp4: dense TFLOP/s; joins: devices of one domain", "left"
    sources = []
    for name in device_names():
        found = device(name)
        rates = [f"{found.flops[kind] / 1e12:,.5g}" if kind in found.flops else "" for kind in ("bf16", "fp8", "fp4")]
        price = "owned" if found.price_per_hour is None else "{:.2f} to {:.2f}".format(*found.price_per_hour[::2])
        unsure = ", ".join((*found.placeholder, *found.verify))
        result.add_row(name, f"{found.memory_bytes / 2**30:.0f} GiB", format_byte_rate(found.bandwidth), *rates, str(found.scale_up_size),
                       price)
        sources.append((name, {"source": f"{found.source}, {found.date}", "unsure": unsure}))
    return Group(result, "", _entries(sources))


def _knobs() -> RenderableType:
    result = _titled("knob", "what it is", "notch", "costs", "for")
    result.columns[0].no_wrap = True
    for knob in KNOBS:
        result.add_row(knob.name, knob.title, knob.notch, knob.costs, "all" if len(knob.phases) == 3 else ", ".join(knob.phases))
    return Group(result, "", _entries([(knob.name, {"contested": knob.contested}) for knob in KNOBS if knob.contested]))


def _laws() -> RenderableType:
    return _entries([(law.name, {
        "gives": law.gives, "formula": law.formula, "fitted on": "; ".join(f"{n} {format_range(*ends)}" for n, ends in law.valid.items()),
        "source": law.source, "checked": law.checked, "contested": law.contested}) for law in LAWS])


def _records() -> RenderableType:
    known = [(name, record(name)) for name in record_names()]
    return _entries([(name, {
        "title": found.title, "stack": found.stack, "devices": ", ".join(found.devices), "rows": f"{found.rows:,}, {found.date}",
        "band": f"x {1 + found.spread:.2f}, beyond what was measured x {1 + found.spread_beyond:.2f}", "source": found.source})
        for name, found in known])


def _entries(items: Iterable[tuple[str, Mapping[str, str]]]) -> Table:
    """Things with named texts, one text a line; empty ones are left out."""
    result = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(2):
        result.add_column(no_wrap=True)
    result.add_column(overflow="fold")
    for name, texts in items:
        for index, (field, text) in enumerate((field, text) for field, text in texts.items() if text):
            result.add_row("" if index else name, field, text)
    return result


def format_range(low: float, high: float) -> str:
    """`0.02 to 1`, `129M to 3.7B`, `1e+18 to 1e+22`."""
    def one(value: float) -> str:
        return f"{value:g}" if value < 1e3 or value >= 1e16 else format_count(value)
    return f"{one(low)} to {one(high)}"


def fit_table(found: Fit) -> Table:
    """A fitted loss law: each coefficient with its bootstrap interval, what was borrowed, and how far single runs miss it."""
    result = _titled("loss = E + A / active^alpha + B / tokens^beta", "value", "80 % interval", "")
    for name, value in found.coefficients.items():
        if name in ("A", "alpha") and not found.coefficients["A"] or name in ("B", "beta") and not found.coefficients["B"]:
            continue
        low, high = found.intervals[name]
        borrowed = "borrowed from the published dense law" if name in found.borrowed else "from your runs"
        result.add_row(name, f"{value:.4g}", f"{low:.4g} to {high:.4g}", borrowed)
    result.add_row("a run misses it by", f"{found.residual:.3g} nat", "", f"{len(found.runs)} runs, 80 %")
    return result


def curve_table(found: Curve) -> Table:
    """A fitted curve: the table's points beside it, and three points further out."""
    formula = f"{found.y} = {found.level:.4g} {found.reach:+.4g} / {found.x}^{found.exponent:.3g}"
    result = _titled(found.x, f"{found.y}, measured", formula, "band", "")
    measured = dict(found.points)
    last = max(measured)
    for x in (*sorted(measured), 2 * last, 4 * last, 8 * last):
        estimate = found.at(x)
        seen = f"{measured[x]:.4g}" if x in measured else ""
        result.add_row(f"{x:g}", seen, f"{estimate.value:.4g}", f"{estimate.low:.4g} to {estimate.high:.4g}", estimate.badge)
    return result


def _titled(*columns: str) -> Table:
    result = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        result.add_column(name, overflow="fold")
    return result
