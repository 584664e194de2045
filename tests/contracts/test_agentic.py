"""Agents as rollouts: a harness for each group, some held out; what was attempted is what is learnt from, to the token."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from posttraining_fixtures import network, save, serving

from gnomon.agent import trajectory_file
from gnomon.agent.harness.draw import Draw
from gnomon.agent.verifiers_trace import to_trace
from gnomon.data.chat import ChatFormat
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import ConfigError
from gnomon.parallel.mesh import Mesh
from gnomon.posttrain.agentic import AgentSampler, AgentsConfig, AgentSource
from gnomon.posttrain.demonstrations import of_trajectory
from gnomon.posttrain.endpoint import EndpointConfig
from gnomon.posttrain.grading import Grading
from gnomon.posttrain.keeping import KeepConfig
from gnomon.posttrain.partial import Pool, PoolConfig
from gnomon.posttrain.remote import RemoteConfig, RemoteSampler
from gnomon.posttrain.rl import RLConfig, SamplingConfig, Start, train
from gnomon.posttrain.rollout import Rollout, seed_of

KEY = "a-long-secret"
TALK = '{"id": "sum", "prompt": "2+2?", "budget": {"turns": 3}, "check": {"kind": "exact", "settings": {"answer": "4"}}}'


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> AgentsConfig:
    """A task without a machine under harnesses that need none."""
    file = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    file.write_text(TALK + "\n")
    harness = file.parent
    for name, words in (("plain", "Answer."), ("terse", "Be brief."), ("kept", "Say it.")):
        (harness / f"{name}.toml").write_text(f'system = "{words}"\npatience = 2\nturns = 2\nthinking = false\n')
    draw = Draw(harnesses=(str(harness / "plain.toml"), str(harness / "terse.toml")), held_out=(str(harness / "kept.toml"),), mixes=0.0,
                seed=3)
    return AgentsConfig(tasks=({"kind": "jsonl", "path": str(file)},), held_out=0.4, held_out_mixes=0, answer_tokens=6, effort="none",
                        concurrency=4, draw=draw)


@pytest.fixture(scope="module")
def run(vocabulary: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder."""
    return save(network(vocabulary.vocab_size, 1), tmp_path_factory.mktemp("runs") / "run", vocabulary)


@pytest.fixture(scope="module")
def remote(vocabulary: Tokenizer, run: Path) -> Iterator[RemoteConfig]:
    """A server that takes newer weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINER_KEY", KEY)
        with serving(network(vocabulary.vocab_size, 1), vocabulary, 'access.admins=["trainer"]',
                     f'access.reload_folders=["{run.parent}"]', keys={"trainer": KEY}) as url:
            yield RemoteConfig(endpoints=(EndpointConfig(url=url, key_variable="TRAINER_KEY", retries=2),), folder=run.parent / "served")


def test_a_harness_is_the_groups_own(config: AgentsConfig, chat: ChatFormat) -> None:
    """The same for all members, on any machine, from the seed; a share is held out, and none of those is ever trained on."""
    source, again = AgentSource(config, chat), AgentSource(config, chat)
    names = [source.harness(i).name for i in range(200)]
    assert names == [again.harness(i).name for i in range(200)] and set(names) == {"plain", "terse", "kept"}
    kept = [source.problem(i).held_out for i in range(200)]
    assert kept == [name == "kept" for name in names] and 50 < sum(kept) < 110
    other = AgentSource(replace(config, draw=replace(config.draw, seed=4)), chat)
    assert [other.harness(i).name for i in range(200)] != names
    bare = AgentSource(replace(config, draw=replace(config.draw, held_out=())), chat)
    with pytest.raises(ConfigError, match="no harness is held out"):
        bare.harness(kept.index(True))
    for wrong in ({"held_out": 1.0}, {"tasks": ()}, {"concurrency": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            replace(config, **wrong)


def test_an_attempt_is_a_rollout_to_the_token(config: AgentsConfig, chat: ChatFormat, run: Path, remote: RemoteConfig,
                                              vocabulary: Tokenizer, tmp_path: Path) -> None:
    """Ids, log-probabilities and masks are the trajectory's on disk, which exports as a trace and is learnt from as it is."""
    source = AgentSource(config, chat)
    vocabulary.save(tmp_path / "run" / "tokenizer")
    sampler = AgentSampler(source, RemoteSampler(network(vocabulary.vocab_size, 1), remote, tmp_path / "run", version=5), tmp_path / "run")
    try:
        fresh = [Rollout(problem=source.problem(i // 2), group=i // 2, member=i % 2, seed=seed_of(1, i)) for i in range(6)]
        with Grading() as grading:
            made = sampler.sample(fresh, on_finished=grading.submit)
            graded = grading.collect()
    finally:
        sampler.close()
    assert len(made.finished) == 6 and not made.unfinished and made.tokens == sum(len(each.sampled) for each in graded) > 0
    for rollout in graded:
        path = tmp_path / "run" / "attempts" / f"{rollout.group}-{rollout.member}-0.jsonl"
        kept = trajectory_file.read(path)
        assert kept.harness == source.harness(rollout.group).name == rollout.notes["harness"]
        assert rollout.score == kept.score and rollout.score is not None and rollout.score.reward is not None
        samples = [sample for sample in kept.samples() if any(sample.loss_mask)]
        longest = max(samples, key=lambda sample: sum(sample.loss_mask))
        assert rollout.token_ids == longest.token_ids and rollout.mask == longest.loss_mask and set(rollout.versions) == {5}
        assert rollout.logprobs == tuple(p for p, flag in zip(longest.logprobs, longest.loss_mask, strict=True) if flag)
        nodes, read = to_trace(kept)["nodes"], {None: ()}
        for number, node in enumerate(nodes):
            read[number] = (*read[node["parent"]], *node.get("token_ids", ()))
        assert rollout.token_ids in read.values()
        assert rollout.token_ids in [example.token_ids for example in of_trajectory(kept, chat)]


def test_reinforcement_of_agents(config: AgentsConfig, chat: ChatFormat, run: Path, remote: RemoteConfig, vocabulary: Tokenizer,
                                 tmp_path: Path) -> None:
    """Through the same loop; the server's log-probabilities are the trainer's, and what is held out is told beside what is not."""
    vocabulary.save(tmp_path / "run" / "tokenizer")
    source = AgentSource(config, chat)

    def make(model: Any, version: int, folder: Path, mesh: Mesh) -> AgentSampler:
        return AgentSampler(source, RemoteSampler(model, remote, folder, version=version), folder)

    settings = RLConfig(steps=2, pool=PoolConfig(prompts=5, group_size=2), sampling=SamplingConfig(remote=remote),
                        keep=KeepConfig(every=9))
    rows = train(Start(model=network(vocabulary.vocab_size, 1), source=source, sampler=make), settings, tmp_path / "run")
    kept = [source.held_out(i) for i in range(10)]
    for row, part in zip(rows, (kept[:5], kept[5:]), strict=True):
        assert row["groups"] == 5 - sum(part) and row.get("held_out_groups", 0) == sum(part)
        assert row["largest_gap"] < 1e-3 and row["failed"] == 0


def test_attempts_go_on_between_iterations(config: AgentsConfig, chat: ChatFormat, run: Path, remote: RemoteConfig,
                                           vocabulary: Tokenizer, tmp_path: Path) -> None:
    """What had not finished is waited for by the next call, and is not attempted twice; closing ends what is left."""
    vocabulary.save(tmp_path / "run" / "tokenizer")
    source = AgentSource(config, chat)
    servers = RemoteSampler(network(vocabulary.vocab_size, 1), remote, tmp_path / "run")
    sampler = AgentSampler(source, servers, tmp_path / "run")
    try:
        pool = Pool(source, PoolConfig(prompts=4, group_size=2, share=0.4), 0)
        with Grading() as grading:
            first = pool.iterate(sampler, grading)  # type: ignore[arg-type]
            second = pool.iterate(sampler, grading)  # type: ignore[arg-type]
        numbers = [group.number for step in (first, second) for group in step.groups]
        assert len(set(numbers)) == len(numbers) >= 2
        files = list((tmp_path / "run" / "attempts").glob("*.jsonl.*"))
        assert not files, "no attempt was put aside for a second one"
    finally:
        sampler.close()
        sampler.close()  # twice is no error


def test_a_server_that_fails_is_no_policy_that_fails(config: AgentsConfig, chat: ChatFormat, run: Path, remote: RemoteConfig,
                                                     vocabulary: Tokenizer, tmp_path: Path) -> None:
    """No reward, so it is in no mean."""
    vocabulary.save(tmp_path / "run" / "tokenizer")
    source = AgentSource(config, chat)
    servers = RemoteSampler(network(vocabulary.vocab_size, 1), remote, tmp_path / "run")
    servers.send()
    servers.endpoints[0].key = "not-the-key"
    sampler = AgentSampler(source, servers, tmp_path / "run")
    try:
        with Grading() as grading:
            sampler.sample([Rollout(problem=source.problem(0), group=0, member=0, seed=1)], on_finished=grading.submit)
            [found] = grading.collect()
    finally:
        sampler.close()
    assert found.score is not None and found.score.reward is None and not found.sampled and found.score.error
