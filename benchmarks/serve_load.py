"""Does a server stay even and small under load, and do long prompts leave short ones alone?

Part one: clients that stream one answer after another from the tiny model for some time: errors, time between tokens (median, p99), and
memory of the server's process from the moment its cache is full. Part two: the time to the first token of short requests, in windows
without and with bursts of long prompts, in turns. The server runs in a process of its own, the clients in this one.

    python benchmarks/serve_load.py                 # 64 clients for 5 minutes, then 5 pairs of windows of 20 s
    python benchmarks/serve_load.py --only bursts --pairs 2 --window 15          # a part; the other one's figures stay
    python benchmarks/serve_load.py --short         # seconds; nothing is saved
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import save

WORDS = tuple("a server under load should stay even and small while people ask it many things at once".split())  # noqa: SIM905
CACHE_BYTES = 96 << 20
SHORT_TOKENS, LONG_WORDS, BURST = 8, 2000, 3


@dataclass
class Seen:
    """What the clients saw."""

    answers: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)


def serve() -> None:
    """The server: the tiny preset with random weights, until it is ended. Prints its address."""
    from gnomon.data.tokenizer import train_tokenizer
    from gnomon.model.config import preset
    from gnomon.model.inference import InferenceModel, refuse
    from gnomon.model.transformer import Transformer
    from gnomon.serve import server
    from gnomon.serve.assembly import service_of
    from gnomon.serve.load import Loaded
    from gnomon.serve.runner import TorchRunner
    from gnomon.serve.settings import load

    tokenizer = train_tokenizer([Path(__file__).read_text(encoding="utf-8"), " ".join(WORDS)], 512)
    model = Transformer(preset("tiny", (f"vocab_size={tokenizer.vocab_size}",))).initialise(seed=0).eval()
    runner = TorchRunner(model) if refuse(model.config) else InferenceModel.from_transformer(model, "fp32")
    settings = load(None, ["port=0", "log=none", "drain_seconds=1", f"cache.memory_bytes={CACHE_BYTES}"])
    bound = server.listen(settings.host, settings.port)
    with service_of(Loaded(runner=runner, tokenizer=tokenizer, name="tiny", fingerprint="load"), settings) as service:
        server.serve(service, {}, bound, lambda: print(bound.getsockname()[1], flush=True))


async def ask(port: int, words: int, tokens: int, seen: Seen, dice: random.Random) -> None:
    """One streamed answer over a connection of its own; notes what happened."""
    text = " ".join(dice.choice(WORDS) for _ in range(words))
    body = json.dumps({"model": "tiny", "max_tokens": tokens, "stream": True, "reasoning_effort": "none",
                       "messages": [{"role": "system", "content": " ".join(WORDS) * 3}, {"role": "user", "content": text}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    began, last = time.perf_counter(), 0.0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            seen.errors.append(status.decode().strip())
            return
        done = False
        async for line in reader:
            if line.startswith(b"data: {") and b'"content":"' in line and b'"content":""' not in line:
                now = time.perf_counter()
                (seen.gaps if last else seen.firsts).append(now - (last or began))
                last = now
                seen.tokens += 1
            done = done or line.startswith(b"data: [DONE]")
            if line.startswith(b'data: {"error"'):
                seen.errors.append(line.decode().strip()[:200])
        if not done:
            seen.errors.append("a stream ended early")
        seen.answers += 1
    finally:
        writer.close()


def memory(process: int) -> int:
    """Resident bytes of a process."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


async def steady(port: int, process: int, clients: int, seconds: float) -> dict[str, Any]:
    """Part one. Memory is compared between the second fifth of the time, when the cache is full, and the last."""
    seen, end = Seen(), time.perf_counter() + seconds
    samples: list[tuple[float, int]] = []

    async def client(number: int) -> None:
        dice = random.Random(number)
        while time.perf_counter() < end:
            await ask(port, dice.randrange(5, 60), 64, seen, dice)

    async def watch() -> None:
        while time.perf_counter() < end:
            samples.append((1 - (end - time.perf_counter()) / seconds, memory(process)))
            await asyncio.sleep(min(1.0, seconds / 40))

    await asyncio.gather(watch(), *(client(number) for number in range(clients)))
    early = statistics.mean(size for share, size in samples if 0.2 <= share < 0.4)
    late = statistics.mean(size for share, size in samples if share >= 0.8)
    gaps = sorted(seen.gaps)
    median, p99 = gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)]
    print(f"{clients} clients, {seconds:g} s: {seen.answers} answers, {seen.tokens / seconds:.0f} tokens/s, {len(seen.errors)} errors; "
          f"between tokens {median * 1e3:.1f} ms median, {p99 * 1e3:.1f} ms p99 ({p99 / median:.2f} times); "
          f"memory {early / 1e6:.0f} → {late / 1e6:.0f} MB ({late / early - 1:+.1%})")
    for error in seen.errors[:3]:
        print("  ", error)
    return {"clients": clients, "seconds": seconds, "answers": seen.answers, "tokens_per_second": seen.tokens / seconds,
            "errors": len(seen.errors), "gap_median": median, "gap_p99": p99, "gap_ratio": p99 / median,
            "first_token_p95": p95(seen.firsts), "memory_early": early, "memory_late": late, "memory_drift": late / early - 1}


async def window(port: int, seconds: float, bursts: bool, dice: random.Random) -> Seen:
    """Short requests, five a second, with or without bursts of long prompts."""
    short, long = Seen(), Seen()
    tasks: list[asyncio.Task[None]] = []
    steps = max(2, int(seconds * 5))
    for step in range(steps):
        if bursts and step % 15 == 0:
            tasks += [asyncio.create_task(ask(port, LONG_WORDS, 4, long, dice)) for _ in range(BURST)]
        tasks.append(asyncio.create_task(ask(port, 10, SHORT_TOKENS, short, dice)))
        await asyncio.sleep(seconds / steps)
    await asyncio.gather(*tasks)
    short.errors += long.errors
    return short


async def mixed(port: int, pairs: int, seconds: float) -> dict[str, Any]:
    """Part two: the windows in turns; p95 over all requests of a kind."""
    dice = random.Random(0)
    quiet, loud, errors = [], [], 0
    for _ in range(pairs):
        for bursts, firsts in ((False, quiet), (True, loud)):
            seen = await window(port, seconds, bursts, dice)
            firsts += seen.firsts
            errors += len(seen.errors)
    alone, beside = p95(quiet), p95(loud)
    print(f"short requests, p95 to the first token: {alone * 1e3:.0f} ms alone, {beside * 1e3:.0f} ms beside bursts of {BURST} prompts of "
          f"{LONG_WORDS} words ({beside / alone:.2f} times), medians {statistics.median(quiet) * 1e3:.0f} and "
          f"{statistics.median(loud) * 1e3:.0f} ms, {errors} errors")
    return {"alone_p95": alone, "beside_p95": beside, "ratio": beside / alone, "alone_median": statistics.median(quiet),
            "beside_median": statistics.median(loud), "errors": errors, "requests": len(quiet) + len(loud)}


def p95(values: list[float]) -> float:
    """The 95th percentile."""
    return sorted(values)[int(len(values) * 0.95)]


def main() -> None:
    """Start the server, load it, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64, help="streaming clients (default: 64)")
    parser.add_argument("--seconds", type=float, default=300, help="how long they stream (default: 300)")
    parser.add_argument("--only", choices=("steady", "bursts"), help="one part only")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of windows without and with bursts (default: 5)")
    parser.add_argument("--window", type=float, default=20, help="seconds of a window (default: 20)")
    parser.add_argument("--short", action="store_true", help="10 s and one pair of windows; nothing is saved")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve()
        return
    process = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        parts: dict[str, Any] = {}
        if asked.only != "bursts":
            parts["steady"] = asyncio.run(steady(port, process.pid, asked.clients, 10 if asked.short else asked.seconds))
        if asked.only != "steady":
            parts["beside"] = asyncio.run(mixed(port, 1 if asked.short else asked.pairs, 6 if asked.short else asked.window))
    finally:
        process.terminate()
        process.wait()
    if not asked.short:
        save("serve_load", parts, keep=True)


if __name__ == "__main__":
    main()
