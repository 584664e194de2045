"""One iteration of reinforcement learning: rollouts with a tail of long ones, sandboxes that answer, grading, and the update.

Rollouts share the copies of the policy; while a sandbox works its rollout holds memory but takes no step. The longest of many rollouts
decide when an iteration ends, unless partial rollouts carry them over. Read next: nothing; `docs/planner.md` shows it all in use.
"""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from gnomon.plan.cost import Deployment, decode, price, read_prompt
from gnomon.plan.quantity import Estimate, banded
from gnomon.plan.training import train
from gnomon.plan.workload import RL, Training


@dataclass(frozen=True, kw_only=True, slots=True)
class RLTime:
    """One iteration by phase, and what follows."""

    rollout: Estimate            # s until all that must finish have finished
    steady: Estimate             # of it, with all copies full
    tail: Estimate               # of it, waiting for the longest
    grading: Estimate
    update: Estimate
    sync: Estimate               # new weights to the copies
    iteration: Estimate
    sandbox_share: float         # of a rollout's life, its sandbox works
    idle_share: float            # of a rollout's life, its sandbox waits for the policy
    tokens_per_second: Estimate  # written
    trajectories_per_day: Estimate
    cost: Estimate | None        # $ per iteration
    wall: str                    # the phase that takes longest


def rl_iteration(plan: Deployment, work: RL, update: Deployment | None = None) -> RLTime:
    """Price an iteration; `update` is the deployment that trains, by default the one that rolls out."""
    learner = update or plan
    share = 1.0 if work.colocated else 0.5
    copies = max(1.0, plan.layout.data * share)
    each = work.rollouts / copies
    room = plan.require_fit()
    running = max(1.0, min(float(work.concurrency), each, room.sequences(work.final_context)))
    context = (work.prompt + work.final_context) / 2
    sandbox = work.turns * work.sandbox_seconds
    step = decode(plan, running, context).total
    reading = read_prompt(plan, work.prompt / work.group + work.turns * work.observation_tokens, work.prompt).total
    life = step * float(work.output_tokens) + sandbox
    busy = (life.value - sandbox) / life.value
    # Slots whose sandbox works leave the step to the others, which are then fewer: the step that counts is theirs.
    active = max(1.0, running * busy)
    step = decode(plan, active, context).total
    life = step * float(work.output_tokens) + sandbox + reading
    steady = life * (each / running)
    single = decode(plan, 1.0, context).total
    tail = (single * float(work.output_tokens) + sandbox) * _beyond(work, each)
    rollout = steady + tail
    grading = banded(work.grading_seconds * max(1.0, min(work.rollouts, running * copies) / work.graders), "s", 0.25, "calibrated",
                     "as given; graders work while rollouts go on, the last ones after them")
    training = Training(tokens=work.rollouts * work.final_context * work.epochs, context=work.final_context,
                        global_batch_tokens=round(work.rollouts * work.final_context), optimiser="muon")
    learnt = train(learner, training)
    learn = learnt.step * work.epochs * (1 / share)
    sync = _sync(plan)
    total = rollout + grading + learn + sync if work.colocated else _longer(rollout + grading, learn) + sync
    phases = {"rollout": rollout, "grading": grading, "update": learn, "sync": sync}
    hourly = price(plan)
    per_day = replace(float(86400 * work.rollouts) / total, unit="1/day")
    return RLTime(rollout=rollout, steady=steady, tail=tail, grading=grading, update=learn, sync=sync, iteration=total,
                  sandbox_share=sandbox / life.value, idle_share=1 - sandbox / life.value,
                  tokens_per_second=replace(float(work.rollouts * work.output_tokens) / total, unit="token/s"),
                  trajectories_per_day=per_day, cost=None if hourly is None else replace(hourly * (total / 3600.0), unit="$"),
                  wall=max(phases, key=lambda name: phases[name].value))


def _beyond(work: RL, rollouts: float) -> float:
    """How far the longest rollout that must finish goes beyond the mean, as a share of it; lengths are log-normal."""
    if work.length_spread == 0:
        return 0.0
    last = max(0.5, min(1 - work.partial_share, 1 - 1 / (rollouts + 1)))
    longest = math.exp(work.length_spread * NormalDist().inv_cdf(last) - work.length_spread**2 / 2)
    return max(0.0, longest - 1)


def _sync(plan: Deployment) -> Estimate:
    """Seconds to bring new weights to every rank: each receives its own once, over the network where there is one."""
    device = plan.cluster.device
    rate = device.scale_out_bandwidth if plan.cluster.domains > 1 else device.scale_up_bandwidth or device.bandwidth
    return banded(max(plan.room.weights) / rate, "s", 1.0, "extrapolated", "weights of a rank at the fabric's rate")


def _longer(a: Estimate, b: Estimate) -> Estimate:
    return a if a.value >= b.value else b
