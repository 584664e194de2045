"""What the tests of serving share: a small vocabulary, a scripted engine, a service and a server around it.

A conftest takes the fixtures it needs by name. Nothing heavy is imported before a test asks for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
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


@pytest.fixture(scope="session")
def the_engine(chat: ChatFormat) -> ScriptedEngine:
    """The one engine behind all servers of a session; tests take it as `scripted`."""
    from scripted_engine import ScriptedEngine, spoken

    return ScriptedEngine(script=lambda request: spoken(chat, "Hello world", reasoning="hm"))


@pytest.fixture
def scripted(the_engine: ScriptedEngine, chat: ChatFormat) -> ScriptedEngine:
    """An engine that thinks "hm" and says "Hello world", whatever the test before made of it."""
    from scripted_engine import ScriptedEngine, spoken

    new = ScriptedEngine(script=lambda request: spoken(chat, "Hello world", reasoning="hm"))
    for entry in fields(new):
        setattr(the_engine, entry.name, getattr(new, entry.name))
    return the_engine


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


@pytest.fixture(scope="session")
def the_url(the_engine: ScriptedEngine, chat: ChatFormat, vocabulary: Tokenizer) -> Iterator[str]:
    """The one server with the settings' defaults; tests take it as `server_url`."""
    from gnomon.serve.server import Background
    from gnomon.serve.service import Service
    from gnomon.serve.settings import ServeSettings

    with Background(Service(the_engine, chat, vocabulary, ServeSettings(log="none"), "tiny")) as address:
        yield address


@pytest.fixture
def server_url(the_url: str, scripted: ScriptedEngine) -> str:
    """A server with the settings' defaults over `scripted`. Its counts go on from test to test."""
    return the_url
