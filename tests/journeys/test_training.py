"""What a user of `gnomon train` does: train, look, continue, change their mind, and make mistakes."""

import json
import re
import shutil

import numpy as np
import pytest
import torch

from gnomon import config as toml
from gnomon.data.mixture import Item, Mixture
from gnomon.data.packing import PackedBatches
from gnomon.data.tokenizer import train_tokenizer
from gnomon.errors import ConfigError, DataError, TrainingError
from gnomon.model.config import PRESETS
from gnomon.model.transformer import Transformer
from gnomon.parallel.mesh import Mesh
from gnomon.train import checkpoint, loop
from gnomon.train.loop import train
from gnomon.train.material import prepare
from gnomon.train.recipe import TrainRecipe

BRIEF = {"stages": [{"context": 128, "steps": 2}], "evaluate": {"contexts": [128], "tokens": 256}}


def weights(recipe, ending):
    tensors = checkpoint.load(checkpoint.latest(recipe.run)).tensors["model"]
    return {name: t for name, t in tensors.items() if name.endswith(ending)}


def biases(recipe):
    return weights(recipe, "e_score_correction_bias")


def test_a_run_learns_and_leaves_everything_behind(recipe, rows):
    wanted = recipe(stages=[{"context": 128, "steps": 24}, {"context": 256, "steps": 6}], batch_tokens=2048,
                    evaluate={"every": 10, "tokens": 512})
    summary = train(wanted, quiet=True)
    metrics = rows(wanted)
    assert [row["step"] for row in metrics] == list(range(1, 31))
    assert summary.steps == 30
    assert summary.tokens == 30 * 2048 == metrics[-1]["tokens"]
    assert metrics[0]["loss"] == pytest.approx(6.24, abs=0.3)  # about log 512: nothing known yet
    assert summary.loss < metrics[0]["loss"] - 0.8  # sixty thousand tokens of diverse rows
    assert summary.loss == metrics[-1]["loss"]
    assert [row["step"] for row in metrics if "held_out_loss" in row] == [10, 20]
    assert {row["context"] for row in metrics} == {128, 256}
    assert metrics[-1]["max_violation"] < metrics[0]["max_violation"]
    assert all(value.abs().max() > 0 for value in biases(wanted).values())
    assert [result.context for result in summary.held_out] == [256, 512]
    assert 0 < summary.held_out[0].bits_per_byte < 5
    assert sum(tokens for *_, tokens in summary.held_out[0].by_position) > 0
    for name in ("recipe.toml", "tokenizer/tokenizer.json", "report.html", "tensorboard", "checkpoints/step-000030"):
        assert (wanted.run / name).exists(), name
    assert len(checkpoint.checkpoints(wanted.run)) == 2


def test_the_report_stands_alone_and_shows_each_figure(base):
    page = (base.run / "report.html").read_text()
    for title in ("Loss", "Loss by position", "Load balance", "Depth reads", "Throughput", "Learning rate", "Attention logits", "Recipe"):
        assert f"<h2>{title}</h2>" in page or f"<summary>{title}</summary>" in page, title
    assert not re.search(r'(src|href)="(?!#|data:)', page)  # nothing is fetched
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert page.count("<svg") == page.count("</svg>") == 8


def test_the_resolved_recipe_is_itself_a_recipe(base):
    again = toml.load(TrainRecipe, base.run / "recipe.toml", presets=PRESETS)
    filled = {"bos_token_id": 480, "eos_token_id": 482, "pad_token_id": 511}
    assert toml.to_dict(again) == toml.merge(toml.to_dict(base), {"model": filled})


def test_a_trained_run_is_loaded_with_its_tokenizer(base):
    model, tokenizer, saved = checkpoint.load_run(base.run)
    assert tokenizer.vocab_size == 512
    assert saved.seed == base.seed
    tokens = torch.tensor([tokenizer.encode("def main(argv):\n    return")])
    before = Transformer(saved.model).initialise(saved.seed)
    with torch.no_grad():
        trained, fresh = model(tokens), before(tokens)
    assert torch.isfinite(trained).all()
    assert (trained - fresh).abs().max() > 0.1


def test_metrics_are_json_lines_with_the_promised_keys(base):
    lines = [json.loads(line) for line in (base.run / "metrics.jsonl").read_text().splitlines()]
    always = {"step", "loss", "learning_rate", "gradient_norm", "max_violation", "max_violation_by_layer", "tokens", "context", "stage",
              "tokens_per_second", "seconds", "max_logit"}
    assert len(lines) == 6
    assert all(always <= line.keys() for line in lines)


@pytest.mark.parametrize("changes", [{"micro_batch_tokens": 256}, {"activation_checkpointing": "block"}], ids=["pieces", "recompute"])
def test_memory_settings_change_neither_losses_nor_balance(base, recipe, rows, changes):
    other = recipe(evaluate={"tokens": 256}, **changes)
    train(other, quiet=True)
    for a, b in zip(rows(base), rows(other), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=2e-5)
        assert a["max_violation_by_layer"] == b["max_violation_by_layer"]
        assert a["max_logit"] == pytest.approx(b["max_logit"], rel=1e-3)
    for name, bias in biases(base).items():
        assert torch.allclose(bias, biases(other)[name], atol=1e-4), name


def test_bfloat16_stays_close_to_single_precision(base, recipe, rows):
    half = recipe(precision="bf16", evaluate={"tokens": 256})
    train(half, quiet=True)
    for a, b in zip(rows(base), rows(half), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=0.05)
    saved = checkpoint.load(checkpoint.latest(half.run)).tensors["model"]
    assert {t.dtype for t in saved.values()} == {torch.float32}


@pytest.mark.parametrize(("method", "recompute"), [
    ("sign", "block"), ("none", "none"), ("auxiliary", "none"), ("auxiliary", "block"),
])
def test_the_comparators_do_what_they_say(recipe, rows, method, recompute):
    wanted = recipe(balance={"method": method}, activation_checkpointing=recompute, **BRIEF)
    train(wanted, quiet=True)
    assert all(np.isfinite(row["loss"]) for row in rows(wanted))
    largest = max(bias.abs().max().item() for bias in biases(wanted).values())
    assert largest == (pytest.approx(2e-3, abs=1e-6) if method == "sign" else 0.0)


def test_the_auxiliary_loss_moves_the_router(recipe):
    one_step = BRIEF | {"stages": [{"context": 128, "steps": 1}]}
    gates = []
    for weight in (1e-6, 10.0):
        wanted = recipe(f"run{weight}", balance={"method": "auxiliary", "auxiliary_weight": weight}, **one_step)
        train(wanted, quiet=True)
        gates.append(next(iter(weights(wanted, "gate.weight").values())))
    assert (gates[0] - gates[1]).abs().max() > 1e-4


def test_another_run_starts_from_the_weights_of_the_first(base, recipe, rows):
    second = recipe(start_from=str(base.run), stages=[{"context": 256, "steps": 1}], evaluate={"contexts": [128], "tokens": 256})
    train(second, quiet=True)
    assert rows(second)[0]["loss"] < rows(base)[0]["loss"] - 0.3


def test_a_run_that_goes_on_no_longer_needs_the_one_it_started_from(base, recipe, rows, tmp_path):
    first = tmp_path / "first"
    shutil.copytree(base.run, first)
    second = recipe(start_from=str(first), **BRIEF)
    train(second, quiet=True)
    shutil.rmtree(first)
    longer = recipe(start_from=str(first), **BRIEF | {"stages": [{"context": 128, "steps": 3}]})
    assert train(longer, quiet=True).resumed_at == 2
    assert len(rows(longer)) == 3


def test_weights_of_another_tokenizer_are_refused(base, recipe, text, tmp_path):
    documents = [path.read_text(encoding="utf-8").upper() for path in text.iterdir()]
    train_tokenizer(documents, base.model.vocab_size).save(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"'start_from'.*another tokenizer"):
        train(recipe(start_from=str(base.run), data={"tokenizer": str(tmp_path / "other")}), quiet=True)


def test_a_finished_run_can_be_made_longer_and_a_torn_checkpoint_does_not_count(base, recipe, rows):
    longer = recipe(stages=[{"context": 128, "steps": 4}, {"context": 256, "steps": 3}])
    shutil.copytree(base.run, longer.run)
    torn = longer.run / "checkpoints" / "step-000009.partial"  # a kill while it was written
    shutil.copytree(checkpoint.latest(base.run), torn)
    summary = train(longer, quiet=True)
    assert summary.resumed_at == 6
    assert not torn.exists()
    assert [row["step"] for row in rows(longer)] == list(range(1, 8))


def test_a_changed_model_is_refused_on_resume(base, recipe):
    wanted = recipe(model={"attn_res_block_size": 1}, seed=5)
    shutil.copytree(base.run, wanted.run)
    with pytest.raises(ConfigError, match=r"another model \(model\.attn_res_block_size: 2 → 1; seed: 0 → 5\).*run=FOLDER"):
        train(wanted, quiet=True)
    with pytest.raises(ConfigError, match=r"already has step-000006"):
        train(wanted, resume=False, quiet=True)


def test_a_loss_that_is_not_finite_stops_with_all_that_is_known(recipe):
    wanted = recipe(optimizer={"learning_rate": 1e30}, schedule={"warmup": 0.0}, checkpoint={"every_steps": 1})
    with pytest.raises(TrainingError, match=r"step 2: loss nan.*batch 2 .*begins '.*last good checkpoint: .*step-000001.*learning_rate"):
        train(wanted, quiet=True)


def test_a_vocabulary_that_does_not_fit_is_named(recipe):
    with pytest.raises(ConfigError, match=r"'model\.vocab_size' is 640, but the tokenizer has 512 ids"):
        train(recipe(model={"vocab_size": 640}), quiet=True)


def test_an_empty_corpus_is_one_clear_error(recipe, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="empty"):
        train(recipe(data={"sources": [{"paths": [str(tmp_path / "empty.txt")]}]}), quiet=True)


class Samples:
    """Items that must stay whole and leave padding."""

    def __init__(self) -> None:
        self.number = 0

    def next_item(self):
        self.number += 1
        return Item(tokens=np.arange(1, 91 + self.number % 5), loss_mask=None, whole=True)

    def state(self):
        return {"number": self.number}

    def restore(self, state):
        self.number = state["number"]


def test_padding_is_not_counted(recipe):
    wanted = recipe()
    wanted.run.mkdir()
    parts = loop.build(prepare(wanted, Mesh(), print, show_progress=False), Mesh())
    batch = PackedBatches(Mixture([(Samples(), 1.0)]), 4, 128, pad_id=511).next()
    real = int(batch.token_mask.sum())
    assert real < batch.token_mask.numel()
    loss, total = parts.objective(batch, int(batch.loss_mask.sum()))
    assert loss.item() == pytest.approx(total.item() / int(batch.loss_mask.sum()))
    for router in parts.model.routers():
        assert int(router.load.sum()) == real * router.config.num_experts_per_token
        assert router.histogram.sum(1).eq(real).all()
