"""`gnomon verify` as a user runs it: on a checkpoint, with a table, JSON and an exit status."""

import json
from pathlib import Path

import exported
import pytest

from gnomon.cli import main
from gnomon.data.tokenizer import train_tokenizer
from gnomon.kernels import native
from gnomon.model.weights import save_pretrained


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = train_tokenizer([Path(__file__).read_text(encoding="utf-8")], 320)
    save_pretrained(exported.build("kimi_k3", bos_token_id=288, eos_token_id=290, pad_token_id=319), folder, tokenizer=tokenizer)
    return folder


@pytest.mark.skipif(native.unavailable() is not None, reason="the inference model needs the C++ library")
def test_verify_a_checkpoint(checkpoint, tmp_path, capsys):
    """MXFP4 experts as stored, against the forward of the decoded weights, and all that a cache may do."""
    out = tmp_path / "verdicts.json"
    only = [word for name in ("resume", "restart", "meaning") for word in ("--only", name)]
    assert main(["verify", str(checkpoint), "--json", str(out), *only]) == 0
    told = json.loads(out.read_text())
    assert told["passed"]
    assert {row["name"]: row["status"] for row in told["checks"]} == dict.fromkeys(
        ("resume", "restart", "meaning"), "pass")
    assert "3 checks passed" in capsys.readouterr().out


def test_wrong_names_and_folders(checkpoint, tmp_path, capsys):
    assert main(["verify", str(checkpoint), "--only", "forks"]) == 2
    assert "did you mean 'fork'" in capsys.readouterr().err
    assert main(["verify", str(tmp_path)]) == 2
    assert main(["verify", str(checkpoint), "--operations", "0"]) == 2
    capsys.readouterr()
    assert main(["verify", str(checkpoint), "--list"]) == 0
    assert "thinking stripped" in capsys.readouterr().out


@pytest.mark.skipif(native.unavailable() is not None, reason="the inference model needs the C++ library")
def test_verify_a_run(base, capsys):
    """A run's own fp32 weights come within rounding of the model that was trained."""
    assert main(["verify", str(base.run), "--only", "meaning", "--only", "recurrent", "--only", "edited", "--json", "-"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["checks"]}
    assert rows["meaning"]["bound"] == 1e-3
    assert rows["recurrent"]["worst"] == rows["edited"]["worst"] == 0
