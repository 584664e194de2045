"""The sources of installed packages, as material for tasks: read as text, never imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gnomon.agent.inside import __file__ as _inside
from gnomon.errors import ConfigError

MOST_BYTES = 4 << 20
ROOT = "/app"
SCRIPT = "#!/bin/sh\nexec python3 -I /tests/judge.py\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A package of Python alone. `modules` and `tests` are its files by path, the package's own folder first (`pkg/part.py`)."""

    name: str
    modules: Mapping[str, str]
    tests: Mapping[str, str]

    @property
    def files(self) -> dict[str, bytes]:
        """Its modules where a machine has them."""
        return {f"{ROOT}/{path}": text.encode() for path, text in self.modules.items()}


def read(name: str, image: str) -> Package:
    """A package's sources.

    Raises `ConfigError` where it is not installed, is no package of Python alone, is too large to travel with each task, or where the
    machine would have it too, so that the answer lay there.
    """
    try:
        found = importlib.util.find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError):
        found = None
    if found is None or not found.submodule_search_locations:
        raise ConfigError(f"'packages': '{name}' is not installed, or no package: pip install it, or name another")
    folder = Path(next(iter(found.submodule_search_locations)))
    if any(folder.rglob("*.so")):
        raise ConfigError(f"'packages': '{name}' has compiled parts; tasks are made of packages of Python alone")
    if image == "host" and (Path("/usr") in folder.parents or any(Path("/usr").glob(f"lib/python3*/dist-packages/{name}"))):
        raise ConfigError(f"'packages': the machine 'host' has '{name}' itself, so the answer lies there; set 'image', or name another one")
    texts = {f"{name}/{path.relative_to(folder).as_posix()}": _text(path) for path in sorted(folder.rglob("*.py"))}
    tests = {path: text for path, text in texts.items() if "tests" in path.split("/")[:-1] or path.rsplit("/", 1)[-1].startswith("test_")}
    modules = {path: text for path, text in texts.items() if path not in tests}
    if sum(map(len, modules.values())) > MOST_BYTES:
        raise ConfigError(f"'packages': '{name}' has more than {MOST_BYTES >> 20} MiB of modules, which each task would carry; name a "
                          "smaller one")
    return Package(name=name, modules=modules, tests=tests)


def judging() -> str:
    """The program that judges what is made of packages, for a test's files."""
    return (Path(_inside).parent / "apart.py").read_text(encoding="utf-8")


def dotted(path: str) -> str:
    """`pkg/part.py` as `pkg.part`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
