"""Architectures as rows of numbers: a model beside its own variants at equal cost per token, and beside published families as they are.

The model's variants take latent attention everywhere, or DeepSeek-V4's layers, with feed-forwards resized until as many parameters are
active. With a machine, each row also says how many sequences fit and how fast one user is served. `gnomon plan --compare`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.table import Table

from gnomon.errors import CapacityError, ConfigError
from gnomon.model.config import ModelConfig
from gnomon.plan.calibration import Record
from gnomon.plan.cost import decode_step
from gnomon.plan.families import Row, all_mla, at_equal_active, compare, families, layered_sparse, released
from gnomon.plan.footprint import capacity
from gnomon.plan.hardware import Cluster
from gnomon.plan.quantity import Estimate, exact
from gnomon.plan.workload import Layout
from gnomon.units import format_bytes, format_count

CONTEXTS = (8192, 131_072, 1_048_576)
"""Lengths at which architectures part company."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A row, and on a machine: sequences of that length that fit, and tokens per second of one user; `because` where it does not fit."""

    row: Row
    fit: int | None = None
    speed: Estimate | None = None
    because: str = ""


def beside(name: str, config: ModelConfig) -> dict[str, ModelConfig]:
    """The model, its variants at as many active parameters, and the published families."""
    active = config.activated_parameters()
    found = {name: config}
    for title, change in (("all-MLA", all_mla), ("layered sparse", layered_sparse)):
        try:
            found[f"{name}, {title}"] = at_equal_active(change(config), active)
        except ConfigError:
            continue  # no latent attention to take a shape from, or mixers that alone cost more
    return found | {item.name: item.config for item in families().values() if item.config != config}


def compared(models: Mapping[str, ModelConfig], cluster: Cluster | None = None, record: Record | None = None,
             contexts: Iterable[int] = CONTEXTS) -> list[Compared]:
    """One row per model and context, with speeds where a machine is given."""
    rows = compare(models, contexts)
    return [Compared(row=row) if cluster is None else _on(models[row.name], row, cluster, record) for row in rows]


def _on(config: ModelConfig, row: Row, cluster: Cluster, record: Record | None) -> Compared:
    precision = released(config)
    try:
        layout = _layout(config, cluster)
        room = capacity(config, precision, layout, cluster.device)
        fit = int(room.sequences(row.context) * layout.data)
        if fit < 1:
            raise CapacityError("weights do not fit" if not room.fits else "a sequence does not fit")
        step = decode_step(config, cluster, layout, precision, layout.data, row.context, record)
    except (CapacityError, ConfigError) as error:
        return Compared(row=row, because=str(error))
    return Compared(row=row, fit=fit, speed=exact(1.0, "token") / step.total)


def _layout(config: ModelConfig, cluster: Cluster) -> Layout:
    """As many tensor ranks of the machine as the heads allow, latents dealt among them."""
    sizes = [2**n for n in range(cluster.count.bit_length()) if cluster.count % 2**n == 0]
    for tensor in reversed(sizes):
        try:
            return Layout(tensor=tensor, kv_shards=tensor).check(config, cluster.count)
        except ConfigError:
            continue
    return Layout()


def comparison_table(found: Iterable[Compared]) -> Table:
    """The rows for a terminal: a model's name stands on its first row, `?` marks speeds beyond what was measured."""
    rows, result = list(found), Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    timed = any(item.speed is not None or item.because for item in rows)
    for name in ("model", "context", "total", "active", "cache", "state", "moved", "GFLOP", *(("fit", "token/s (80 %)") if timed else ())):
        result.add_column(name, overflow="fold", justify="left" if name == "model" else "right", no_wrap=name != "token/s (80 %)")
    last = ""
    for item in rows:
        row = item.row
        title = "" if row.name == last else f"  {row.name.partition(', ')[2]}" if ", " in row.name else row.name
        last = row.name
        cells = [title, _length(row.context), format_count(row.total), format_count(row.active), _short(row.kv_bytes),
                 _short(row.state_bytes), _short(row.cache_traffic), _plain(row.flops / 1e9)]
        if item.speed is not None:
            speed = item.speed
            mark = " ?" if speed.badge == "extrapolated" else ""
            cells += [f"{item.fit:,}", f"{_plain(speed.value)} ({_plain(speed.low)} to {_plain(speed.high)}){mark}"]
        elif timed:
            cells += ["0", item.because]
        result.add_row(*cells)
    return result


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _short(size: float) -> str:
    value, _, unit = format_bytes(size).partition(" ")
    return f"{float(value):.3g} {unit}" if float(value) < 1000 else f"{float(value):.0f} {unit}"


def _length(tokens: int) -> str:
    return f"{tokens // 2**20}M" if tokens % 2**20 == 0 else f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens:,}"
