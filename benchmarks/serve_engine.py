"""What does the engine add to a step, and how does throughput grow with the number of sequences?

Four questions, each with its peer in the same run: the seconds of a step outside the model, on a model of almost nothing; tokens per second
of 1 to 64 sequences that decode together, against the same rows handed to the model without an engine; a prompt with results that do not
depend on how it is cut (`exact`) against one without that promise; sixteen answers to one prompt against one. And the gap between two
tokens of a conversation while long prompts come in.

    OMP_NUM_THREADS=2 python benchmarks/serve_engine.py                    # small preset, then the K3-shaped medium model
    OMP_NUM_THREADS=2 python benchmarks/serve_engine.py --models tiny --short
    OMP_NUM_THREADS=2 python benchmarks/serve_engine.py --models path/to/checkpoint
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from kernels_decode import RandomWeights, medium
from machine import save, spread

from gnomon.kernels import native
from gnomon.model.config import PRESETS, ModelConfig, preset
from gnomon.model.inference import InferenceModel
from gnomon.model.inference_state import PackedRows
from gnomon.model.parts import KDAConfig, MLAConfig
from gnomon.serve.engine import Engine, EngineSettings
from gnomon.serve.pages import Memory
from gnomon.serve.prefix import PrefixCache
from gnomon.serve.request import Request, Sampled, Sampling

CONTEXT = 128


def build(name: str) -> InferenceModel:
    """`medium`, a preset with random weights in the released types, or a released checkpoint."""
    if name == "medium":
        return InferenceModel(medium(), RandomWeights(medium()))
    if (PRESETS / f"{name}.toml").exists():
        config = preset(name)
        return InferenceModel(config, RandomWeights(config))
    return InferenceModel.load(name)


def almost_nothing() -> InferenceModel:
    """A model whose own work is negligible: what is left of a step is the engine."""
    bare = ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, intermediate_size=32, layer_pattern=("kda", "mla"),
                       mixers={"kda": KDAConfig(num_heads=1, head_dim=8), "mla": MLAConfig(num_attention_heads=1, kv_lora_rank=8)})
    return InferenceModel(bare, RandomWeights(bare))


def prompt(model: InferenceModel, length: int, seed: int) -> tuple[int, ...]:
    """Random ids."""
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(model.config.vocab_size, (length,), generator=draw).tolist())


def engine_of(model: InferenceModel, tokens: int, cached: bool = True, exact: bool = True) -> Engine:
    """An engine with memory for so many tokens and a hundred states beside them."""
    probe = model.new_pool(1, 64)
    budget = 200 * probe.slot_bytes + (tokens // 64 + 200) * probe.page_bytes
    cache = PrefixCache(Memory(model, budget)) if cached else None
    return Engine(model, EngineSettings(memory_bytes=budget, exact=exact), cache)


def decoding(engine: Engine, model: InferenceModel, sequences: int, tokens: int, **sampling: Any) -> None:
    """Bring so many sequences to where they decode."""
    for i in range(sequences):
        settings = Sampling(max_tokens=tokens, seed=i, **sampling)
        engine.submit(Request(id=f"r{i}", prompt=prompt(model, CONTEXT, i), sampling=settings))
    begun = set()
    while len(begun) < sequences:
        begun |= {name for name, event in engine.step() if isinstance(event, Sampled)}


def overhead(counts: list[int], steps: int) -> dict[str, Any]:
    """Seconds of a step outside the model's call, greedy and with a top-p draw."""
    result = {}
    for kind, sampling in (("greedy", {"temperature": 0.0}), ("top_p", {"temperature": 0.8, "top_p": 0.9})):
        for count in counts:
            model = almost_nothing()
            engine, inside = engine_of(model, count * (CONTEXT + 2 * steps + 64)), []
            whole = model.forward

            def forward(*rows: Any, whole: Any = whole, inside: list[float] = inside, **more: Any) -> Any:
                start = time.perf_counter()
                outputs = whole(*rows, **more)
                inside.append(time.perf_counter() - start)
                return outputs

            model.forward = forward  # type: ignore[method-assign]
            decoding(engine, model, count, 2 * steps, **sampling)
            inside.clear()
            seconds = [timed(engine) for _ in range(steps)]
            outside = statistics.median(a - b for a, b in zip(seconds, inside, strict=True))
            print(f"{kind:7} {count:3} sequences: a step takes {outside * 1e3:6.3f} ms outside the model's call, "
                  f"{statistics.median(inside) * 1e3:6.3f} ms in it", flush=True)
            result[f"{kind}_{count}"] = {"outside": outside, "inside": statistics.median(inside), "steps": steps}
    return result


def timed(engine: Engine) -> float:
    """Seconds of one step."""
    start = time.perf_counter()
    engine.step()
    return time.perf_counter() - start


def throughput(model: InferenceModel, counts: list[int], steps: int) -> dict[str, Any]:
    """Tokens per second of sequences that decode together, by the engine and by the model alone with the same rows."""
    result = {}
    for count in counts:
        engine = engine_of(model, count * (CONTEXT + steps + 128))
        decoding(engine, model, count, 2 * steps + 8, temperature=0.8)
        ours = [timed(engine) for _ in range(steps)]
        bare = list(alone(model, count, steps))
        print(f"decode {count:3} sequences: {count / statistics.median(ours):7.1f} tok/s, the model alone "
              f"{count / statistics.median(bare):7.1f}", flush=True)
        result[f"decode_{count}"] = {"engine": spread(ours), "model": spread(bare)}
    return result


def alone(model: InferenceModel, count: int, steps: int) -> Iterator[float]:
    """Seconds of calls that bring one token of each sequence, without an engine."""
    each = -(-(CONTEXT + steps) // 64)
    pool = model.new_pool(count, count * each * 64)
    pages = torch.arange(count * each, dtype=torch.int32).reshape(count, each)
    slots = torch.arange(count)
    tokens = torch.cat([torch.tensor(prompt(model, CONTEXT, i)) for i in range(count)])
    model.forward(PackedRows(tokens=tokens, bounds=torch.arange(count + 1) * CONTEXT, past=torch.zeros(count, dtype=torch.int64),
                             slots=slots, pages=pages), pool)
    for i in range(steps):
        rows = PackedRows(tokens=tokens[:count].contiguous(), bounds=torch.arange(count + 1), past=torch.full((count,), CONTEXT + i),
                          slots=slots, pages=pages)
        start = time.perf_counter()
        model.forward(rows, pool)
        yield time.perf_counter() - start


def first_token(engine: Engine, requests: list[Request]) -> float:
    """Seconds until all of these have their first token."""
    start, waiting = time.perf_counter(), {request.id for request in requests}
    engine.submit_many(requests)
    while waiting:
        waiting -= {name for name, event in engine.step() if isinstance(event, Sampled)}
    seconds = time.perf_counter() - start
    for request in requests:
        engine.cancel(request.id)
    engine.step()
    return seconds


def prompts(model: InferenceModel, length: int, runs: int) -> dict[str, Any]:
    """Seconds of a prompt with and without bits that do not depend on how it is cut, and of sixteen answers to it."""
    seconds: dict[str, list[float]] = {"exact": [], "free": [], "sixteen": []}
    for run in range(runs):
        for kind, times in seconds.items():
            engine = engine_of(model, 2 * length, exact=kind != "free")
            many = [Request(id=str(i), prompt=prompt(model, length, run), sampling=Sampling(max_tokens=8, seed=i))
                    for i in range(16 if kind == "sixteen" else 1)]
            times.append(first_token(engine, many))
    middle = {kind: statistics.median(times) for kind, times in seconds.items()}
    print(f"prompt of {length}: {length / middle['exact']:6.0f} tok/s exact, {length / middle['free']:6.0f} without; sixteen answers begin "
          f"after {middle['sixteen'] / middle['exact']:.2f} times the seconds of one", flush=True)
    return {f"prompt_{length}": {kind: spread(times) for kind, times in seconds.items()}}


def gaps(model: InferenceModel, length: int, steps: int) -> dict[str, Any]:
    """Seconds between two tokens of a conversation, undisturbed and while prompts of this length come in one after another."""
    engine = engine_of(model, 4 * length + 4096)
    decoding(engine, model, 1, 10**6, temperature=0.0)
    quiet = [timed(engine) for _ in range(steps)]
    busy: list[float] = []
    for i in range(3):
        engine.submit(Request(id=f"long{i}", prompt=prompt(model, length, 50 + i), sampling=Sampling(max_tokens=1)))
    while engine.stats().running + engine.stats().waiting > 1:
        busy.append(timed(engine))
    print(f"between two tokens: {statistics.median(quiet) * 1e3:.1f} ms, {statistics.median(busy) * 1e3:.1f} ms while prompts of {length} "
          f"come in (largest {max(busy) * 1e3:.1f})", flush=True)
    return {"gap": {"quiet": spread(quiet), "busy": spread(busy), "prompt": length}}


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["small", "medium"], help="medium, a preset, or the folder of a checkpoint")
    parser.add_argument("--short", action="store_true", help="few steps and short prompts: does it run?")
    asked = parser.parse_args()
    counts, steps = ([1, 4], 10) if asked.short else ([1, 4, 16, 64], 40)
    results: dict[str, Any] = {"overhead": overhead(counts, 4 * steps)}
    for name in asked.models:
        print(name, flush=True)
        model = build(name)
        results[name] = throughput(model, counts, steps)
        for length in [256] if asked.short else [2048, 8192]:
            results[name] |= prompts(model, length, 2 if asked.short else 5)
        results[name] |= gaps(model, 256 if asked.short else 2048, steps)
    if not asked.short:
        save("serve_engine", {"threads": torch.get_num_threads(), "instructions": native.instruction_set(), **results})


if __name__ == "__main__":
    main()
