"""A patch over several files, all of it or nothing. No settings. The form is that of `patches.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.patches import parsed, updated
from gnomon.agent.harness.spec import Argument


class Kind:
    """Adds, deletes, updates and moves files."""

    about = "Change files by a patch, from '*** Begin Patch' to '*** End Patch'."
    main = "patch"
    machine = True
    arguments: Mapping[str, Argument] = {"patch": Argument(doc="The whole patch", required=True)}

    def __init__(self, settings: Mapping[str, Any]) -> None:
        Fields(settings, "apply_patch").done()

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """The files that changed, by what happened to them."""
        return Seen(text=await applied(desk, given["patch"]))


async def applied(desk: Desk, patch: str) -> str:
    """Carry out a patch. Everything is worked out before the first file is touched. Raises `Fault`; then nothing was changed."""
    after: dict[str, str | None] = {}
    marks = []
    for change in parsed(patch):
        path = desk.path(change.path)
        there = after[path] is not None if path in after else await _there(desk, path)
        if change.kind == "add":
            if there:
                raise Fault(f"{change.path} is there already; update it")
            after[path] = change.content
        elif not there:
            raise Fault(f"{change.path} is not there")
        elif change.kind == "delete":
            after[path] = None
        else:
            text = updated(change, known if (known := after.get(path)) is not None else await desk.text(path))
            if change.to is not None:
                after[path] = None
            after[desk.path(change.to) if change.to is not None else path] = text
        marks.append(f"{change.kind[0].upper()} {change.to or change.path}")
    for path, made in after.items():
        if made is not None:
            await desk.write(path, made.encode())
    for path, made in after.items():
        if made is None and (result := await desk.run(("rm", "--", path))).code:
            raise Fault(result.stderr.decode("utf-8", "replace").strip() or f"{path} cannot be removed")
    return "Changed:\n" + "\n".join(marks)


async def _there(desk: Desk, path: str) -> bool:
    return (await desk.run(("test", "-f", path))).code == 0
