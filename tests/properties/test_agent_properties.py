"""Whatever a task, a task directory or a trajectory holds comes back the same."""

import datetime
import tomllib

from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.agent.harbor import Entry, HarborTask, read, write
from gnomon.agent.harbor_schema import Agent, Artifact, Environment, HarborConfig, Verifier
from gnomon.agent.task import Budget, Check, Task
from gnomon.agent.toml_text import to_toml

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
