"""The programs in `examples/` run, stay short, and show what they say they show."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_runs_and_is_short(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
    assert len(path.read_text().splitlines()) <= 60


def test_three_forms_of_the_recurrence_agree(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES[0].with_name("one_recurrence_three_ways.py")), run_name="__main__")
    differences = [float(number) for number in re.findall(r"\d\.\de-\d+|0\.0e\+00", capsys.readouterr().out)]
    assert len(differences) == 4
    assert max(differences) < 1e-5


def test_quantile_balancing_needs_one_step_and_the_sign_rule_many(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES[0].with_name("balance_in_one_step.py")), run_name="__main__")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    quantile, sign = [[float(row[column]) for row in rows] for column in (1, 2)]
    assert quantile[1] < 0.5
    assert sign[-1] > 4
