"""Who a sandbox is: what must differ between two of them that came from one state.

A restored or forked sandbox has the memory of another. It gets an id, a token, a name and a machine id of its own; its kernel's random
numbers get fresh bytes; its clock is compared with ours. Random numbers that a *program* keeps in its memory nobody can reach: the file
`/run/gnomon/identity` changes with each identity, so that a program which cares can look. Read next: `pool.py`.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import dataclass, replace

from gnomon.errors import SandboxError
from gnomon.sandbox.sandbox import Command, Sandbox, Spec

PLACE = "/run/gnomon/identity"
CLOCK_SECONDS = 2.0
"""How far a restored clock may be from ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The id and token of an instance, also in the environment of its programs (`GNOMON_SANDBOX_ID`, `GNOMON_SANDBOX_TOKEN`); its names."""

    id: str
    token: str
    hostname: str
    machine: str


def named(spec: Spec) -> Spec:
    """The same with a host name that no other sandbox has."""
    return replace(spec, hostname=f"{spec.hostname[:50]}-{secrets.token_hex(3)}")


async def renew(sandbox: Sandbox, *, restored: bool = False) -> Identity:
    """Give a sandbox an identity that no other has; `restored`: it came with the memory of another.

    Raises `SandboxError` for a restored sandbox whose clock is wrong and cannot be set.
    """
    hostname = named(sandbox.spec).hostname if restored else sandbox.spec.hostname
    identity = Identity(id=sandbox.id, token=secrets.token_urlsafe(24), hostname=hostname, machine=secrets.token_hex(16))
    marks = {"GNOMON_SANDBOX_ID": identity.id, "GNOMON_SANDBOX_TOKEN": identity.token}
    sandbox.spec = replace(sandbox.spec, hostname=hostname, env={**sandbox.spec.env, **marks})
    await sandbox.write("/etc/hostname", f"{hostname}\n".encode())
    await sandbox.write("/etc/machine-id", f"{identity.machine}\n".encode())
    await sandbox.write(PLACE, json.dumps({"id": identity.id, "machine": identity.machine, "began": time.time()}).encode())
    if restored:
        await _restored(sandbox, hostname)
    return identity


async def _restored(sandbox: Sandbox, hostname: str) -> None:
    """Random numbers and clock of a kernel that was stopped for a while; where the kernel is the host's both are right already."""
    await sandbox.exec(Command(argv=("/bin/sh", "-c", "cat > /dev/urandom"), stdin=os.urandom(256), timeout_seconds=10.0, user="root"))
    await sandbox.exec(Command(argv=("hostname", hostname), timeout_seconds=10.0, user="root"))  # in vain where it is not allowed
    if abs(await _offset(sandbox)) > CLOCK_SECONDS:
        await sandbox.exec(Command(argv=("date", "-s", f"@{time.time():.3f}"), timeout_seconds=10.0, user="root"))
        if abs(offset := await _offset(sandbox)) > CLOCK_SECONDS:
            raise SandboxError(f"sandbox {sandbox.id}: its clock is {offset:+.0f} s off after a restore and cannot be set")


async def _offset(sandbox: Sandbox) -> float:
    before = time.time()
    result = await sandbox.exec(Command(argv=("date", "+%s.%N"), timeout_seconds=10.0))
    if result.code:
        return 0.0  # without `date` nobody inside reads the clock by it
    return float(result.text) - (before + time.time()) / 2
