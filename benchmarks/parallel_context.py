"""What does a stream of tokens cost when several ranks share it? CPU time per rank, and bytes on the wire against the planner's figures.

One model with KDA and latent attention, forward and backward over one long document: on one rank, and cut over four gloo ranks. Four ranks
share the cores of this machine, so the figure is a rank's own CPU time against a quarter of one rank's. Attention is causal, so the last
stretch of a document has more to look at than the first: KDA alone, whose work is the same everywhere, is measured as well. Bytes are those
that the exchanges were handed, forward; the planner's are `gnomon.plan.exchange`.

    OMP_NUM_THREADS=1 python benchmarks/parallel_context.py                       # some minutes
    OMP_NUM_THREADS=1 python benchmarks/parallel_context.py --tokens 2048 --runs 1
    OMP_NUM_THREADS=1 python benchmarks/parallel_context.py --only long --runs 2   # one of the three cases
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from machine import earlier, save

from gnomon.model.config import ModelConfig, preset
from gnomon.model.transformer import Transformer
from gnomon.parallel.context import Cut, spread, stretches
from gnomon.plan.exchange import exchanges
from gnomon.plan.workload import Layout, Precision

RANKS, LAYERS, WIDTH = 4, 2, 128
CASES = ("short", "long", "both")


def model_of(kind: str) -> ModelConfig:
    """Two dense layers of one kind of mixer, or one of each."""
    pattern = {"kda": '["kda"]', "mla": '["mla"]', "both": '["kda","mla"]'}[kind]
    made = preset("tiny", (f"num_hidden_layers={LAYERS}", "vocab_size=256", f"hidden_size={WIDTH}", "intermediate_size=256",
                           f"layer_pattern={pattern}", "final_mixer=none"))
    return replace(made, moe=None)


def turn(model: Transformer, tokens: torch.Tensor, borders: torch.Tensor) -> float:
    """CPU seconds of a forward and backward pass."""
    model.zero_grad()
    spent = time.process_time()
    model.hidden(tokens, cu_seqlens=borders).square().mean().backward()
    return time.process_time() - spent


def worker(kind: str, length: int, runs: int) -> None:
    """One rank, alone or of four; the first prints what all found."""
    torch.set_num_threads(1)
    config = model_of(kind)
    model = Transformer(config).initialise(1)
    tokens = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(1))
    if "RANK" not in os.environ:
        seconds = [turn(model, tokens, torch.tensor([0, length], dtype=torch.int32)) for _ in range(runs + 1)][1:]
        print(json.dumps([{"seconds": statistics.median(seconds)}]))
        return
    dist.init_process_group("gloo")
    context = spread(model)
    context.cut = Cut(lengths=stretches(length, RANKS), borders=(0, length))
    own = slice(*context.cut.span(context.rank))
    seconds = []
    for _ in range(runs + 1):
        dist.barrier()
        seconds.append(turn(model, tokens[:, own], context.borders()))
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, {"seconds": statistics.median(seconds[1:]),
                                   "sent": {kind: count // (runs + 1) for kind, count in context.sent_bytes.items()}})
    if context.rank == 0:
        print(json.dumps(every))
    dist.destroy_process_group()


def measured(kind: str, length: int, runs: int, ranks: int) -> list[dict[str, Any]]:
    """What the ranks of one case found, in processes of their own."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else [sys.executable]
    command = [*start, __file__, "--worker", kind, "--tokens", str(length), "--runs", str(runs)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def planned(kind: str, length: int) -> dict[str, float]:
    """Bytes that a rank sends in a forward pass, as the planner counts them, fp32."""
    found = exchanges(model_of(kind), Precision(experts="fp32", rest="fp32", activations="fp32"), Layout(context=RANKS), tokens=length)
    return {item.what: item.sent_bytes for item in found if item.axis == "context"}


def main() -> None:
    """All cases; keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65_536, help="length of the document (default: 65536)")
    parser.add_argument("--attention-tokens", type=int, default=8192, help="the same where there is attention (default: 8192)")
    parser.add_argument("--runs", type=int, default=5, help="repetitions (default: 5)")
    parser.add_argument("--only", choices=CASES, help="one case, into the figures that are there already")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.tokens, given.runs)
        return
    sizes = {"short": ("kda", given.tokens // 8), "long": ("kda", given.tokens),
             "both": ("both", min(given.tokens, given.attention_tokens))}
    rows = []
    for case in (CASES if given.only is None else [given.only]):
        kind, length = sizes[case]
        alone = measured(kind, length, given.runs, 1)[0]["seconds"]
        ranks = measured(kind, length, given.runs, RANKS)
        worst, mean = max(r["seconds"] for r in ranks), statistics.mean(r["seconds"] for r in ranks)
        rows.append({"layers": kind, "tokens": length, "one rank, CPU seconds": alone, "ranks, CPU seconds": [r["seconds"] for r in ranks],
                     "busiest over a quarter": worst / (alone / RANKS), "mean over a quarter": mean / (alone / RANKS),
                     "sent by a rank": ranks[0]["sent"], "planner": planned(kind, length)})
        print(f"{kind:>5} {length:7d} tokens: a rank's CPU time is {rows[-1]['mean over a quarter']:.2f} of a quarter of one rank's "
              f"(busiest {rows[-1]['busiest over a quarter']:.2f}); sent {ranks[0]['sent']}, planner {rows[-1]['planner']}",
              file=sys.stderr)
    if given.only is not None:
        rows += [row for row in earlier("parallel_context").get("rows", [])
                 if (row["layers"], row["tokens"]) != (rows[0]["layers"], rows[0]["tokens"])]
    save("parallel_context", {"ranks": RANKS, "rows": sorted(rows, key=lambda row: (row["layers"] == "both", row["tokens"]))})


if __name__ == "__main__":
    main()
