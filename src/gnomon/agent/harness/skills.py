"""Skills: folders with a file SKILL.md, whose head says what it is for and whose body says how it is done (agentskills.io).

The policy reads the heads in its prompt, and the body of one when it asks for it. Read next: `tools/skill.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gnomon.errors import ConfigError
from gnomon.extend import suggestion

OURS = Path(__file__).parent / "skills"
HEAD = "---"


@dataclass(frozen=True, kw_only=True, slots=True)
class Skill:
    """One skill; `folder` is where its files lie on the host."""

    name: str
    about: str
    body: str
    folder: Path

    @property
    def files(self) -> list[str]:
        """Its other files, by their path in the folder."""
        found = (path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink())
        return sorted(str(path.relative_to(self.folder)) for path in found if path.name != "SKILL.md")


def loaded(names: Sequence[str]) -> dict[str, Skill]:
    """Skills by name: each a folder of ours, or a path. Raises `ConfigError` for one that is not there, or whose head says too little."""
    found = {}
    for place in names:
        folder = OURS / place if "/" not in place else Path(place).expanduser()
        try:
            text = (folder / "SKILL.md").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            ours = sorted(path.parent.name for path in OURS.glob("*/SKILL.md"))
            raise ConfigError(f"'skills': {place!r} has no readable SKILL.md{suggestion(place, ours)} (ours: {', '.join(ours)}; "
                              "or the path of a folder)") from None
        skill = parsed(text, folder)
        if skill.name in found:
            raise ConfigError(f"'skills': two are called '{skill.name}'")
        found[skill.name] = skill
    return found


def parsed(text: str, folder: Path) -> Skill:
    """The skill of a file. Raises `ConfigError` where its head lacks `name` or `description`."""
    _, opening, rest = text.partition(f"{HEAD}\n") if text.startswith(f"{HEAD}\n") else ("", "", text)
    head, _, body = rest.partition(f"\n{HEAD}\n") if opening else ("", "", rest)
    said = {key.strip(): value.strip().strip("\"'") for key, colon, value in (line.partition(":") for line in head.split("\n")) if colon}
    for key in ("name", "description"):
        if not said.get(key):
            raise ConfigError(f"{folder / 'SKILL.md'}: its head has no '{key}'; begin the file with ---, name: …, description: …, ---")
    return Skill(name=said["name"], about=said["description"], body=body.strip(), folder=folder)
