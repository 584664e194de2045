"""What can go wrong while a model is post-trained: each is an error that says what to do, or the run goes on as if nothing had been."""

import errno
import math
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gnomon.agent.trajectory import Score
from gnomon.errors import CheckpointError, ConfigError, TrainingError
from gnomon.model.config import preset
from gnomon.model.transformer import Transformer
from gnomon.posttrain import rl
from gnomon.posttrain.effort import Budgets
from gnomon.posttrain.grading import Grading
from gnomon.posttrain.keeping import KeepConfig
from gnomon.posttrain.learner import Learner, LearnerConfig
from gnomon.posttrain.partial import Group, Iteration, PoolConfig
from gnomon.posttrain.policy import Sampler
from gnomon.posttrain.problem import Problem
from gnomon.posttrain.rl import RLConfig, SamplingConfig, Start
from gnomon.posttrain.rollout import Rollout, chosen
from gnomon.posttrain.worlds import Failed, answers
from gnomon.train import checkpoint, metrics
from gnomon.train.settings import MuonConfig

SHAPE = ("vocab_size=48", "hidden_size=32", "num_hidden_layers=2", "intermediate_size=32", "mixers.kda.num_heads=1",
         "mixers.kda.head_dim=16", "mixers.mla.num_attention_heads=1", "mixers.mla.q_lora_rank=none", "mixers.mla.kv_lora_rank=16",
         "mixers.mla.qk_nope_head_dim=16", "mixers.mla.qk_rope_head_dim=8", "mixers.mla.v_head_dim=16", "moe.num_experts=4",
         "moe.num_experts_per_token=2", "moe.moe_intermediate_size=32", "moe.num_shared_experts=1", "moe.routed_expert_hidden_size=32",
         "initializer_range=0.2")
LEARNER = LearnerConfig(optimizer=MuonConfig(learning_rate=0.01, matrices=False, weight_decay=0.0, clip_logits=None))
ASK = 5


class World:
    """Answers the id that asks; as told, it cannot be opened, raises, hangs until it is let go, or cannot say where it stands."""

    let_go = threading.Event()
    open = 0

    def __init__(self, how: str) -> None:
        if how == "shut":
            raise OSError("no machine is left")
        self.how = how
        World.open += 1

    def reply(self, sampled: tuple[int, ...]) -> tuple[int, ...] | None:
        """One id, or trouble."""
        if self.how == "raises":
            raise ValueError("the box is gone")
        if self.how == "hangs":
            self.let_go.wait(60)
        return (9,)

    def state(self) -> Any:
        """Nothing to know."""
        if self.how == "forgets":
            raise OSError("the snapshot is gone")
        return {}

    def close(self) -> None:
        """Gone."""
        World.open -= 1


class Source:
    """Prompts of two ids; as told, graders and every third world do something else than they should."""

    def __init__(self, *, reward: Any = None, world: str = "") -> None:
        self.reward, self.world = reward, world

    def problem(self, index: int) -> Problem:
        """Problem `index`."""
        def grade(sampled: tuple[int, ...], world: Any) -> Score:
            return Score(reward=float(sampled[0] < 24) if self.reward is None else self.reward)

        how = self.world if index % 3 == 0 else "well"
        asks = {"begin": lambda state: World(how), "asks": frozenset(range(ASK, 48)), "room": 9} if self.world else {}
        return Problem(id=str(index), prompt=(2, 3 + index % 40), domain="general", effort="max", grade=grade, max_tokens=9,
                       stop_ids=frozenset((1, 2, 3, 4)), **asks)  # type: ignore[arg-type]


def start(source: Source | None = None, **changes: Any) -> Start:
    """Fresh weights."""
    return Start(**{"model": Transformer(preset("tiny", SHAPE)).initialise(5), "source": source or Source(), "seed": 3} | changes)


def config(**changes: Any) -> RLConfig:
    """A run of a moment."""
    return RLConfig(**{"steps": 3, "pool": PoolConfig(prompts=6, group_size=4), "learner": LEARNER, "keep": KeepConfig(every=1, keep=9),
                       "sampling": SamplingConfig(slots=32, cache_tokens=2048)} | changes)


def told(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without the clock."""
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]


def test_groups_whose_rewards_are_equal_teach_nothing(tmp_path: Path) -> None:
    """Not one weight changes, nothing goes through the trainer, and it is said; their tokens count."""
    said: list[str] = []
    begun = start(Source(reward=1.0), say=said.append)
    before = {name: p.clone() for name, p in begun.model.named_parameters()}
    rows = rl.train(begun, config(), tmp_path / "run")
    assert all(torch.equal(p, before[name]) for name, p in begun.model.named_parameters())
    assert all(row["signal"] == 0 and row["trained_tokens"] == 0 and row["gradient_norm"] == 0 and row["tokens"] > 0 for row in rows)
    assert rows[-1]["alarm"] == "collapse" and len(said) == 1


@pytest.mark.parametrize("reward", [math.nan, math.inf, "much", True])
def test_a_reward_that_is_no_number_counts_as_none(reward: Any, tmp_path: Path) -> None:
    """It is a fault of the grader: those rollouts are left out, and metrics stay finite."""
    rows = rl.train(start(Source(reward=reward)), config(steps=1), tmp_path / "run")
    assert rows[0]["failed"] == 24 and rows[0]["tokens"] == 0 and rows[0]["trained_tokens"] == 0
    assert all(math.isfinite(value) for value in rows[0].values() if isinstance(value, float))


def test_an_answer_of_nothing_counts_as_the_policys() -> None:
    """Its reward is in the mean of its group; there is no token to learn from."""
    problem = Source().problem(0)
    spans = ((), (chosen((9, 1), (-1.0, -2.0), 0),), (), (chosen((40, 1), (-1.0, -2.0), 0),))
    rollouts = [Rollout(problem=problem, group=0, member=m, seed=m, spans=s, end="stop", score=Score(reward=float(m == 1)))
                for m, s in enumerate(spans)]
    iteration = Iteration(groups=(Group(number=0, problem=problem, rollouts=tuple(rollouts)),), carried=0, dropped=0, failed=0,
                          sampled_tokens=4, steps=2)
    begun = start(budgets=Budgets(tokens={("general", ""): 4.0}))
    made = Learner(begun.model, LEARNER, 10)
    row = rl.learn(made, iteration, begun, config(updates=1), 0)
    assert row["reward"] == 0.25 and row["tokens"] == 4 and row["spent"] == 1.0 and row["gradient_norm"] > 0 and row["signal"] == 1
    nothing = [r for r in rollouts if not r.sampled] * 2
    empty = Iteration(groups=(Group(number=0, problem=problem, rollouts=tuple(nothing)),), carried=0, dropped=0, failed=0, sampled_tokens=0,
                      steps=0)
    assert rl.learn(made, empty, begun, config(updates=1), 0)["trained_tokens"] == 0


@pytest.mark.parametrize("how", ["shut", "raises", "hangs"])
def test_a_world_that_fails_is_left_out(how: str, tmp_path: Path) -> None:
    """The others go on beside it, groups are whole, worlds are closed, and what is learnt does not know of it."""
    World.let_go, World.open = threading.Event(), 0
    sampling = SamplingConfig(slots=32, cache_tokens=2048, world_seconds=0.3 if how == "hangs" else 60.0)
    try:
        rows = rl.train(start(Source(world=how)), config(steps=1, sampling=sampling), tmp_path / "run")
    finally:
        World.let_go.set()
    assert rows[0]["groups"] == 6 and rows[0]["tokens"] > 0 and World.open == 0
    assert rows[0]["failed"] == 8 if how == "shut" else 0 < rows[0]["failed"] <= 8
    well = rl.train(start(Source(world="well")), config(steps=1), tmp_path / "well")
    assert well[0]["failed"] == 0 and well[0]["tokens"] > rows[0]["tokens"]


def test_a_world_that_cannot_say_where_it_stands_begins_again() -> None:
    """Put aside, its rollout starts from its prompt; one whose world can keeps what it said."""
    World.open = 0
    source = Source(world="forgets")
    rollouts = [Rollout(problem=source.problem(i), group=i, member=0, seed=i) for i in range(12)]
    made = Sampler(start().model, slots=12, cache_tokens=1024).sample(rollouts, enough=1)
    assert {bool(each.spans) for each in made.unfinished if each.group % 3 == 0} == {False}
    assert {bool(each.spans) for each in made.unfinished if each.group % 3 != 0} == {True} and World.open == 0


def test_worlds_that_hang_are_given_up_one_by_one() -> None:
    """Each in its time; nobody is asked twice, and nobody is asked by a thread that was given up."""
    let_go, asked = threading.Event(), []

    def question(number: int) -> int:
        asked.append(number)
        if number % 3 == 1:
            let_go.wait(60)
        return number

    found = answers([lambda n=n: question(n) for n in range(6)], 0.2)  # type: ignore[misc]
    let_go.set()
    assert [each if isinstance(each, int) else "gone" for each in found] == [0, "gone", 2, 3, "gone", 5]
    assert asked == [0, 1, 2, 3, 4, 5] and isinstance(found[1], Failed) and "did not answer for 0.2 s" in found[1].error


def test_a_grader_is_not_blamed_for_a_process_that_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour passes at once, as where a laptop was shut; the grader then answers within its time."""
    from gnomon.posttrain import grading

    hours, began, go_on = [0.0], threading.Event(), threading.Event()
    clock = grading.time.monotonic
    monkeypatch.setattr(grading.time, "monotonic", lambda: clock() + hours[0])
    wait = grading._wait

    def sleeping(result: Any, seconds: float) -> None:
        wait(result, 0.01)
        hours[0] += 3600.0
        if hours[0] > 3 * 3600:
            go_on.set()
            wait(result, 60)

    monkeypatch.setattr(grading, "_wait", sleeping)

    def grade(sampled: tuple[int, ...], world: Any) -> Score:
        began.set()
        go_on.wait(60)
        return Score(reward=1.0)

    problem = Problem(id="0", prompt=(2, 3), domain="general", effort="max", grade=grade)
    with Grading(1, timeout_seconds=60.0) as graders:
        graders.submit(Rollout(problem=problem, group=0, member=0, seed=0, spans=(chosen((9,), (-1.0,), 0),), end="stop"), None)
        assert began.wait(60)
        (found,) = graders.collect()
    assert found.score == Score(reward=1.0)


def test_an_engine_that_dies_loses_the_iteration_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that says so, worlds closed, and the same metrics in the end."""
    whole, short = rl.train(start(Source(world="well")), config(steps=2), tmp_path / "whole"), config(steps=2)
    World.open, begun = 0, Sampler.load

    def load(self: Sampler, model: Transformer, version: int) -> None:
        begun(self, model, version)
        forward, calls = self.runner.forward, [0]

        def dies(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if version == 1 and calls[0] == 3:
                raise RuntimeError("the device fell off the bus")
            return forward(*args, **kwargs)

        self.runner.forward = dies  # type: ignore[method-assign]

    with monkeypatch.context() as patched:
        patched.setattr(Sampler, "load", load)
        with pytest.raises(TrainingError, match=r"engine failed while it sampled with the weights of step 1 .*fell off the bus.* goes on"):
            rl.train(start(Source(world="well")), short, tmp_path / "run")
    assert World.open == 0 and [row["step"] for row in metrics.read(tmp_path / "run")] == [1]
    assert told(rl.train(start(Source(world="well")), short, tmp_path / "run")) == told(whole)[1:]


@pytest.mark.parametrize("stay", [(), pytest.param((2,), marks=pytest.mark.slow)])
def test_a_full_disk_leaves_the_checkpoint_before(stay: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that names it, and the same metrics once there is room, also where weights are copied to stay."""
    kept = config(steps=2, keep=KeepConfig(every=1, keep=9, stay=stay))
    whole = rl.train(start(), kept, tmp_path / "whole")
    write, written = checkpoint._write_tensors, [0]

    def full(path: Path, named: Any) -> None:
        written[0] += 1
        write(path, named)
        if written[0] >= 3:  # the second checkpoint: the first had two files
            path.write_bytes(path.read_bytes()[:100])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "_write_tensors", full)
        with pytest.raises(CheckpointError, match=r"step 2 could not be written .*No space left.*free space and start the same command"):
            rl.train(start(), kept, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]
    assert told(rl.train(start(), kept, tmp_path / "run")) == told(whole)[1:]


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    """What decides results must be what it was; what does not may change."""
    rl.train(start(budgets=Budgets(tokens={("general", ""): 4.0})), config(steps=2), tmp_path / "run")
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*"))
    same = {"budgets": Budgets(tokens={("general", ""): 4.0})}
    for changed, begun, words in (
            (config(steps=3), start(**same), r"train.steps: 2 → 3"),
            (config(steps=2, pool=PoolConfig(prompts=6, group_size=4, share=0.5)), start(**same), r"train.pool.share: 1.0 → 0.5\)"),
            (config(steps=2, updates=1), start(**same), r"train.updates: 2 → 1.*start_from="),
            (config(steps=2), start(), r"budgets.general/: 4.0 → 'none'"),
    ):
        with pytest.raises(ConfigError, match=words):
            rl.train(begun, changed, tmp_path / "run")
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*")) == before
    others = config(steps=2, largest_gap=1.0, keep=KeepConfig(every=7), sampling=SamplingConfig(
        slots=7, cache_tokens=512, cache_share=0.8, graders=1))
    assert rl.train(start(**same), others, tmp_path / "run") == []


@pytest.mark.parametrize("phase", ["rl", pytest.param("sft", marks=pytest.mark.slow), pytest.param("distill", marks=pytest.mark.slow)])
def test_kill_9(phase: str, on_ranks: Any, tmp_path: Path) -> None:
    """Whatever the run was doing, the same command again ends with the metrics and the weights of a run that nobody killed."""
    (found,) = on_ranks("killed_runs.py", phase, str(tmp_path))
    whole = tmp_path / phase / "whole"
    assert len(metrics.read(whole)) == 4 and len(found) == (2 if phase == "sft" else 3)
    for point, lives in found.items():
        again = tmp_path / phase / point
        assert lives["ended"] == -signal.SIGKILL and lives["again"] == 0
        left = [name for name in lives["left"] if not name.endswith(".partial")]
        assert left == ["step-000002"] and (len(lives["left"]) == 2) == (point == "checkpoint")
        assert told(metrics.read(again)) == told(metrics.read(whole))
        one, other = (checkpoint.load(path) for path in map(checkpoint.latest, (whole, again)) if path is not None)
        for group, named in one.tensors.items():
            assert all(torch.equal(tensor, other.tensors[group][name]) for name, tensor in named.items())
        assert one.state["memory"] == other.state["memory"]
