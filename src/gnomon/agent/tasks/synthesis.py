"""Questions about local documents, made by way of a graph of concepts. The agent gets the documents in its machine and finds the answer.

Settings: `documents`, a folder; `roots`, topics to begin with; `count`; `seed`; `depth` and `width` of the graph, 2 and 6 by default;
`granularity`, from which level keywords are drawn, `depth` by default; `keywords`, how many at a time, 2 by default; `policy`, a table of
one that expands and writes, by default rules that need none; `image`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gnomon.agent import policy as policies
from gnomon.agent.library import Library
from gnomon.agent.solution import Solution
from gnomon.agent.synthesis import Asked, Graph, Question, Rules, grow, questions
from gnomon.agent.task import Budget, Check, Task
from gnomon.agent.task_source import settings
from gnomon.errors import DataError

PLACE = "/documents"
MOST_BYTES = 4 << 20


class Source:
    """Grows the graph once, then asks."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        self.folder, self.roots = Path(fields.text("documents")), [*map(str, fields.rows("roots"))]
        self.count, self.seed, self.keywords = fields.whole("count", 10, 1), fields.whole("seed", 0), fields.whole("keywords", 2, 1)
        self.depth, self.width = fields.whole("depth", 2, 1), fields.whole("width", 6, 1)
        self.granularity, self.image = fields.whole("granularity", self.depth), fields.text("image", "host")
        self.policy = dict(fields.table("policy"))
        fields.done()
        if not self.roots:
            raise DataError("'roots': name at least one topic to begin with")
        if self.granularity > self.depth:
            raise DataError(f"'granularity': {self.granularity}; the graph is {self.depth} deep")
        if self.policy and not isinstance(self.policy.get("kind"), str):
            raise DataError("'policy': write a table with 'kind' and the settings of that policy")

    def tasks(self) -> Iterator[Task]:
        """The tasks. Raises `DataError` for a folder without documents, and what the policy raises."""
        library = Library(self.folder)
        try:
            files = {f"{PLACE}/{name}": text.encode() for name, text in library.documents.items()}
            if sum(map(len, files.values())) > MOST_BYTES:
                raise DataError(f"'documents': {self.folder}: more than {MOST_BYTES >> 20} MiB, which each task would carry; name a part")
            with ThreadPoolExecutor(1) as apart:  # whoever iterates may have an event loop of its own
                found = apart.submit(asyncio.run, self._made(library)).result()
            for number, question in enumerate(found):
                yield self._task(number, question, files)
        finally:
            library.close()

    async def _made(self, library: Library) -> list[Question]:
        given = dict(self.policy)
        who = Asked(policies.opened(given.pop("kind"), given)) if given else Rules()
        graph = await grow(Graph(self.roots), library, who, depth=self.depth, width=self.width)
        return await questions(graph, library, who, depth=self.granularity, keywords=self.keywords, count=self.count, seed=self.seed)

    def _task(self, number: int, question: Question, files: Mapping[str, bytes]) -> Task:
        return Task(
            id=f"synthesis/{self.seed}-{number}", image=self.image, files=files, workdir=PLACE, budget=Budget(turns=30, seconds=600.0),
            prompt=f"The documents are in {PLACE}. {question.text}\n\nAnswer with the missing or wanted words alone, as they stand there.",
            check=Check(kind="exact", settings={"answer": question.answer}), solution=Solution.says(question.answer),
            metadata={"source": "synthesis", "keywords": list(question.keywords), "document": question.passage.document})
