"""gVisor: what only it does here (checkpoints, forks with memory, hibernation) and how it ends. Skipped where `runsc` cannot run."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from sandbox_backends import need_gvisor

from gnomon.errors import SandboxError, SandboxLost, Unsupported
from gnomon.sandbox.backends.gvisor import Backend
from gnomon.sandbox.gvisor import runsc
from gnomon.sandbox.gvisor.machine import Machine
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.sandbox import Command, Spec

SOURCE = Path(__file__).parents[2] / "src"


def with_backend(use: Callable[[Backend], Awaitable[None]]) -> None:
    """Run a coroutine with a backend over a store of its own, and see that nothing of it is left."""
    need_gvisor()

    async def run(home: Path) -> None:
        backend = Backend(LayerStore(home))
        try:
            await use(backend)
        finally:
            await backend.close()
            assert backend.registry.list() == []
            assert list((home / "scratch").iterdir()) == []
            backend.registry.close()

    with tempfile.TemporaryDirectory() as home:
        asyncio.run(run(Path(home)))
        listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert home not in listing


def command(*argv: str) -> Command:
    return Command(argv=argv, timeout_seconds=120.0)


COUNTER = """
import os, sys, time
block = bytearray(os.urandom(1 << 20))
count = 0
while True:
    count += 1
    with open("/tmp/count.new", "w") as file:
        file.write(f"{count} {block[:8].hex()}")
    os.rename("/tmp/count.new", "/tmp/count")
    if count == 1:
        print("counts", flush=True)
    time.sleep(0.02)
"""


async def count(machine: Machine) -> tuple[int, str]:
    number, digest = (await machine.read("/tmp/count")).decode().split()
    return int(number), digest


async def counting(machine: Machine) -> tuple[int, str]:
    """Start the counter and wait for its first word."""
    await machine.write("/tmp/counter.py", COUNTER.encode())
    process = await machine.start(Command(argv=("python3", "-I", "-S", "/tmp/counter.py"), timeout_seconds=None))
    assert (await asyncio.wait_for(anext(process.output()), 120)).data == b"counts\n"
    return await count(machine)


async def grows(machine: Machine, beyond: int) -> int:
    for _ in range(2000):
        number, _ = await count(machine)
        if number > beyond:
            return number
        await asyncio.sleep(0.02)
    raise AssertionError(f"still at {number}")


def test_a_fork_with_memory_goes_on_and_its_branches_part() -> None:
    async def use(backend: Backend) -> None:
        async with await backend.create(Spec(env={"WHO": "parent"})) as parent:
            first, digest = await counting(parent)
            echo = Command(argv=("sh", "-c", "while read line; do echo got $line; done"), timeout_seconds=None)
            follower = await parent.start(echo, stdin=True)
            children = await parent.fork(2, memory=True)
            assert all(isinstance(child, Machine) for child in children)
            machines = [parent, *(child for child in children if isinstance(child, Machine))]
            for index, machine in enumerate(machines):
                assert await grows(machine, first) > first
                assert (await count(machine))[1] == digest
                await machine.write("/home/user/mine", str(index).encode())
            assert [await machine.read("/home/user/mine") for machine in machines] == [b"0", b"1", b"2"]
            identities = [(await machine.exec(command("sh", "-c", "hostname; cat /run/gnomon/instance"))).text for machine in machines]
            assert len({line for text in identities for line in text.split()}) == 2 * len(machines)
            clocks = [float((await machine.exec(command("date", "+%s.%N"))).text) for machine in machines]
            assert max(clocks) - min(clocks) < 30
            await follower.write(b"hello\n")
            assert (await anext(follower.output())).data == b"got hello\n"

    with_backend(use)


def test_hibernation_leaves_nothing_running_and_forgets_nothing() -> None:
    async def use(backend: Backend) -> None:
        async with await backend.create(Spec()) as machine:
            number, digest = await counting(machine)
            await machine.pause("hibernate")
            usage = await machine.usage()
            assert usage.memory_bytes == 0
            assert usage.disk_bytes > 1 << 20
            assert machine.processes == ()
            with pytest.raises(SandboxError, match="hibernated"):
                await machine.exec(command("true"))
            await machine.resume()
            assert (await count(machine))[1] == digest
            assert await grows(machine, number) > number
            await machine.pause()
            await machine.pause("hibernate")
            await machine.resume()
            assert (await count(machine))[1] == digest
            assert (await machine.usage()).memory_bytes > 0

    with_backend(use)


@pytest.mark.slow
def test_snapshots_outlive_their_sandbox_with_and_without_processes() -> None:
    async def use(backend: Backend) -> None:
        async with await backend.create(Spec()) as machine:
            _, digest = await counting(machine)
            await machine.write("/home/user/kept", b"kept")
            whole = await machine.snapshot("whole", memory=True)
            bare = await machine.snapshot("bare")
            assert (whole.memory, bare.memory) == (True, False)
            number, _ = await count(machine)
            assert await grows(machine, number) > number
        async with await backend.create(Spec(image="whole")) as machine:
            number, again = await count(machine)
            assert again == digest
            assert await grows(machine, number) > number
        async with await backend.create(Spec(image="bare")) as machine:
            assert await machine.read("/home/user/kept") == b"kept"
            number, _ = await count(machine)
            await asyncio.sleep(0.3)
            assert (await count(machine))[0] == number
            assert (await machine.usage()).processes <= 1

    with_backend(use)


LOOK_IN = r"""
import ctypes, errno, os
library = ctypes.CDLL(None, use_errno=True)
def attempt(call):
    try:
        call()
        return "open"
    except OSError as error:
        return errno.errorcode[error.errno]
def traced(request):
    if library.ptrace(request, 1, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
print(attempt(lambda: traced(0x4206)), *[attempt(lambda: os.open(f"/proc/1/{name}", os.O_RDONLY)) for name in ("mem", "exe")])
pid = os.fork()
if pid == 0:
    library.ptrace(0, 0, 0, 0); os.kill(os.getpid(), 19); os._exit(0)
print("own", os.WIFSTOPPED(os.waitpid(pid, 0)[1]) and library.ptrace(7, pid, 0, 0) == 0)
"""
FORGE = r"""
import json, os, struct, time
made = 0
for name in os.listdir("/proc/1/fd"):
    try:
        place = os.readlink(f"/proc/1/fd/{name}")
        handle = os.open(f"/proc/1/fd/{name}", os.O_WRONLY | os.O_NONBLOCK) if "host" in place or "socket" in place else -1
    except OSError:
        continue
    for id in range(1, 60):
        text = json.dumps({"ev": "exit", "id": id, "code": 0}).encode()
        try:
            made += handle >= 0 and os.write(handle, struct.pack(">II", len(text), 0) + bytes(16) + text) > 0
        except OSError:
            break
time.sleep(0.2)
raise SystemExit(7)
"""


def test_root_inside_does_not_speak_in_the_agents_name() -> None:
    """It may not look into the agent, and what it writes into the agent's channel ends the machine instead of being an answer."""

    async def use(backend: Backend) -> None:
        async with await backend.create(Spec()) as machine:
            looked = await machine.exec(command("python3", "-c", LOOK_IN))
            assert looked.text.split("\n")[:2] == ["EPERM EACCES EACCES", "own True"], looked.stderr
            [forged] = await asyncio.gather(machine.exec(command("python3", "-c", FORGE)), return_exceptions=True)
            if isinstance(forged, BaseException):
                assert isinstance(forged, SandboxLost) and "not the agent's" in str(forged)
            else:
                assert forged.code == 7
        async with await backend.create(Spec()) as machine:  # no process list to look into, and the agent still finds what it ends
            script = "mount -t tmpfs none /proc; (sleep 1000 &) ; sleep 1000"
            ended = await machine.exec(Command(argv=("sh", "-c", script), timeout_seconds=2.0))
            assert ended.timed_out
            assert (await machine.usage()).processes == 0

    with_backend(use)


def test_a_machine_that_loses_its_agent_is_lost_and_cleared() -> None:
    async def use(backend: Backend) -> None:
        machine = await backend.create(Spec())
        with pytest.raises(SandboxLost):
            await machine.exec(command("sh", "-c", "kill -9 1; sleep 5"))
        with pytest.raises(SandboxLost):
            await machine.read("/etc/passwd")
        await machine.kill()
        keyed = [await backend.create(Spec(idempotency_key="one", ttl_seconds=0.5)) for _ in range(2)]
        assert keyed[0] is keyed[1]
        for _ in range(100):
            if keyed[0].state == "ended":
                break
            await asyncio.sleep(0.1)
        assert keyed[0].state == "ended"

    with_backend(use)


def test_no_runsc_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RUNSC_PATH", str(tmp_path / "absent"))
    with pytest.raises(Unsupported, match="apt-get install runsc"):
        runsc.find()
    with pytest.raises(Unsupported):
        asyncio.run(Backend(LayerStore(tmp_path / "home")).probe())


def test_an_ordinary_user_has_it_all_too() -> None:
    python = shutil.which("python3", path="/usr/bin")
    if os.geteuid() != 0 or shutil.which("setpriv") is None or python is None:
        pytest.skip("needs root, setpriv and a system Python to become another user")
    need_gvisor()
    program = """
import asyncio, sys
from gnomon.sandbox.backends.gvisor import Backend
from gnomon.sandbox.sandbox import Command, Spec
async def main():
    backend = Backend()
    async with await backend.create(Spec()) as machine:
        await machine.write("/home/user/word", b"kept")
        [child] = await machine.fork(1, memory=True)
        print((await child.exec(Command(argv=("sh", "-c", "cat word; echo; id -u")))).text.split())
    await backend.close()
asyncio.run(main())
"""
    home = tempfile.mkdtemp()
    try:
        os.chmod(home, 0o755)
        os.makedirs(f"{home}/store")
        os.chown(f"{home}/store", 65534, 65534)
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"}
        environment["GNOMON_SANDBOX_HOME"] = f"{home}/store"
        if runsc_path := os.environ.get("RUNSC_PATH"):
            environment["RUNSC_PATH"] = runsc_path
        words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-c", program]
        readable = subprocess.run([*words[:4], "test", "-r", str(SOURCE / "gnomon/errors.py")], check=False)
        if readable.returncode != 0:
            pytest.skip("another user cannot read this tree")
        result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, cwd="/", check=False)
        assert result.stdout == "['kept', '0']\n", result.stderr
    finally:
        shutil.rmtree(home)
