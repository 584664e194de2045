"""How many turns a second do harness, gateway and record allow, when policy and machine cost nothing? And does memory grow?

    python benchmarks/agent_overhead.py [--rollouts 200] [--turns 10] [--longer 10]

A scripted policy with ids (K3's chat format) answers each turn with a call; the result of the call comes back at once. Rollouts are whole
attempts, judged and on disk, each turn synchronised before its answer is given. Two ways to the policy: our own harness and its loop, and a
program that speaks OpenAI's API to the gateway over HTTP. Beside the latter, in the same run: the same program and a server that only gives
a constant answer, which is what HTTP itself costs.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import resource
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
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
Door = Callable[[Any], contextlib.AbstractContextManager[tuple[str, str]]]
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


class Program:
    """A program that speaks OpenAI's API: asks until an answer has no call. `door` gives an attempt its address and key, while it lasts."""

    name = "program"

    def __init__(self, door: Door, client: httpx.AsyncClient) -> None:
        self.door, self.client = door, client

    async def run(self, task: Task, model: Any, box: Sandbox | None, *, effort: str | None = None) -> StopReason:
        """One attempt."""
        with self.door(model) as (url, key):
            return await self._run(task, url, key)

    async def _run(self, task: Task, url: str, key: str) -> StopReason:
        messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
        while True:
            body = {"model": "m", "messages": messages, "tools": TOOLS}
            response = await self.client.post(f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
            response.raise_for_status()
            said = response.json()["choices"][0]["message"]
            messages.append(said)
            if not said.get("tool_calls"):
                return "finished"
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": OUTPUT.decode()} for call in said["tool_calls"]]


def policy(turns: int, chat: ChatFormat) -> ScriptedPolicy:
    """Calls in every turn but the last."""
    def reply(conversation: Conversation) -> Message:
        done = sum(message.role == "assistant" for message in conversation.messages)
        return say("I look.", ("bash", {"command": f"ls -la /home/user/{done}"}), reasoning="hm") if done < turns - 1 else say("done")

    return ScriptedPolicy(reply, chat)


async def attempts(count: int, concurrency: int, way: Any, answers: ScriptedPolicy, folder: Path) -> float:
    """Make so many attempts, so many at a time; seconds."""
    coming = iter(range(count))
    began = time.perf_counter()

    async def worker() -> None:
        for number in coming:
            rollout = Rollout(id=f"r{number}", task=TASK, harness=way, policy=answers)
            path = folder / f"{number}.jsonl"
            done = await attempt(rollout, path, Machines(), Deadlines(grace=1.0))  # type: ignore[arg-type]
            assert done.score is not None and done.score.reward == 1.0, done.score
            path.unlink()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return time.perf_counter() - began


@contextlib.asynccontextmanager
async def bare(turns: int) -> AsyncIterator[Door]:
    """A server that gives constant answers: calls until the conversation has so many turns."""
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
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        yield lambda model: contextlib.nullcontext((address, "none"))
        serving.should_exit = serving.force_exit = True
        await asyncio.gather(running, return_exceptions=True)


async def plain(count: int, concurrency: int, door: Door, client: httpx.AsyncClient) -> float:
    """The program alone, with nothing around it."""
    coming = iter(range(count))
    began = time.perf_counter()

    async def worker() -> None:
        for _ in coming:
            await Program(door, client).run(TASK, None, None)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return time.perf_counter() - began


def resident() -> int:
    """Bytes of memory in use, after a collection."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def measure(parsed: argparse.Namespace, chat: ChatFormat, folder: Path) -> dict[str, Any]:
    """All ways, some repetitions each in turn, then one of them for longer."""
    answers, total = policy(parsed.turns, chat), parsed.rollouts * parsed.turns
    limits = httpx.Limits(max_connections=parsed.concurrency, max_keepalive_connections=parsed.concurrency)
    async with Gateway() as gateway, bare(parsed.turns) as door, httpx.AsyncClient(timeout=60, limits=limits) as client:
        @contextlib.contextmanager
        def admitted(model: Any) -> Iterator[tuple[str, str]]:
            visit = gateway.admit(model)
            try:
                yield gateway.url, visit.secret
            finally:
                gateway.leave(visit)

        loop = harness.opened("bash")
        program = Program(admitted, client)
        ways: dict[str, Callable[[int], Awaitable[float]]] = {
            "harness + record": lambda count: attempts(count, parsed.concurrency, loop, answers, folder),
            "program + gateway + record": lambda count: attempts(count, parsed.concurrency, program, answers, folder),
            "program + constant answers": lambda count: plain(count, parsed.concurrency, door, client),
        }
        for work in ways.values():
            await work(max(parsed.rollouts // 10, 1))
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for run in range(parsed.repeats):
            for name, work in ways.items():
                seconds[name].append(await work(parsed.rollouts))
                print(f"{name:28} {total / seconds[name][-1]:8.0f} turns/s  (run {run + 1} of {parsed.repeats})", flush=True)
        figures: dict[str, Any] = {}
        for name, values in seconds.items():
            rates = machine.spread([total / value for value in values])
            figures[name] = {"turns_per_second": rates, "milliseconds_per_turn": 1e3 / rates["median"]}
            print(f"{name:28} {rates['median']:8.0f} turns/s  (min {rates['min']:.0f}, max {rates['max']:.0f}, {rates['runs']} runs)")
        figures["memory"] = await memory(ways["program + gateway + record"], parsed)
        return figures


async def memory(work: Callable[[int], Awaitable[float]], parsed: argparse.Namespace) -> dict[str, Any]:
    """Resident memory after each of `longer` runs, one after the other."""
    sizes = []
    for _ in range(parsed.longer):
        await work(parsed.rollouts)
        sizes.append(resident())
    growth = sizes[-1] / sizes[0] - 1 if sizes else 0.0
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
    parser.add_argument("--longer", type=int, default=10, help="runs in a row over which memory is watched (default: 10)")
    parser.add_argument("--folder", type=Path, help="where trajectories are written (default: a temporary folder)")
    parser.add_argument("--no-save", action="store_true", help="print only")
    parsed = parser.parse_args()
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))]
    with tempfile.TemporaryDirectory(dir=parsed.folder) as folder:
        figures = asyncio.run(measure(parsed, chat_format(train_tokenizer(texts, 1024)), Path(folder)))
    ours = figures["program + gateway + record"]["turns_per_second"]["median"]
    print(f"through the gateway: {ours:.0f} turns/s with {len(os.sched_getaffinity(0))} cores; the target is 100")
    if not parsed.no_save:
        settings = {name: getattr(parsed, name) for name in ("rollouts", "turns", "concurrency", "repeats", "longer")}
        machine.save("agent_overhead", {"settings": settings, **figures})


if __name__ == "__main__":
    main()
