"""Synthesis of tasks: a graph without circles or doubles, keywords at a granularity, questions whose answers stand in the documents."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.agent import task_source
from gnomon.agent.library import Library, Passage
from gnomon.agent.policies.scripted import ScriptedPolicy
from gnomon.agent.synthesis import Asked, Graph, Rules, grow, questions, same_concept, stands
from gnomon.agent.validate import validate
from gnomon.data.messages import Conversation
from gnomon.errors import DataError

BRIDGES = """# Bridges

A suspension bridge hangs its deck from cables that run over two towers. The longest span of this kind measures 2023 metres.

An arch bridge carries its weight outward along a curve to abutments on both sides. Stone arches were built by the Romans already.

```
code is not a passage, however long the line may be and whatever it says about bridges
```

Cables of a suspension bridge are spun from thousands of galvanised wires, which are compacted and wrapped against corrosion.
"""
RIVERS = """Rivers carry sediment to the sea, and where the current slackens they drop it in a delta of many branches.

A meander grows because the outer bank erodes while sediment settles on the inner one; at last the loop is cut off as an oxbow.
"""


@pytest.fixture
def documents(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "bridges.md").write_text(BRIDGES)
    (tmp_path / "more" / "rivers.txt").write_text(RIVERS)
    (tmp_path / "picture.png").write_bytes(b"x")
    return tmp_path


def test_a_library_finds_passages(documents):
    library = Library(documents)
    assert [*library.documents] == ["bridges.md", "more/rivers.txt"] and len(library.passages) == 5
    [first, *_] = library.search("suspension cables")
    assert "cable" in first.text.casefold() and first.document == "bridges.md"
    assert library.search("delta")[0].document == "more/rivers.txt" and library.search("!?") == [] and library.search('"; EXPLODE') == []
    assert not any("code is not" in passage.text for passage in library.passages)
    library.close()
    with pytest.raises(DataError, match="'documents'"):
        Library(documents / "nowhere")


def test_names_of_one_concept_are_one():
    assert same_concept("Suspension Bridges") == same_concept("bridge, suspension") and same_concept("glass") != same_concept("glas")
    graph = Graph(["Bridges"])
    assert graph.add("arches", "bridge")
    assert not graph.add("ARCHES", "Bridges") and not graph.add("bridge", "Bridges") and not graph.add("?", "Bridges")
    assert graph.at(0) == ["Bridges"] and graph.at(1) == ["arches"]
    with pytest.raises(DataError, match="'roots'"):
        Graph(["?"])


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("abcdefgh")), max_size=40))
def test_a_graph_never_has_a_circle(edges):
    graph = Graph(["a", "b"])
    for name, parent in edges:
        if parent in graph.names:
            graph.add(name, parent)
    done: set[str] = set()
    while ready := {key for key in graph.names if key not in done and graph.parents[key] <= done}:
        done |= ready
    assert done == set(graph.names)


def made(documents: Path, **table: Any) -> list[Any]:
    return [*task_source.opened({"kind": "synthesis", "documents": str(documents), "roots": ["bridges", "rivers"], **table}).tasks()]


def test_rules_make_valid_tasks_from_a_seed(documents):
    tasks = made(documents, count=3, seed=1)
    assert tasks == made(documents, count=3, seed=1) and 1 <= len(tasks) <= 3
    for task in tasks:
        assert asyncio.run(validate(replaced(task))).holds
        answer = task.check.settings["answer"]
        assert answer not in task.prompt and any(answer.encode() in data for data in task.files.values()) and "____" in task.prompt
    assert len({task.prompt for task in tasks}) == len(tasks)

    async def inside() -> list[Any]:  # whoever iterates may have an event loop
        return made(documents, count=3, seed=1)

    assert asyncio.run(inside()) == tasks


def replaced(task: Any) -> Any:
    """Without its machine: the answer is judged from the words alone."""
    record = {name: value for name, value in task.to_json().items() if name not in ("image", "files")}
    return type(task).from_json(record)


def asked(conversation: Conversation) -> str:
    """A policy that names concepts, and writes questions of which some do not stand."""
    text = conversation.messages[-1].text
    if "finer concepts" in text:
        return '```json\n["Cables", "cable", "towers", 3]\n```'
    if "2023" in text:
        return json.dumps({"question": "How long is the longest span of its kind?", "answer": "2023 metres"})
    return json.dumps({"question": "What do Romans do about galvanised wires?", "answer": "galvanised wires"}) if "Romans" in text else "no"


def test_a_policy_expands_and_writes(documents):
    library, who = Library(documents), Asked(ScriptedPolicy(asked))

    async def main() -> Any:
        graph = await grow(Graph(["bridges"]), library, who, depth=1, width=5)
        return graph, await questions(graph, library, who, depth=1, keywords=2, count=5, seed=0)

    graph, found = asyncio.run(main())
    library.close()
    assert graph.at(1) == ["Cables", "towers"]
    assert [(each.text, each.answer, each.passage.document) for each in found] == [
        ("How long is the longest span of its kind?", "2023 metres", "bridges.md")]


@pytest.mark.parametrize(("question", "answer", "right"), [
    ("How many branches does it have, then?", "seven", True), ("How many branches does it have, seven?", "seven", False),
    ("How many branches does it have, then?", "eight", False), ("How many branches does it have, then?", "branch", False),
    ("How many branches does it have, then?", "the", False), ("How many?", "seven", False),
    ("How many branches does it have, then?", " ", False),
])
def test_what_stands(question, answer, right):
    passage = Passage(document="d", number=0, text="The river has seven branches in the delta.")
    assert stands(question, answer, passage) == right


@pytest.mark.parametrize(("change", "says"), [
    ({"roots": []}, "'roots'"), ({"granularity": 3}, "'granularity'"), ({"policy": {"x": 1}}, "'policy'"), ({"depth": 0}, "'depth'"),
])
def test_settings_are_read_strictly(documents, change, says):
    with pytest.raises(DataError, match=says):
        made(documents, **change)


def test_rules_expand_by_what_stands_near():
    passage = Passage(document="d", number=0, text="Bridges need towers; towers need bridges and foundations.")
    assert asyncio.run(Rules().finer("bridge", [passage])) == ["towers", "foundations"]
