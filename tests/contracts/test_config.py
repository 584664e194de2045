"""Recipes: strict, with paths and suggestions in every complaint; what is written reads back to an equal object."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from gnomon.config import from_dict, load, merge, read_toml, setting, to_dict, to_toml, toml_key, toml_string
from gnomon.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    """A part."""

    rate: float = setting(0.1, "step size")
    rule: Literal["cosine", "wsd"] = setting("cosine", "shape of the schedule")
    clip: float | None = setting(1.0, "norm to clip to; none: off")

    def __post_init__(self) -> None:
        if self.rate <= 0:
            raise ConfigError(f"'rate' is {self.rate}; it must be positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    """A whole."""

    name: str = setting(doc="required")
    steps: int = setting(10, "how many")
    sizes: tuple[int, ...] = setting((1, 2), "a list")
    inner: Inner = setting(factory=Inner, doc="a part")
    extra: Inner | None = setting(None, "an optional part")
    folder: Path = setting(Path("runs"), "where")
    parts: dict[str, Any] = setting(factory=dict, doc="parts by kind", table=lambda kind: Inner)


def recipe(folder: Path, text: str, name: str = "a.toml") -> Path:
    """A recipe file."""
    path = folder / name
    path.write_text(text)
    return path


def test_reads_nested_tables_and_overrides(tmp_path: Path) -> None:
    path = recipe(tmp_path, 'name = "x"\n[inner]\nrate = 1\n[parts.kda]\nrule = "wsd"')
    got = load(Outer, path, ("steps=20", "inner.rule=wsd", "sizes=[4]", "inner.clip=none"))
    assert (got.name, got.steps, got.sizes, got.inner) == ("x", 20, (4,), Inner(rate=1.0, rule="wsd", clip=None))
    assert got.parts == {"kda": Inner(rule="wsd")}


def test_extends_merges_below(tmp_path: Path) -> None:
    recipe(tmp_path, 'name = "below"\nsteps = 5\n[inner]\nrate = 0.5\nrule = "wsd"', "below.toml")
    path = recipe(tmp_path, 'extends = "below.toml"\nname = "above"\n[inner]\nrate = 0.25')
    assert load(Outer, path) == Outer(name="above", steps=5, inner=Inner(rate=0.25, rule="wsd"))


def test_extends_names_a_preset(tmp_path: Path) -> None:
    presets = tmp_path / "presets"
    presets.mkdir()
    recipe(presets, "rate = 0.5", "quick.toml")
    path = recipe(tmp_path, 'name = "x"\n[inner]\nextends = "quick"')
    assert load(Outer, path, presets=presets).inner.rate == 0.5
    with pytest.raises(ConfigError, match="did you mean 'quick'"):
        load(Outer, recipe(tmp_path, 'name = "x"\n[inner]\nextends = "quik"'), presets=presets)


@pytest.mark.parametrize(("text", "message"), [
    ('name = "x"\nstep = 3', r"'step': unknown key; did you mean 'steps'\?"),
    ('name = "x"\n[inner]\nrat = 3', r"'inner\.rat': unknown key; did you mean 'rate'\?"),
    ('name = "x"\n[parts.kda]\nrat = 3', r"'parts\.kda\.rat': unknown key"),
    ('name = "x"\nparts = 3', r"'parts': expected a table of parts by kind, got 3"),
    ("steps = 3", r"'name': is required"),
    ('name = "x"\nsteps = "many"', r"'steps': expected int, got 'many'"),
    ('name = "x"\nsteps = true', r"'steps': expected int, got True"),
    ('name = "x"\nsizes = 3', r"'sizes': expected a list, got 3"),
    ('name = "x"\nsizes = [1, "two"]', r"'sizes\.1': expected int, got 'two'"),
    ('name = "x"\ninner = 3', r"'inner': expected a table of Inner, got 3"),
    ('name = "x"\n[inner]\nrule = "cosin"', r"'inner\.rule': 'cosin' is not one of 'cosine', 'wsd'; did you mean 'cosine'\?"),
    ('name = "x"\n[inner]\nrate = nan', r"'inner\.rate': expected a finite number, got nan"),
    ('name = "x"\n[inner]\nrate = inf', r"'inner\.rate': expected a finite number, got inf"),
    ('name = "x"\n[inner]\nrate = -1', r"'inner': 'rate' is -1\.0; it must be positive"),
    ("name = ", "cannot be read"),
    ('extends = "a.toml"', "goes round in a circle"),
    ('extends = "gone.toml"', "gone.toml' does not exist"),
])
def test_bad_recipe_is_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(Outer, recipe(tmp_path, text))
    assert "a.toml" in str(caught.value) or "gone.toml" in str(caught.value)


@pytest.mark.parametrize("override", ["steps", "=3", "inner..rate=3", ".steps=3"])
def test_bad_override_says_how_to_write_it(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"write it as a\.b=c"):
        load(Outer, recipe(tmp_path, 'name = "x"'), (override,))


def test_extends_must_be_a_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a file or a preset name, not 3"):
        load(Outer, recipe(tmp_path, "extends = 3"))


def test_missing_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load(Outer, tmp_path / "gone.toml")


@pytest.mark.parametrize("docs", [False, True])
def test_what_is_written_reads_back_equal(tmp_path: Path, docs: bool) -> None:
    value = Outer(name='quote " backslash \\ line\nend', sizes=(), inner=Inner(rate=1e-5, clip=None), extra=Inner(rule="wsd"),
                  folder=Path("a b"), parts={"your.mixers:Hyena": Inner()})
    text = to_toml(value, docs=docs)
    assert load(Outer, recipe(tmp_path, text)) == value
    assert ("# step size" in text) == docs


def test_tables_round_trip_through_dictionaries() -> None:
    value = Outer(name="x", extra=Inner(rate=2.0))
    assert from_dict(Outer, to_dict(value)) == value


def test_merge_keeps_what_is_not_overridden() -> None:
    assert merge({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 9}}) == {"a": {"b": 9, "c": 2}, "d": 3}


@pytest.mark.parametrize("text", ["ключ", "a b", "", "a\x00\x1f\x7fb", 'quo"te\\', "line\nline\r\t", "a-b_9"])
def test_any_text_is_a_key_and_a_value(text: str) -> None:
    assert tomllib.loads(f"{toml_key(text)} = {toml_string(text)}") == {text: text}


def test_every_recipe_in_the_repository_is_toml(repository: Path) -> None:
    for path in (repository / "recipes").glob("*.toml"):
        assert read_toml(path, repository / "src/gnomon/model/presets")
