"""The `qemu` program: where it is, whether a guest boots with it, and how a sandbox's machine is started.

A machine has read-only drives, one serial port for its agent and nothing else: no network card, no display, no firmware settings. qemu
itself is kept small in case that a guest takes it over: an environment of its own, a user of its own where we are root, no right to start
programs, and it is given its files as open descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnomon.errors import ConfigError, SandboxError, Unsupported
from gnomon.sandbox.microvm import starter
from gnomon.sandbox.ns.cgroups import Group

ACCELERATOR = "GNOMON_MICROVM_ACCEL"
BOOT_SECONDS = 8.0
SECTOR, DISK_BYTES = 512, 1 << 20
WORD = b"gnomon boots"
PROGRAM = "qemu-system-x86_64"
MEGABYTE = 1 << 20
FIRST_USER, USERS = 1 << 30, 1 << 29
WAIT_AND_BECOME = 'read -r go && exec "$@"'
BOUND = "--pdeathsig=KILL"
"""For `setpriv`: the kernel ends the machine when the thread that started it is gone, by whatever death, also one that stands still. That
thread is `starter`'s, which lives as long as this process."""

CLOSED = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


def boot_sector(word: bytes = WORD) -> bytes:
    """A guest of one sector: real-mode x86 that writes a word to the first serial port and then ends the virtual machine.

    By hand, loaded by the firmware at 0x7c00: `xor ax, ax; mov ds, ax; mov si, 0x7c19; mov dx, 0x3f8; next: lodsb; test al, al; jz off;
    out dx, al; jmp next; off: mov dx, 0xf4; out dx, al; stay: hlt; jmp stay`. Port 0xf4 is QEMU's `isa-debug-exit`.
    """
    code = bytes.fromhex("31c0 8ed8 be197c baf803 ac 84c0 7403 ee ebf8 baf400 ee f4 ebfd")
    return ((code + word + b"\0").ljust(SECTOR - 2, b"\0") + b"\x55\xaa").ljust(DISK_BYTES, b"\0")


def refusal(modules: Path = Path("/sys/module"), device: Path = Path("/dev/kvm")) -> str | None:
    """Why no guest can boot here with KVM, as far as that shows without trying; `None` if it is worth trying."""
    if not device.exists():
        return f"{device} does not exist: the machine, or the host that lends it, has no KVM or keeps it to itself"
    if not os.access(device, os.R_OK | os.W_OK):
        return f"{device} may not be opened; add yourself to its group (kvm)"
    if not any((modules / name).exists() for name in ("kvm_intel", "kvm_amd")):
        if (modules / "kvm_pvm").exists():
            return "KVM here is a software one (kvm_pvm) that boots only kernels built for it"
        if os.uname().machine == "x86_64":
            return "neither kvm_intel nor kvm_amd is there: the processor's extension is off, or the host keeps it to itself"
    return None


async def boots(program: str, accelerator: str, seconds: float = BOOT_SECONDS) -> bool:
    """Whether a guest says its word under this accelerator in time."""
    with tempfile.TemporaryDirectory() as folder:
        disk = Path(folder) / "disk"
        disk.write_bytes(boot_sector())
        child = await asyncio.create_subprocess_exec(
            program, "-accel", accelerator, "-M", "pc", "-m", "16", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
            "-serial", "stdio", "-device", "isa-debug-exit,iobase=0xf4,iosize=4", "-drive", f"file={disk},format=raw,if=ide",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            env={"PATH": os.defpath}, start_new_session=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(seconds):
                assert child.stdout is not None
                return WORD in await child.stdout.read()
        except TimeoutError:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()


def find() -> str:
    """The program. Raises `Unsupported` with the remedy where there is none, or on another processor than x86-64."""
    if os.uname().machine != "x86_64":
        raise Unsupported(f"microvm: guests are for x86-64 so far, and this is {os.uname().machine}")
    found = shutil.which(PROGRAM)
    if found is None:
        raise Unsupported(f"microvm: there is no {PROGRAM} on the path; `apt-get install qemu-system-x86`")
    return found


def version(program: str) -> str:
    """What the program calls itself, for instance `7.2.22`; a checkpoint goes on under the same one."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Unsupported(f"microvm: {program} --version failed: {error}") from error
    found = re.search(r"version (\S+)", said)
    return found[1] if found else said.strip()[:80]


async def accelerator(program: str) -> str:
    """`kvm` where a guest boots with it, `tcg` where `GNOMON_MICROVM_ACCEL` asks for it and never otherwise. Raises `Unsupported`."""
    wanted = os.environ.get(ACCELERATOR, "kvm")
    if wanted not in ("kvm", "tcg"):
        raise ConfigError(f"{ACCELERATOR}={wanted}; it is kvm, or tcg for tests")
    if wanted == "tcg":
        return wanted
    reason = refusal()
    if reason is None and not await boots(program, "kvm"):
        reason = f"/dev/kvm opens, but a guest did not boot within {BOOT_SECONDS:g} s"
    if reason is not None:
        raise Unsupported(f"microvm: {reason}; whatever needs KVM (microsandbox, libkrun and Firecracker too) works as little here; use "
                          "gvisor for strong isolation without KVM, or e2b for machines elsewhere; "
                          f"{ACCELERATOR}=tcg runs the same machines for tests, slowly and with no promise of isolation")
    return wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a machine is made of, which a start from a checkpoint must repeat: memory, processors, and its `-kernel`, `-initrd`, drives."""

    memory_mib: int
    cpus: int
    drives: int
    words: str
    qemu: str
    accelerator: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A qemu that runs, and our ends of its sockets."""

    process: subprocess.Popen[bytes]
    handle: int
    agent: socket.socket
    monitor: socket.socket
    console: socket.socket


def arguments(shape: Shape, handles: Sequence[int], folder: Sequence[int], incoming: int | None) -> list[str]:
    """The options of a machine. `handles`: its ends of the sockets for agent, monitor and console; `folder`: kernel, archive, drives."""
    agent, monitor, console = handles
    kernel, archive, *drives = (f"/proc/self/fd/{handle}" for handle in folder)
    quick = shape.accelerator == "tcg"
    words = [
        "-accel", "tcg,thread=multi,tb-size=256" if quick else "kvm", "-cpu", "max,la57=off" if quick else "host",
        "-M", "q35,usb=off,smm=off,vmport=off", "-m", f"{shape.memory_mib}M", "-smp", str(shape.cpus),
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-rtc", "base=utc,clock=host", "-sandbox", CLOSED,
        "-chardev", f"socket,id=monitor,fd={monitor}", "-mon", "chardev=monitor,mode=control",
        "-chardev", f"socket,id=console,fd={console}", "-serial", "chardev:console",
        "-chardev", f"socket,id=agent,fd={agent}", "-device", "virtio-serial-pci,max_ports=2", "-device", "virtserialport,chardev=agent",
        "-device", "vmgenid,guid=auto",
    ]  # fmt: skip
    for number, drive in enumerate(drives):
        words += ["-blockdev", f"driver=file,node-name=drive{number},filename={drive},read-only=on,locking=off",
                  "-device", f"virtio-blk-pci,drive=drive{number}"]  # fmt: skip
    if incoming is not None:
        return [*words, "-incoming", f"fd:{incoming}"]
    start = f"console=ttyS0 quiet loglevel=3 panic=-1 rdinit=/init lockdown=confidentiality audit=0 apparmor=0 {shape.words}"
    if quick:
        start += " tsc=reliable no_timer_check mitigations=off"
    return [*words, "-kernel", kernel, "-initrd", archive, "-append", start]


async def launch(program: str, shape: Shape, folder: Path, group: Group | None, state: Path | None) -> Started:
    """Start a machine from the files in `folder`, from a checkpoint's `state` if there is one, in a control group if there is one."""
    ours, theirs = zip(*(socket.socketpair() for _ in range(3)), strict=True)
    files: list[int] = []
    child: subprocess.Popen[bytes] | None = None
    try:
        names = ["kernel", "archive", *(f"drive{number}" for number in range(shape.drives))]
        files += [os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC) for name in names]
        if state is not None:
            files.append(os.open(state, os.O_RDONLY | os.O_CLOEXEC))
        handles = [end.fileno() for end in theirs]
        words = arguments(shape, handles, files[: len(names)], None if state is None else files[-1])
        child = await starter.start(lambda: spawn([program, *words], [*handles, *files], folder.parent / "errors", group))
        return Started(process=child, handle=os.pidfd_open(child.pid), agent=ours[0], monitor=ours[1], console=ours[2])
    except BaseException:
        for end in ours:
            end.close()
        if child is not None:
            child.kill()
            child.wait()
        raise
    finally:
        for end in theirs:
            end.close()
        for handle in files:
            os.close(handle)


def spawn(words: list[str], handles: list[int], errors: Path, group: Group | None) -> subprocess.Popen[bytes]:
    """A child that waits until it is in its control group and then becomes qemu; as root, under a user that nobody else is."""
    identity: dict[str, Any] = {}
    if os.geteuid() == 0:
        user = FIRST_USER + secrets.randbelow(USERS)
        extra = [os.stat("/dev/kvm").st_gid] if os.path.exists("/dev/kvm") and "kvm" in words else []
        identity = {"user": user, "group": user, "extra_groups": extra}
    tie = shutil.which("setpriv")
    if tie is not None:
        words = [tie, BOUND, *words]
    with errors.open("wb") as said:
        child = subprocess.Popen(
            ["/bin/sh", "-c", WAIT_AND_BECOME, "sh", *words], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said,
            env={"PATH": os.defpath}, start_new_session=True, cwd="/", pass_fds=handles, **identity,
        )  # fmt: skip
    try:
        for join in group.joins if group is not None else ():
            os.write(join, str(child.pid).encode())
        assert child.stdin is not None
        with child.stdin as gate:
            gate.write(b"go\n")
    except BaseException as error:
        child.kill()
        child.wait()
        if isinstance(error, OSError):
            raise SandboxError(f"microvm: qemu could not be put into its control group: {error.strerror}") from error
        raise
    return child
