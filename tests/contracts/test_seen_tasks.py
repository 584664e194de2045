"""Tasks with images and tasks over long texts: made from their numbers, solved by their solutions, shown by length."""

import asyncio
import io
import json
from pathlib import Path

import pytest
from PIL import Image as Picture

from gnomon.agent import task_source
from gnomon.agent.evaluate_lengths import by_length, section
from gnomon.agent.evaluate_results import Column, Results, Row, summary
from gnomon.agent.harness import harness
from gnomon.agent.policies.scripted import ScriptedPolicy, say
from gnomon.agent.rollout import Rollout, attempt
from gnomon.agent.task import Task
from gnomon.agent.validate import validate
from gnomon.errors import ConfigError, DataError

PLAIN = Path(__file__).parents[2] / "examples" / "harness" / "plain.toml"
TEXT = "Nobody had anything to say about the harvest, the weather or the price of rope.\n"


@pytest.fixture
def documents(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT * 400)
    return [str(tmp_path / "text.txt")]


def test_evidence_lies_in_every_quarter_and_the_solution_is_right(documents) -> None:
    table = {"kind": "scattered", "lengths": [2000, 9000], "count": 2, "documents": documents}
    tasks = list(task_source.opened(table).tasks())
    assert [task.to_json() for task in tasks] == [task.to_json() for task in task_source.opened(table).tasks()]
    assert len({task.id for task in tasks}) == len(tasks) == 2 * 2 * 5
    for task in tasks:
        assert Task.parse(json.dumps(task.to_json()), "here") == task
        length = task.metadata["length"]
        assert len(task.prompt) == length
        distances = task.check.settings["distances"]
        assert len(distances) == 4 and max(distances) - min(distances) >= (length - 700) / 2
        if length == 9000:  # evidence and question are small beside the text
            ends = sorted(1 - distance / length for distance in distances)
            assert all(place / 4 - 0.08 <= end <= (place + 1) / 4 + 0.08 for place, end in enumerate(ends))
        assert asyncio.run(validate(task)).holds


def test_pictures_come_before_the_words_and_survive_json() -> None:
    tasks = list(task_source.opened({"kind": "pictures", "kinds": ["line", "document"], "count": 2, "seed": 3}).tasks())
    assert [len(task.images) >= 3 for task in tasks] == [False, True, False, True]
    for task in tasks:
        assert Task.parse(json.dumps(task.to_json()), "here") == task
        assert Picture.open(io.BytesIO(task.images[0].data)).format == "PNG"
        assert asyncio.run(validate(task)).holds


def test_the_model_is_shown_the_pictures(tmp_path) -> None:
    task = next(task_source.opened({"kind": "pictures", "kinds": ["line"]}).tasks())
    seen = []

    def looks(conversation):
        seen.append(conversation.messages[-1].content)
        return say(task.check.settings["answer"])

    rollout = Rollout(id="one", task=task, harness=harness.opened(PLAIN), policy=ScriptedPolicy(looks))
    found = asyncio.run(attempt(rollout, tmp_path / "one.json"))
    assert found.score is not None and found.score.reward == 1.0
    assert seen[0][0] == task.images[0]
    assert seen[0][1].text == task.prompt


def test_wrong_settings_are_named(documents) -> None:
    for table, name in (({"kind": "scattered", "kinds": ["boxs"]}, "'kinds': 'boxs'"),
                        ({"kind": "scattered", "lengths": [100]}, "'lengths'"),
                        ({"kind": "pictures", "kinds": ["line", "line"]}, "each once")):
        with pytest.raises(DataError, match=name):
            task_source.opened(table)
    with pytest.raises(ConfigError, match=r"'lines'.*did you mean 'line'"):
        list(task_source.opened({"kind": "pictures", "kinds": ["lines"]}).tasks())


def row(column: Column, length: int, number: int, reward: float, near: float, far: float) -> Row:
    return Row(id=f"{column.name}/{length}/{number}", column=column, task=f"scattered/boxes/{length}-0-{number}", sample=1, path="",
               reward=reward, metrics={"length": float(length), "found_near": near, "found_far": far})


def test_rewards_are_shown_by_length() -> None:
    column = Column(policy="one <b>", harness="minimal")
    rows = [row(column, 4000, 0, 1.0, 1.0, 1.0), row(column, 4000, 1, 0.0, 1.0, 0.5), row(column, 16000, 0, 0.0, 0.5, 0.0)]
    tasks = [each.task for each in rows]
    results = Results(columns=(summary(column, rows, tasks, 3),), rows=tuple(rows), tasks=tuple(tasks), planned=3)
    assert {length: len(each) for length, each in by_length(results)[column.name].items()} == {4000: 2, 16000: 1}
    shown = "".join(section(results))
    assert "<td>4,000</td><td>2</td><td>50%</td><td>100%</td><td>75%</td>" in shown
    assert "<td>16,000</td><td>1</td><td>0%</td><td>50%</td><td>0%</td>" in shown
    assert "one &lt;b&gt;" in shown and "<b>" not in shown
