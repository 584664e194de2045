"""What a skill says. No settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.harness.desk import LEFT_TO_THE_MACHINE, Desk
from gnomon.agent.harness.fault import Fault
from gnomon.agent.harness.observation import Seen
from gnomon.agent.harness.spec import Argument
from gnomon.errors import SandboxError
from gnomon.extend import suggestion

PLACE = "/opt/skills"


class Kind:
    """The body of a skill, or one of its files; its files are put into the machine when it is first asked for."""

    about = "Read how something is done: the text of a skill."
    main = "name"
    machine = False
    arguments: Mapping[str, Argument] = {
        "name": Argument(doc="The skill", required=True),
        "words": Argument(doc="What it should be applied to"),
        "file": Argument(doc="One of its files, in place of its text"),
    }

    def __init__(self, settings: Mapping[str, Any]) -> None:
        Fields(settings, "skill").done()

    async def call(self, desk: Desk, given: Mapping[str, Any]) -> Seen:
        """The text."""
        skill = desk.skills.get(given["name"])
        if skill is None:
            names = [*desk.skills]
            raise Fault(f"there is no skill {given['name'][:80]!r}{suggestion(given['name'][:80], names)} "
                        f"(there are: {', '.join(names) or 'none'})")
        if given.get("file"):
            if given["file"] not in skill.files:
                raise Fault(f"'{skill.name}' has no file {given['file'][:80]!r} (it has: {', '.join(skill.files) or 'none'})")
            return Seen(text=(skill.folder / given["file"]).read_bytes().decode("utf-8", "replace"))
        place = f"{PLACE}/{skill.folder.name}"
        if desk.box is not None and skill.files and place not in desk.state.setdefault("uploaded", set()):
            try:
                await desk.box.upload(skill.folder, place)
            except LEFT_TO_THE_MACHINE:
                raise
            except SandboxError as error:
                raise Fault(str(error)) from None
            desk.state["uploaded"].add(place)
        where = f"\n\nIts files are in {place}: {', '.join(skill.files)}" if desk.box is not None and skill.files else ""
        words = f"\n\nApply it to: {given['words']}" if given.get("words") else ""
        return Seen(text=skill.body + where + words)
