"""What a harness is: everything between a task and a policy, swappable, so that a policy does not learn one set of tools by heart (§4.2.1).

`opened("kimi-code")` is a preset, `opened("mine.toml")` a file of yours, `opened("your_pkg.module:Class")` a class, and
`opened("programs/codex")` the program itself, unchanged. Read next: `spec.py`, `composed.py`, `loop.py`; `gnomon.agent.program`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

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

        A spent budget, a policy that cannot be reached and a machine that is lost are raised; what a policy does wrong is not.
        """
        ...


@runtime_checkable
class Fits(Protocol):
    """A harness that needs something of a machine, such as a program in it."""

    async def fitted(self, spec: Spec) -> Spec:
        """The machine that it needs where a task needs that one. Raises `ConfigError` where it cannot be made."""
        ...


def names() -> list[str]:
    """The presets."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def spec(name: str | Path, overrides: Sequence[str] = ()) -> HarnessSpec:
    """The spec of a preset or of a file; overrides are `a.b=c`. Raises `ConfigError` for one that does not exist, or that is malformed."""
    text = str(name)
    if text.endswith(".toml"):
        path = Path(text)
    elif text in names():
        path = PRESETS / f"{text}.toml"
    else:
        raise ConfigError(f"harness '{text}': no such preset{extend.suggestion(text, names())} (choices: {', '.join(names())}; a file "
                          "ending in .toml; or 'your_pkg.module:Class')")
    given = [] if any(word.split("=")[0].strip() == "name" for word in overrides) else [f"name={config.toml_string(path.stem)}"]
    table = config.read_toml(path, PRESETS)
    table = config.apply_overrides(table, [*([] if "name" in table else given), *overrides], PRESETS)
    return config.from_dict(HarnessSpec, table, f"harness {text}")


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
