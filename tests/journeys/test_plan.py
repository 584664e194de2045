"""`gnomon plan` as a user types it: answers with bands, pages, JSON of a fixed shape, and one clear line for each mistake."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gnomon import cli
from gnomon.plan import answer as answers
from gnomon.plan.command import ordered

Capture = pytest.CaptureFixture[str]
Ask = Callable[..., str]


@pytest.fixture
def ask(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """`ask("serve", …)` is what the command prints."""
    monkeypatch.setenv("COLUMNS", "140")

    def run(*words: str) -> str:
        assert cli.main(["plan", *words]) == 0
        return capsys.readouterr().out
    return run


def shape(value: Any, where: str = "") -> set[str]:
    """Paths of all keys of a JSON value, lists as their first item."""
    if isinstance(value, dict):
        return {path for key, item in value.items() for path in ({f"{where}.{key}"} | shape(item, f"{where}.{key}"))}
    return shape(value[0], f"{where}[]") if isinstance(value, list) and value else set()


def test_serving_names_plan_wall_and_knob(ask: Ask) -> None:
    shown = ask("--hardware", "b300:8", "--model", "k3-2.8t", "serve", "prompt=8k", "output=1k", "concurrency=16")
    for words in ("speed of one user", "80 % band", "what stops you", "decode:", "turn first:", "record:", "GiB of", "experts mxfp4"):
        assert words in shown
    assert "assumed: nothing cached, no drafts, formats as released" in shown


def test_four_macs_hold_k3_and_one_does_not(ask: Ask) -> None:
    assert "speed of one user" in ask("--hardware", "m3-ultra:4", "--model", "k3-2.8t")
    refused = ask("--hardware", "m3-ultra:1", "--model", "k3-2.8t")
    for words in ("no, because", "GiB too much", "nearest:", "what would do", "m3-ultra:4"):
        assert words in refused


def test_training_within_a_week_and_tonight(ask: Ask) -> None:
    week = ask("train", "--model", "1B", "hardware=h200:8", "time=7d")
    for words in ("expected loss", "time at most 7.0 days", "limit: time", "nat/token per h", "money in all", "optimiser=muon"):
        assert words in week
    tonight = ask("train", "--hardware", "xeon-2core:1", "time=2h")
    assert "any size of the family" in tonight and "K3's shape" in tonight and "extrapolated" in tonight


def test_as_many_devices_as_needed(ask: Ask) -> None:
    found = json.loads(ask("--json", "serve", "--hardware", "gb300", "--model", "kimi-linear-48b", "concurrency=8", "speed=40"))
    assert found["feasible"] and found["plan"]["metrics"]["speed"]["value"] >= 40
    assert found["goal"]["metric"] == "bill"


def test_domains_stay_as_they_are_asked_for(ask: Ask) -> None:
    for hardware in ("h200:4x2", "h200:8x2", "gb300:72x2"):
        found = json.loads(ask("--json", "train", "--hardware", hardware, "--model", "small", "tokens=1B", "batch=4M"))
        assert found["plan"]["cluster"] == hardware


KEYS = {
    ".schema", ".phase", ".feasible", ".assumptions", ".goal", ".goal.metric", ".plan", ".plan.model", ".plan.cluster", ".plan.layout",
    ".plan.precision.experts", ".plan.metrics", ".plan.memory.needed.value", ".plan.memory.usable", ".limits", ".binding", ".knobs",
    ".knobs[].knob", ".knobs[].direction", ".knobs[].goal_change", ".knobs[].goal_change_band", ".hardware_worth_bands",
    ".knobs[].costs", ".knobs[].contested", ".knobs[].keeps_limits",
    ".first_knob", ".refusal", ".hardware_worth", ".record.title", ".weighed", ".seconds",
}


def test_json_keeps_its_shape(ask: Ask) -> None:
    found = json.loads(ask("--json", "serve", "--hardware", "h200:8", "--model", "kimi-linear-48b", "concurrency=8", "latency=10s"))
    assert found["schema"] == answers.SCHEMA == 1
    assert shape(found) >= KEYS
    speed = found["plan"]["metrics"]["speed"]
    assert set(speed) == {"value", "low", "high", "unit", "badge", "because"} and speed["low"] <= speed["value"] <= speed["high"]
    assert {"metric", "bound", "unit", "value", "slack", "binds", "shadow_price", "shadow_price_band", "next_bound",
            "next_gain"} == set(found["limits"][0])
    refused = json.loads(ask("--json", "--hardware", "h100:8", "--model", "k3-2.8t"))
    assert refused["plan"] is None and refused["refusal"]["because"] and shape(refused) >= {".refusal.remedies", ".refusal.nearest"}


def test_a_queue_that_never_drains_is_valid_json(ask: Ask) -> None:
    def refuse(word: str) -> None:
        raise ValueError(f"JSON has no {word}")

    shown = ask("--json", "--hardware", "h200:1", "--model", "small", "arrivals=1000000")
    assert json.loads(shown, parse_constant=refuse)["plan"]["metrics"]["first_token"]["value"] is None


def test_users_are_not_multiplied_by_copies(ask: Ask) -> None:
    for users in (1, 8, 9):
        found = json.loads(ask("--json", "--hardware", "h200:8", "--model", "small", "dp=8", f"concurrency={users}"))["plan"]["metrics"]
        written = found["throughput"]["value"] / found["speed"]["value"]
        assert 0.8 * users < written <= users     # less than one each: first tokens take their time
        assert found["cost"]["value"] == pytest.approx(found["bill"]["value"] / found["throughput"]["value"] / 3600 * 1e6)


def test_what_ends_before_a_step_or_never_gets_there_is_refused(ask: Ask) -> None:
    assert "end before one optimiser step does" in ask("train", "--hardware", "xeon-2core:1", "--model", "small", "time=1s")
    assert "reaches a loss of 0.5" in ask("train", "--hardware", "h200:8", "--model", "small", "loss=0.5")
    assert "devices is 8, above 4" in ask("--hardware", "h200:8", "--model", "small", "devices=4")


def test_what_is_assumed_of_drafts_is_said(ask: Ask) -> None:
    assert "acceptance=coding" in ask("--hardware", "h200:1", "--model", "small", "drafts=3")


def test_the_page_has_its_pictures(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "pages" / "plan.html"
    assert f"wrote {path}" in ask("train", "--model", "small", "--hardware", "h100:2", "time=3h", "--html", str(path)).replace("\n", "")
    page = path.read_text(encoding="utf-8")
    for words in ("What stops you", "Roofline", "Which wall binds", "Knobs", "Cost against speed", "What this rests on"):
        assert words in page
    assert page.count("<svg") >= 5 and "http://" not in page.replace("http://www.w3.org", "")
    refused = tmp_path / "no.html"
    ask("--hardware", "h100:8", "--model", "k3-2.8t", "--html", str(refused))
    assert "No, because" in refused.read_text(encoding="utf-8")


@pytest.mark.parametrize("what", ["hardware", "knobs", "laws", "records"])
def test_lists(ask: Ask, what: str) -> None:
    words = {"hardware": "gb300", "knobs": "speculation", "laws": "arXiv 2404.10102", "records": "default"}
    assert words[what] in ask("--list", what)


def test_lists_keep_names_whole_at_80_columns(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = ask("--list", "hardware")
    assert "rtx-pro-6000  96 GiB   1.79 TB/s" in shown and max(map(len, shown.splitlines())) <= 80
    assert "activations-format" in ask("--list", "knobs")


def test_a_table_gives_a_curve(ask: Ask, tmp_path: Path) -> None:
    table = tmp_path / "effort.csv"
    table.write_text("tokens,score\n" + "".join(f"{x},{0.9 - 40 * x**-0.7}\n" for x in (500, 1000, 2000, 4000, 8000)))
    shown = ask("--fit", str(table))
    assert "score = 0.9" in shown and "extrapolated" in shown


def test_runs_of_ones_own_give_the_loss(ask: Ask, tmp_path: Path) -> None:
    recipe = (Path(__file__).parents[2] / "recipes" / "tour.toml").read_text(encoding="utf-8")
    for width in (96, 128, 192):
        for steps in (100, 400, 1600):
            folder = tmp_path / f"{width}-{steps}"
            folder.mkdir()
            (folder / "recipe.toml").write_text(recipe.replace("hidden_size = 128", f"hidden_size = {width}"), encoding="utf-8")
            end = {"step": steps, "tokens": 4096 * steps, "loss": 1.5 + 40 / width + 300 / (4096 * steps) ** 0.33}
            (folder / "metrics.jsonl").write_text(json.dumps(end) + "\n", encoding="utf-8")
    runs = [str(folder) for folder in sorted(tmp_path.iterdir())]
    shown = ask("--fit", *runs)
    assert "9 runs" in shown and "beta" in shown and "from your runs" in shown
    found = json.loads(ask("--json", "train", "--hardware", "xeon-2core:1", "time=1h", "--fit", *runs))
    loss = found["plan"]["metrics"]["loss"]
    assert "9 runs of yours" in loss["because"] and 1 < loss["value"] < 5


def test_a_knob_of_ones_own_is_weighed(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halving.py").write_text(
        "from dataclasses import replace\nfrom gnomon.plan.knobs import Knob\n"
        "from gnomon.plan.shapes import with_depth\n"
        "turn = lambda c: replace(c, model=with_depth(c.model, c.model.num_hidden_layers // 2))\n"
        "KNOB = Knob(name='half-depth', title='half the layers', changes='model', costs='retraining', notch='half',\n"
        "            shown=lambda c: str(c.model.num_hidden_layers), up=lambda c: None, down=turn)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "half-depth" in ask("serve", "--hardware", "h100:1", "--model", "small", "--knob", "halving:KNOB")


@pytest.mark.parametrize(("words", "message"), [
    (["--hardware", "h20O:8", "--model", "small"], "unknown device 'h20O'; did you mean 'h20'"),
    (["--hardware", "h200:8", "--model", "smal"], "unknown model 'smal'; did you mean 'small'"),
    (["--hardware", "h200:8", "--model", "small", "serv"], "'serv' is no kind of work; did you mean 'serve'"),
    (["--hardware", "h200:8", "--model", "small", "serve", "train"], "one question at a time"),
    (["--hardware", "h200:8", "--model", "small", "promt=8k"], "unknown word 'promt'; did you mean 'prompt'"),
    (["--hardware", "h200:8", "--model", "small", "prompt=8k", "prompt=4k"], "'prompt' is given twice"),
    (["--hardware", "h200:8", "--model", "small", "latency=2"], "'2' has no unit; write it like 2s"),
    (["--hardware", "h200:8", "--model", "small", "memory=80"], "'80' has no unit; write it like 80GB"),
    (["--hardware", "h200:8", "--model", "small", "latency=0s"], "no plan is bounded by that"),
    (["--hardware", "h200:8", "--model", "small", "speed=1e40"], "no plan is bounded by that"),
    (["--hardware", "h200:8", "--model", "k3-2.8t", "concurrency=0"], "'concurrency' is 0; it must be 1 or more"),
    (["--hardware", "h200:8", "--model", "small", "cached=some%"], "'some' is not a count"),
    (["--hardware", "h200:8", "--model", "small", "drafts=3", "acceptance=²"], "no acceptance table '²'"),
    (["--hardware", "h200:8", "--model", "small", "price=²"], "'²' is not an amount of money"),
    (["--hardware", "h200:8", "--model", "small", "arrivals=inf"], "'inf' is not a number to plan with"),
    (["--hardware", "h200:8", "--model", "small", "output=1e300"], "more than anything here can be counted to"),
    (["--hardware", "h200:8", "--model", "small", "train", "time=1e308d"], "is not a duration"),
    (["--hardware", "h200:8", "--model", "small", "train", "tokens=100"], "less than one batch of"),
    (["--hardware", "h200:8", "--model", "/"], "neither recipe.toml nor config.json"),
    (["--hardware", "h200:8", "--model", "small", "goal=speed", "speed=10"], "is the goal and also a limit"),
    (["--hardware", "h200:8", "--model", "small", "goal=loss"], "'loss' means nothing for 'serve'"),
    (["--hardware", "h200:8", "--model", "small", "train", "tokens=1B", "goal=loss"], "it cannot change"),
    (["--hardware", "h200:8", "--model", "small", "train", "goal=loss"], "nothing bounds the training"),
    (["--hardware", "h200:8", "train", "goal=time"], "nothing says how much to train"),
    (["--hardware", "h200:8", "--model", "k3-2.8t", "tp=5"], "does not divide the 96 heads"),
    (["--hardware", "h200:8", "--model", "small", "experts=512"], "model.moe.num_experts=512"),
    (["--hardware", "h200:8", "--model", "small", "kv=fp9"], "is no format"),
    (["--hardware", "m3-ultra:1", "--model", "small", "cost=$1"], "has no price"),
    (["--model", "small"], "which hardware?"),
    (["--hardware", "h200:8"], "which model?"),
    (["--hardware", "h200:8", "hardware=b200:8", "--model", "small"], "keep one"),
    (["--hardware", "h200:8", "--model", "small", "--knob", "expert"], "unknown knob 'expert'"),
    (["--hardware", "h200:8", "--model", "small", "--record", "defult"], "unknown calibration record 'defult'"),
    (["--hardware", "h200:8", "--model", "small", "--bogus"], "unrecognized arguments"),
])
def test_each_mistake_has_one_clear_line(words: list[str], message: str, capsys: Capture) -> None:
    assert cli.main(["plan", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0], lines


def test_a_hardware_file_without_source_is_refused(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "box.toml"
    path.write_text('title = "Box"\ndate = "2026-11"\nmemory = "24 GiB"\nbandwidth = "900 GB/s"\n[compute]\nbf16 = "150 TFLOP/s"\n')
    assert cli.main(["plan", "--hardware", str(path), "--model", "small"]) == 2
    assert "'source' is missing" in capsys.readouterr().err
    path.write_text('source = "data sheet"\n' + path.read_text())
    assert cli.main(["plan", "--hardware", f"{path}:1", "--model", "small"]) == 0
    path.write_text(path.read_text().replace("900 GB/s", "900 MB/s"))
    assert cli.main(["plan", "--hardware", str(path), "--model", "small"]) == 2
    assert "check the units" in capsys.readouterr().err


def test_words_and_options_may_be_mixed() -> None:
    mixed = ["train", "--model", "1B", "tokens=20B", "--json", "time=7d"]
    assert ordered(mixed) == ["train", "tokens=20B", "time=7d", "--model", "1B", "--json"]
    assert ordered(["--fit", "a", "b", "train", "time=1h"]) == ["train", "time=1h", "--fit", "a", "b"]


def test_planning_never_loads_torch(tmp_path: Path) -> None:
    program = ("import sys\nfrom gnomon.cli import main\n"
               "code = main(['plan', 'serve', '--hardware', 'h200:8', '--model', 'small', '--html', sys.argv[1]])\n"
               "sys.exit(code or ('torch loaded' if 'torch' in sys.modules else 0))")
    command = [sys.executable, "-c", program, str(tmp_path / "x.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout
