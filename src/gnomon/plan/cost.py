"""Seconds of one step of a model on a cluster: decoding and prefill, with the wall that each waits for.

Exact arithmetic (`traffic.py`, `exchange.py`) divided by what the hardware's data sheet offers gives a `Demand`; a calibration record
turns that into time. A copy of the model is meant unless said otherwise: with `data` copies, `sequences` and `tokens` are those of one.
Read next: `serving.py`, `training.py`, `rl.py`.
"""

import math
from dataclasses import dataclass, replace

from gnomon.errors import CapacityError, ConfigError
from gnomon.model.config import ModelConfig
from gnomon.plan.calibration import Record, best_record, scaled
from gnomon.plan.exchange import Exchange, exchanges
from gnomon.plan.footprint import Room, capacity
from gnomon.plan.hardware import Cluster
from gnomon.plan.laws import sizes
from gnomon.plan.quantity import Badge, Estimate
from gnomon.plan.step import WALLS, Demand, StepTime, step_time
from gnomon.plan.traffic import OVER_CONTEXT, flops, tokens_of_group, touched_experts, traffic
from gnomon.plan.workload import Layout, Precision
from gnomon.units import format_bytes

NETWORK_HOPS = 2.0
"""A doubling of ranks over the network takes this many times as long as one within a domain, on top (10 µs: aiconfigurator's systems)."""

RINGS = ("PCIe", "Thunderbolt", "ConnectX", "Ethernet")
"""Fabrics without a switch that adds or repeats: collectives take one step per other rank."""

RING_STEP = 3 / 7
"""A ring of 8 takes as long as three doublings: where the two laws are set equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """A model laid out on a cluster under a calibration record; refuses what cannot be laid out so, and what does not fit."""

    config: ModelConfig
    cluster: Cluster
    layout: Layout
    precision: Precision
    record: Record

    def __post_init__(self) -> None:
        self.layout.check(self.config, self.cluster.count)

    @property
    def room(self) -> Room:
        """What fits beside the weights on a rank of each stage."""
        return capacity(self.config, self.precision, self.layout, self.cluster.device)

    def require_fit(self) -> Room:
        """The room, or `CapacityError` that says what is lacking and what would help."""
        room = self.room
        if not room.fits:
            held, lacking = max(room.weights), -min(room.left)
            raise CapacityError(
                f"weights take {format_bytes(held)} on each of {self.layout.ranks // self.layout.data} ranks ({self.layout}), "
                f"{self.cluster.device.title} has {format_bytes(room.usable)} usable: {format_bytes(lacking)} too much; "
                f"use more ranks per copy, narrower formats, or a device with more memory")
        return room


def deployment(config: ModelConfig, cluster: Cluster, layout: Layout, precision: Precision, record: Record | None = None) -> Deployment:
    """A deployment under a record, by default the best one for the device."""
    return Deployment(config=config, cluster=cluster, layout=layout, precision=precision, record=record or best_record(cluster.device))


def decode_step(config: ModelConfig, cluster: Cluster, layout: Layout, precision: Precision, sequences: float, context: float,
                record: Record | None = None) -> StepTime:
    """Time of one step that adds a token to each of `sequences` sequences of `context` tokens on every copy.

    With pipeline stages the sequences go round in as many groups, and the time is that of one group's way through all stages.
    """
    return decode(deployment(config, cluster, layout, precision, record), sequences, context)


def prefill(config: ModelConfig, cluster: Cluster, layout: Layout, precision: Precision, tokens: float, context: float = 0.0,
            record: Record | None = None) -> StepTime:
    """Time to read `tokens` new prompt tokens of one request that has `context` cached tokens before them."""
    return read_prompt(deployment(config, cluster, layout, precision, record), tokens, context)


def decode(plan: Deployment, sequences: float, context: float, tokens_each: float = 1.0, prompt_tokens: float = 0.0) -> StepTime:
    """Time of a decode step; `tokens_each` counts drafts too, `prompt_tokens` are those of other requests that the step reads besides."""
    if not sequences > 0 or context < 0:
        raise ConfigError(f"a step of {sequences} sequences with {context} tokens of context; both must be positive")
    demand = decode_demand(plan, sequences, context, tokens_each, prompt_tokens)
    spread, badge, because = trust(plan, sequences, context)
    drawing = plan.record.draw_seconds(plan.config.vocab_size)
    usual = plan.record.coefficients
    return step_time(demand, replace(usual, sequence_seconds=usual.sequence_seconds + drawing), spread, badge, because)


def trust(plan: Deployment, sequences: float, context: float) -> tuple[float, Badge, str]:
    """The band, badge and reason of a decode step under the deployment's record."""
    return plan.record.trust(plan.cluster.device, plan.layout.ranks, sequences * plan.layout.data, context, sizes(plan.config)[0])


def decode_demand(plan: Deployment, sequences: float, context: float, tokens_each: float = 1.0, prompt_tokens: float = 0.0) -> Demand:
    """What a decode step asks for on a rank."""
    config, layout, device = plan.config, plan.layout, plan.cluster.device
    group = max(1.0, sequences / layout.pipeline)       # each stage works on another group
    share = group / sequences
    tokens = group * tokens_each
    moved = traffic(config, plan.precision, layout, tokens=tokens, sequences=group, context=context)
    products, attention = _computed(plan, flops(config, layout, tokens=tokens, context=context, absorbed=True))
    reading = 0.0
    if prompt_tokens:
        reading = sum(_computed(plan, flops(config, layout, tokens=prompt_tokens * share, context=context / 2, logits=0)))
    hops, link = _messages(plan, exchanges(config, plan.precision, layout, tokens=tokens + prompt_tokens * share))
    return Demand(layers=config.num_hidden_layers, expert_layers=config.num_moe_layers, sequences=group, hops=hops, link=link,
                  weights=moved.weights / device.bandwidth, cache=moved.cache / device.bandwidth, products=products, attention=attention,
                  prefill=reading)


def read_prompt(plan: Deployment, tokens: float, context: float = 0.0, chunk: float = 8192.0) -> StepTime:
    """Time to read a prompt in chunks, each of which sees those before; pipeline stages work on several chunks at once."""
    if not tokens > 0:
        raise ConfigError(f"a prompt of {tokens} new tokens; it must be at least one")
    whole, rest = divmod(tokens, chunk)
    parts = [_chunk(plan, chunk, context + (whole - 1) * chunk / 2, int(whole))] if whole else []
    parts += [_chunk(plan, rest, context + whole * chunk, 1)] if rest else []
    chunks, stages = whole + (1 if rest else 0), plan.layout.pipeline
    factor = (chunks + stages - 1) / chunks / stages
    terms = {name: factor * sum((getattr(part, name) for part in parts[1:]), getattr(parts[0], name)) for name in (*WALLS, "total")}
    return StepTime(**terms, wall=max(WALLS, key=lambda name: terms[name].value))


def _chunk(plan: Deployment, tokens: float, before: float, times: int) -> StepTime:
    """Time of `times` chunks of `tokens` tokens, with `before` tokens seen by the first of each on average."""
    config, layout, device, record = plan.config, plan.layout, plan.cluster.device, plan.record
    context = before + tokens / 2
    moved = traffic(config, plan.precision, layout, tokens=tokens, sequences=1, context=before)
    products, attention = _computed(plan, flops(config, layout, tokens=tokens, context=context, logits=1))
    hops, link = _messages(plan, exchanges(config, plan.precision, layout, tokens=tokens))
    demand = Demand(layers=config.num_hidden_layers, expert_layers=config.num_moe_layers, sequences=1, hops=hops, link=link,
                    weights=moved.weights / device.bandwidth, cache=moved.cache / device.bandwidth, products=products + attention)
    first, usual = record.first_token, record.coefficients
    tuned = scaled(record, {"compute_efficiency": first.compute_efficiency / usual.compute_efficiency,
                            "link_efficiency": first.link_efficiency / usual.link_efficiency})
    spread, badge, because = record.trust(device, layout.ranks, 1, before + tokens, sizes(config)[0])
    found = step_time(demand, tuned.coefficients, max(spread, first.spread), badge, because)
    if times == 1:
        return found
    return StepTime(**{name: getattr(found, name) * float(times) for name in (*WALLS, "total")}, wall=found.wall)


def _computed(plan: Deployment, parts: dict[str, float]) -> tuple[float, float]:
    """Seconds at peak of products with weights, and of attention and recurrences."""
    device, precision = plan.cluster.device, plan.precision
    usual, experts = device.peak(precision.rest_arithmetic), device.peak(precision.expert_arithmetic)
    activations = device.peak("fp32" if precision.activations == "fp32" else "bf16")
    over = sum(parts.get(part, 0.0) for part in (*OVER_CONTEXT, "depth"))
    routed = parts.get("routed", 0.0)
    rest = sum(parts.values()) - over - routed
    return routed / experts + rest / usual, over / activations


def _messages(plan: Deployment, listed: list[Exchange]) -> tuple[float, float]:
    """Doublings of all collectives, and seconds of their bytes at the fabrics' rates."""
    found = [_message(plan.cluster, plan.layout, item) for item in listed]
    return sum(hops for hops, _ in found), sum(link for _, link in found)


def _message(cluster: Cluster, layout: Layout, item: Exchange) -> tuple[float, float]:
    device, inside = cluster.device, cluster.devices_per_domain
    span = {"tensor": layout.tensor, "kv": layout.tensor, "expert": layout.expert_shards, "context": layout.tensor * layout.context,
            "pipeline": layout.tensor * layout.context * layout.pipeline, "data": layout.ranks}[item.axis]
    hops, domains = item.calls * doublings(item.ranks, device.fabric), -(-span // inside)
    if domains == 1:
        return hops, item.sent_bytes / device.scale_up_bandwidth if device.scale_up_bandwidth else 0.0
    hops += item.calls * NETWORK_HOPS * math.log2(domains)
    # Sums go over the network once per domain's share; tokens for experts and stages go there whole.
    crossing = {"all-to-all": 1 - inside / span, "send": 1.0}.get(item.verb, 1 / min(inside, item.ranks))
    inner = (1 - crossing) * item.sent_bytes / device.scale_up_bandwidth if device.scale_up_bandwidth else 0.0
    return hops, inner + crossing * item.sent_bytes / device.scale_out_bandwidth


def doublings(ranks: int, fabric: str) -> float:
    """Steps of a collective, in units of those that a switch takes per doubling of ranks; without a switch they go round a ring."""
    if any(fabric.startswith(name) for name in RINGS):
        return RING_STEP * (ranks - 1)
    return math.log2(max(2, ranks))


def message_seconds(plan: Deployment, listed: list[Exchange]) -> float:
    """Seconds of messages that nothing hides: latency of each call and bytes at the record's share of the fabrics' rates."""
    hops, link = _messages(plan, listed)
    return plan.record.coefficients.collective_seconds * hops + link / plan.record.coefficients.link_efficiency


def price(plan: Deployment) -> Estimate | None:
    """Dollars per hour of the devices in use; none for machines without a price."""
    prices = plan.cluster.device.price_per_hour
    if prices is None:
        return None
    low, typical, high = (plan.layout.ranks * each for each in prices)
    device = plan.cluster.device
    return Estimate(value=typical, low=low, high=high, unit="$/h", badge="validated",
                    because=f"{device.title}: ${prices[0]} to ${prices[2]} per device and hour ({device.price_date})")


def touched_share(config: ModelConfig, layout: Layout, tokens: float) -> float:
    """Share of the routed experts that a step of `tokens` tokens per copy reads."""
    return touched_experts(config, tokens_of_group(layout, tokens)) / config.moe.num_experts if config.moe else 0.0
