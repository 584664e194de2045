"""What the planner knows, as tables: devices, knobs, laws, calibration records; and a law that was fitted. `gnomon plan --list …`."""

from rich.table import Table

from gnomon.plan.calibration import record, record_names
from gnomon.plan.fit import Curve, Fit
from gnomon.plan.hardware import device, device_names
from gnomon.plan.knobs import KNOBS
from gnomon.plan.laws import LAWS
from gnomon.units import format_byte_rate, format_bytes, format_count, format_flops


def table(what: str) -> Table:
    """One of the lists: `hardware`, `knobs`, `laws` or `records`."""
    return {"hardware": _hardware, "knobs": _knobs, "laws": _laws, "records": _records}[what]()


def _hardware() -> Table:
    result = _titled("device", "memory", "bandwidth", "bf16", "fp8", "fp4", "joins", "$/h", "source, date")
    for name in device_names():
        found = device(name)
        rates = [f"{format_flops(found.flops[kind])}/s" if kind in found.flops else "" for kind in ("bf16", "fp8", "fp4")]
        price = "owned" if found.price_per_hour is None else "{:.2f} to {:.2f}".format(*found.price_per_hour[::2])
        marks = f" ? {', '.join((*found.placeholder, *found.verify))}" if found.placeholder or found.verify else ""
        result.add_row(name, format_bytes(found.memory_bytes), format_byte_rate(found.bandwidth), *rates, str(found.scale_up_size), price,
                       f"{found.source}, {found.date}{marks}")
    return result


def _knobs() -> Table:
    result = _titled("knob", "what it is", "changes", "notch", "costs", "for", "contested")
    for knob in KNOBS:
        result.add_row(knob.name, knob.title, knob.changes, knob.notch, knob.costs, ", ".join(knob.phases), knob.contested)
    return result


def _laws() -> Table:
    result = _titled("law", "gives", "formula", "fitted range", "source", "checked", "contested")
    for law in LAWS:
        valid = "; ".join(f"{name} {format_range(*ends)}" for name, ends in law.valid.items())
        result.add_row(law.name, law.gives, law.formula, valid, law.source, law.checked, law.contested)
    return result


def _records() -> Table:
    result = _titled("record", "title", "stack", "devices", "date", "rows", "band", "source")
    for name in record_names():
        found = record(name)
        result.add_row(name, found.title, found.stack, ", ".join(found.devices), found.date, f"{found.rows:,}",
                       f"x {1 + found.spread:.2f}, beyond x {1 + found.spread_beyond:.2f}", found.source)
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
