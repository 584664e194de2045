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
    """The rows for a terminal."""
    rows, result = list(found), Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    timed = any(item.speed is not None or item.because for item in rows)
    for name in ("model", "context", "parameters", "active", "cache", "state", "cache moved", "GFLOP", *(
            ("fit", "token/s, one user", "80 % band", "") if timed else ())):
        result.add_column(name, overflow="fold", justify="left" if name == "model" else "right")
    for item in rows:
        row = item.row
        cells = [row.name, f"{row.context:,}", format_count(row.total), format_count(row.active), format_bytes(row.kv_bytes),
                 format_bytes(row.state_bytes), format_bytes(row.cache_traffic), f"{row.flops / 1e9:,.0f}"]
        if item.speed is not None:
            speed = item.speed
            cells += [f"{item.fit:,}", f"{speed.value:.1f}", f"{speed.low:.1f} to {speed.high:.1f}", speed.badge]
        elif timed:
            cells += ["no", "", item.because, ""]
        result.add_row(*cells)
    return result
