"""Harbor's task directories. Settings: `path`, a task directory, a folder of task directories, or a list of either."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gnomon.agent import harbor, harbor_tasks
from gnomon.agent.task import Task
from gnomon.agent.task_source import settings
from gnomon.agent.tasks.jsonl import paths
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.sandbox import Backend


class Source:
    """Reads directories in the order of their names."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        self.paths = paths(fields.get("path"))
        fields.done()

    def tasks(self) -> Iterator[Task]:
        """The tasks. Raises `DataError` naming the file and the field."""
        for directory in self._directories():
            yield harbor_tasks.task(directory)

    async def prepare(self, backend: Backend, store: LayerStore) -> None:
        """Build the images from local files. Raises what `harbor_tasks.build` raises."""
        for directory in self._directories():
            await harbor_tasks.build(directory, backend, store)

    def _directories(self) -> Iterator[harbor.HarborTask]:
        for path in self.paths:
            for folder in harbor_tasks.folders(path):
                yield harbor.read(folder)
