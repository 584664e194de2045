"""Agent programs as people install them: how each gets into a machine, how it is pointed at the gateway, and what its end means.

A program is a TOML file of `programs/` or of yours. It is installed once from its package index, into a layer that lies over the image of a
task; the machine has no network but the gateway. Read next: `gateway.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shlex
import shutil
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gnomon import extend
from gnomon.agent.gateway import INSIDE, Gateway
from gnomon.agent.gateway_visit import Visit
from gnomon.agent.record import BudgetSpent, Recorder
from gnomon.agent.task import Task
from gnomon.agent.trajectory import StopReason
from gnomon.config import from_dict, read_toml, setting
from gnomon.data.messages import Effort
from gnomon.errors import ConfigError, DataError, SandboxError
from gnomon.sandbox.images import Image
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.sandbox import Command, Network, Process, Sandbox, Spec

PROGRAMS = Path(__file__).parent / "programs"
"""The folder of programs that have a name, one TOML file each."""

PREFIX = "programs/"
BACKENDS = ("namespaces",)
"""The sandboxes that programs are known to run in: those that take a layer over an image, and have a gateway as their only network."""

PLACE = "/opt/gnomon"          # in a machine: what is installed
STATE = "/var/tmp/gnomon"      # in a machine: what a program keeps for itself
INSTALL_SECONDS = 1800.0
TAIL_BYTES = 4000
_installing = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program. In `argv`, `env` and `files` these words are replaced: `{prompt}`, `{url}` and `{key}` of the gateway, `{model}`,
    `{effort}`, `{home}` (where it is installed) and `{state}` (a folder for its own files)."""

    name: str = setting("", "what trajectories call it; by default the file's name")
    about: str = setting("", "which program and version, for people")
    pip: tuple[str, ...] = setting((), "packages that pip installs, for the machine's own Python")
    npm: tuple[str, ...] = setting((), "packages that npm installs")
    argv: tuple[str, ...] = setting(doc="the command")
    env: dict[str, str] = setting(factory=dict, doc="its environment")
    files: dict[str, str] = setting(factory=dict, doc="files that are written before it starts")
    memory_megabytes: int = setting(1024, "the least memory of a machine that it runs in")


def names() -> list[str]:
    """The programs that have a name: `programs/codex` and so on."""
    return sorted(PREFIX + path.stem for path in PROGRAMS.glob("*.toml"))


def known(name: str) -> bool:
    """Whether a name is that of a program, or a TOML file one that says a command."""
    if name.startswith(PREFIX) or not (name.endswith(".toml") and Path(name).is_file()):
        return name.startswith(PREFIX)
    try:
        return "argv" in read_toml(Path(name))
    except ConfigError:
        return False  # it may begin with a preset of harnesses; what else is wrong with it is said when it is opened as one


def program(name: str) -> Program:
    """The program of a name, or of a TOML file. Raises `ConfigError` for an unknown one, and naming what is wrong in a file."""
    path = PROGRAMS / f"{name.removeprefix(PREFIX)}.toml" if name in names() else Path(name)
    if not name.endswith(".toml") and name not in names():
        raise ConfigError(f"program '{name}': no such program{extend.suggestion(name, names())} (choices: {', '.join(names())})")
    found = from_dict(Program, read_toml(path), f"program {name}")
    return found if found.name else replace(found, name=PREFIX + path.stem)


def check_backend(name: str, backend: str) -> None:
    """Raises `ConfigError` for sandboxes that a program cannot be put into."""
    if known(name) and backend not in BACKENDS:
        raise ConfigError(f"harness '{name}' is a program, and those run in sandboxes of the backend {', '.join(BACKENDS)} only, not "
                          f"'{backend}': set backend = \"{BACKENDS[0]}\", or use a preset of ours in its manner")


class ProgramHarness:
    """A program as a harness. `gateway` is one that is open, for many attempts; without it each attempt opens its own.

    A program whose budget is spent has `grace_seconds` to end by itself.
    """

    def __init__(self, chosen: Program, gateway: Gateway | None = None, *, grace_seconds: float = 10.0) -> None:
        self._grace = grace_seconds
        self.name = chosen.name
        self.program = chosen
        self._gateway = gateway

    async def fitted(self, spec: Spec) -> Spec:
        """The machine of a task, with the program in it and room for it. Installs it at the first call, which takes minutes.

        Raises `ConfigError` where it cannot be installed.
        """
        image = await asyncio.to_thread(image_with, self.program, spec.image, LayerStore())
        least = self.program.memory_megabytes << 20
        return replace(spec, image=image, limits=replace(spec.limits, memory_bytes=max(spec.limits.memory_bytes, least)))

    async def run(self, task: Task, model: Recorder, box: Sandbox | None, *, effort: Effort | None = None) -> StopReason:
        """One attempt: the program runs until it ends by itself, or is refused an answer.

        Raises what the gateway refused it (a spent budget, a policy that failed), and `SandboxError` where it did not even ask.
        """
        if box is None:
            raise ConfigError(f"harness '{self.name}' is a program and needs a machine; task {task.id} has no 'image'")
        if task.images:
            raise ConfigError(f"task {task.id} shows images, which harness '{self.name}', a program, cannot be given; choose another")
        if task.network.allow:
            raise ConfigError(f"task {task.id} wants a network ({', '.join(task.network.allow)}); a program's only way out is the gateway")
        async with contextlib.AsyncExitStack() as stack:
            gateway = await stack.enter_async_context(Gateway()) if self._gateway is None else self._gateway
            visit = gateway.admit(model, effort=effort)
            stack.callback(gateway.leave, visit)
            before = model.turns
            await box.set_network(Network(proxy=gateway.socket))
            try:
                code, said = await self._ran(task, box, visit, effort)
            finally:
                await box.set_network(Network())
        if visit.failure is not None and not (isinstance(visit.failure, ConfigError | DataError) and model.turns > before):
            raise visit.failure  # but a request that makes no sense, after others that did, is the program's own doing
        if model.turns == before:
            raise SandboxError(f"harness '{self.name}': it ended with status {code} and had asked nothing. It said: {said}")
        return "finished" if code == 0 else "refused"

    async def _ran(self, task: Task, box: Sandbox, visit: Visit, effort: Effort | None) -> tuple[int, str]:
        """Its exit status and the last of its output."""
        known = {"prompt": _prompt(task), "url": INSIDE, "key": visit.secret, "model": "gnomon", "effort": effort or "",
                 "home": home(self.program), "state": STATE}
        for path, text in self.program.files.items():
            await box.write(_filled(path, known), _filled(text, known).encode())
        user = task.user or box.spec.user
        await box.exec(Command(argv=("sh", "-c", f"mkdir -p {STATE} && chmod -R a+rwX {STATE}"), user="root"))
        argv = tuple(_filled(word, known) for word in self.program.argv)
        env = {**task.env, **{name: _filled(value, known) for name, value in self.program.env.items()}}
        process = await box.start(Command(argv=argv, env=env, cwd=task.workdir or box.spec.workdir, user=user, timeout_seconds=None))
        output, watch = asyncio.ensure_future(_last(process)), asyncio.ensure_future(_refused(visit))
        try:
            await asyncio.wait((output, watch), return_when=asyncio.FIRST_COMPLETED)
            if not output.done():
                await asyncio.wait((output,), timeout=self._grace)
            if not output.done():
                await process.kill()
            said = await output
            return (await process.wait()).code, said
        finally:
            for waiting in (output, watch):
                waiting.cancel()
            await asyncio.gather(output, watch, return_exceptions=True)
            with contextlib.suppress(SandboxError):
                await process.kill()


async def _refused(visit: Visit) -> None:
    """Until its budget is spent. Other failures it may try to get over."""
    while not isinstance(visit.failure, BudgetSpent):
        visit.wake.clear()
        await visit.wake.wait()


async def _last(process: Process) -> str:
    """All output is taken, the last of it kept."""
    kept = b""
    async for chunk in process.output():
        kept = (kept + chunk.data)[-TAIL_BYTES:]
    return kept.decode("utf-8", "replace")


def _prompt(task: Task) -> str:
    return f"{task.system}\n\n{task.prompt}" if task.system else task.prompt


def _filled(text: str, known: Mapping[str, str]) -> str:
    """Only the words that are known: other braces stay as they are."""
    pieces, rest = [], text
    while (start := min((at for word in known if (at := rest.find(f"{{{word}}}")) >= 0), default=-1)) >= 0:
        word = rest[start + 1 : rest.index("}", start)]
        pieces += [rest[:start], known[word]]
        rest = rest[start + len(word) + 2 :]
    return "".join((*pieces, rest))


def home(chosen: Program) -> str:
    """Where a program is in a machine."""
    return f"{PLACE}/{chosen.name.rsplit('/', 1)[-1]}"


def image_with(chosen: Program, base: str, store: LayerStore) -> str:
    """The name of an image: `base` with a program laid over it. Installs the program where the store does not have it yet."""
    if not chosen.pip and not chosen.npm:
        return base
    wanted = json.dumps([chosen.name, chosen.pip, chosen.npm])
    digest = "program-" + hashlib.sha256(wanted.encode()).hexdigest()[:24]
    with _installing:
        found = store.cached(digest)
        if found is None:
            found = _install(chosen, store, digest)
    below = store.resolve(base)
    mark = hashlib.sha256(f"{digest} {below.digest}".encode()).hexdigest()[:16]
    name = f"program/{chosen.name.rsplit('/', 1)[-1]}-{mark}"
    store.keep(replace(below, name=name, layers=(*found.layers, *below.layers), snapshot=None))
    return name


def _install(chosen: Program, store: LayerStore, digest: str) -> Image:
    """A layer with the program. The packages' own installers run on this machine, as `pip install` and `npm install` always do."""
    folder = store.scratch()
    try:
        target = folder / home(chosen).lstrip("/")
        target.mkdir(parents=True)
        if chosen.npm:
            _called([_tool("npm"), "install", "--prefix", str(target), "--no-audit", "--no-fund", *chosen.npm], chosen)
        if chosen.pip:
            python = subprocess.run(["/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True,
                                    text=True, check=True).stdout.strip()
            _called([_tool("python3"), "-m", "pip", "install", "--quiet", "--target", str(target), "--python-version", python,
                     "--implementation", "cp", "--only-binary=:all:", *chosen.pip], chosen)
        layer = store.seal(folder)
    except BaseException:
        store.discard(folder)
        raise
    image = store.cache(digest, Image(name=digest, layers=(layer,)))
    store.release([layer])
    return image


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ConfigError(f"installing a program needs '{name}', which this machine does not have; install it, or point to a program of "
                          "yours that needs none")
    return found


def _called(argv: list[str], chosen: Program) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"program '{chosen.name}': `{shlex.join(argv[:4])} …` did not end within {INSTALL_SECONDS:g} s") from None
    if done.returncode:
        raise ConfigError(f"program '{chosen.name}': `{shlex.join(argv[:4])} …` failed: {(done.stderr or done.stdout)[-1500:].strip()}; "
                          "is the package index reachable?")
