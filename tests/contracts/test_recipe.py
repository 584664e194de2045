"""Training recipes: what fits, what is refused and how it is said."""

from dataclasses import replace
from pathlib import Path

import pytest

from gnomon import config as toml
from gnomon.errors import ConfigError
from gnomon.model.config import PRESETS, preset
from gnomon.parallel.axes import Axes
from gnomon.train.recipe import DataConfig, EvaluateConfig, SourceConfig, Stage, TrainRecipe, load
from gnomon.train.settings import BalanceConfig

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


def recipe(**changes):
    return TrainRecipe(**{"model": preset("tiny"), "stages": (Stage(context=512, steps=10),)} | changes)


@pytest.mark.parametrize(("changes", "message"), [
    ({"stages": ()}, "'stages' is empty"),
    ({"stages": (Stage(context=3, steps=1),), "batch_tokens": 3}, r"'stages\.0\.context' is 3, shorter than the short convolution"),
    ({"batch_tokens": 1000}, r"'batch_tokens' is 1000, no multiple of 'stages\.0\.context' = 512; use 1024"),
    ({"mesh": Axes(expert=3)}, r"'mesh\.expert' is 3, but \d+ experts cannot be shared out evenly"),
    ({"mesh": Axes(expert=2), "model": replace(preset("tiny"), moe=None)}, "the model has no experts"),
    ({"mesh": Axes(context=1024)}, "less than one token for each of 'mesh.context' = 1024 ranks"),
    ({"mesh": Axes(pipeline=9)}, r"'mesh\.pipeline' x 'mesh\.virtual' is 9 stages, but the model has \d layers"),
    ({"mesh": Axes(pipeline=2), "balance": BalanceConfig(method="auxiliary")}, "a loss of all layers, which a pipeline does not have"),
    ({"mesh": Axes(context=2), "micro_batch_tokens": 200}, "over 2 context ranks; use at least 256"),
    ({"seed": -1}, "'seed' is -1"),
    ({"seed": 2**63}, "'seed' is 9223372036854775808"),
    ({"batch_tokens": 0}, "'batch_tokens' is 0; it must be positive"),
    ({"batch_tokens": -512}, "'batch_tokens' is -512; it must be positive"),
    ({"micro_batch_tokens": 256}, "'micro_batch_tokens' is 256, less than one row"),
    ({"stages": (Stage(context=512, steps=1, weights=(1.0, 2.0)),)}, r"'stages\.0\.weights' has 2 shares for 1 sources"),
])
def test_parts_that_do_not_fit_are_named_with_a_remedy(changes, message):
    with pytest.raises(ConfigError, match=message):
        recipe(**changes)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Stage(context=512), "either 'steps' or 'tokens'"),
    (lambda: Stage(context=512, steps=1, tokens=5), "either 'steps' or 'tokens'"),
    (lambda: Stage(context=512, steps=0), "positive"),
    (lambda: Stage(context=512, steps=1, long_exponent=9.0), "'long_exponent' is 9"),
    (lambda: EvaluateConfig(contexts=(512, 0)), r"'contexts' is \[512, 0\]; each must be at least 2"),
    (lambda: EvaluateConfig(tokens=0), "'tokens' is 0"),
    (lambda: EvaluateConfig(every=-1), "'every' is -1"),
    (lambda: DataConfig(sources=()), "'sources' is empty"),
    (lambda: DataConfig(held_out=0.9), "'held_out' is 0.9"),
    (lambda: SourceConfig(weight=-1.0), "'weight' is -1"),
    (lambda: SourceConfig(paths=("a",), max_bytes=5), "goes with empty 'paths'"),
])
def test_parts_check_themselves(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_unknown_keys_suggest_the_known_one(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('[model]\nextends = "tiny"\n[[stages]]\ncontext = 512\nsteps = 1\n[optimizer]\nlerning_rate = 1.0\n')
    with pytest.raises(ConfigError, match=r"'optimizer\.lerning_rate': unknown key; did you mean 'learning_rate'"):
        load(path)
    with pytest.raises(ConfigError, match=r"top-k|more than the pool"):
        load(path, ("optimizer={}", "model.moe.num_experts_per_token=99"))


def test_stages_follow_one_another_and_tokens_round_up():
    two = recipe(stages=(Stage(context=512, steps=3), Stage(context=1024, tokens=16_385)), batch_tokens=16_384)
    assert two.total_steps == 5
    assert [two.stage_at(step)[0] for step in range(6)] == [0, 0, 0, 1, 1, 1]
    assert two.evaluation_contexts() == (1024, 2048)


def test_micro_batches_divide_the_rows_of_a_rank_evenly():
    parts = recipe(batch_tokens=512 * 12, micro_batch_tokens=512 * 5)
    assert parts.micro_batches(512, 1) == 3  # 12 rows, at most 5 at once: 3 pieces of 4
    assert parts.micro_batches(512, 2) == 2
    assert recipe(batch_tokens=512 * 12).micro_batches(512, 4) == 1
    with pytest.raises(ConfigError, match=r"12 rows of 512 tokens, which 5 ranks cannot share; use a multiple of 2560"):
        parts.micro_batches(512, 5)
    staged = recipe(batch_tokens=512 * 6, mesh=Axes(pipeline=4))
    assert staged.micro_batches(512, 1) == 6
    with pytest.raises(ConfigError, match=r"has 3 rows of 512 tokens for a pipeline of 4 stages on 4 ranks.* use batch_tokens = 4096"):
        staged.micro_batches(512, 2)


def test_a_written_recipe_reads_back_equal(tmp_path):
    one = recipe(stages=(Stage(context=512, tokens=99_999, long_exponent=0.5),), start_from=Path("runs/a"), micro_batch_tokens=1024,
                 data=DataConfig(sources=(SourceConfig(paths=("a/*.md",), weight=2.0), SourceConfig(max_bytes=1000))))
    path = tmp_path / "r.toml"
    path.write_text(toml.to_toml(one, docs=True))
    assert load(path) == one


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_of_the_repository_are_valid(path):
    if "stages" not in toml.read_toml(path, PRESETS):
        pytest.skip("no training recipe")
    found = load(path)
    assert found.total_steps > 0
    assert all(found.micro_batches(stage.context, 1) > 0 for stage in found.stages)
