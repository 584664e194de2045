"""Virtual machines with the processor's help (KVM): the strongest isolation. So far the question whether a guest boots, honestly answered.

A `/dev/kvm` that opens proves nothing: some hosts have one that answers every call and boots no ordinary guest (a paravirtual KVM in
software). So the probe looks for the processor's own extension first and then runs a guest of a few bytes until it says a word, within
seconds. Sandboxes on top of that are not part of this version; whoever asks gets the reason and what to use instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from gnomon.errors import Unsupported
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.registry import Registry
from gnomon.sandbox.sandbox import Capabilities, Sandbox, Spec

BOOT_SECONDS = 8.0
SECTOR, DISK_BYTES = 512, 1 << 20
WORD = b"gnomon boots"
PROGRAMS = ("qemu-system-x86_64", "qemu-system-aarch64")
INSTEAD = "use gvisor for strong isolation without KVM, or e2b for machines elsewhere"


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
    """Whether a guest says its word under this accelerator in time; `tcg`, which is no isolation at all, serves to test the way itself."""
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


class Backend:
    """Says whether virtual machines would work here, and makes none; see `gnomon.sandbox.sandbox.Backend`."""

    name = "microvm"

    def __init__(self, store: LayerStore | None = None, registry: Registry | None = None) -> None:
        self.store, self.registry = store, registry

    async def probe(self) -> Capabilities:
        """Raises `Unsupported`, always: with the reason why no guest boots here, or with the word that one does and nothing uses it yet."""
        raise Unsupported(f"microvm: {await self._why()}; {INSTEAD}")

    async def _why(self) -> str:
        reason = refusal()
        if reason is not None:
            return reason
        program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
        if program is None:
            return "KVM may work, but there is no qemu to try it with (`apt-get install qemu-system-x86`)"
        if not program.endswith("x86_64"):
            return "KVM may work, but the test guest is for x86-64 only"
        if not await boots(program, "kvm"):
            return f"/dev/kvm opens, but a guest did not boot within {BOOT_SECONDS:g} s"
        return "a guest boots under KVM here, but this version makes no sandboxes of virtual machines"

    async def create(self, spec: Spec) -> Sandbox:
        """Raises `Unsupported` with the reason."""
        await self.probe()
        raise Unsupported(f"microvm: not part of this version; {INSTEAD}")

    async def close(self) -> None:
        """Nothing was made."""
