"""Every recipe in the repository fits: it resolves, its model exists, and what `gnomon show` prints of it is the same recipe."""

from pathlib import Path

import pytest
import torch

from gnomon.config import to_toml
from gnomon.model.transformer import Transformer
from gnomon.train.recipe import load

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.toml"))


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
        model = Transformer(config)
    assert sum(t.numel() for t in model.state_dict().values()) == config.num_parameters()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_says_what_it_is_for(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# "), "begin with a comment: what this run is for, and on what machine"
