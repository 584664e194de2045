"""Every recipe in the repository fits: it resolves, its model exists, and what `gnomon show` prints of it is the same recipe."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from gnomon.config import to_toml
from gnomon.model.multimodal import Multimodal
from gnomon.model.transformer import Transformer
from gnomon.posttrain.lab.recipe import load as read_lab
from gnomon.serve.settings import ServeSettings
from gnomon.serve.settings import load as read_settings
from gnomon.train.recipe import load

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
RECIPES = sorted(path for path in FOLDER.glob("*.toml") if path.stem.split("-")[0] not in ("serve", "eval", "sft", "lab"))


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_resolves_and_reads_back(path: Path, tmp_path: Path) -> None:
    recipe = load(path)
    for docs in (False, True):
        (tmp_path / "resolved.toml").write_text(to_toml(recipe, docs=docs))
        assert load(tmp_path / "resolved.toml") == recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_has_a_model_that_can_be_built(path: Path) -> None:
    config = load(path).model
    with torch.device("meta"):
        model = Transformer(config) if config.vision is None else Multimodal(config)
    assert sum(t.numel() for t in model.state_dict().values()) == config.num_parameters() + config.vision_parameters()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_says_what_it_is_for(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# "), "begin with a comment: what this run is for, and on what machine"


@pytest.mark.parametrize("name", ["lab", "lab-slice"])
def test_the_recipes_of_the_lab_read_back(name: str, tmp_path: Path) -> None:
    recipe = read_lab(FOLDER / f"{name}.toml")
    for docs in (False, True):
        (tmp_path / "lab.toml").write_text(to_toml(recipe, docs=docs))
        assert read_lab(tmp_path / "lab.toml") == recipe
    assert len(recipe.cells) == (9 if name == "lab" else 3) and recipe.evaluate.problems >= 300


def test_the_server_recipe_has_every_setting_with_its_line() -> None:
    assert read_settings(FOLDER / "serve.toml") == ServeSettings()
    text = (FOLDER / "serve.toml").read_text(encoding="utf-8")

    def check(part: object) -> None:
        for field in dataclasses.fields(part):  # type: ignore[arg-type]
            value = getattr(part, field.name)
            if dataclasses.is_dataclass(value):
                assert f"# {field.metadata['doc']}\n[" in text
                check(value)
            else:
                assert re.search(rf"^{field.name} = .*  # {re.escape(field.metadata['doc'])}$", text, re.MULTILINE), field.name

    check(ServeSettings())
