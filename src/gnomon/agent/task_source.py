"""Where tasks come from: the contract of sources, which read tasks that somebody has or make new ones (report §4.2).

A recipe names a source by a table: `kind`, a file of `tasks/` or `your_pkg.module:Class`, and the settings of that kind::

    [[tasks]]
    kind = "harbor"
    path = "tasks/hello"

Any source also takes `limit`, how many tasks at most, and `match`, a pattern such as `"sum-*"` for their ids. Read next: `validate.py`.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from gnomon import extend
from gnomon.agent.fields import Fields
from gnomon.agent.task import Task
from gnomon.errors import ConfigError, DataError
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.sandbox import Backend

KINDS = "gnomon.agent.tasks"


class Source(Protocol):
    """One kind. Built from the settings of a table: `Source(settings)` raises `DataError` naming a wrong one, and does nothing else.

    `tasks` gives the same tasks in the same order each time it is called, and makes each when it is asked for; it raises `ConfigError`
    with the remedy where a package or a file that it needs is missing. A source whose tasks need images that are not there yet also has
    `async def prepare(self, backend, store)`, which makes them.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Read the settings."""
        ...

    def tasks(self) -> Iterator[Task]:
        """The tasks, lazily."""
        ...


@dataclass(frozen=True, slots=True)
class Selected:
    """A source with what a table selects from it."""

    kind: str
    source: Source
    limit: int | None = None
    match: str | None = None

    def tasks(self) -> Iterator[Task]:
        """Those that match, at most `limit`."""
        found = (task for task in self.source.tasks() if self.match is None or fnmatch.fnmatchcase(task.id, self.match))
        return itertools.islice(found, self.limit)

    async def prepare(self, backend: Backend, store: LayerStore) -> None:
        """Make the images that the tasks start from, where the source has any to make. Raises what building raises."""
        prepare = getattr(self.source, "prepare", None)
        if prepare is not None:
            await prepare(backend, store)


def opened(table: Mapping[str, Any], where: str = "tasks") -> Selected:
    """The source that a table names.

    Raises `ConfigError` for an unknown kind, listing the choices, `DataError` naming a wrong setting.
    """
    fields = Fields(table, where)
    kind, match = fields.text("kind"), fields.maybe("match", fields.text)
    limit = fields.maybe("limit", lambda name: fields.whole(name, least=1))
    factory = extend.find(KINDS, kind, "Source")
    rest = {name: value for name, value in table.items() if name not in ("kind", "limit", "match")}
    try:
        source = cast(Source, factory(rest))
    except DataError as error:
        raise DataError(f"{where}: source '{kind}': {error}") from None
    return Selected(kind, source, limit, match)


def every(sources: Sequence[Selected]) -> Iterator[Task]:
    """The tasks of several sources, one source after another. Raises `DataError` for an id that came before, `ConfigError` for none."""
    seen: dict[str, str] = {}
    for source in sources:
        for task in source.tasks():
            if task.id in seen:
                raise DataError(f"task '{task.id}' comes from source '{source.kind}' and from '{seen[task.id]}'; "
                                "ids are unique in a run: name each source once, or select with 'match'")
            seen[task.id] = source.kind
            yield task
    if not seen:
        raise ConfigError("no source gave a task: look at 'match' and the paths")


def settings(table: Mapping[str, Any]) -> Fields:
    """The settings of a source while they are read; call `done` at the end."""
    return Fields(table, "settings")
