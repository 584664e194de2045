"""Questions about made pictures: lines of letters to read, shapes to name, charts, SVG code, points. Needs Pillow.

Settings: `kinds` (those of `gnomon/data/picture_tasks.py`), `count` of each, `seed`. Documents of several pictures are asked with their
words before, pictures in their order; clips frame by frame. The answer must be said alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gnomon.agent.solution import Solution
from gnomon.agent.task import Check, Task
from gnomon.agent.task_source import settings
from gnomon.data.messages import Image
from gnomon.errors import ConfigError, DataError
from gnomon.extend import suggestion


class Source:
    """The kinds in turn: one picture of each, then the next of each."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        self.kinds = [*fields.rows("kinds")] or ["line", "scene"]
        self.count, self.seed = fields.whole("count", 20, 1), fields.whole("seed", 0)
        fields.done()
        if not all(isinstance(kind, str) for kind in self.kinds) or len(set(self.kinds)) < len(self.kinds):
            raise DataError(f"'kinds': {self.kinds!r}; write names, each once")

    def tasks(self) -> Iterator[Task]:
        """The pictures, drawn one by one. Raises `ConfigError` for a kind that there is not, and where Pillow is missing."""
        try:
            import numpy as np

            from gnomon.data.drawing import png
            from gnomon.data.picture_tasks import KINDS, stills
        except ImportError as error:
            raise ConfigError(f"pictures need {error.name}; pip install pillow") from None
        for kind in self.kinds:
            if kind not in KINDS:
                raise ConfigError(f"'kinds': {kind!r}{suggestion(kind, list(KINDS))}; choose of {', '.join(KINDS)}")
        for number in range(self.count):
            for kind in self.kinds:
                shown = KINDS[kind](np.random.Generator(np.random.Philox(key=self.seed + (1 << 33), counter=[0, 0, 0, number])))
                parts = stills(shown.parts)
                words = [part for part in parts if isinstance(part, str)]
                images = tuple(Image(data=png(part), media_type="image/png") for part in parts if not isinstance(part, str))
                yield Task(id=f"pictures/{kind}/{self.seed}-{number}", prompt="\n".join([*words, shown.question]), images=images,
                           check=Check(kind="exact", settings={"answer": shown.answer, "fold_case": False}),
                           solution=Solution.says(shown.answer), metadata={"source": "pictures", "family": kind})
