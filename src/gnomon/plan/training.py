"""A training step: products at the share of peak that whole steps reach, messages where they no longer hide, bubble, optimiser.

The share comes from a record, one per arithmetic: published shares are of whole steps and count the model's FLOPs alone, so recomputation
is added and messages count only as far as they exceed the products they run beside. Read next: `rl.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gnomon.errors import CapacityError
from gnomon.plan.calibration import record as named_record
from gnomon.plan.cost import Deployment, message_seconds, price
from gnomon.plan.exchange import exchanges, optimiser_exchanges
from gnomon.plan.inventory import inventory
from gnomon.plan.learning import is_muon, training_bytes, training_traffic
from gnomon.plan.quantity import Badge, Estimate, banded
from gnomon.plan.step import as_table, smooth_maximum
from gnomon.plan.traffic import OVER_CONTEXT, flops
from gnomon.plan.workload import Training
from gnomon.units import format_bytes

BACKWARD = 2.0
"""Products of the backward pass for each of the forward pass."""

RECOMPUTED = {"none": 0.0, "selective": 0.05, "full": 1.0}
"""Forward passes that recomputation adds; selective repeats what is element-wise."""

STATE_BYTES = 24.0
"""Bytes that an update moves per value: weight, gradient and momentum in fp32, read and written."""

STATES_SHARE = 0.5
"""Share of the memory's rate at which a CPU updates: several passes over each value."""

NEWTON_SCHULZ_STEPS = 5
"""Iterations of Muon's orthogonalisation (report §2.5)."""

PER_HEAD = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj")
"""Projections whose heads Muon orthogonalises apart (report §2.5)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingDemand:
    """What a training step asks of one device: layer passes, and seconds at the data sheet's rates. Fields may be arrays."""

    layers: Any
    products: Any
    orthogonal: Any
    activations: Any
    attention: Any
    states: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingTime:
    """One optimiser step by what it waits for, and what follows for the whole run."""

    compute: Estimate
    communication: Estimate     # messages beside the products, hidden or not
    bubble: Estimate            # idle stages of a pipeline
    optimiser: Estimate
    step: Estimate              # s
    wall: str
    utilisation: float          # model FLOPs over peak
    tokens_per_second: Estimate
    tokens_per_second_per_device: Estimate
    steps: float
    total: Estimate             # s for all tokens
    cost: Estimate | None       # $
    bytes_per_device: float


def train(plan: Deployment, work: Training) -> TrainingTime:
    """Price a training; raises `CapacityError` where weights, optimiser and activations do not fit on a device."""
    layout, device = plan.layout, plan.cluster.device
    micro_batches = work.micro_batches(layout)
    memory = training_bytes(plan.config, plan.precision, layout, tokens=work.micro_batch * work.context, recompute=work.recompute,
                            micro_batches=micro_batches, optimiser=work.optimiser)
    held = memory.bytes - (1 - work.trainable_share) * memory.parts.get("optimiser", 0.0)
    if held > plan.room.usable:
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.parts.items())
        raise CapacityError(f"training takes {format_bytes(held)} on each device ({parts}), {device.title} has "
                            f"{format_bytes(plan.room.usable)} usable; raise 'zero', 'expert' or 'pipeline', "
                            "recompute more, or use more devices")
    if plan.record.training_step is not None and layout.ranks == 1:
        return _in_parts(plan, work, held)
    share, spread, badge, because = _share(plan)
    tokens = work.global_batch_tokens / layout.data
    useful = tokens * (1 + BACKWARD) * _seconds_per_token(plan, work.context)
    compute = useful * (1 + RECOMPUTED[work.recompute] / (1 + BACKWARD)) / share
    batch = exchanges(plan.config, plan.precision, layout, tokens=work.micro_batch * work.context)
    passes = (1 + BACKWARD + (1 if work.recompute == "full" else 0)) * micro_batches
    messages = passes * message_seconds(plan, batch) + message_seconds(plan, optimiser_exchanges(plan.config, layout))
    fixed = 3 * micro_batches * (plan.record.coefficients.layer_seconds * plan.config.num_hidden_layers
                                 + plan.record.coefficients.expert_layer_seconds * plan.config.num_moe_layers) / layout.pipeline
    idle = (layout.pipeline - 1) / micro_batches * compute
    optimiser = _optimiser_seconds(plan, work, share)
    beside = smooth_maximum(smooth_maximum(compute, messages), fixed)
    step = beside + idle + optimiser
    terms = {"compute": compute + idle, "communication": messages, "latency": fixed, "bandwidth": optimiser}

    def estimate(value: float, unit: str = "s") -> Estimate:
        return banded(value, unit, spread, badge, because)

    steps = math.ceil(work.tokens / work.global_batch_tokens)
    hourly, total = price(plan), estimate(steps * step)
    rate = estimate(work.global_batch_tokens / step, "token/s")
    return TrainingTime(
        compute=estimate(compute), communication=estimate(messages), bubble=estimate(idle), optimiser=estimate(optimiser),
        step=estimate(step), wall=max(terms, key=lambda name: terms[name]), utilisation=useful / step,
        tokens_per_second=rate, tokens_per_second_per_device=replace(rate / float(layout.ranks), unit="token/s"), steps=steps, total=total,
        cost=None if hourly is None else replace(hourly * (total / 3600.0), unit="$"), bytes_per_device=held)


def _share(plan: Deployment) -> tuple[float, float, Badge, str]:
    """The share of peak for the weights' arithmetic, its band, badge and reason; records without trainings lean on the default one."""
    record, wanted = plan.record, plan.precision.rest_arithmetic
    arithmetic = plan.cluster.device.computes_in(wanted)
    if not record.training:
        record = named_record("training")
    if arithmetic in record.training:
        return record.training[arithmetic], record.training_spread, "calibrated", f"record '{record.title}' of {record.date}"
    nearest = next(iter(record.training))
    return record.training[nearest], 2 * record.training_spread, "extrapolated", f"no training in {arithmetic} was measured, {nearest} was"


def _seconds_per_token(plan: Deployment, context: int) -> float:
    """Seconds at peak that one token's forward pass takes on a rank of each stage; a token sees half its context."""
    device, precision = plan.cluster.device, plan.precision
    parts = flops(plan.config, plan.layout, tokens=1, context=context / 2)
    over = sum(parts.get(part, 0.0) for part in (*OVER_CONTEXT, "depth"))
    routed = parts.get("routed", 0.0)
    rest = sum(parts.values()) - over - routed
    seconds = routed / device.peak(precision.expert_arithmetic) + rest / device.peak(precision.rest_arithmetic)
    return (seconds + over / device.peak("bf16")) / plan.layout.pipeline


def training_demand(plan: Deployment, work: Training) -> TrainingDemand:
    """The demand of an optimiser step on a single device."""
    config, device, precision = plan.config, plan.cluster.device, plan.precision
    peak, micro_batches = device.peak(precision.rest_arithmetic), work.micro_batches(plan.layout)
    parts = flops(config, tokens=work.global_batch_tokens, context=work.context / 2)
    over = sum(parts.get(part, 0.0) for part in (*OVER_CONTEXT, "depth"))
    forward = 1 + BACKWARD + RECOMPUTED[work.recompute]
    moved = training_traffic(config, precision, tokens=work.global_batch_tokens, context=work.context, recompute=work.recompute)
    values, orthogonal = _optimised(plan, work)
    return TrainingDemand(
        layers=config.num_hidden_layers * micro_batches, products=forward * (sum(parts.values()) - over) / peak,
        orthogonal=orthogonal / peak, activations=(moved.read["activations"] + moved.written["activations"]) / device.bandwidth,
        attention=forward * over / peak, states=STATE_BYTES * values / device.bandwidth)


def whole_step(demand: TrainingDemand, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of a step by part, given a `TrainingStep` as a table; numbers or arrays."""
    return {"latency": parts["layer_seconds"] * demand.layers,
            "compute": demand.products / parts["product_efficiency"] + demand.attention / parts["attention_efficiency"],
            "bandwidth": demand.activations / parts["activation_efficiency"],
            "optimiser": demand.orthogonal / parts["optimiser_efficiency"] + demand.states / STATES_SHARE}


def _in_parts(plan: Deployment, work: Training, held: float) -> TrainingTime:
    """A training on one device under a record that measured whole steps in parts."""
    record, demand = plan.record, training_demand(plan, work)
    found = whole_step(demand, as_table(record.training_step))
    step, nothing = sum(found.values()), banded(0.0, "s", record.training_spread, "calibrated")
    because = f"record '{record.title}' of {record.date}"

    def estimate(value: float, unit: str = "s") -> Estimate:
        return banded(value, unit, record.training_spread, "calibrated", because)

    steps, rate = math.ceil(work.tokens / work.global_batch_tokens), estimate(work.global_batch_tokens / step, "token/s")
    hourly, total = price(plan), estimate(steps * step)
    walls = {"latency": found["latency"], "compute": found["compute"] + found["optimiser"], "bandwidth": found["bandwidth"]}
    useful = (demand.products + demand.attention) / (1 + RECOMPUTED[work.recompute] / (1 + BACKWARD))
    return TrainingTime(
        compute=estimate(found["compute"]), communication=nothing, bubble=nothing, optimiser=estimate(found["optimiser"]),
        step=estimate(step), wall=max(walls, key=lambda name: walls[name]), utilisation=useful / step, tokens_per_second=rate,
        tokens_per_second_per_device=rate, steps=steps, total=total, bytes_per_device=held,
        cost=None if hourly is None else replace(hourly * (total / 3600.0), unit="$"))


def _optimised(plan: Deployment, work: Training) -> tuple[float, float]:
    """Values that a rank's optimiser updates, and FLOPs of Muon's orthogonalisation of them."""
    if work.optimiser == "none":
        return 0.0, 0.0
    values = products = 0.0
    for piece, count in inventory(plan.config).counted():
        held = piece.spec.elements * count / piece.shards(plan.layout) / plan.layout.pipeline * work.trainable_share
        values += held
        if work.optimiser == "muon" and is_muon(piece):
            rows, columns = piece.spec.shape
            if piece.spec.name.startswith(tuple(f"self_attn.{name}" for name in PER_HEAD)):
                rows = min(rows, _head_rows(plan, piece.part))
            short, long = sorted((rows, columns))
            products += held * NEWTON_SCHULZ_STEPS * (4 * short + 2 * short * short / long)
    return values, products


def _head_rows(plan: Deployment, kind: str) -> int:
    mixer = plan.config.mixers[kind]
    return getattr(mixer, "head_dim", None) or getattr(mixer, "qk_nope_head_dim", None) or plan.config.hidden_size


def _optimiser_seconds(plan: Deployment, work: Training, share: float) -> float:
    """Seconds to update on a rank: states read and written once, and Muon's orthogonalisation, both shared out with ZeRO."""
    copies = plan.layout.context * plan.layout.data if plan.layout.zero else 1
    values, products = _optimised(plan, work)
    return STATE_BYTES * values / copies / plan.cluster.device.bandwidth + products / copies / (plan.cluster.device.peak("bf16") * share)
