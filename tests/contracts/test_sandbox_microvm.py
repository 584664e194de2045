"""Whether virtual machines would work: found out by booting a guest, and said with the reason."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from gnomon.errors import Unsupported
from gnomon.sandbox.backends import microvm
from gnomon.sandbox.sandbox import Spec


def test_a_guest_that_boots_says_its_word() -> None:
    program = shutil.which("qemu-system-x86_64")
    if program is None:
        pytest.skip("no qemu-system-x86_64 (apt-get install qemu-system-x86)")
    assert asyncio.run(microvm.boots(program, "tcg", 60.0))


def test_one_that_does_not_is_given_up_in_time() -> None:
    program = shutil.which("qemu-system-x86_64")
    if program is None:
        pytest.skip("no qemu-system-x86_64 (apt-get install qemu-system-x86)")
    assert not asyncio.run(microvm.boots(program, "tcg", 0.01))
    assert not asyncio.run(microvm.boots("/bin/false", "tcg", 10.0))


def test_what_shows_without_trying_is_said(tmp_path: Path) -> None:
    modules, device = tmp_path / "module", tmp_path / "kvm"
    modules.mkdir()
    assert "does not exist" in (microvm.refusal(modules, device) or "")
    device.touch(0o600)
    (modules / "kvm_pvm").mkdir()
    assert "software" in (microvm.refusal(modules, device) or "")
    (modules / "kvm_intel").mkdir()
    assert microvm.refusal(modules, device) is None
    if os.geteuid() != 0:
        device.chmod(0)
        assert "may not be opened" in (microvm.refusal(modules, device) or "")


def test_nothing_is_made_and_the_reason_names_what_to_use() -> None:
    backend = microvm.Backend()
    for call in (backend.probe, lambda: backend.create(Spec())):
        with pytest.raises(Unsupported, match="use gvisor"):
            asyncio.run(call())
    asyncio.run(backend.close())
