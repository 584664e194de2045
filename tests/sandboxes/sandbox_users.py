"""Tests of sandboxes as an ordinary user when the tests run as root: a user made for the occasion, and programs run as that user."""

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gnomon

USER = f"gnomontest{os.getpid() % 100_000}"


@contextlib.contextmanager
def user_without_privileges() -> Iterator[str]:
    """The name of a user without privileges: this one, or one that is made for the occasion."""
    if os.geteuid() != 0:
        yield pwd.getpwuid(os.geteuid()).pw_name
        return
    if not (shutil.which("useradd") and shutil.which("userdel") and shutil.which("setpriv")):
        pytest.skip("useradd, userdel and setpriv are needed to become an ordinary user")
    subprocess.run(["useradd", "--system", "--shell", "/bin/sh", USER], check=False, capture_output=True)
    try:
        pwd.getpwnam(USER)
    except KeyError:
        pytest.skip("no user can be added here")
    try:
        yield USER
    finally:
        subprocess.run(["userdel", USER], check=False, capture_output=True)


def readable_python() -> str:
    """A Python of the right age that every user may run."""
    for candidate in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        path = Path(candidate).resolve()
        if path.exists() and all(parent.stat().st_mode & 0o001 for parent in path.parents):
            asked = [path, "-c", "import sys; print(sys.version_info >= (3, 11))"]
            if subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() == "True":
                return str(path)
    pytest.skip("no Python from 3.11 on that an ordinary user may run")


def as_user(user: str, folder: Path, *argv: str, seconds: float = 180) -> subprocess.CompletedProcess[str]:
    """Run a Python program of this folder as a user, with a copy of the package that the user may read."""
    package = Path(gnomon.__file__).parent
    shutil.copytree(package, folder / "gnomon", ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.toml"), dirs_exist_ok=True)
    for program in Path(__file__).resolve().parent.glob("sandbox_*.py"):
        shutil.copy(program, folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    home = folder / "home"
    home.mkdir(mode=0o700, exist_ok=True)
    if os.geteuid() == 0:
        shutil.chown(home, user)
    become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if os.geteuid() == 0 else []
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([*become, readable_python(), *argv], cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds,
                          check=False)  # fmt: skip
