"""Notes that outlive a context: entries in a few files, bounded, written through to the machine where there is one.

Read next: `tools/memory.py`.
"""

from __future__ import annotations

from gnomon.agent.harness.desk import Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.observation import bounded

BETWEEN = "\n---\n"


async def recalled(desk: Desk) -> str:
    """What the prompt says of the notes; reads their files once for an attempt."""
    memory = desk.spec.memory
    if memory is None:
        return ""
    for target, path in memory.files.items():
        if target not in desk.notes:
            try:
                desk.notes[target] = bounded((await desk.text(path)).strip(), memory.characters, "start") if desk.box is not None else ""
            except Fault:
                desk.notes[target] = ""
    told = [f"Notes ({target}):\n{text}" for target, text in desk.notes.items() if text]
    return "\n\n".join(told) or "There are no notes yet."


def entries(desk: Desk, target: str) -> list[str]:
    """The entries of one file. Raises `Fault` for one that there is not."""
    memory = desk.spec.memory
    if memory is None or target not in memory.files:
        raise Fault(f"there are no notes {target[:40]!r} (there are: {', '.join(memory.files) if memory else 'none'})")
    return [entry for entry in desk.notes.get(target, "").split(BETWEEN) if entry]


async def noted(desk: Desk, target: str, kept: list[str]) -> None:
    """Keep these entries. Raises `Fault` where they are too long; then nothing changed."""
    memory = desk.spec.memory
    text = BETWEEN.join(kept)
    if memory is None or len(text) > memory.characters:
        raise Fault(f"the notes would have {len(text)} characters, and {memory.characters if memory else 0} are possible; "
                    "remove or shorten some first")
    if desk.box is not None:
        await desk.write(memory.files[target], f"{text}\n".encode())
    desk.notes[target] = text
