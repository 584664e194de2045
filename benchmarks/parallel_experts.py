"""What does balanced expert parallelism buy, and what does it cost? The planner alone, then whole layers over four ranks.

Three questions. *Balance*: over many random, lognormal and hopeless routings, does every rank get the same number of rows, with how many
copies of experts, and how near is that to the fewest copies that do it (small cases, solved exactly)? *Planner*: how long does a plan take
at 896 experts on 64 ranks? *Layers*: forward and backward of one layer of routed experts over four gloo ranks, while the routing gets more
and more uneven (MaxVio, the load of the busiest rank over the mean, less one), with planned copies and with conventional expert
parallelism, where each token goes to its expert's home. Ranks share this machine's cores, so a rank's own CPU time is the figure to read.

    OMP_NUM_THREADS=1 python benchmarks/parallel_experts.py                    # some minutes
    OMP_NUM_THREADS=1 python benchmarks/parallel_experts.py --routings 100 --runs 1 --tokens 128
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from machine import earlier, repeat, save

from gnomon.model.config import preset
from gnomon.model.experts import RoutedExperts
from gnomon.parallel import expert
from gnomon.parallel.expert_plan import plan_at_home, plan_experts

SIZES = ((8, 2), (16, 4), (64, 8), (256, 16), (896, 32), (896, 64))
RANKS, EXPERTS, CHOSEN, LATENT, INNER = 4, 32, 4, 256, 256
KINDS = ("even", "lognormal", "hopeless")
SKEWS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)  # MaxVio by expert


def routing(kind: str, experts: int, ranks: int, random: np.random.Generator) -> np.ndarray:
    """Counts [R, E] of one micro-batch of 8,192 tokens per rank and 16 choices each."""
    rows = 8192 * 16
    if kind == "lognormal":
        popularity = random.lognormal(0.0, 1.0, experts)
    elif kind == "even":
        popularity = np.ones(experts)
    else:  # hopeless: all want the experts of few ranks
        popularity = np.full(experts, 1e-9)
        popularity[: max(1, int(random.integers(1, experts // 2 + 1)))] = 1.0
    return random.multinomial(rows, popularity / popularity.sum(), size=ranks)


def balance(routings: int, kinds: list[str]) -> dict[str, Any]:
    """Over all sizes and some kinds: rows per rank and copies."""
    found: dict[str, Any] = {}
    for kind in kinds:
        copies, unequal, over = [], 0, 0
        for number in range(routings // 3):
            experts, ranks = SIZES[number % len(SIZES)]
            plan = plan_experts(routing(kind, experts, ranks, np.random.default_rng(number)))
            rows, own = plan.assigned.sum(1), ((plan.assigned > 0) & (plan.home() != np.arange(ranks)[:, None])).sum(1).tolist()
            unequal += int(rows.max() - rows.min() > 0)  # S K tokens on every rank come out even
            over += int(max(own) > experts // ranks)
            copies.append((max(own), statistics.mean(own)))
        found[kind] = {"routings": len(copies), "unequal": unequal, "over E/R": over, "most copies on a rank": max(c for c, _ in copies),
                       "mean copies": statistics.mean(c for _, c in copies)}
    return found


def feasible(loads: list[int], home: list[int], capacity: list[int], extra: tuple[tuple[int, int], ...]) -> bool:
    """Whether these copies let every rank have exactly its capacity: a largest flow from experts to ranks."""
    experts, ranks = len(loads), len(capacity)
    room = dict.fromkeys((*enumerate(home), *extra), 10 ** 9)
    flow: dict[tuple[int, int], int] = dict.fromkeys(room, 0)
    left, free = list(loads), list(capacity)
    for start in range(experts):
        while left[start]:
            parents: dict[tuple[str, int], tuple[str, int] | None] = {("e", start): None}
            queue, end = deque([("e", start)]), None
            while queue and end is None:
                kind, at = queue.popleft()
                if kind == "e":
                    steps = [("r", r) for e, r in room if e == at]
                else:
                    if free[at]:
                        end = at
                        break
                    steps = [("e", e) for e, r in room if r == at and flow[e, r]]
                for step in steps:
                    if step not in parents:
                        parents[step] = (kind, at)
                        queue.append(step)
            if end is None:
                return False
            path = [("r", end)]
            while (before := parents[path[0]]) is not None:
                path.insert(0, before)
            pairs = list(zip(path, path[1:], strict=False))
            amount = min([left[start], free[end], *(flow[b[1], a[1]] for a, b in pairs if a[0] == "r")])
            for a, b in pairs:
                if a[0] == "e":
                    flow[a[1], b[1]] += amount
                else:
                    flow[b[1], a[1]] -= amount
            left[start] -= amount
            free[end] -= amount
    return all(not rest for rest in left) and ranks > 0


def optimum(cases: int) -> dict[str, Any]:
    """Copies of the planner over the fewest that balance exactly, in small cases."""
    ours = fewest = 0
    for number in range(cases):
        random = np.random.default_rng(1000 + number)
        experts, ranks = ((6, 3), (8, 4), (6, 2))[number % 3]
        counts = random.multinomial(60, random.dirichlet(np.full(experts, 0.5)), size=ranks)
        plan = plan_experts(counts)
        home = [e // (experts // ranks) for e in range(experts)]
        pairs = [(e, r) for e in range(experts) for r in range(ranks) if home[e] != r and counts.sum(0)[e]]
        loads, capacity = counts.sum(0).tolist(), plan.capacity.tolist()
        ours += sum(len(plan.redundant(rank)) for rank in range(ranks))
        fewest += next(size for size in range(len(pairs) + 1) if any(feasible(loads, home, capacity, c) for c in combinations(pairs, size)))
    return {"cases": cases, "copies": ours, "fewest copies": fewest, "ratio": ours / max(1, fewest)}


def pinned(violation: float, tokens: int, random: torch.Generator) -> torch.Tensor:
    """Choices [tokens, CHOSEN] whose busiest expert has (1 + violation) times the mean load, up to what one choice per token allows."""
    share = min(1.0, (1.0 + violation) * CHOSEN / EXPERTS)
    scores = torch.rand(tokens, EXPERTS, generator=random)
    hot = torch.rand(tokens, generator=random) < share
    scores[:, 0] = torch.where(hot, 2.0, -1.0)
    ids = scores.topk(CHOSEN, -1).indices
    crowd = (violation / 10.0)  # beyond one expert, the neighbours on the same rank grow hot as well
    near = torch.rand(tokens, generator=random) < crowd
    return torch.where(near[:, None], torch.arange(CHOSEN).expand(tokens, -1), ids)


def worker(tokens: int, runs: int) -> None:
    """One of four ranks; the first prints what all found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    config = replace(preset("tiny").moe, num_experts=EXPERTS, num_experts_per_token=CHOSEN, routed_expert_hidden_size=LATENT,
                     moe_intermediate_size=INNER)
    for violation in SKEWS:
        for name, planner in (("planned", plan_experts), ("at home", plan_at_home)):
            random = torch.Generator().manual_seed(rank)
            experts = RoutedExperts(config, LATENT, (4.0, 25.0))
            for parameter in experts.parameters():
                parameter.data.normal_(std=0.05)
            dispatch = expert.spread(experts, planner=planner)
            z, weights = torch.randn(tokens, LATENT, generator=random), torch.rand(tokens, CHOSEN, generator=random)
            ids, cpu, wall = pinned(violation, tokens, random), [], []
            for turn in range(runs + 1):
                dist.barrier()
                began, spent = time.perf_counter(), time.process_time()
                experts(z.clone().requires_grad_(), ids, weights).sum().backward()
                if turn:
                    cpu.append(time.process_time() - spent)
                    wall.append(time.perf_counter() - began)
            assert dispatch.plan is not None
            every: list[Any] = [None] * RANKS
            dist.all_gather_object(every, {"cpu": statistics.median(cpu), "wall": statistics.median(wall),
                                           "rows": int(dispatch.plan.assigned[rank].sum()), "copies": len(dispatch.plan.redundant(rank)),
                                           "sent": {k: v // (runs + 1) for k, v in dispatch.sent_bytes.items()}})
            load = np.bincount(ids.flatten().numpy(), minlength=EXPERTS)
            found.append({"MaxVio": float(load.max() / load.mean() - 1), "planner": name, "ranks": every})
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def layers(tokens: int, runs: int) -> list[dict[str, Any]]:
    """The layers over four ranks, in processes of their own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", __file__, "--worker",
               "--tokens", str(tokens), "--runs", str(runs)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True)
    found = []
    for case in json.loads(done.stdout.strip().splitlines()[-1]):
        ranks = case["ranks"]
        found.append({"MaxVio": case["MaxVio"], "planner": case["planner"], "busiest rank, CPU seconds": max(r["cpu"] for r in ranks),
                      "all ranks, CPU seconds": sum(r["cpu"] for r in ranks), "seconds": max(r["wall"] for r in ranks),
                      "largest buffer, rows": max(r["rows"] for r in ranks), "most copies": max(r["copies"] for r in ranks),
                      "bytes of tokens": sum(r["sent"]["tokens"] for r in ranks),
                      "bytes of copies": sum(r["sent"]["weights"] for r in ranks)})
    return found


def main() -> None:
    """Run all three and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routings", type=int, default=10_000, help="routings that are planned (default: 10000)")
    parser.add_argument("--cases", type=int, default=60, help="small cases that are solved exactly (default: 60)")
    parser.add_argument("--runs", type=int, default=5, help="repetitions of each layer (default: 5)")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per rank (default: 2048)")
    parser.add_argument("--only", choices=(*KINDS, "planner", "layers"), help="one piece, into the figures that are there already")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.tokens, given.runs)
        return
    result: dict[str, Any] = {}
    kinds = [kind for kind in KINDS if given.only in (None, kind)]
    if kinds:
        result["balance"] = balance(given.routings, kinds)
    if given.only in (None, "planner"):
        counts = [routing("lognormal", 896, 64, np.random.default_rng(n)) for n in range(20)]
        turns, busy = iter(counts * 2), []
        result["plan seconds at 896 x 64"] = repeat(lambda: plan_experts(next(turns)), runs=20, warm_up=3)
        for count in counts:
            spent = time.process_time()
            plan_experts(count)
            busy.append(time.process_time() - spent)
        result["plan CPU seconds at 896 x 64"] = {"median": statistics.median(busy), "least": min(busy), "most": max(busy)}
        result["optimum"] = optimum(given.cases)
    if given.only in (None, "layers"):
        result["layers"] = layers(given.tokens, given.runs)
        print(f"{'MaxVio':>7} {'planner':>8} {'busiest rank, CPU ms':>21} {'rows':>7} {'copies':>7}", file=sys.stderr)
        for row in result["layers"]:
            print(f"{row['MaxVio']:7.2f} {row['planner']:>8} {row['busiest rank, CPU seconds'] * 1e3:21.1f} "
                  f"{row['largest buffer, rows']:7d} {row['most copies']:7d}", file=sys.stderr)
    print(json.dumps({key: value for key, value in result.items() if key != "layers"}, indent=1), file=sys.stderr)
    if given.only is not None:  # a piece of what was measured before
        before = earlier("parallel_experts")
        result = before | result | {"balance": before.get("balance", {}) | result.get("balance", {})}
    save("parallel_experts", result)


if __name__ == "__main__":
    main()
