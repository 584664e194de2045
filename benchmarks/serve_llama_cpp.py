"""How fast does the engine decode and read prompts beside llama.cpp, same weights, same machine, same run?

Both run a checkpoint in the released layout with the weights as stored: ours from its folder, llama.cpp from the GGUF of the same
checkpoint (`--outtype bf16`; docs/export.md says how to make it), tuned: no file mapping, huge pages, its repacked kernels. Runs take
turns, the medians are compared. Ours are whole requests through the engine, sampling included; llama-bench times the bare model.

    OMP_NUM_THREADS=2 python benchmarks/serve_llama_cpp.py CHECKPOINT MODEL.gguf path/to/llama-bench
    … --contexts 128 --prompts 512 --runs 1 --steps 8          (a short look)

At long contexts llama.cpp takes minutes to get there, so above `--deep` tokens its repetitions share one run.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import save

from gnomon.model.inference import InferenceModel
from gnomon.serve.cache_settings import CacheSettings
from gnomon.serve.engine import Engine, EngineSettings
from gnomon.serve.prefix import PrefixCache
from gnomon.serve.request import Finished, Request, Sampled, Sampling

TUNED = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
TIMEOUT = 3600
Peer = Callable[[list[str], int], list[float]]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder in the released layout")
    parser.add_argument("gguf", type=Path, help="the same checkpoint, converted")
    parser.add_argument("bench", type=Path, help="the llama-bench program")
    parser.add_argument("--contexts", type=int, nargs="*", default=[128, 2048, 16384], help="tokens before decoding")
    parser.add_argument("--prompts", type=int, nargs="*", default=[2048, 16384], help="lengths of prompts")
    parser.add_argument("--runs", type=int, default=5, help="runs of each, taking turns")
    parser.add_argument("--steps", type=int, default=64, help="tokens decoded in a run")
    parser.add_argument("--deep", type=int, default=4096, help="contexts and prompts above share one run of llama-bench")
    parser.add_argument("--fast", action="store_true", help="let the engine give up equal bits with and without cache (exact=false)")
    return parser.parse_args()


class Ours:
    """The engine on the checkpoint, with the defaults of a server but latents in bf16, which the weights are too."""

    def __init__(self, folder: Path, exact: bool):
        self.runner = InferenceModel.load(folder)
        cache = PrefixCache.build(self.runner, CacheSettings(latents="bf16"), "benchmark")
        self.engine = Engine(self.runner, EngineSettings(exact=exact), cache)
        self.count = 0

    def request(self, tokens: int, output: int, cache: bool) -> tuple[list[float], int]:
        """Times at which the tokens of an answer came, from the request on, and how much of the prompt was cached."""
        draw = torch.Generator().manual_seed(tokens)
        prompt = tuple(torch.randint(self.runner.config.vocab_size, (tokens,), generator=draw).tolist())
        self.count += 1
        start, times, cached = time.perf_counter(), list[float](), 0
        self.engine.submit(Request(id=str(self.count), prompt=prompt, sampling=Sampling(max_tokens=output, temperature=0.0), cache=cache))
        while not self.engine.idle:
            for _, event in self.engine.step():
                if isinstance(event, Sampled):
                    times.append(time.perf_counter() - start)
                elif isinstance(event, Finished):
                    cached = event.usage.cached_tokens
        return times, cached

    def decode(self, context: int, steps: int) -> float:
        """Tokens per second after a context, which is cached from the second run on."""
        times, _ = self.request(context, steps + 1, cache=True)
        return steps / (times[-1] - times[0])

    def prefill(self, tokens: int) -> float:
        """Prompt tokens per second until the first token."""
        times, cached = self.request(tokens, 1, cache=False)
        assert not cached
        return tokens / times[0]


def llama_bench(program: Path, gguf: Path, threads: int) -> Peer:
    """A function that runs llama-bench with these options and returns tokens per second, one figure for each repetition."""

    def run(options: list[str], repetitions: int) -> list[float]:
        command = [str(program), "-m", str(gguf), "-t", str(threads), "-lm", "none", "-r", str(repetitions), "-o", "json", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT, env=os.environ | TUNED)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return [float(value) for value in json.loads(done.stdout)[0]["samples_ts"]]

    return run


def measure(name: str, ours: Callable[[], float], theirs: Callable[[int], list[float]], runs: int, deep: bool) -> dict[str, Any]:
    """Both sides in turns, or the peer in one piece amid ours; prints medians and their ratio."""
    mine, peers = list[float](), list[float]()
    if deep:
        mine += [ours() for _ in range(runs // 2)]
        peers += theirs(runs)
        mine += [ours() for _ in range(runs - runs // 2)]
    else:
        for _ in range(runs):
            mine.append(ours())
            peers += theirs(1)
    a, b = statistics.median(mine), statistics.median(peers)
    spans = [f"({min(runs_):.1f} to {max(runs_):.1f})" for runs_ in (mine, peers)]
    print(f"{name:24} engine {a:8.1f} tok/s {spans[0]}   llama.cpp {b:8.1f} {spans[1]}   {a / b:5.2f} times", flush=True)
    return {"engine": a, "llama_cpp": b, "ratio": a / b, "engine_runs": mine, "llama_cpp_runs": peers}


def main() -> None:
    """Print and save."""
    parsed = arguments()
    threads = torch.get_num_threads()
    ours, peer = Ours(parsed.checkpoint, exact=not parsed.fast), llama_bench(parsed.bench, parsed.gguf, threads)
    results: dict[str, Any] = {}
    for context in parsed.contexts:
        ours.decode(context, 1)  # reads the context, which later runs find in the cache
        results[f"decode_{context}"] = measure(
            f"decode after {context}", partial(ours.decode, context, parsed.steps),
            partial(peer, ["-p", "0", "-n", str(parsed.steps), "-d", str(context)]), parsed.runs, context > parsed.deep)
    for tokens in parsed.prompts:
        results[f"prefill_{tokens}"] = measure(
            f"prompt of {tokens}", partial(ours.prefill, tokens), partial(peer, ["-p", str(tokens), "-n", "0"]), parsed.runs,
            tokens > parsed.deep)
    save("serve_llama_cpp", {"threads": threads, "exact": ours.engine.exact, "checkpoint_bytes": ours.runner.weight_bytes, **results})


if __name__ == "__main__":
    main()
