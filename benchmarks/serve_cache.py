"""What does the prefix cache save, and what does it cost?

Everything runs on the cache and the inference model directly, without a server, so that only these two are measured; the peer in the same
run is the same model without a cache.

    OMP_NUM_THREADS=2 python benchmarks/serve_cache.py            # all parts, the K3-shaped medium model for time to first token and forks
    OMP_NUM_THREADS=2 python benchmarks/serve_cache.py --short    # the same on the tiny model and short prompts, in seconds
    OMP_NUM_THREADS=2 python benchmarks/serve_cache.py --only reuse lookup      # the figures of other parts stay
    OMP_NUM_THREADS=2 python benchmarks/serve_cache.py --only first_token --runs 3
"""

import argparse
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernels_decode import RandomWeights, medium
from machine import save, spread

from gnomon.kernels import native
from gnomon.model.config import ModelConfig, preset
from gnomon.model.inference import InferenceModel
from gnomon.model.inference_state import PackedRows
from gnomon.model.parts import KDAConfig
from gnomon.model.transformer import Transformer
from gnomon.serve.cache_settings import CacheSettings
from gnomon.serve.held import Held
from gnomon.serve.pages import Memory
from gnomon.serve.prefix import PrefixCache
from gnomon.units import format_bytes

STEP = 2048
BRANCHES, BRANCH_TOKENS = 16, 32
DEPTHS = (128, 2048, 16384)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is measured: tokens of the long conversation and of the longest context, repetitions."""

    model: str
    cached: int
    context: int
    runs: int
    indexed: int


FULL = Sizes(model="medium", cached=8192, context=131_072, runs=5, indexed=1_000_000)
SHORT = Sizes(model="tiny", cached=1024, context=4096, runs=5, indexed=100_000)


def build(name: str) -> InferenceModel:
    """The tiny preset in fp32, or the K3-shaped medium model with random weights as released."""
    if name == "tiny":
        return InferenceModel.from_transformer(Transformer(preset("tiny")).initialise(seed=0), "fp32")
    return InferenceModel(medium(), RandomWeights(medium()))


def ids(count: int, seed: int, config: ModelConfig) -> list[int]:
    """Random ids."""
    draw = random.Random(seed)
    return [draw.randrange(config.vocab_size) for _ in range(count)]


class Server:
    """A model with a cache: whole prompts, and steps of several sequences."""

    def __init__(self, model: InferenceModel, budget: int, **more: Any):
        self.model, self.cache = model, PrefixCache(Memory(model, budget), **more)

    def step(self, plan: list[tuple[Held, list[int]]]) -> torch.Tensor:
        """One forward; logits of each sequence's last token."""
        copies, bounds, width = [], [0], 0
        for i, (held, new) in enumerate(plan):
            if not held.reserve(len(new)):
                raise SystemExit("the budget is too small for this measurement")
            copies += [(i, seen, slot) for seen, slot in held.copies(held.length, held.length + len(new))]
            bounds.append(bounds[-1] + len(new))
            width = max(width, len(held.pages))
        pages = torch.zeros(len(plan), width, dtype=torch.int32)
        for i, (held, _) in enumerate(plan):
            pages[i, :len(held.pages)] = held.pages
        rows = PackedRows(
            tokens=torch.tensor([token for _, new in plan for token in new]), bounds=torch.tensor(bounds),
            past=torch.tensor([held.length for held, _ in plan]), slots=torch.tensor([held.slot for held, _ in plan]), pages=pages,
            copies=torch.tensor(copies) if copies else None,
        )
        logits = self.model.forward(rows, self.cache.memory.pool).logits
        assert logits is not None
        for held, new in plan:
            held.advance(new)
        return logits

    def prompt(self, tokens: list[int], *, reuse: bool = True) -> Held:
        """A prompt to its first logits, in steps of some thousand tokens."""
        held = self.cache.open(tokens, reuse=reuse)
        while held.length < len(tokens):
            self.step([(held, tokens[held.length:held.length + STEP])])
        return held


def timed(run: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def reuse(_: Sizes) -> dict[str, Any]:
    """Tokens reused where a server with one live state per conversation reuses few or none (llama-server's figures beside ours)."""
    model = build("tiny")
    server = Server(model, 4 << 30)
    long, first, second = (ids(n, n, model.config) for n in (6000, 332, 400))
    system = ids(1000, 1, model.config)
    scenarios = [
        ("cold", long, 0), ("the same prompt again", long, 5996), ("next turn", long + first, 6015),
        ("an earlier turn edited: first 4,000 kept", long[:4000] + second, 0), ("back to the branch that was left", long + first, 3884),
        ("a system prompt of 1,000 tokens, first conversation", system + ids(3000, 2, model.config), 0),
        ("the same system prompt, another conversation", system + ids(2500, 3, model.config), 0),
        ("the same system prompt, a third", system + ids(2500, 4, model.config), 0),
    ]
    rows = []
    for name, prompt, theirs in scenarios:
        held = server.prompt(prompt)
        rows.append({"scenario": name, "prompt": len(prompt), "reused": held.cached_tokens, "llama_server": theirs, "note": held.note})
        print(f"{name:55s} {len(prompt):6d} tokens, {held.cached_tokens:6d} reused (llama-server {theirs})", flush=True)
        held.close()
    return {"scenarios": rows}


def first_token(sizes: Sizes) -> dict[str, Any]:
    """Time to first token: cold, and with all but 64 tokens cached; from memory, and from the disk after a restart."""
    model = build(sizes.model)
    past = ids(sizes.cached, 1, model.config)
    server = Server(model, 8 << 30)
    server.prompt(past).close()
    cold = [timed(lambda: server.prompt(past + ids(64, 1, model.config), reuse=False).close()) for _ in range(sizes.runs)]
    warm, lookups, disk, closing = [], [], [], []
    for run in range(sizes.runs + 1):
        asked = past + ids(64, 100 + run, model.config)
        warm.append(timed(lambda asked=asked: server.prompt(asked).close(keep=False)))
        lookups.append(timed(lambda asked=asked: server.cache.open(asked).close(keep=False)))
    with tempfile.TemporaryDirectory() as folder:
        writer = Server(model, 8 << 30, disk=Path(folder), settings=CacheSettings(disk_queue_bytes=8 << 30))
        held = writer.prompt(past)
        closing.append(timed(held.close))
        writer.cache.close()
        for run in range(3):
            again = Server(model, 8 << 30, disk=Path(folder))
            asked = past + ids(64, 200 + run, model.config)
            disk.append(timed(lambda again=again, asked=asked: again.prompt(asked).close(keep=False)))
            again.cache.close()
    slow, fast, opening, stored = (statistics.median(x) for x in (cold, warm[1:], lookups[1:], disk))
    ratio = slow / fast
    print(f"{sizes.cached} tokens cached and 64 new, {sizes.model}: cold {slow:.3f} s, cached {fast:.4f} s ({ratio:.0f} times faster), "
          f"opening {opening * 1e3:.2f} ms; from the disk {stored:.3f} s, handing over to its writer {closing[0] * 1e3:.1f} ms", flush=True)
    return {"cold": spread(cold), "cached": spread(warm[1:]), "open": spread(lookups[1:]), "disk": spread(disk), "handing_over": closing[0],
            "times_faster": ratio}


def forks(sizes: Sizes) -> dict[str, Any]:
    """Sixteen branches of one conversation against one cold prefill and the branches' own tokens."""
    model = build(sizes.model)
    past = ids(sizes.cached, 1, model.config)
    ratios, forking = [], []
    for run in range(sizes.runs):
        server = Server(model, 8 << 30)
        cold = timed(lambda server=server: server.prompt(past, reuse=False).close())
        start = time.perf_counter()
        trunk = server.prompt(past)
        at = time.perf_counter()
        branches = [trunk.fork() for _ in range(BRANCHES)]
        forking.append((time.perf_counter() - at) / BRANCHES)
        own = 0.0
        for step in range(BRANCH_TOKENS):
            plan = [(branch, [(run + step * 31 + i) % model.config.vocab_size]) for i, branch in enumerate(branches)]
            own += timed(lambda server=server, plan=plan: server.step(plan))
        ratios.append((time.perf_counter() - start - own) / cold)
    print(f"{BRANCHES} branches of {sizes.cached} tokens, {sizes.model}: {statistics.median(ratios):.2f} cold prefills and the branches' "
          f"own tokens; a fork {statistics.median(forking) * 1e3:.2f} ms", flush=True)
    return {"cold_prefills": spread(ratios), "fork_seconds": spread(forking), "branches": BRANCHES}


def memory(sizes: Sizes) -> dict[str, Any]:
    """Resident bytes of one long context of the tiny model against the arithmetic of its configuration."""
    model = build("tiny")
    config = model.config
    Server(model, 1 << 30).prompt(ids(STEP, 1, config), reuse=False).close()  # the arena, and whatever else the first steps need
    server, before = Server(model, 1 << 30), resident()
    held = server.prompt(ids(sizes.context, 2, config), reuse=False)
    grown, counted = resident() - before, held.bytes
    expected = sizes.context * config.kv_bytes_per_token(4) + config.state_bytes() + config.conv_state_bytes(4)
    print(f"{sizes.context} tokens of context, tiny, fp32: {format_bytes(grown)} resident, {format_bytes(counted)} counted, "
          f"{format_bytes(expected)} by arithmetic", flush=True)
    return {"context": sizes.context, "resident_bytes": grown, "counted_bytes": counted, "expected_bytes": expected,
            "counted_share": counted / expected, "resident_share": grown / expected}


def resident() -> int:
    """Resident bytes of this process."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def lookup(sizes: Sizes) -> dict[str, Any]:
    """Processor time of the cache's own work with a long index: opening a prompt that is all there, one that parts, and a step."""
    model = build("tiny")
    cache = PrefixCache(Memory(model, 8 << 30))
    tokens = ids(sizes.indexed, 1, model.config)
    held = cache.open(tokens)
    indexing = 0.0
    while held.length < len(tokens):  # nothing is computed: the index does not look into states
        piece = tokens[held.length:held.length + STEP]
        start = time.process_time()
        if not held.reserve(len(piece)):
            raise SystemExit("the budget is too small for this measurement")
        held.copies(held.length, held.length + len(piece))
        held.advance(piece)
        indexing += time.process_time() - start
    whole = [processor_time(lambda: cache.open(tokens).close()) for _ in range(sizes.runs)]
    parted = [processor_time(lambda: cache.open([*tokens[:1000], *tokens[:len(tokens) // 2]]).close()) for _ in range(sizes.runs)]
    print(f"an index of {cache.index.count} blocks: {indexing / len(tokens) * 64e6:.1f} us to build one; opening {sizes.indexed} tokens "
          f"{statistics.median(whole) * 1e3:.1f} ms, half as many that part at 1,000 {statistics.median(parted) * 1e3:.1f} ms", flush=True)
    return {"blocks": cache.index.count, "index_seconds_per_block": indexing / len(tokens) * 64, "open_all": spread(whole),
            "open_parted": spread(parted)}


def boundaries(sizes: Sizes) -> dict[str, Any]:
    """Time to first token after a prefix that ends at a hash block, for many blocks: what is reused, and how even the time is."""
    model = build("tiny")
    server, past = Server(model, 4 << 30), ids(sizes.cached, 1, model.config)
    server.prompt(past).close()
    rows = []
    for tokens in range(sizes.cached // 8, sizes.cached + 1, sizes.cached // 8):
        seconds = []
        for run in range(sizes.runs):
            asked, start = past[:tokens] + ids(64, 1000 * tokens + run, model.config), time.perf_counter()
            held = server.prompt(asked)
            seconds.append(time.perf_counter() - start)
            assert held.cached_tokens == tokens, held.note
            held.close(keep=False)
        rows.append({"boundary": tokens, "recomputed_below": 0, **spread(seconds)})
    low, high = (f(row["median"] for row in rows) for f in (min, max))
    print(f"64 new tokens after each of {len(rows)} boundaries up to {sizes.cached}: all of the prefix reused, {low * 1e3:.1f} to "
          f"{high * 1e3:.1f} ms", flush=True)
    return {"rows": rows, "slowest_over_fastest": high / low}


def kda(sizes: Sizes) -> dict[str, Any]:
    """Seconds of a decoded token of KDA layers alone, at several contexts in turns: the state is all they have of the past."""
    shape = medium()
    layers = ModelConfig(vocab_size=256, hidden_size=shape.hidden_size, num_hidden_layers=4, intermediate_size=256, layer_pattern=("kda",),
                         final_mixer=None, mixers={"kda": KDAConfig(num_heads=12, head_dim=128)})
    model = InferenceModel(layers, RandomWeights(layers))
    depths = [depth for depth in DEPTHS if depth <= sizes.context // 8]
    pool, seen = model.new_pool(len(depths), 64), [0] * len(depths)
    tokens = torch.tensor(ids(sizes.context // 8 + 200, 1, layers))

    def read(which: int, count: int) -> None:
        past, seen[which] = seen[which], seen[which] + count
        model.forward(PackedRows(tokens=tokens[past:past + count], bounds=torch.tensor([0, count]), past=torch.tensor([past]),
                                 slots=torch.tensor([which]), pages=torch.zeros(1, 1, dtype=torch.int32)), pool)

    for which, depth in enumerate(depths):
        while seen[which] < depth:
            read(which, min(STEP, depth - seen[which]))
    times = [[timed(partial(read, which, 1)) for which in range(len(depths))] for _ in range(100)]
    rows = {str(depth): spread([turn[which] for turn in times]) for which, depth in enumerate(depths)}
    medians = [row["median"] for row in rows.values()]
    print("a token of 4 KDA layers: " + ", ".join(f"{row['median'] * 1e3:.3f} ms after {depth}" for depth, row in rows.items()), flush=True)
    return {"layers": 4, "seconds": rows, "last_over_first": medians[-1] / medians[0]}


def processor_time(run: Callable[[], object]) -> float:
    """Processor seconds."""
    start = time.process_time()
    run()
    return time.process_time() - start


PARTS = {"reuse": reuse, "boundaries": boundaries, "kda": kda, "memory": memory, "lookup": lookup, "first_token": first_token,
         "forks": forks}


def main() -> None:
    """Print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="the tiny model and short prompts; nothing is saved")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--runs", type=int, help="repetitions of each figure (default: 5)")
    asked = parser.parse_args()
    if reason := native.unavailable():
        sys.exit(f"the inference model needs the C++ library: {reason}")
    sizes = SHORT if asked.short else FULL
    if asked.runs:
        sizes = replace(sizes, runs=asked.runs)
    about = {"threads": torch.get_num_threads(), "instructions": native.instruction_set()}
    for part in asked.only:
        result = PARTS[part](sizes)
        if not asked.short:
            save("serve_cache", {part: {**result, **about}}, keep=True)


if __name__ == "__main__":
    main()
