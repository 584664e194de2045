"""Which harness a group gets: the same anywhere, and never one that is kept for evaluation."""

import asyncio
import re
import subprocess
import sys
import tomllib

import pytest

from gnomon import config
from gnomon.agent.harness import harness
from gnomon.agent.harness.composed import Composed
from gnomon.agent.harness.draw import FAMILIES, Draw, Sampler
from gnomon.agent.harness.spec import HarnessSpec
from gnomon.agent.policies.scripted import ScriptedPolicy
from gnomon.agent.record import Recorder
from gnomon.agent.task import Check, Task
from gnomon.agent.trajectory import Trajectory
from gnomon.errors import ConfigError

GROUPS = [f"group-{i}" for i in range(80)]


def test_a_group_has_one_harness_whatever_came_before() -> None:
    sampler = Sampler(Draw(seed=3))
    forwards = {group: sampler.drawn(group) for group in GROUPS}
    assert {group: sampler.drawn(group) for group in reversed(GROUPS)} == forwards
    program = ("from gnomon.agent.harness.draw import Draw, Sampler\nsampler = Sampler(Draw(seed=3))\n"
               f"print(*(sampler.drawn(f'group-{{i}}').name for i in range({len(GROUPS)})))")
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert other.stdout.split() == [forwards[group].name for group in GROUPS]
    other_seed = Sampler(Draw(seed=4))
    assert [other_seed.drawn(group).name for group in GROUPS] != [forwards[group].name for group in GROUPS]


def test_draws_are_spread_and_mixed() -> None:
    sampler, plain, mixing = Sampler(Draw()), Sampler(Draw(mixes=0.0)), Sampler(Draw(mixes=1.0))
    names = [sampler.drawn(group).name for group in GROUPS]
    assert {name for name in names if not name.startswith("mix-")} == set(Draw().harnesses)
    assert 0.3 < sum(name.startswith("mix-") for name in names) / len(names) < 0.7
    assert len({name for name in names if name.startswith("mix-")}) > 20
    assert all(not plain.drawn(group).name.startswith("mix-") for group in GROUPS)
    kinds = {frozenset(family for family, kinds in FAMILIES.items() if {use.kind for use in spec.tools.values()} & kinds)
             for spec in map(mixing.drawn, GROUPS)}
    assert all({"commands", "files"} <= families for families in kinds) and len(kinds) > 1


def test_what_is_kept_for_evaluation_is_never_drawn() -> None:
    kept = {spec.name for spec in Sampler(Draw()).held_out(mixes=8)}
    assert "minimal" in kept and len(kept) > 5
    for seed in range(3):
        trained = {spec.name for spec in map(Sampler(Draw(seed=seed, mixes=1.0)).drawn, GROUPS)}
        assert not trained & kept
    assert kept == {spec.name for spec in Sampler(Draw(seed=9)).held_out(mixes=8)}, "whatever the seed"


def test_every_draw_can_be_run_and_written_down() -> None:
    task = Task(id="t", prompt="2 + 2?", check=Check(kind="exact", settings={"answer": "4"}))
    for spec in map(Sampler(Draw(mixes=1.0)).drawn, GROUPS[:25]):
        assert config.from_dict(HarnessSpec, tomllib.loads(config.to_toml(spec))) == spec
        recorder = Recorder(ScriptedPolicy(["4"]), Trajectory(id="a", task_id="t"))
        assert asyncio.run(Composed(spec).run(task, recorder, None)) == "finished"
        assert not re.search(r"\{(skills|memory|tools|task)\}", recorder.trajectory.messages()[0].text)


@pytest.mark.parametrize("name", harness.names())
def test_every_preset_can_be_written_down(name: str) -> None:
    spec = harness.spec(name)
    assert config.from_dict(HarnessSpec, tomllib.loads(config.to_toml(spec))) == spec


def test_what_needs_a_machine_is_not_drawn_without_one() -> None:
    draw = Draw(harnesses=("recursive", "bash"), held_out=("minimal",))
    sampler = Sampler(draw)
    assert {sampler.drawn(group, machine=False).name for group in GROUPS} == {"bash"}
    assert sampler.held_out(machine=False) == ()
    with pytest.raises(ConfigError, match="needs a machine"):
        Sampler(Draw(harnesses=("recursive",))).drawn("g", machine=False)


@pytest.mark.parametrize(("settings", "complaint"), [
    ({"mixes": 1.5}, "share"), ({"held_out_mixes": 1.0}, "leaves no mix"), ({"harnesses": ("minimal",)}, "training would see it"),
    ({"harnesses": ()}, "is empty"),
])
def test_settings_that_do_not_fit(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Draw(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean"):
        Sampler(Draw(harnesses=("kimi-cod",)))
