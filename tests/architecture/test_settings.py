"""Every field that a recipe can set carries its line of documentation, however deep it stands."""

import dataclasses
import typing

import pytest

from gnomon.agent.evaluate_recipe import EvalRecipe
from gnomon.model.config import ModelConfig
from gnomon.posttrain.recipe import DistillRecipe, RLRecipe, SFTRecipe
from gnomon.serve.settings import ServeSettings
from gnomon.train.recipe import TrainRecipe

CLASSES = [DistillRecipe, EvalRecipe, ModelConfig, RLRecipe, ServeSettings, SFTRecipe, TrainRecipe]


def parts(hint: object) -> set[type]:
    """The dataclasses inside a type annotation."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return {hint}
    return {found for argument in typing.get_args(hint) for found in parts(argument)}


def undocumented(cls: type, seen: set[type]) -> list[str]:
    """The fields without a line, in `cls` and in every dataclass that it holds."""
    if cls in seen:
        return []
    seen.add(cls)
    hints = typing.get_type_hints(cls)
    missing = [f"{cls.__name__}.{f.name}" for f in dataclasses.fields(cls) if f.init and not f.metadata.get("doc")]
    return missing + [line for f in dataclasses.fields(cls) for part in parts(hints[f.name]) for line in undocumented(part, seen)]


@pytest.mark.parametrize("cls", CLASSES)
def test_fields_are_documented(cls: type) -> None:
    assert not undocumented(cls, set())


@pytest.mark.parametrize("cls", CLASSES)
def test_configurations_cannot_change(cls: type) -> None:
    seen: set[type] = set()
    undocumented(cls, seen)
    thawed = [part.__name__ for part in seen if not part.__dataclass_params__.frozen or "__slots__" not in vars(part)]
    assert not thawed
