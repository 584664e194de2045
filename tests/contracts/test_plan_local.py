"""A machine's own files: what is written reads back, predictions follow measurements, and a failed measurement says why."""

from dataclasses import replace
from pathlib import Path

import pytest

from gnomon.errors import ConfigError
from gnomon.plan import local
from gnomon.plan.calibration import best_record, record
from gnomon.plan.hardware import device
from gnomon.plan.step import as_table, seconds
from gnomon.plan.training import training_demand, whole_step

TRUE_STEP = local.TrainingStep(layer_seconds=2e-3, product_efficiency=0.7, optimiser_efficiency=0.9, activation_efficiency=0.3,
                               attention_efficiency=0.35)
TRUE_SAMPLING = replace(local.EXPECTED_HERE, layer_seconds=2e-5, read_efficiency=0.6, sequence_seconds=8e-5)
DRAWING = {"2048": 1e-4, "8192": 7e-4, "32768": 3.5e-3}


def times(names: list[str]) -> dict:
    """What a machine of known coefficients would measure."""
    machine = {"processor": "Test", "cores": 2, "threads": 2, "memory_bytes": 16 << 30, "system": "Linux", "torch": "2", "library": True}
    found = {"machine": machine, "read_bytes_per_second": 2e10, "operator_seconds": 1e-6, "flops": {"fp32": 9e10, "bf16": 2e11},
             "drawing": DRAWING, "seconds": 12.0}
    known = local.shapes()
    chosen = [known[name] for name in names] if names else [shape for shape in known.values() if shape.calibrates]
    here = replace(device("xeon-2core"), name="here", bandwidth=2e10, flops={"fp32": 9e10, "bf16": 2e11})
    start = replace(record("default"), drawing=DRAWING)
    plans = [local._plan(here, shape, start) for shape in chosen]
    found["training"] = [sum(whole_step(training_demand(plan, shape.work), as_table(TRUE_STEP)).values())
                         for plan, shape in zip(plans, chosen, strict=True)]
    found["sampling"] = [float(seconds(local._sampled(plan, shape), as_table(TRUE_SAMPLING))) + start.draw_seconds(shape.config.vocab_size)
                         for plan, shape in zip(plans, chosen, strict=True)]
    return found


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> local.Calibrated:
    """A calibration from made-up measurements, in a configuration folder of its own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(local, "measured", times)
    return local.calibrate()


def test_shapes_that_were_not_measured_are_predicted(made: local.Calibrated) -> None:
    checks = {name: shape for name, shape in local.shapes().items() if not shape.calibrates}
    found = times(list(checks))
    for shape, step, pace in zip(checks.values(), found["training"], found["sampling"], strict=True):
        training, sampling = local.predicted(made.device, made.made, shape)
        assert training.value == pytest.approx(shape.batch_tokens / step, rel=0.05)
        assert sampling.value == pytest.approx(1 / pace, rel=0.08)
        assert training.low < training.value < training.high and training.badge == "calibrated"


def test_files_are_found_by_name(made: local.Calibrated, tmp_path: Path) -> None:
    assert made.hardware.parent == tmp_path / "gnomon" / "hardware"
    assert device("here").flops == made.device.flops
    assert best_record(device("here")) == made.made == record("here")
    assert "Test, 2 cores" in made.made.machine and made.made.date


def test_before_a_calibration_there_is_no_machine_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="gnomon plan --calibrate"):
        device("here")


def test_drawing_goes_along_what_was_measured() -> None:
    found = replace(record("default"), drawing=DRAWING)
    assert [found.draw_seconds(size) for size in (512, 2048, 5120, 8192)] == pytest.approx([1e-4, 1e-4, 4e-4, 7e-4])
    assert found.draw_seconds(65_536) > found.draw_seconds(32_768)
    assert record("default").draw_seconds(4096) == 0.0


def test_a_failed_measurement_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="the measuring program stopped"):
        local.measured([])


def test_impossible_parts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'training_step.product_efficiency' is -1"):
        local.TrainingStep(product_efficiency=-1.0)
