"""What the tests of serving share: a small vocabulary, a scripted engine, a service and a server around it.

A conftest takes the fixtures it needs by name. Nothing heavy is imported before a test asks for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from scripted_engine import ScriptedEngine

    from gnomon.data.chat import ChatFormat
    from gnomon.data.tokenizer import Tokenizer
    from gnomon.serve.service import Service

TEXT = "The quick brown fox jumps over the lazy dog; hello world, this is a small text for a small vocabulary. "


@pytest.fixture(scope="session")
def vocabulary() -> Tokenizer:
    """A vocabulary of 400 ids with K3's markers."""
    import textwrap

    from gnomon.data.tokenizer import train_tokenizer

    return train_tokenizer([TEXT * 20, Path(textwrap.__file__).read_text(encoding="utf-8")], 400)


@pytest.fixture(scope="session")
def chat(vocabulary: Tokenizer) -> ChatFormat:
    """K3's chat format over it."""
    from gnomon.data.chat import chat_format

    return chat_format(vocabulary)


@pytest.fixture
def scripted(chat: ChatFormat) -> ScriptedEngine:
    """An engine that thinks "hm" and says "Hello world"."""
    from scripted_engine import ScriptedEngine, spoken

    return ScriptedEngine(script=lambda request: spoken(chat, "Hello world", reasoning="hm"))


@pytest.fixture
def service(scripted: ScriptedEngine, chat: ChatFormat, vocabulary: Tokenizer) -> Callable[..., Service]:
    """`service(limits={…}, …)` answers with the scripted engine, under the name `tiny`."""
    from gnomon import config as toml
    from gnomon.serve.service import Service
    from gnomon.serve.settings import ServeSettings

    def make(**changes: Any) -> Service:
        settings = toml.from_dict(ServeSettings, {"log": "none", "drain_seconds": 5} | changes)
        return Service(scripted, chat, vocabulary, settings, "tiny")

    return make


@pytest.fixture
def server_url(service: Callable[..., Service]) -> Iterator[str]:
    """A server with the settings' defaults."""
    from gnomon.serve.server import Background

    with Background(service()) as address:
        yield address
