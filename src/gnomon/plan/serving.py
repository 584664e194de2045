"""Serving: speed per user, throughput, time to the first token with its queue, the cache as a cliff, and what a token costs.

A copy runs as many requests as its memory holds. What memory remains beside them keeps the caches of idle sessions; the sessions that do
not fit read their whole prompt again. In a steady state every request that ends is followed by another's prompt, so prefill takes its
share of every step. Arrivals faster than a copy can serve never drain, and that is said. Read next: `training.py`.
"""

import math
from dataclasses import dataclass, replace

from gnomon.errors import CapacityError
from gnomon.plan.cost import Deployment, decode, price, read_prompt
from gnomon.plan.quantity import Estimate, exact
from gnomon.plan.speculation import DRAFT_CACHE_SHARE, draft_cost, gained
from gnomon.plan.step import StepTime
from gnomon.plan.workload import Serving

SATURATED = 0.98
"""Share of a copy's greatest rate above which a queue is taken never to drain."""

HOURS_PER_DAY, SECONDS_PER_HOUR = 24.0, 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """What a deployment delivers for a workload. Rates count written tokens unless the name says otherwise; money needs a price."""

    speed: Estimate                       # token/s of one user, after the first token
    time_per_token: Estimate              # s
    first_token: Estimate                 # s, queue included; infinite where arrivals outrun the deployment
    request_seconds: Estimate
    throughput: Estimate                  # token/s written, all copies
    throughput_per_device: Estimate
    read_and_written_per_device: Estimate   # token/s, prompts counted as some publications do
    requests_per_second: Estimate
    cost_per_million: Estimate | None     # $ per million tokens written
    cost_per_task: Estimate | None
    tasks_per_day: Estimate
    gained: Estimate                      # tokens per step and user
    running: float                        # requests that a copy really runs at once
    fits: float                           # requests that its memory holds at once
    hit_share: float                      # share of prompts found in the cache
    step: StepTime
    wall: str                             # of the step; "capacity" where memory keeps requests waiting or caches out
    saturated: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Memory:
    """What a copy's memory means for its requests."""

    fits: float
    running: float
    hit_share: float
    tight: bool


def serve(plan: Deployment, work: Serving) -> Throughput:
    """Price a serving workload; raises `CapacityError` where the weights or a single request do not fit."""
    memory = _memory(plan, work)
    new_tokens = max(1.0, work.prompt * (1 - memory.hit_share))
    reading = read_prompt(plan, new_tokens, work.prompt - new_tokens, work.chunk_tokens).total
    running, saturated, utilisation = _load(plan, work, memory, new_tokens, reading)
    step, per_step, pace = _pace(plan, work, running, new_tokens)
    first = _first_token(plan, work, reading, pace, (running, utilisation, memory, saturated))
    writing = pace * work.output_tokens
    request = (first if math.isfinite(first.value) else reading) + writing
    requests = exact(running * work.filled * plan.layout.data, "1") / (reading + writing) if work.arrivals_per_second is None or saturated \
        else exact(work.arrivals_per_second, "1/s")
    requests = replace(requests, unit="1/s")
    written = replace(requests * work.output_tokens, unit="token/s")
    per_device = replace(written / float(plan.layout.ranks), unit="token/s")
    hourly = price(plan)
    cost = None if hourly is None else replace(hourly / (written * (SECONDS_PER_HOUR / 1e6)), unit="$")
    tasks = replace(requests * (HOURS_PER_DAY * SECONDS_PER_HOUR / work.requests_per_task), unit="1/day")
    return Throughput(
        speed=replace(exact(1.0, "token") / pace, unit="token/s"), time_per_token=pace, first_token=first, request_seconds=request,
        throughput=written, throughput_per_device=per_device,
        read_and_written_per_device=per_device * ((work.prompt + work.output_tokens) / work.output_tokens),
        requests_per_second=requests, cost_per_million=cost,
        cost_per_task=None if cost is None else cost * (work.output_tokens * work.requests_per_task / 1e6),
        tasks_per_day=tasks, gained=per_step, running=running, fits=memory.fits, hit_share=memory.hit_share, step=step,
        wall="capacity" if memory.tight else step.wall, saturated=saturated)


def _memory(plan: Deployment, work: Serving) -> _Memory:
    """Requests that fit, those that run, and the share of prompts that the rest of the memory lets be found.

    Running requests take their mean context each. The other sessions' caches share what is left; a session that returns finds its cache
    as often as that holds one.
    """
    room = plan.require_fit()
    share = 1 - DRAFT_CACHE_SHARE if work.speculation is not None else 1.0
    fits = room.sequences(work.mean_context) * share
    if room.sequences(work.final_context) * share < 1:
        raise CapacityError(f"one request of {work.final_context} tokens does not fit beside the weights; shorten it, use a narrower "
                            f"cache format, deal the latents over ranks ('kv_shards'), or use more devices")
    running = min(float(work.concurrency), fits)
    sessions = work.sessions or work.concurrency
    kept = 1.0
    if sessions > fits:
        idle = sessions - running
        kept = max(0.0, fits - running) / idle if idle else 1.0
    return _Memory(fits=fits, running=running, hit_share=work.cached_share * kept,
                   tight=work.concurrency > fits or (sessions > fits and work.cached_share > 0))


def _pace(plan: Deployment, work: Serving, running: float, new_tokens: float) -> tuple[StepTime, Estimate, Estimate]:
    """The step, tokens per step, and seconds per token and user, prompts of others included."""
    per_step = gained(work.speculation, work.mean_context)
    drafts = 0 if work.speculation is None else work.speculation.drafts
    # Of a burst, each request sees on average half of the other prompts being read after its own first token.
    later = 1.0 if work.waves is None else 1 - 0.5 / max(0.5, work.waves)
    prompts = later * running * per_step.value * new_tokens / work.output_tokens
    step = decode(plan, running, work.mean_context, 1.0 + drafts, prompts)
    total = step.total
    if work.speculation is not None:
        total = total + decode(plan, running, work.mean_context).total * draft_cost(work.speculation)
    pace = total / per_step
    middle = total.value / per_step.value
    # Errors of the step and of the acceptance have nothing to do with each other: bands join as squares of logarithms.
    reach = math.exp(math.hypot(math.log1p(total.spread), math.log1p(per_step.spread)))
    return step, per_step, replace(pace, unit="s", low=middle / reach, high=middle * reach)


def _load(plan: Deployment, work: Serving, memory: _Memory, new_tokens: float, reading: Estimate) -> tuple[float, bool, float]:
    """Requests in flight per copy, whether arrivals outrun it, and how busy it is."""
    if work.arrivals_per_second is None:
        return memory.running, False, 1.0
    rate = work.arrivals_per_second / plan.layout.data
    most = memory.running * work.filled / (reading.value + _pace(plan, work, memory.running, new_tokens)[2].value * work.output_tokens)
    if rate >= SATURATED * most:
        return memory.running, True, 1.0
    low, high = 1e-3, memory.running
    for _ in range(40):     # requests in flight = arrivals times the time each stays, which grows with their number
        middle = (low + high) / 2
        stay = reading.value + _pace(plan, work, max(middle, 1e-3), new_tokens)[2].value * work.output_tokens
        low, high = (middle, high) if rate * stay > middle else (low, middle)
    return max(high, 1e-3), False, rate / most


def _first_token(plan: Deployment, work: Serving, reading: Estimate, pace: Estimate,
                 load: tuple[float, float, _Memory, bool]) -> Estimate:
    """Time to the first token: the steps until a prompt is taken up, the prompts before it, its own, and the wait for memory."""
    running, utilisation, memory, saturated = load
    first = plan.record.first_token
    own = reading + replace(pace * first.wait_steps, unit="s") + first.base_seconds
    if saturated:
        return Estimate(value=math.inf, low=own.low, high=math.inf, unit="s", badge=own.badge,
                        because=f"{work.arrivals_per_second:g} requests per second arrive, more than leave: the queue never drains")
    stay = reading.value + pace.value * work.output_tokens
    share = min(0.95, running * reading.value / stay)     # of the time, prompts are being read
    queue = share / (2 * (1 - share)) * reading.value     # equal prompts that arrive at random (M/D/1)
    if work.waves is not None:
        queue = max(queue, (running - 1) * reading.value / (2 * work.waves))   # all at once, `waves` times over
    if work.arrivals_per_second is not None and utilisation < 1:
        queue += utilisation ** math.sqrt(2 * (memory.running + 1)) / (1 - utilisation) * stay / memory.running
    waiting = max(0.0, work.concurrency / memory.fits - 1) * stay if work.arrivals_per_second is None else 0.0
    total = own + queue + waiting
    spread = (1 + first.spread) * (2.0 if waiting or memory.tight else 1.0)
    return replace(total, low=total.value / spread, high=total.value * spread)
