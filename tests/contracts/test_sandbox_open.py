"""Which backend is opened: by doing, in order, and never a weaker one than was asked for."""

import asyncio
import sys
import types
from dataclasses import replace
from pathlib import Path

import pretend_backend
import pytest

from gnomon.errors import ConfigError, Unsupported
from gnomon.sandbox import open as opening
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.sandbox import Capabilities


class Strong(pretend_backend.Backend):
    name = "strong"

    async def probe(self) -> Capabilities:
        return replace(await super().probe(), isolation="strong")


class Broken(pretend_backend.Backend):
    probes = 0

    async def probe(self) -> Capabilities:
        Broken.probes += 1
        raise Unsupported("user namespaces are off; sysctl -w user.max_user_namespaces=1000")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LayerStore:
    module = types.ModuleType("backends_of_the_test")
    module.Weak, module.Strong, module.Broken = pretend_backend.Backend, Strong, Broken
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(opening, "_refused", {})
    return LayerStore(tmp_path / "store")


def order(monkeypatch: pytest.MonkeyPatch, **names: tuple[str, ...]) -> None:
    monkeypatch.setattr(opening, "ORDER", {kind: tuple(f"backends_of_the_test:{n}" for n in each) for kind, each in names.items()})


def test_auto_takes_the_first_that_works(store, monkeypatch):
    order(monkeypatch, standard=("Broken", "Weak", "Strong"), strong=("Broken", "Weak", "Strong"))
    assert asyncio.run(opening.open_backend(store=store)).name == "pretend"
    assert asyncio.run(opening.open_backend(isolation="strong", store=store)).name == "strong"
    assert Broken.probes == 1  # a refusal is remembered


def test_strong_is_never_lowered(store, monkeypatch):
    order(monkeypatch, standard=("Weak",), strong=("Broken", "Weak"))
    with pytest.raises(Unsupported, match=r"strong isolation.*Broken: user namespaces are off.*Weak: its isolation is standard.*runsc"):
        asyncio.run(opening.open_backend(isolation="strong", store=store))
    with pytest.raises(Unsupported, match="its isolation is standard"):
        asyncio.run(opening.open_backend("backends_of_the_test:Weak", isolation="strong", store=store))
    with pytest.raises(ConfigError, match="isolation 'medium'"):
        asyncio.run(opening.open_backend(isolation="medium", store=store))


def test_an_unknown_name_lists_the_choices(store):
    with pytest.raises(ConfigError, match="unknown kind 'namespace'"):
        asyncio.run(opening.open_backend("namespace", store=store))


def test_a_probe_that_hangs_is_a_refusal(store, monkeypatch):
    class Hanging(pretend_backend.Backend):
        async def probe(self) -> Capabilities:
            await asyncio.sleep(60)
            raise AssertionError

    sys.modules["backends_of_the_test"].Hanging = Hanging
    monkeypatch.setattr(opening, "PROBE_SECONDS", 0.05)
    with pytest.raises(Unsupported, match="did not answer"):
        asyncio.run(opening.open_backend("backends_of_the_test:Hanging", store=store))
