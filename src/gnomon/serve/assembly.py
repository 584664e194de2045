"""From a folder to a service: model, memory, prefix cache, engine, each made from its own settings. Read next: `service.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gnomon.data.chat import ChatFormat, chat_format
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import ConfigError
from gnomon.model.multimodal import PAD
from gnomon.serve.engine import Engine
from gnomon.serve.exchange import exchanging
from gnomon.serve.live import LiveEngine
from gnomon.serve.load import Loaded, load
from gnomon.serve.prefix import PrefixCache
from gnomon.serve.seeing import Sight
from gnomon.serve.service import Revision, Service
from gnomon.serve.settings import ServeSettings


@contextmanager
def served(path: str | Path, settings: ServeSettings) -> Iterator[Service]:
    """The service of a run folder or a released checkpoint; its engine runs inside the block.

    Raises what loading raises, `CapacityError` for memory that holds no sequence, `ConfigError` for settings that do not fit the model.
    """
    with service_of(load(path, settings.weights), settings) as service:
        yield service


@contextmanager
def service_of(model: Loaded, settings: ServeSettings) -> Iterator[Service]:
    """The service of a model that is loaded."""
    chat = _chat(model.tokenizer, settings.chat_format)
    cache = PrefixCache.build(model.runner, settings.cache, model.fingerprint) if settings.reuse else None
    live = LiveEngine(Engine(model.runner, settings.engine, cache, model.tokenizer))
    service = Service(live, chat, model.tokenizer, settings, settings.name or model.name)
    pad = model.tokenizer.special_ids.get(PAD)
    service.sight = None if model.eye is None or pad is None else Sight(model.eye, pad, settings.sight)
    service.revision = Revision(fingerprint=model.fingerprint)
    if settings.access.reload_folders:
        service.exchange = exchanging(model, live, settings.weights)
    live.start()
    try:
        yield service
    finally:
        service.close()
        live.stop()
        if cache is not None:
            cache.close()


def _chat(tokenizer: Tokenizer, name: str | None) -> ChatFormat | None:
    """The chat format; none where the vocabulary names no markers and nobody asked for one: such a model continues text."""
    try:
        return chat_format(tokenizer, name)
    except ConfigError:
        if name is not None:
            raise
        return None
