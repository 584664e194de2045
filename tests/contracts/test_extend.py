"""The one plug-in rule: a file name or a dotted path; a typo lists the choices."""

import sys
from pathlib import Path

import pytest

from gnomon.errors import ConfigError
from gnomon.extend import find, kinds, suggestion


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with two kinds and a private module, importable for one test."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "red.py").write_text("class Thing: colour = 'red'")
    (folder / "blue.py").write_text("class Other: pass")
    (folder / "_hidden.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shelf", raising=False)
    return "shelf"


def test_file_names_are_the_registry(package: str) -> None:
    assert kinds(package) == ["blue", "red"]
    assert find(package, "red", "Thing").colour == "red"


def test_a_new_file_is_a_new_kind(package: str, tmp_path: Path) -> None:
    (tmp_path / "shelf" / "green.py").write_text("class Thing: colour = 'green'")
    assert "green" in kinds(package)
    assert find(package, "green", "Thing").colour == "green"


def test_a_dotted_path_names_a_class_of_yours(package: str) -> None:
    assert find(package, "shelf.blue:Other", "Thing").__name__ == "Other"


@pytest.mark.parametrize(("name", "message"), [
    ("rde", r"unknown kind 'rde' in shelf; did you mean 'red'\? \(choices: blue, red; or a dotted path"),
    ("_hidden", "unknown kind '_hidden'"),
    ("blue", "defines no 'Thing'"),
    ("shelf.blue:Missing", "defines no 'Missing'"),
    ("nowhere.at_all:X", "cannot import module 'nowhere.at_all'"),
])
def test_a_wrong_kind_is_one_clear_error(package: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find(package, name, "Thing")


def test_suggestion_is_silent_when_nothing_is_close() -> None:
    assert suggestion("zzz", ["red", "blue"]) == ""
    assert suggestion("trian", ["train", "tour"]) == "; did you mean 'train'?"
