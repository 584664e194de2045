"""Small edges of a sandbox that somebody hostile would try: descriptors that nobody asked for, users of another's, output on a terminal."""

import asyncio
import multiprocessing
import os
import socket
from pathlib import Path

import pytest

from gnomon.errors import SandboxError
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.ns import door, launch, users, wire
from gnomon.sandbox.ns.channel import Channel
from gnomon.sandbox.terminal import Shown


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def answered(kind: int, sent: list[int], *, listening: bool) -> object:
    """What becomes of an answer that brings descriptors, to a call that wants one or to another; and how many stay open."""

    async def main() -> tuple[object, int]:
        ours, theirs = socket.socketpair()
        channel = Channel(ours, messages=False, on_close=lambda reason: None)
        before = descriptors()
        call = asyncio.ensure_future(door.listener(channel) if listening else channel.request(kind, (), (), lambda frame: None))
        await asyncio.sleep(0)
        number = wire.unpack(theirs.recv(4096))[1]
        socket.send_fds(theirs, [wire.pack(wire.OK, number)], sent)
        [answer] = await asyncio.gather(call, return_exceptions=True)
        if isinstance(answer, socket.socket):
            answer.close()
        left = descriptors() - before
        channel.close("over")
        theirs.close()
        return answer, left

    return asyncio.run(main())


def test_descriptors_come_in_for_the_door_alone() -> None:
    with socket.socket() as listening, socket.socket() as other, Path("/dev/null").open() as null:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        answer, left = answered(wire.LISTEN, [listening.fileno()], listening=True)
        assert isinstance(answer, socket.socket) and left == 0
        for sent in ([other.fileno()], [listening.fileno()] * 3, []):
            answer, left = answered(wire.LISTEN, sent, listening=True)
            assert isinstance(answer, SandboxError) and left == 0, sent
        answer, left = answered(wire.READ, [null.fileno()] * 4, listening=False)
        assert isinstance(answer, tuple) and left == 0


def taken(places: tuple[str, ...], count: int, results: "multiprocessing.Queue[list[int]]", done: "multiprocessing.Event") -> None:
    """In another process: take ranges and hold them until told."""
    ranges = users.Ranges(places)
    results.put([ranges.take() for _ in range(count)])
    done.wait(60)


def test_two_processes_never_give_the_same_users(tmp_path: Path) -> None:
    places = (str(tmp_path / "users"),)
    context = multiprocessing.get_context("fork")
    results, done = context.Queue(), context.Event()
    others = [context.Process(target=taken, args=(places, 300, results, done)) for _ in range(2)]
    for other in others:
        other.start()
    ranges = users.Ranges(places)
    mine = [ranges.take() for _ in range(600)]
    try:
        all_of_them = [*mine, *results.get(timeout=60), *results.get(timeout=60)]
    finally:
        done.set()
        for other in others:
            other.join()
    assert len(set(all_of_them)) == len(all_of_them) == 1200
    assert all(first % users.USERS == 0 and users.FIRST_USER <= first < (1 << 32) - users.USERS for first in all_of_them)
    ranges.give(mine[0])
    rest = [ranges.take() for _ in range(3 * users.BLOCK - 600 + 1)]
    assert mine[0] in rest and len({*rest, *mine[1:]}) == len(rest) + 599  # what came back is used again, and last


def test_a_folder_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    ranges = users.Ranges((str(tmp_path / "open"),))
    assert ranges.folder == "" and ranges.take() >= users.FIRST_USER


@pytest.mark.parametrize("name", ["reach", "gvisor"])
def test_a_folder_of_the_store_that_somebody_made_before_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SandboxError, match="not a folder of yours"):
        LayerStore(tmp_path / "store")


def test_a_terminal_is_shown_letters_and_colours() -> None:
    shown = Shown()
    pieces = [b"plain \x1b[3", b"1mred\x1b[0m \xc3", b"\xa4\n", b"\x1b]0;owned\x07\x1b[2J\x1b", b"[1;1H\x9b2J", b"\xc2\x9b2J\x1b[5n\r\n"]
    said = b"".join(shown.of(piece) for piece in pieces) + shown.of(b"", final=True)
    assert said.decode() == (
        "plain \x1b[31mred\x1b[0m ä\n^[]0;owned^G^[[2J^[[1;1H\ufffd2J\\x9b2J^[[5n\r\n"
    )
    assert Shown().of(b"\x1b[" + b"1" * 1000, final=True).startswith(b"^[[1")
    assert Shown().of("a\u202eb".encode()) == b"a\\x202eb"


def test_the_step_before_a_program_joins_limits_and_closes(tmp_path: Path) -> None:
    """Started on the host as the agent does it; what it writes into a group's file, and what the program finds."""
    step = launch.prepare()
    if step < 0:
        pytest.skip("there is no step for this processor, or no program may be run from memory here")
    group, out = os.open(tmp_path / "tasks", os.O_CREAT | os.O_RDWR), os.memfd_create("out")
    os.set_inheritable(group, True)
    (tmp_path / "odd").write_bytes(b"neither program nor script")
    (tmp_path / "odd").chmod(0o755)

    def run(*argv: bytes, cwd: bytes = os.fsencode(tmp_path)) -> tuple[int, str]:
        os.ftruncate(out, 0)
        os.lseek(out, 0, os.SEEK_SET)
        pid = launch.start(step, argv, {b"A": b"x"}, cwd, (out, out, out), [group], 4321)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else -1
        return code, os.pread(out, 9999, 0).decode()

    try:
        code, said = run(b"sh", b"-c", b'echo "$A" "$0"; pwd; ls /proc/self/fd; grep processes /proc/self/limits; exit 7', b"zero")
        assert code == 7 and said.startswith(f"x zero\n{tmp_path}\n0\n1\n2\n3\nMax processes") and said.split()[-3:-1] == ["4321"] * 2
        assert os.pread(group, 9, 0) == b"0"
        assert run(b"./odd")[0] == run(b"no-such-program")[0] == run(b"true", cwd=b"/no-such-folder")[0] == -1, "a fork's"
        assert run(os.fsencode(tmp_path / "odd")) == (126, f"gnomon: {tmp_path}/odd: Exec format error\n")
        assert os.stat(f"/proc/self/fd/{step}").st_mode & 0o777 == 0o111, "whoever could read it could trace it"
    finally:
        for fd in (step, group, out):
            os.close(fd)
