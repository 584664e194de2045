"""What a harness is: everything between a task and a policy, swappable, so that a policy does not learn one set of tools by heart (§4.2.1).

`opened("kimi-code")` is a preset, `opened("mine.toml")` a file of yours, `opened("your_pkg.module:Class")` a class, and
`opened("programs/codex")` the program itself, unchanged. Read next: `spec.py`, `composed.py`, `loop.py`; `gnomon.agent.program`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from gnomon import config, extend
from gnomon.agent import program
from gnomon.agent.harness.composed import Composed
from gnomon.agent.harness.desk import Model
from gnomon.agent.harness.spec import HarnessSpec
from gnomon.agent.task import Task
from gnomon.agent.trajectory import StopReason
from gnomon.errors import ConfigError
from gnomon.sandbox.sandbox import Sandbox, Spec

PRESETS = Path(__file__).parent / "presets"
"""The folder of harnesses that have a name, one TOML file each."""


class Harness(Protocol):
    """How an attempt is made. `name` is what its trajectories are called by."""

    name: str

    async def run(self, task: Task, model: Model, box: Sandbox | None, *, effort: str | None = None) -> StopReason:
        """One attempt: why it ended. What was said is on `model`'s record; `box` is None where the task needs no machine.

        `model.diagnosis` is the task's public verifier, or None: a harness may let its agent ask it, and need not.
        A spent budget, a policy that cannot be reached and a machine that is lost are raised; what a policy does wrong is not.
        """
        ...


@runtime_checkable
class Fits(Protocol):
    """A harness that needs something of a machine, such as a program in it."""

    async def fitted(self, spec: Spec) -> Spec:
        """The machine that it needs where a task needs that one. May install, for minutes, at its first call.

        Raises `ConfigError` where it cannot be made.
        """
        ...


def names() -> list[str]:
    """The presets."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def spec(name: str | Path, overrides: Sequence[str] = ()) -> HarnessSpec:
    """The spec of a preset or of a file; overrides are `a.b=c`. Raises `ConfigError` for one that does not exist, or that is malformed."""
    path = _place(str(name), Path())
    table = {"name": path.stem, **_table(path, ())}
    for override in overrides:
        table = _over(table, config.apply_overrides({}, [override]))
    return config.from_dict(HarnessSpec, table, f"harness {name}")


def _place(text: str, folder: Path) -> Path:
    if text.endswith(".toml"):
        return folder / text
    if text not in names():
        raise ConfigError(f"harness '{text}': no such preset{extend.suggestion(text, names())} (choices: {', '.join(names())}; a file "
                          "ending in .toml; or 'your_pkg.module:Class')")
    return PRESETS / f"{text}.toml"


def _table(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The table of a file over the one that it extends. A name is the file's own: it is not taken over."""
    if path.resolve() in seen:
        raise ConfigError(f"{path}: 'extends' goes round in a circle")
    try:
        own = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"harness '{path}' cannot be read: {error}") from None
    below = own.pop("extends", None)
    if below is None:
        return own
    if not isinstance(below, str):
        raise ConfigError(f"{path}: 'extends' must be a preset or a file, not {below!r}")
    base = _table(_place(below, path.parent), (*seen, path.resolve()))
    return _over({key: value for key, value in base.items() if key != "name"}, own)


def _over(below: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """One table over another; a part that becomes another kind leaves behind what was said of the one that it was."""
    base = dict(below)
    for part in ("wire", "context"):
        base[part] = _kept(below.get(part, {}), own.get(part))
    tools, changed = below.get("tools", {}), own.get("tools")
    if isinstance(tools, Mapping) and isinstance(changed, Mapping):
        base["tools"] = {name: _kept(use, changed.get(name)) for name, use in tools.items()}
    return config.merge({key: value for key, value in base.items() if value != {}}, own)


def _kept(before: Any, after: Any) -> Any:
    other = isinstance(before, Mapping) and isinstance(after, Mapping) and after.get("kind", before.get("kind")) != before.get("kind")
    return {} if other else before


def opened(name: str | Path, overrides: Sequence[str] = ()) -> Harness:
    """The harness of a preset, a program, a file of either, or a class `your_pkg.module:Class`, which is made without arguments.

    Raises `ConfigError` for one that does not exist, or whose parts do not fit together.
    """
    text = str(name)
    if program.known(text):
        if overrides:
            raise ConfigError(f"harness '{text}': a program takes no overrides; write a file of your own")
        return cast(Harness, program.ProgramHarness(program.program(text)))
    if ":" in text and not text.endswith(".toml"):
        if overrides:
            raise ConfigError(f"harness '{text}': a class takes no overrides")
        return cast(Harness, extend.find("gnomon.agent.harness", text, "Harness")())
    return Composed(spec(name, overrides))
