"""The tour, shortened: every step runs on the user's own text, says what it found, and leaves its files."""

import json
import shutil
import sysconfig
from pathlib import Path

import pytest

from gnomon import tour
from gnomon.errors import ConfigError

TINY_LAB = ("tasks=long_answers:Tasks", "workers=0", "model.hidden_size=32", "model.num_hidden_layers=2", "gate.rollouts=60",
            "cold=[{texts=100, train={epochs=1, batch_tokens=1024}}]", "domains=[{name=\"walks\", max={steps=1}, "
            "high={steps=1, tau={target=1.2}}, low={steps=1, tau={target=0.7}}}]", "expert.pool.prompts=4", "expert.pool.group_size=2",
            "student.steps=1", "student.pool.prompts=6", "evaluate.problems=10", "seesaw.average=false")
"""The slice of the lab in a moment, on tasks that need no skill."""

PICTURE = ("stages=[{context=128, steps=2}]", "batch_tokens=512", "evaluate.pictures=2", "evaluate.tokens=512", "evaluate.contexts=[128]",
           "checkpoint.every_steps=1")
"""Two steps of learning to see: enough to say something, not to be right."""

SHORT = ("stages=[{context=64, steps=6}, {context=128, steps=2}]", "batch_tokens=512", "model.vocab_size=512", "model.hidden_size=64",
         "evaluate.contexts=[128, 512]", "evaluate.tokens=4096", "data.held_out=0.1", "checkpoint.every_steps=4")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Some modules of the standard library."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("argparse", "ast", "calendar", "configparser", "csv", "difflib", "doctest", "enum", "inspect", "pickle", "typing"):
        shutil.copy(Path(sysconfig.get_path("stdlib")) / f"{name}.py", folder)
    return folder


def test_every_step_on_own_text(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
                                ) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    out = tmp_path / "out"
    figures = tour.run(data=[texts], out=out, overrides=SHORT, lab=TINY_LAB, picture=PICTURE)
    shown = capsys.readouterr().out
    for title in ("Tokenizer and pre-training", "Longer than it was trained", "Prediction is compression", "What it writes", "Served",
                  "Pictures described", "Out into the world", "a million times larger", "An isolated machine, forked",
                  "An agent acts, a verifier decides", "three experts, one student"):
        assert title in shown

    assert figures["loss_last"] < figures["loss_first"]
    assert figures["export_difference"] == 0.0
    cached = [row[2] for row in figures["served"]]
    assert figures["cached_equals_uncached"] and cached[0] == cached[-1] == 0 and min(cached[1:-1]) > 0
    seen = figures["pictures"]
    assert len(seen["answers"]) == len(seen["shown"]) == 2 and 0 <= seen["right"] <= 1
    assert all(answer.startswith(("A ", "An ")) for answer in seen["shown"])
    assert shown.count("▀") == 2 * 28 * 14
    assert sum(answer == wanted for answer, wanted in zip(seen["answers"], seen["shown"], strict=True)) == 2 - shown.count("wrong:")
    assert 0 < figures["xz_bits_per_byte"] < 8
    assert 0 < figures["bits_per_byte"] < 8
    pieces = figures["held_out_in_pieces"]
    whole = {row[0]: row[2] for row in figures["held_out"][1]["by_position"]}
    assert [row[2] for row in pieces["by_position"][:3]] == pytest.approx([whole[0], whole[32], whole[64]], abs=1e-4)
    assert json.loads((out / "tour.json").read_text())["bits_per_byte"] == figures["bits_per_byte"]
    assert "Kimi K3" in (out / "tour.html").read_text()
    assert (out / "run" / "report.html").stat().st_size > 10_000
    assert {"config.json", "tokenizer.json"} <= {path.name for path in (out / "export").iterdir()}

    if "agents" in figures:  # where sandboxes work
        rewards = list(figures["agents"].values())
        assert rewards == [1.0, 0.0, 0.0, None, None, None]
        assert (out / "agents" / "index.html").is_file()

    assert sorted(figures["lab"]) == ["walks/high", "walks/low", "walks/max"]
    assert (out / "lab" / "report.html").is_file()

    again = tour.run(data=[texts], out=out, overrides=SHORT, lab=TINY_LAB, picture=PICTURE)
    assert again["loss_last"] == figures["loss_last"]
    assert again["bits_per_byte"] == figures["bits_per_byte"]
    assert again["pictures"] == seen


@pytest.mark.parametrize(("override", "message"), [("run=elsewhere", "use --out FOLDER"), ("data.held_out=0", r"'data\.held_out' is 0")])
def test_overrides_that_the_tour_cannot_follow(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tour.run(out=tmp_path / "out", overrides=(override,))
    assert not (tmp_path / "out").exists()


def test_a_recipe_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"recipe 'nowhere\.toml' is not installed"):
        tour.recipe_file("nowhere.toml")
