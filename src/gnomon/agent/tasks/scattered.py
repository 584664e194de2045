"""Questions whose evidence is scattered over a long text, by length: values to be found, hops to be followed, entries to be added up.

Settings: `kinds` (`boxes`, `code`, `order`, `chain`, `total`), `lengths` of the whole prompt in characters, `pieces` of evidence, `count`
of tasks of each kind and length, `seed`, and `documents`, paths of the text around the evidence; this machine's own text without them.
Each quarter of the text holds evidence, so that the first and the last piece are at least half of it apart. The tasks are those that
training strews over its windows (`gnomon/data/long_tasks.py`), in numbers of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from gnomon.agent.solution import Solution
from gnomon.agent.task import Check, Task
from gnomon.agent.task_source import settings
from gnomon.data.corpus import open_corpus
from gnomon.data.long_tasks import KINDS, SubTask, draw
from gnomon.data.machine_text import default_corpus
from gnomon.errors import ConfigError, DataError
from gnomon.extend import suggestion

QUARTERS = 4
ASKED = "Answer with that alone, without any other word."
_FEW = 200
"""Characters of text around a piece of evidence, at least."""


class Source:
    """For each length and kind `count` tasks."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        self.kinds = [*fields.rows("kinds")] or [*KINDS]
        self.lengths = [*fields.rows("lengths")] or [4_000, 16_000, 64_000]
        self.pieces, self.count, self.seed = fields.whole("pieces", 4, QUARTERS), fields.whole("count", 10, 1), fields.whole("seed", 0)
        self.documents = tuple(fields.rows("documents"))
        fields.done()
        for kind in self.kinds:
            if kind not in KINDS:
                raise DataError(f"'kinds': {kind!r}{suggestion(str(kind), list(KINDS))}; choose of {', '.join(KINDS)}")
        if not all(isinstance(each, int) and each >= _FEW * self.pieces for each in self.lengths):
            raise DataError(f"'lengths': {self.lengths!r}; whole numbers of at least {_FEW} characters for each of {self.pieces} pieces")
        if not all(isinstance(each, str) for each in self.documents):
            raise DataError(f"'documents': {self.documents!r}; write paths")

    def tasks(self) -> Iterator[Task]:
        """The tasks, made one by one. Raises `ConfigError` where there is too little text."""
        for length in self.lengths:
            for number in range(self.count):
                for place, kind in enumerate(self.kinds):
                    random = np.random.Generator(np.random.Philox(key=self.seed, counter=[length, place, 0, number]))
                    asked = draw(kind, self.pieces, random)
                    prompt, distances = self._strewn(asked, length, random)
                    told = {"answer": asked.answer, "length": length, "distances": distances,
                            "parts": [asked.answer[first:past] for first, past in asked.parts]}
                    yield Task(id=f"scattered/{kind}/{length}-{self.seed}-{number}", prompt=prompt,
                               check=Check(kind="scattered", settings=told), solution=Solution.says(asked.answer),
                               metadata={"source": "scattered", "family": kind, "length": length})

    def _strewn(self, asked: SubTask, length: int, random: np.random.Generator) -> tuple[str, list[int]]:
        """The prompt, and how many characters lie between each piece of evidence and the question."""
        question = f"\n\n{asked.question} {ASKED}"
        room = length - len(question) - sum(len(piece) + 2 for piece in asked.evidence)
        start = int(random.integers(len(self._text) - room)) if len(self._text) > room else 0
        text = (self._text * (room // len(self._text) + 1))[start : start + room]
        extra = random.integers(QUARTERS, size=self.pieces - QUARTERS)
        quarters = random.permutation(np.concatenate([np.arange(QUARTERS), extra]))
        cuts = ((quarters + random.random(self.pieces)) * room / QUARTERS).astype(int).tolist()
        parts, at, ends = [], 0, {}
        for place in sorted(range(self.pieces), key=cuts.__getitem__):
            parts += [text[at : cuts[place]], f"\n{asked.evidence[place]}\n"]
            at, ends[place] = cuts[place], sum(map(len, parts))
        body = "".join([*parts, text[at:]])
        return body + question, [len(body) - ends[place] for place in range(self.pieces)]

    @cached_property
    def _text(self) -> str:
        corpus = open_corpus(self.documents, "text") if self.documents else default_corpus(2 * max(self.lengths))
        text = "\n\n".join(document.text for document in corpus)[: 4 * max(self.lengths)]
        if not text.strip():
            raise ConfigError("'documents' hold no text to scatter evidence over; name others, or leave them out")
        return text
