"""Tasks as JSON: the same both ways, and one clear complaint for what is none."""

import json

import pytest

from gnomon.agent.task import Budget, Check, Task
from gnomon.errors import DataError
from gnomon.sandbox.sandbox import Limits, Network

FULL = Task(
    id="org/name#1", prompt="Say <|open|> and é.", domain="coding", system="Be brief.", image="host", env={"A": "1"}, user="user",
    files={"/app/x": b"text", "/app/y": b"\xff\x00"}, workdir="/app", network=Network(allow=("a.b:443",)), limits=Limits(cpus=2.0),
    artifacts=("/app",), budget=Budget(tokens=10, turns=3, seconds=1.5, dollars=0.1), check=Check(kind="exact", settings={"answer": "4"}),
    diagnosis=Check(kind="exact", settings={"answer": "4"}), metadata={"deep": [1, None, {"a": True}]})


def test_there_and_back():
    assert Task.parse(FULL.text) == FULL
    small = Task(id="a", prompt="p", check=Check(kind="exact"))
    assert Task.parse(small.text) == small
    assert "\n" not in FULL.text


@pytest.mark.parametrize(("change", "says"), [
    ({"promt": "x"}, "'promt': unknown field; did you mean 'prompt'"), ({"prompt": None}, "'prompt' is required"),
    ({"prompt": 3}, "'prompt': expected a string, got 3"), ({"id": "a b"}, "'id'"), ({"id": ""}, "'id'"),
    ({"check": "exact"}, "'check': expected an object"), ({"check": {"settings": {}}}, "'check.kind' is required"),
    ({"check": {"kind": "exact", "more": 1}}, "'check.more': unknown"), ({"check": {"kind": ""}}, "'check.kind' is empty"),
    ({"budget": {"tokens": 1.5}}, "'budget.tokens'"), ({"budget": {"tokens": 0}}, "'budget.tokens': 0"),
    ({"budget": {"seconds": True}}, "'budget.seconds'"), ({"files": {"/a": 3}}, "'files./a'"),
    ({"files": {"a": "x"}}, "absolute path"),
    ({"files": {"/a/../b": "x"}}, "absolute path"), ({"files": {"/a": {"base64": "!"}}}, "'files./a'"),
    ({"image": None}, "without an 'image'"),
    ({"artifacts": [1]}, r"'artifacts\[0\]'"),
    ({"limits": {"cpus": 0}}, "'limits.cpus'"), ({"limits": {"processes": 0}}, "'limits.processes'"),
    ({"network": "all"}, "'network': expected a list"), ({"env": {"A": 1}}, "'env.A': expected a string"),
])
def test_one_complaint_names_the_field(change, says):
    record = {**FULL.to_json(), **change}
    with pytest.raises(DataError, match=says) as caught:
        Task.parse(json.dumps(record), "tasks.jsonl:3")
    assert str(caught.value).startswith("tasks.jsonl:3: ") and "tasks.jsonl:3: tasks.jsonl:3" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"id": NaN}', '{"budget": {"seconds": 1e309}}'])
def test_what_is_no_json_object(text):
    with pytest.raises(DataError, match=r"tasks\.jsonl"):
        Task.parse(text, "tasks.jsonl")
