"""How many turns a second do harness, gateway and record allow, when policy and machine cost nothing? And does memory grow?

    python benchmarks/agent_overhead.py [--rollouts 200] [--turns 10] [--only gateway]

A scripted policy with ids (K3's chat format) answers each turn with a call; the result of the call comes back at once. Rollouts are whole
attempts, judged and on disk, each turn synchronised before its answer is given. Two ways to the policy: our own harness and its loop, and a
program that speaks OpenAI's API to the gateway over HTTP, from a process of its own, as programs do. Beside the latter, in the same run:
the same program and a server that only gives a constant answer, which is what HTTP itself costs. Processor time is our process's alone.

All of it takes several minutes; `--only` measures one part and puts it beside those that were measured before with the same settings.
"""

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import machine
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gnomon.agent.gateway import Gateway
from gnomon.agent.gateway_routes import Server
from gnomon.agent.harness import harness
from gnomon.agent.policies.scripted import ScriptedPolicy, say
from gnomon.agent.rollout import Deadlines, Rollout, attempt
from gnomon.agent.task import Check, Task
from gnomon.agent.trajectory import StopReason
from gnomon.data.chat import ChatFormat, chat_format
from gnomon.data.messages import Conversation, Message
from gnomon.data.tokenizer import train_tokenizer
from gnomon.sandbox.sandbox import Command, Result, Sandbox, Spec

OUTPUT = b"".join(b"%04d drwxr-xr-x 2 user user 4096 file-%d.txt\n" % (i, i) for i in range(10))
TASK = Task(id="work", prompt="Look around and say what there is.", image="host", check=Check(kind="exact", settings={"answer": "done"}))
WAYS = {"harness": "our harness and record", "gateway": "a program, the gateway and record", "constant": "the program and constant answers"}
TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Run a command.", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}]


class Box:
    """A machine that costs nothing: every program prints the same at once."""

    id = "box"

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    async def exec(self, command: Command) -> Result:
        """The same result whatever is asked."""
        return Result(code=0, stdout=OUTPUT, stderr=b"")

    async def kill(self) -> None:
        """Nothing to end."""


class Machines:
    """A backend of such boxes."""

    name = "nothing"

    async def create(self, spec: Spec) -> Any:
        """A box."""
        return Box(spec)


class Client:
    """A process that plays programs which speak OpenAI's API: each asks until an answer has no call."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._numbers = itertools.count()
        self._hearing = asyncio.create_task(self._hear())

    async def play(self, url: str, key: str) -> None:
        """One program, from its first request to its end."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([number, url, key]).encode() + b"\n")
        said = await self._waiting[number]
        del self._waiting[number]
        if said:
            raise RuntimeError(said)

    async def _hear(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            number, said = json.loads(line)
            self._waiting[number].set_result(said)
        for each in self._waiting.values():
            each.set_result("the process of the programs has ended")


@contextlib.asynccontextmanager
async def clients(concurrency: int) -> AsyncIterator[Client]:
    """That process, for as long as the block lasts."""
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, "--programs", str(concurrency), stdin=asyncio.subprocess.PIPE,
                                                   stdout=asyncio.subprocess.PIPE)
    try:
        yield Client(process)
    finally:
        process.kill()
        await process.wait()


async def programs(concurrency: int) -> None:
    """What that process does: programs by their numbers, addresses and keys on its input, their ends on its output."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)

    async def one(number: int, url: str, key: str) -> None:
        try:
            await program(client, url, key)
            said = ""
        except (httpx.HTTPError, KeyError) as error:
            said = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps([number, said]) + "\n")
        sys.stdout.flush()

    async with httpx.AsyncClient(timeout=60, limits=limits) as client, asyncio.TaskGroup() as group:
        async for line in reader:
            group.create_task(one(*json.loads(line)))


async def program(client: httpx.AsyncClient, url: str, key: str) -> None:
    """One program."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": TASK.prompt}]
    while True:
        body = {"model": "m", "messages": messages, "tools": TOOLS}
        response = await client.post(f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
        response.raise_for_status()
        said = response.json()["choices"][0]["message"]
        messages.append(said)
        if not said.get("tool_calls"):
            return
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": OUTPUT.decode()} for call in said["tool_calls"]]


class Program:
    """A program as a harness: it is admitted to the gateway, and plays elsewhere."""

    name = "program"

    def __init__(self, gateway: Gateway, client: Client) -> None:
        self.gateway, self.client = gateway, client

    async def run(self, task: Task, model: Any, box: Sandbox | None, *, effort: str | None = None) -> StopReason:
        """One attempt."""
        visit = self.gateway.admit(model)
        try:
            await self.client.play(self.gateway.url, visit.secret)
        finally:
            self.gateway.leave(visit)
        return "finished"


def policy(turns: int, chat: ChatFormat) -> ScriptedPolicy:
    """Calls in every turn but the last."""
    def reply(conversation: Conversation) -> Message:
        done = sum(message.role == "assistant" for message in conversation.messages)
        return say("I look.", ("bash", {"command": f"ls -la /home/user/{done}"}), reasoning="hm") if done < turns - 1 else say("done")

    return ScriptedPolicy(reply, chat)


async def each(count: int, concurrency: int, work: Callable[[int], Awaitable[None]]) -> None:
    """So many pieces of work, so many at a time."""
    coming = iter(range(count))

    async def worker() -> None:
        for number in coming:
            await work(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())


async def attempts(count: int, concurrency: int, way: Any, answers: ScriptedPolicy, folder: Path) -> None:
    """So many attempts."""
    async def one(number: int) -> None:
        rollout = Rollout(id=f"r{number}", task=TASK, harness=way, policy=answers)
        path = folder / f"{number}.jsonl"
        done = await attempt(rollout, path, Machines(), Deadlines(grace=1.0))  # type: ignore[arg-type]
        assert done.score is not None and done.score.reward == 1.0, done.score
        path.unlink()

    await each(count, concurrency, one)


@contextlib.asynccontextmanager
async def bare(turns: int) -> AsyncIterator[str]:
    """The address of a server that gives constant answers: calls until the conversation has so many turns."""
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": json.dumps({"command": "ls -la /home/user/0"})}}
    answer, last = ({"choices": [{"message": {"role": "assistant", "content": "I look.", **more}}]}
                    for more in ({"tool_calls": [call]}, {}))

    async def complete(request: Request) -> Response:
        body = await request.json()
        done = sum(message["role"] == "assistant" for message in body["messages"])
        return Response(json.dumps(answer if done < turns - 1 else last), media_type="application/json")

    import socket

    import uvicorn

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(512)
        application = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
        serving = Server(uvicorn.Config(application, log_config=None, access_log=False, lifespan="off", ws="none"))
        running = asyncio.create_task(serving.serve(sockets=[listening]))
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        serving.should_exit = serving.force_exit = True
        await asyncio.gather(running, return_exceptions=True)


def resident() -> int:
    """Bytes of memory in use, after a collection."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def measure(parsed: argparse.Namespace, chat: ChatFormat, folder: Path) -> dict[str, Any]:
    """What was asked for: each way some times in turn, and memory over a run that is longer."""
    answers, at_once = policy(parsed.turns, chat), parsed.concurrency
    async with Gateway() as gateway, bare(parsed.turns) as address, clients(at_once) as client:
        loop, program = harness.opened("bash"), Program(gateway, client)

        async def constant(number: int) -> None:
            await client.play(address, "none")

        ways: dict[str, Callable[[int], Awaitable[None]]] = {
            "harness": lambda count: attempts(count, at_once, loop, answers, folder),
            "gateway": lambda count: attempts(count, at_once, program, answers, folder),
            "constant": lambda count: each(count, at_once, constant),
        }
        figures: dict[str, Any] = {}
        chosen = {name: way for name, way in ways.items() if name in parsed.only}
        if chosen:
            figures = await rates(chosen, parsed)
        if "memory" in parsed.only:
            figures["memory"] = await memory(ways["gateway"], parsed)
        return figures


async def rates(ways: dict[str, Callable[[int], Awaitable[None]]], parsed: argparse.Namespace) -> dict[str, Any]:
    """Turns a second of each way, and milliseconds of this process for a turn."""
    total = parsed.rollouts * parsed.turns
    for work in ways.values():
        await work(max(parsed.rollouts // 10, 1))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for run in range(parsed.repeats):
        for name, work in ways.items():
            began, busy = time.perf_counter(), time.process_time()
            await work(parsed.rollouts)
            found[name].append((total / (time.perf_counter() - began), 1e3 * (time.process_time() - busy) / total))
            print(f"{name:10} {found[name][-1][0]:7.0f} turns/s, {found[name][-1][1]:.2f} ms of our process a turn "
                  f"(run {run + 1} of {parsed.repeats})", flush=True)
    figures = {}
    for name, runs in found.items():
        rate, busy = machine.spread([each for each, _ in runs]), machine.spread([each for _, each in runs])
        figures[name] = {"turns_per_second": rate, "processor_milliseconds_per_turn": busy, "about": WAYS[name]}
        print(f"{name:10} {rate['median']:7.0f} turns/s (min {rate['min']:.0f}, max {rate['max']:.0f}, {rate['runs']} runs): {WAYS[name]}")
    return figures


async def memory(work: Callable[[int], Awaitable[None]], parsed: argparse.Namespace) -> dict[str, Any]:
    """Resident memory after one run, and after each of the others that make it so many times longer."""
    sizes = []
    for _ in range(parsed.longer):
        await work(parsed.rollouts)
        sizes.append(resident())
    growth = sizes[-1] / sizes[0] - 1
    print(f"memory after {parsed.rollouts} rollouts {sizes[0] / 1e6:.1f} MB, after {parsed.longer} times as many {sizes[-1] / 1e6:.1f} MB: "
          f"{growth:+.1%} (target: within 10 %)")
    return {"bytes": sizes, "growth": growth}


def main() -> None:
    """Measure, print, keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=200, help="attempts of a run (default: 200)")
    parser.add_argument("--turns", type=int, default=10, help="turns of an attempt (default: 10)")
    parser.add_argument("--concurrency", type=int, default=16, help="attempts at a time (default: 16)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each way, at least 5 for a result (default: 5)")
    parser.add_argument("--longer", type=int, default=10, help="how much longer the run is over which memory is watched (default: 10)")
    parser.add_argument("--only", nargs="+", choices=(*WAYS, "memory"), default=[*WAYS, "memory"], help="these parts alone (default: all)")
    parser.add_argument("--folder", type=Path, help="where trajectories are written (default: a temporary folder)")
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--programs", type=int, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.programs:
        asyncio.run(programs(parsed.programs))
        return
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))]
    with tempfile.TemporaryDirectory(dir=parsed.folder) as folder:
        figures = asyncio.run(measure(parsed, chat_format(train_tokenizer(texts, 1024)), Path(folder)))
    if "gateway" in figures:
        ours = figures["gateway"]["turns_per_second"]["median"]
        print(f"through the gateway: {ours:.0f} turns/s with {len(os.sched_getaffinity(0))} cores; the target is 100")
    if not parsed.no_save:
        settings = {name: getattr(parsed, name) for name in ("rollouts", "turns", "concurrency", "repeats", "longer")}
        before = machine.earlier("agent_overhead")
        machine.save("agent_overhead", (before if before.get("settings") == settings else {}) | {"settings": settings, **figures})


if __name__ == "__main__":
    main()
