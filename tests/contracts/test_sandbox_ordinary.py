"""The suites of the default backend once more as an ordinary user, who is made for it where the tests run as root."""

import importlib.util
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from sandbox_users import as_user, user_without_privileges

SUITES = ("test_sandbox_backends.py", "test_sandbox_deaths.py", "test_sandbox_abuse.py")
ELSEWHERE = "not contained and not declared and not of_one_user and not hundred"
"""Tests that become an ordinary user by themselves; a hundred forks are the same for everybody."""

PYTEST = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
LEAST = 30


def test_an_ordinary_user_passes_the_suites_too() -> None:
    """The contract, every death, and what leads out through file calls; the other probes: `test_sandbox_abuse.py`."""
    if os.geteuid() != 0:
        pytest.skip("this is an ordinary user: the suites themselves are what is asked for")
    with user_without_privileges() as user, tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in SUITES:
            shutil.copy(Path(__file__).with_name(name), folder)
        for name in PYTEST:
            found = importlib.util.find_spec(name)
            origin = Path(found.origin) if found is not None and found.origin is not None else None
            if origin is not None and origin.name == "__init__.py":
                shutil.copytree(origin.parent, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif origin is not None:
                shutil.copy(origin, folder)
        words = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", ".", "-o", "markers=slow: long")
        done = as_user(user, folder, *words, "-m", "not slow", "-k", ELSEWHERE, *SUITES, seconds=900)
    if "passed" not in done.stdout and "do not work here" in done.stdout:
        pytest.skip(done.stdout.strip().splitlines()[-2])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= LEAST, done.stdout[-6000:]
