"""What a user types: train, sample, export, show, kernels; and what each mistake answers, in one line, with its exit status."""

import errno
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gnomon import cli
from gnomon.errors import GnomonError

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
run = "run"
batch_tokens = 256
[model]
extends = "tiny"
vocab_size = 512
num_hidden_layers = 2
[data]
sources = [{paths = ["text"]}]
held_out = 0.2
[[stages]]
context = 32
steps = 3
[evaluate]
tokens = 64
[checkpoint]
every_steps = 2
"""
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe and some text, and nothing else."""
    (tmp_path / "text").mkdir()
    for source in sorted((ROOT / "src/gnomon").glob("*.py")):
        (tmp_path / "text" / source.name).write_bytes(source.read_bytes())
    (tmp_path / "mini.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def error_line(capture: Capture) -> str:
    """The only line that a failing command may print on stderr."""
    lines = [line for line in capture.readouterr().err.splitlines() if line.startswith("gnomon: error: ")]
    assert len(lines) == 1
    return lines[0]


def test_train_resume_sample_export_show(here: Path, capsys: Capture) -> None:
    assert cli.main(["train", "mini.toml"]) == 0
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert Path("run/report.html").stat().st_size > 1000

    longer = RECIPE.replace("steps = 3", "steps = 5")
    Path("mini.toml").write_text(longer)
    assert cli.main(["train", "mini.toml"]) == 0
    resumed = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in resumed] == [1, 2, 3, 4, 5]
    assert [row["loss"] for row in resumed[:3]] == [row["loss"] for row in rows]
    capsys.readouterr()

    sampled = []
    for _ in range(2):
        assert cli.main(["sample", "run", "--prompt", "import ", "--tokens", "8", "--seed", "3"]) == 0
        sampled.append(capsys.readouterr().out)
    assert sampled[0] == sampled[1]
    assert sampled[0].startswith("import ")

    assert cli.main(["export", "run", "--out", "released", "--plain"]) == 0
    assert "MXFP4" not in capsys.readouterr().out
    assert cli.main(["sample", "released", "--prompt", "import ", "--tokens", "8", "--seed", "3"]) == 0
    assert capsys.readouterr().out == sampled[0]
    assert cli.main(["export", "run", "--out", "packed"]) == 0
    assert "MXFP4" in capsys.readouterr().out

    assert cli.main(["show", "run"]) == 0
    assert "# tokens per optimiser step" in capsys.readouterr().out
    assert cli.main(["show", "released/config.json"]) == 0
    assert "parameters" in capsys.readouterr().out


def test_a_shown_recipe_is_a_recipe(here: Path, capsys: Capture) -> None:
    assert cli.main(["show", "mini.toml", "stages=[{context = 16, steps = 1}]", "optimizer.learning_rate=0.5"]) == 0
    shown = capsys.readouterr().out
    Path("shown.toml").write_text(shown)
    assert cli.main(["show", "shown.toml"]) == 0
    assert capsys.readouterr().out == shown
    assert "learning_rate = 0.5" in shown


def test_show_a_preset_prints_the_published_counts(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["show", "k3-2.8t"]) == 0
    shown = capsys.readouterr().out
    for figure in ("2,779,484,476,000", "104,189,612,640", "1,560,860,324,864", "27,648", "434,110,464"):
        assert figure in shown


def test_kernels_lists_operators_with_reasons(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("GNOMON_KERNELS", "reference")
    assert cli.main(["kernels"]) == 0
    shown = capsys.readouterr().out
    assert "kda.chunk" in shown
    assert "GNOMON_KERNELS=reference is set" in shown


@pytest.mark.parametrize(("arguments", "message"), [
    (["trian", "mini.toml"], "unknown verb 'trian'; did you mean 'train'?"),
    (["train"], "the following arguments are required: recipe"),
    (["sample", "run", "--tokens", "many"], "invalid int value: 'many'"),
    (["tour", "--shape", "round"], "unrecognized arguments"),
    (["train", "mini.toml", "stages"], "write it as a.b=c"),
    (["train", "gone.toml"], "recipe 'gone.toml' does not exist"),
    (["train", "mini.toml", "optimizer.learning_rat=1"], "'optimizer.learning_rat': unknown key; did you mean 'learning_rate'?"),
    (["train", "mini.toml", "model.hidden_size=100"], "'hidden_size' is 100, which is not divisible by 32"),
    (["train", "mini.toml", "model.moe.num_experts_per_token=99"], "'num_experts_per_token' is 99, more than the pool of 16 experts"),
    (["train", "mini.toml", "stages=[{context=2,steps=1}]"], "shorter than the short convolution"),
    (["train", "."], "recipe '.' cannot be read"),
    (["train", "mini.toml", "run=mini.toml"], "'run' is 'mini.toml', but there is a file in its place"),
    (["train", "mini.toml", "run=mini.toml/deeper"], "but there is a file in its place"),
    (["sample", "gone"], "run folder 'gone' does not exist"),
    (["sample", "mini.toml"], "run folder 'mini.toml' is a file"),
    (["show", "list.json"], "'list.json' holds a list, not an object"),
    (["sample", "run", "--temperature", "-1"], "'temperature' is -1.0"),
    (["sample", "run", "--temperature", "nan"], "'temperature' is nan"),
    (["sample", "run", "--seed", "-1"], "'seed' is -1"),
    (["show", "tinny"], "did you mean 'tiny'?"),
])
def test_usage_errors_end_with_2(here: Path, capsys: Capture, arguments: list[str], message: str) -> None:
    Path("list.json").write_text("[]")
    assert cli.main(arguments) == 2
    assert message in error_line(capsys)


@pytest.mark.parametrize("line", [
    "lab r.toml --seed 2 run=x workers=2", "lab --seed 2 r.toml run=x --only gate workers=2", "lab r.toml run=x workers=2 --seed 2",
])
def test_words_stand_before_between_and_after_options(line: str) -> None:
    parsed = cli.parser().parse_args(line.split())
    assert (parsed.recipe, parsed.seed, parsed.overrides) == (type(parsed.recipe)("r.toml"), 2, ["run=x", "workers=2"])


def _binary(folder: Path) -> None:
    (folder / "x.txt").write_bytes(bytes(range(256)) * 64)


def _broken_parquet(folder: Path) -> None:
    (folder / "x.parquet").write_bytes(b"PAR1" + b"\0" * 64)


@pytest.mark.parametrize(("fill", "words"), [
    (lambda folder: None, ("no", "text")),
    (lambda folder: (folder / "x.txt").write_text(""), ()),
    (lambda folder: (folder / "x.txt").write_text("one line\n"), ()),
    (_binary, ("x.txt",)),
    (lambda folder: (folder / "x.txt").write_bytes(b"caf\xe9 au lait\n" * 900), ("x.txt", "UTF-8")),
    (_broken_parquet, ("x.parquet",)),
], ids=["no file", "empty file", "one line", "binary", "invalid UTF-8", "broken parquet"])
def test_unusable_text_ends_with_1(here: Path, capsys: Capture, fill: Callable[[Path], object], words: tuple[str, ...]) -> None:
    Path("other").mkdir()
    fill(Path("other"))
    assert cli.main(["train", "mini.toml", 'data.sources=[{paths = ["other"]}]']) == 1
    line = error_line(capsys)
    assert all(word in line for word in words), line


def test_resuming_with_another_model_is_refused(here: Path, capsys: Capture) -> None:
    assert cli.main(["train", "mini.toml"]) == 0
    assert cli.main(["train", "mini.toml", "model.intermediate_size=256"]) == 2
    assert "model.intermediate_size: 512 → 256" in error_line(capsys)


def test_a_run_that_has_nothing_to_give_says_so(here: Path, capsys: Capture) -> None:
    assert cli.main(["sample", "text"]) == 1
    assert "text is no run folder: recipe.toml is missing" in error_line(capsys)
    assert cli.main(["show", "mini.toml"]) == 0
    Path("text", "recipe.toml").write_text(capsys.readouterr().out)
    for arguments in (["sample", "text"], ["export", "text", "--out", "released"]):
        assert cli.main(arguments) == 1
        assert "text has no checkpoint yet" in error_line(capsys)


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is a device of Linux")
def test_a_disk_that_is_full_ends_with_1(here: Path, capsys: Capture) -> None:
    assert cli.main(["train", "mini.toml", "run=full"]) == 0
    Path("full", "recipe.toml.partial").symlink_to("/dev/full")
    assert cli.main(["train", "mini.toml", "run=full"]) == 1
    assert "No space left on device; free space" in error_line(capsys)
    assert cli.main(["sample", "full", "--tokens", "1"]) == 0


def test_an_interruption_ends_with_130_and_says_how_to_go_on(here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(parsed: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.VERBS, "train", interrupted)
    assert cli.main(["train", "mini.toml"]) == 130
    assert "the same command again goes on" in capsys.readouterr().err
    monkeypatch.setitem(cli.VERBS, "sample", interrupted)
    assert cli.main(["sample", "run"]) == 130
    assert capsys.readouterr().err == "\ngnomon: interrupted\n"


def test_missing_rights_end_with_1_and_name_the_path(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(parsed: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "run/config.json")

    monkeypatch.setitem(cli.VERBS, "sample", unreadable)
    assert cli.main(["sample", "run"]) == 1
    assert "run/config.json: Permission denied; free space or check the path and its rights" in error_line(capsys)


def test_an_error_of_many_lines_is_printed_as_one(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(parsed: object) -> None:
        raise GnomonError("two tensors are missing\n  a [1]\n  b [2]")

    monkeypatch.setitem(cli.VERBS, "kernels", fails)
    assert cli.main(["kernels"]) == 1
    assert capsys.readouterr().err == "gnomon: error: two tensors are missing; a [1]; b [2]\n"


def test_help_and_import_are_quick_and_free_of_torch() -> None:
    program = ("import sys; sys.path.insert(0, sys.argv[1])\n"
               "import gnomon.cli\ntry: gnomon.cli.main(['--help'])\nexcept SystemExit: pass\n"
               "sys.exit(bool({'torch', 'numpy', 'asyncio', 'rich'} & set(sys.modules)))")
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        result = subprocess.run([sys.executable, "-c", program, str(ROOT / "src")], capture_output=True, text=True, check=False, timeout=60)
        seconds.append(time.perf_counter() - start)
        assert result.returncode == 0, result.stderr
        assert "kernels" in result.stdout
    assert min(seconds) <= 0.5, seconds  # a loose guard: benchmarks/startup.py measures
