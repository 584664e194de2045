"""A run that learns from pictures and text: resumed to the last bit, evaluated, exported in the released layout."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from gnomon import config as toml
from gnomon.cli import main
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import CheckpointError
from gnomon.model.multimodal import load_multimodal
from gnomon.model.runs import load_seeing
from gnomon.parallel.axes import Axes
from gnomon.parallel.mesh import join
from gnomon.train import checkpoint
from gnomon.train.loop import train
from gnomon.train.material import HELD_OUT_SEED, picture_questions, prepare

PROGRAM = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")  # one connection for all runs
from gnomon.train.loop import train
from gnomon.train.recipe import load
for path in sys.argv[1:]:
    train(load(Path(path)), quiet=True)
dist.barrier()
dist.destroy_process_group()
"""

VISION = {"position_grid": 8, "vt_hidden_size": 32, "vt_intermediate_size": 64, "vt_num_hidden_layers": 1, "vt_num_attention_heads": 2,
          "qkv_hidden_size": 32}


@pytest.fixture(scope="module")
def seeing(recipe_in, text, tokenizer_folder, tmp_path_factory):
    """`seeing(folder)` is the small run with a source of pictures beside its text."""
    shards = tmp_path_factory.mktemp("shards")

    def make(run):
        sources = [{"paths": [str(text)]}, {"pictures": {"kinds": ["line", "scene"], "chat": 0.2}}]
        data = {"sources": sources, "tokenizer": str(tokenizer_folder), "held_out": 0.1, "cache": str(shards)}
        return recipe_in(run, model={"vision": VISION}, stages=[{"context": 128, "steps": 4}], data=data,
                         evaluate={"tokens": 512, "pictures": 3, "contexts": [128]})

    return make


@pytest.fixture(scope="module")
def trained(seeing, tmp_path_factory):
    """Four steps, a checkpoint after every two."""
    torch.set_num_threads(1)
    recipe = seeing(tmp_path_factory.mktemp("seeing") / "run")
    train(recipe, quiet=True)
    return recipe


def test_a_resumed_run_has_the_same_bits(trained, seeing, tmp_path, rows) -> None:
    shutil.copytree(trained.run, tmp_path / "run")
    shutil.rmtree(checkpoint.latest(tmp_path / "run"))  # as if it had been killed before the last checkpoint
    again = seeing(tmp_path / "run")
    assert train(again, quiet=True).resumed_at == 2
    assert rows(again) == rows(trained)
    for group in ("model", "eye", "optimizer", "run"):
        one, other = (checkpoint.load(checkpoint.latest(recipe.run)).tensors[group] for recipe in (trained, again))
        assert one.keys() == other.keys()
        assert all(one[name].equal(other[name]) for name in one), group


def test_the_eye_is_trained_and_evaluated_on_other_pictures(trained) -> None:
    first, last = (checkpoint.load(path).tensors["eye"] for path in checkpoint.checkpoints(trained.run))
    assert all(not first[name].equal(last[name]) for name in first)
    report = (trained.run / "report.html").read_text()
    assert "<td>line</td>" in report
    assert "<td>scene</td>" in report
    with join("cpu") as mesh:
        material = prepare(trained, mesh, lambda said: None, show_progress=False)
    questions = picture_questions(material)
    assert list(questions) == ["line", "scene"]
    assert all(source.config.seed == HELD_OUT_SEED and source.config.chat == 0 for source in questions.values())


def test_the_export_sees_the_same(trained, tmp_path, capsys) -> None:
    assert main(["export", str(trained.run), "--plain", "--out", str(tmp_path / "out")]) == 0
    tokenizer = Tokenizer.load(tmp_path / "out")
    table = json.loads((tmp_path / "out" / "config.json").read_text())
    pad = tokenizer.special_ids["<|media_pad|>"]
    assert table["media_placeholder_token_id"] == pad
    assert table["vision_config"]["vt_hidden_size"] == 32
    said = json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())["media_proc_cfg"]
    assert (said["patch_size"], said["merge_kernel_size"], said["in_patch_limit"]) == (14, 2, 65_536)
    ours, _ = load_seeing(trained.run)
    theirs = load_multimodal(tmp_path / "out")
    with join("cpu") as mesh:
        material = prepare(trained, mesh, lambda said: None, show_progress=False)
    item = picture_questions(material)["scene"].sample(0).item
    prompt = torch.tensor([1, pad, 2, 3])
    with torch.no_grad():
        one, other = (model(prompt, [item.images[0].pixels], pad) for model in (ours, theirs))
    torch.testing.assert_close(one, other)


def test_a_run_on_text_has_no_eye(base) -> None:
    with pytest.raises(CheckpointError, match="trained without a vision tower"):
        load_seeing(base.run)


@pytest.mark.slow
def test_ranks_that_share_rows_or_tokens_are_one_run(trained, seeing, rows, tmp_path, repository) -> None:
    paths = []
    for axis in ("data", "context"):
        paths.append(tmp_path / f"{axis}.toml")
        paths[-1].write_text(toml.to_toml(replace(seeing(tmp_path / axis), mesh=Axes(**{axis: 2}, zero=axis == "data"))))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program), *map(str, paths)]
    environment = {**os.environ, "PYTHONPATH": str(repository / "src"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    for axis in ("data", "context"):
        for one, two in zip(rows(trained), rows(seeing(tmp_path / axis)), strict=True):
            assert one["loss"] == pytest.approx(two["loss"], abs=5e-5), axis
            assert one["gradient_norm"] == pytest.approx(two["gradient_norm"], rel=2e-3), axis
        eyes = [checkpoint.load(checkpoint.latest(run)).tensors["eye"] for run in (trained.run, tmp_path / axis)]
        assert all(torch.allclose(value, eyes[1][name], atol=2e-3) for name, value in eyes[0].items()), axis
