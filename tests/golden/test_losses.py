"""The golden loss curve, by the plain operators and by whichever run on this machine."""

import importlib.util
import json
from pathlib import Path

import pytest

from gnomon.model.config import preset

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("golden_losses", HERE / "losses.py")
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("family", list(golden.FAMILIES))
def test_curve(family: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders of summation differ between machines, so the last digits may; a real change shows in the third."""
    monkeypatch.setenv("GNOMON_KERNELS", kernels)
    expected = json.loads((HERE / "losses.json").read_text())[family]
    losses = golden.curve(preset("tiny", (*golden.SHAPE, *golden.FAMILIES[family])))
    assert losses == pytest.approx(expected, rel=2e-4)
    assert losses[-1] < losses[0]
