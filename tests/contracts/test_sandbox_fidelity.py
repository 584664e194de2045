"""The table of what an agent may do inside, in `docs/sandbox.md`, is what programs inside find."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import sandbox_fidelity
from sandbox_backends import need_microvm
from sandbox_fidelity import ROWS
from sandbox_users import as_user, user_without_privileges

from gnomon.sandbox.microvm import qemu

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ("`namespaces` as root", "`namespaces` as an ordinary user", "`gvisor`", "`microvm`")


def table() -> dict[str, dict[str, str]]:
    """Column → row → `yes` or `no`, as the page says."""
    lines = [line for line in (ROOT / "docs" / "sandbox.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    start = next(i for i, row in enumerate(cells) if tuple(row[1:]) == COLUMNS)
    rows = [row for row in cells[start + 2 :] if row[0] in ROWS and len(row) == 5]
    return {column: {row[0]: row[i].split()[0] for row in rows} for i, column in enumerate(COLUMNS, 1)}


def found(name: str) -> subprocess.CompletedProcess[str]:
    """What programs find inside a sandbox of a backend, made by whoever runs the tests."""
    return subprocess.run([sys.executable, sandbox_fidelity.__file__, name], capture_output=True, text=True, timeout=2400, check=False)


@pytest.mark.parametrize("column", [*COLUMNS[:3], pytest.param(COLUMNS[3], marks=pytest.mark.slow)])
def test_the_page_is_right(column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = table()[column]
    assert set(said) == set(ROWS)
    if column == COLUMNS[1]:
        with user_without_privileges() as user, tempfile.TemporaryDirectory() as folder:
            done = as_user(user, Path(folder), "sandbox_fidelity.py", "namespaces")
    elif os.geteuid() != 0:
        pytest.skip("this is not root")
    elif column == COLUMNS[2] and shutil.which("runsc") is None:
        pytest.skip("runsc is not installed")
    else:
        if column == COLUMNS[3]:
            monkeypatch.setenv("GNOMON_MICROVM_ACCEL", "tcg" if qemu.refusal() is not None else "kvm")
            need_microvm()
        done = found(column.split("`")[1])
    if done.returncode and "Unsupported" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == said
