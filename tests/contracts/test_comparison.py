"""`gnomon plan --compare`: architectures side by side, with speeds where a machine is given, and families as models of their own."""

import pytest

from gnomon.cli import main
from gnomon.errors import ConfigError
from gnomon.model.config import preset
from gnomon.plan.comparison import CONTEXTS, beside, compared
from gnomon.plan.families import families, released
from gnomon.plan.hardware import Cluster
from gnomon.plan.words import read_model

K3 = preset("k3-2.8t")


def test_variants_cost_as_much_and_families_stand_as_they_are() -> None:
    models = beside("k3-2.8t", K3)
    assert list(models)[:3] == ["k3-2.8t", "k3-2.8t, all-MLA", "k3-2.8t, layered sparse"] and "k3" not in models
    for name in list(models)[:3]:
        assert models[name].activated_parameters() == pytest.approx(K3.activated_parameters(), rel=0.005)
    assert models["deepseek-v3"] == families()["deepseek-v3"].config


def test_rows_on_a_machine() -> None:
    rows = compared(beside("k3-2.8t", K3), Cluster.parse("b300:8"))
    found = {(item.row.name, item.row.context): item for item in rows}
    assert len(rows) == len(found) == len(CONTEXTS) * len(beside("k3-2.8t", K3))
    for item in rows:
        assert (item.speed is None) == bool(item.because) == (item.fit is None)
        if item.speed is not None:
            assert item.speed.unit == "token/s" and item.speed.low < item.speed.value < item.speed.high and item.fit >= 1
    for context in CONTEXTS[1:]:
        kda, mla = (found[name, context] for name in ("k3-2.8t", "k3-2.8t, all-MLA"))
        assert kda.fit > 3 * mla.fit and kda.speed.value > mla.speed.value
    small = compared({"k3-2.8t": K3}, Cluster.parse("b200:8"), contexts=(8192,))[0]
    assert small.because == "weights do not fit"


def test_families_are_released_in_their_own_formats() -> None:
    assert (released(K3).experts, released(K3).rest) == ("mxfp4", "bf16")
    assert released(read_model("kimi-k2")).experts == "fp8" and released(read_model("deepseek-v4-pro")).rest == "fp8"
    assert released(preset("tiny")).experts == "mxfp4"
    with pytest.raises(ConfigError, match="changes a preset, but 'kimi-k2' is a published family"):
        read_model("kimi-k2", ("hidden_size=64",))
    with pytest.raises(ConfigError, match="did you mean 'deepseek-v4-pro'"):
        read_model("deepseek-v4-prof")


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plan", "--compare", "--model", "tiny", "--hardware", "h200"]) == 0
    text = capsys.readouterr().out
    assert "  all-MLA" in text and "token/s (80 %)" in text and "128k" in text and "record: " in text
    assert max(map(len, text.splitlines()[:-3])) <= 110
    assert main(["plan", "--compare", "speed=3"]) == 2
    assert "does not go with --compare" in capsys.readouterr().err
    assert main(["plan", "--compare", "--hardware", "h2000"]) == 2
