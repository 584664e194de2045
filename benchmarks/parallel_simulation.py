"""Where does each way to spread a model break? A discrete-event model of 64 to 4,096 ranks; nothing here was run on such a machine.

Ranks have clocks. A micro-batch is, layer by layer, work that takes a rank as long as its rows, and exchanges that begin when the last rank
of a group arrives and take as long as the fullest link. Routing is drawn, and the *planner of the package* says who works on what; links,
memory and arithmetic come from the hardware files. Pipelines run 1F1B through a queue of events. Assumed, not measured: products reach 40 %
of the bf16 peak, an exchange starts in 10 us inside a domain and 25 us across, nothing of an exchange hides behind work. Efficiency is
the time of the arithmetic alone over the time of the step; a cross marks what does not fit in memory.

    python benchmarks/parallel_simulation.py --plot docs/scale.svg      # about a minute
    python benchmarks/parallel_simulation.py --samples 1
"""

import argparse
import heapq
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from machine import save

from gnomon.model.config import ModelConfig, preset
from gnomon.parallel.expert_plan import ExpertPlan, plan_at_home, plan_experts
from gnomon.plan.exchange import exchanges
from gnomon.plan.hardware import Device, device
from gnomon.plan.workload import Layout, Precision
from gnomon.train.canvas import STYLE, canvas, svg

RANKS = (64, 128, 256, 512, 1024, 2048, 4096)
TOKENS, BATCH = 8192, 64 << 20  # of a rank's micro-batch, and of an optimiser step
REACHED, NEAR, FAR = 0.4, 10e-6, 25e-6
Planner = Callable[[np.ndarray], ExpertPlan]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A device with its links, and the domain that its ranks lie in."""

    kind: Device
    domain: int

    def seconds(self, flops: np.ndarray | float) -> Any:
        """Time of arithmetic."""
        return flops / (self.kind.peak("bf16") * REACHED)

    def exchange(self, flows: np.ndarray) -> np.ndarray:
        """Seconds of an exchange for each rank from bytes [source, destination]: its fullest link, in or out, near or far."""
        place = np.arange(len(flows)) // self.domain
        near = (place[:, None] == place[None, :]) & ~np.eye(len(flows), dtype=bool)
        far = place[:, None] != place[None, :]
        times = [np.maximum((flows * mask).sum(0), (flows * mask).sum(1)) / bandwidth
                 for mask, bandwidth in ((near, self.kind.scale_up_bandwidth), (far, self.kind.scale_out_bandwidth)) if mask.any()]
        return np.maximum.reduce(times) + (FAR if far.any() else NEAR)

    def link(self, ranks: int) -> float:
        """Bytes per second of a ring over so many neighbouring ranks."""
        return self.kind.scale_up_bandwidth if ranks <= self.domain else self.kind.scale_out_bandwidth


def layer(config: ModelConfig, machine: Machine, ranks: int, planner: Planner, skew: float, random: np.random.Generator) -> float:
    """Seconds of forward and backward of one layer with experts over `ranks` ranks, from when all start to when the last one is done."""
    moe = config.moe
    assert moe is not None
    popularity = random.lognormal(0.0, skew, moe.num_experts)
    counts = random.multinomial(TOKENS * moe.num_experts_per_token, popularity / popularity.sum(), size=ranks)
    plan = planner(counts)
    width, inner = moe.expert_width(config.hidden_size), moe.moe_intermediate_size
    flows = (counts / np.maximum(1, counts.sum(0))) @ plan.assigned.T * (2.0 * width)  # bf16 latents
    copies = np.zeros((ranks, ranks))
    home = plan.home()
    for rank in range(ranks):
        np.add.at(copies[:, rank], home[plan.redundant(rank)], 3.0 * 2 * width * inner)
    dense = 2.0 * (config.activated_parameters() / config.num_hidden_layers - moe.num_experts_per_token * 3 * width * inner) * TOKENS
    clocks = np.zeros(ranks)
    for passes in (1, 2):  # backward does twice the products, and returns the gradients of copies
        clocks += machine.seconds(passes * dense)
        clocks = clocks.max() + machine.exchange(flows + copies)
        clocks = clocks.max() + machine.seconds(passes * 2.0 * 3 * width * inner * plan.assigned.sum(1))
        clocks = clocks.max() + machine.exchange(flows.T)
    return float(clocks.max())


def pipeline(stage_seconds: np.ndarray, hop: float) -> float:
    """Seconds of 1F1B over [stages, micro-batches] of forward-and-backward times, a third of each forward."""
    stages, parts = stage_seconds.shape
    done: dict[tuple[str, int, int], float] = {}
    order = [[*(("f", m) for m in range(min(parts, stages - s - 1))),
              *(step for m in range(parts) for step in
                ([("f", m + stages - s - 1)] if m + stages - s - 1 < parts else []) + [("b", m)])] for s in range(stages)]
    heap = [(0.0, s) for s in range(stages)]
    next_step = [0] * stages
    while heap:
        now, s = heapq.heappop(heap)
        if next_step[s] == len(order[s]):
            continue
        kind, m = order[s][next_step[s]]
        needs = ("f", s - 1, m) if kind == "f" else ("b", s + 1, m)
        if 0 <= needs[1] < stages and needs not in done:
            heapq.heappush(heap, (now + hop + 1e-3, s))  # ask again
            continue
        start = max(now, done.get(needs, 0.0) + hop)
        done[kind, s, m] = start + stage_seconds[s, m] * (1 / 3 if kind == "f" else 2 / 3)
        next_step[s] += 1
        heapq.heappush(heap, (done[kind, s, m], s))
    return max(done.values())


def step(config: ModelConfig, machine: Machine, ranks: int, scheme: dict[str, Any], samples: int) -> dict[str, float]:
    """Efficiency and memory of an optimiser step on so many ranks."""
    random = np.random.default_rng(ranks)
    stages = scheme["stages"]
    most = min(ranks // stages, scheme["experts"])
    expert = max(n for n in range(1, most + 1) if config.moe.num_experts % n == 0)
    readers = ranks // stages // expert * expert  # ranks left over by a divisor of the experts stand idle
    parts = max(1, BATCH // (TOKENS * readers))
    times = np.array([layer(config, machine, expert, scheme["planner"], scheme["skew"], random) for _ in range(samples)])
    layers = config.num_hidden_layers
    if stages == 1:
        seconds = parts * layers * times.mean()
    else:
        drawn = random.choice(times, size=(stages, parts, 4)).mean(-1) * layers / stages
        hop = TOKENS * config.hidden_size * 2 * (1 + layers / config.attn_res_block_size / 2) / machine.link(10**9) + FAR
        seconds = pipeline(drawn, hop)
    one = 3 * config.moe.expert_width(config.hidden_size) * config.moe.moe_intermediate_size
    routed = config.num_moe_layers * config.moe.num_experts * one
    dense, own = (config.num_parameters() - routed) / stages, routed / stages / expert
    copies = readers // expert
    # gradients to their owners in fp32, weights back in bf16
    seconds += (4 + 2) * (dense / machine.link(readers) + (own / machine.link(ranks) if copies > 1 else 0.0))
    ideal = machine.seconds(3.0 * config.flops_per_token(TOKENS) * BATCH / ranks)
    memory = (dense + own) * (2 + 4) + 8 * (dense / readers + own / copies)  # bf16 weights, fp32 gradients, owned masters and momenta
    return {"ranks": ranks, "efficiency": ideal / seconds, "seconds": seconds, "memory": memory, "fits": memory < machine.kind.memory_bytes,
            "micro-batches": parts, "experts over": expert}


def context(config: ModelConfig, machine: Machine, length: int) -> list[dict[str, float]]:
    """Efficiency of a forward pass over one document, by ranks that share it: the last stretch has most to attend to."""
    found = []
    for ranks in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        even = config.flops_per_token(0) * length / ranks
        attention = (config.flops_per_token(length) - config.flops_per_token(0)) * length  # of the last token for all: twice the causal sum
        busiest = even + attention / 2 * (1 - (1 - 1 / ranks) ** 2)
        sent = exchanges(config, Precision(experts="bf16", rest="bf16"), Layout(context=ranks), tokens=length)
        wire = sum(item.sent_bytes / machine.link(ranks) + item.calls * FAR for item in sent if item.axis == "context")
        ideal = machine.seconds(even + attention / 2 / ranks)
        found.append({"ranks": ranks, "efficiency": ideal / (machine.seconds(busiest) + wire), "wire seconds": wire})
    return found


def schemes(domain: int) -> dict[str, dict[str, Any]]:
    """What is compared. Skew: popularity is lognormal with that spread, 1.0 before balancing has learnt, 0.3 after."""
    made: dict[str, dict[str, Any]] = {}
    for skew, state in ((1.0, "cold"), (0.3, "balanced")):
        made[f"experts over all, at home, {state}"] = {"experts": 896, "stages": 1, "planner": plan_at_home, "skew": skew}
        made[f"experts over all, planned, {state}"] = {"experts": 896, "stages": 1, "planner": plan_experts, "skew": skew}
        made[f"experts in a domain, planned, {state}"] = {"experts": domain, "stages": 1, "planner": plan_experts, "skew": skew}
        made[f"experts in a domain, 8 stages, planned, {state}"] = {"experts": domain, "stages": 8, "planner": plan_experts, "skew": skew}
    return made


def plot(curves: dict[str, list[dict[str, float]]], documents: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Both families of curves beside each other."""
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(11.0, 5.0)
        axes.remove()
        left, right = figure.subplots(1, 2)
        for name, rows in curves.items():
            line = left.plot([r["ranks"] for r in rows], [r["efficiency"] for r in rows], label=name,
                             linestyle=":" if "cold" in name else "-", color=f"C{list(curves).index(name) % 4}")[0]
            for mark, fits in (("x", False), ("o", True)):
                marked = [r for r in rows if r["fits"] is fits]
                left.plot([r["ranks"] for r in marked], [r["efficiency"] for r in marked], mark, color=line.get_color(), markersize=7)
        for name, rows in documents.items():
            right.plot([r["ranks"] for r in rows], [r["efficiency"] for r in rows], label=name, marker=".")
        left.set(xlabel="ranks, one optimiser step of 64M tokens (dots fit into memory, crosses do not)",
                 ylabel="time of arithmetic / time of step")
        right.set(xlabel="ranks that share one document, forward pass")
        for side in (left, right):
            side.set_xscale("log", base=2)
            side.set_ylim(0, 1)
            side.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
        path.write_text(svg(figure, "scale").replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n", encoding="utf-8")


def main() -> None:
    """Simulate, keep the figures, draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="gb300", help="a hardware file (default: gb300)")
    parser.add_argument("--samples", type=int, default=8, help="layers drawn for each case (default: 8)")
    parser.add_argument("--plot", type=Path, help="SVG to draw")
    given = parser.parse_args()
    kind = device(given.device)
    domain = 1 << (kind.scale_up_size.bit_length() - 1)  # whole powers of two of a domain are used
    config, machine = preset("k3-2.8t"), Machine(kind=kind, domain=domain)
    curves = {name: [step(config, machine, ranks, scheme, given.samples) for ranks in RANKS if ranks // scheme["stages"] >= 8]
              for name, scheme in schemes(domain).items()}
    documents = {f"{length >> 10}K tokens": context(config, machine, length) for length in (64 << 10, 256 << 10, 1 << 20)}
    for name, rows in (*curves.items(), *documents.items()):
        print(f"{name:>45}: " + "  ".join(f"{r['ranks']}: {r['efficiency']:.2f}{'' if r.get('fits', True) else 'x'}" for r in rows),
              file=sys.stderr)
    if given.plot:
        plot(curves, documents, given.plot)
    save("parallel_simulation", {"device": given.device, "domain": domain, "curves": curves, "documents": documents,
                                 "assumed": {"share of peak": REACHED, "near": NEAR, "far": FAR}})


if __name__ == "__main__":
    main()
