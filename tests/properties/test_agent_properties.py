"""Whatever a task, a task directory or a trajectory holds comes back the same."""

import datetime
import tomllib

from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.agent import trajectory_file
from gnomon.agent.harbor import Entry, HarborTask, read, write
from gnomon.agent.harbor_schema import Agent, Artifact, Environment, HarborConfig, Verifier
from gnomon.agent.task import Budget, Check, Task
from gnomon.agent.toml_text import to_toml
from gnomon.agent.trajectory import Span, Trajectory, Turn
from gnomon.data.messages import Message, Text, ToolCall

text = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
words = st.text("abcdefghij", min_size=1, max_size=8)
json_values = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False) | text,
                           lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=6)
toml_values = st.recursive(
    st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | text
    | st.datetimes(min_value=datetime.datetime(1000, 1, 1)) | st.dates(min_value=datetime.date(1000, 1, 1)) | st.times(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=6)
seconds = st.none() | st.floats(0.001, 1e6)


@settings(max_examples=100)
@given(st.dictionaries(text, toml_values, max_size=4))
def test_toml_is_read_back_by_the_standard_library(table):
    assert tomllib.loads(to_toml(table)) == table


@settings(max_examples=60)
@given(prompt=text, files=st.dictionaries(words.map("/{}".format), st.binary(max_size=8), max_size=3),
       wanted=st.dictionaries(text, json_values, max_size=3),
       tokens=st.none() | st.integers(1, 99), limit=seconds, metadata=st.dictionaries(text, json_values, max_size=3))
def test_tasks(prompt, files, wanted, tokens, limit, metadata):
    task = Task(id="t", prompt=prompt, image="host", files=files, check=Check(kind="exact", settings=wanted), metadata=metadata,
                budget=Budget(tokens=tokens, seconds=limit))
    assert Task.parse(task.text) == task


@settings(max_examples=40)
@given(metadata=st.dictionaries(text, toml_values, max_size=3), env=st.dictionaries(text, text, max_size=3), limit=seconds,
       artifacts=st.lists(st.builds(Artifact, source=words, destination=st.none() | words, exclude=st.lists(text).map(tuple)), max_size=3),
       instruction=text, tests=st.dictionaries(words, st.binary(max_size=8), max_size=3),
       separate=st.sampled_from([None, "separate", "shared"]))
def test_harbor_directories(tmp_path_factory, metadata, env, limit, artifacts, instruction, tests, separate):
    config = HarborConfig(metadata=metadata, agent=Agent(timeout_sec=limit), environment=Environment(env=env), artifacts=tuple(artifacts),
                          verifier=Verifier(env=env, environment_mode=separate))
    files = {"instruction.md": instruction.encode(), "tests/test.sh": b"", **{f"tests/{name}": data for name, data in tests.items()}}
    task = HarborTask(name="t", config=config, files={path: Entry(data=data) for path, data in files.items()})
    back = read(write(task, tmp_path_factory.mktemp("task") / "t"))
    assert back.config == config and {path: entry.content for path, entry in back.files.items()} == files and not back.unknown


ids = st.lists(st.integers(0, 200_000), max_size=5).map(tuple)


@st.composite
def spans(draw):
    tokens = draw(ids)
    if draw(st.booleans()):
        return Span(token_ids=tokens)
    numbers = st.floats(-50, 0)
    return Span(token_ids=tokens, logprobs=tuple(draw(numbers) for _ in tokens), policy_version=draw(st.integers(0, 3)),
                loss_mask=tuple(draw(st.booleans()) for _ in tokens))


@st.composite
def trajectories(draw):
    made = Trajectory(id="t", task_id="task")
    for count in range(draw(st.integers(0, 8))):
        parent = draw(st.none() | st.integers(0, count - 1)) if count else None
        message = Message(role=draw(st.sampled_from(["user", "assistant"])), content=(Text(text=draw(text)),),
                          reasoning=draw(st.none() | text),
                          tool_calls=tuple(ToolCall(id=i, name="f", arguments=a)
                                           for i, a in draw(st.lists(st.tuples(words, text), max_size=1))))
        made = made.appended(Turn(messages=(message,), spans=tuple(draw(st.lists(spans(), max_size=3))), parent=parent))
    return made


@settings(max_examples=60)
@given(trajectories())
def test_token_identity(tmp_path_factory, made):
    path = tmp_path_factory.mktemp("trajectory") / "t.jsonl"
    trajectory_file.write(made, path)
    back = trajectory_file.read(path)
    assert back == made
    for i, turn in enumerate(made.turns):
        before = made.token_ids(turn.parent) if turn.parent is not None else ()
        assert back.token_ids(i) == before + turn.token_ids
    pieces = [span for turn in made.turns for span in turn.spans if span.sampled]
    wanted = sorted((t, v) for s in pieces for t, v, m in zip(s.token_ids, s.logprobs, s.loss_mask, strict=True) if m)
    assert sorted((t, v) for s in back.samples() for t, v, m in zip(s.token_ids, s.logprobs, s.loss_mask, strict=True) if m) == wanted


@settings(max_examples=40)
@given(trajectories())
def test_growing_never_rewrites(tmp_path_factory, made):
    path = tmp_path_factory.mktemp("trajectory") / "t.jsonl"
    before = b""
    with trajectory_file.TrajectoryFile(path, Trajectory(id="t", task_id="task")) as file:
        for turn in made.turns:
            earlier = file.trajectory
            file.append(turn)
            assert file.trajectory.turns[:-1] == earlier.turns
            now = path.read_bytes()
            assert now.startswith(before) and now.endswith(b"\n")
            before = now
