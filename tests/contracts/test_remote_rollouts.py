"""Rollouts from servers: what in process would have been drawn, with newer weights between iterations, and errors that say what to do."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from posttraining_fixtures import network, save, serving

from gnomon.agent.trajectory import Score
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import CapacityError, ConfigError, PolicyError
from gnomon.posttrain.endpoint import Endpoint, EndpointConfig
from gnomon.posttrain.grading import Grading
from gnomon.posttrain.keeping import KeepConfig
from gnomon.posttrain.partial import Pool, PoolConfig
from gnomon.posttrain.policy import Sampler
from gnomon.posttrain.problem import Episode, Problem
from gnomon.posttrain.remote import RemoteConfig, RemoteSampler
from gnomon.posttrain.rl import RLConfig, SamplingConfig, Start, train
from gnomon.posttrain.rollout import Rollout, seed_of
from gnomon.serve import exchange

KEY = "a-long-secret"
STOP, ASK = 7, 11


class Echo:
    """A world that says two ids to what it is asked, four times, then ends."""

    def __init__(self, state: Any) -> None:
        self.turns = 0 if state is None else state
        self.open = True

    def reply(self, sampled: tuple[int, ...]) -> tuple[int, ...] | None:
        """What it says."""
        self.turns += 1
        return (20 + len(sampled) % 9, 30 + self.turns) if self.turns < 5 else None

    def state(self) -> Any:
        """As JSON."""
        return self.turns

    def close(self) -> None:
        """Once."""
        assert self.open
        self.open = False


def grade(sampled: tuple[int, ...], world: Episode | None) -> Score:
    """Few small ids are good."""
    return Score(reward=float(sum(sampled) % 3))


class Source:
    """Half of the problems have a world. Many ids stop or ask, so that answers end."""

    def problem(self, index: int) -> Problem:
        """By number."""
        talks: dict[str, Any] = {"begin": Echo, "asks": frozenset(range(ASK, ASK + 60)), "room": 16} if index % 2 else {}
        return Problem(id=str(index), prompt=(3, 300 + index % 50), domain="d", effort="max", grade=grade, max_tokens=24,
                       stop_ids=frozenset(range(STOP)), **talks)


@pytest.fixture(scope="module")
def run(vocabulary: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder, whose weights of seed 1 are served first."""
    return save(network(vocabulary.vocab_size, 1), tmp_path_factory.mktemp("runs") / "run", vocabulary)


@pytest.fixture(scope="module")
def urls(vocabulary: Tokenizer, run: Path, monkeypatch_module: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Two servers that take newer weights from the run's folder."""
    monkeypatch_module.setenv("TRAINER_KEY", KEY)
    changes = ('access.admins=["trainer"]', f'access.reload_folders=["{run.parent}"]')
    with (serving(network(vocabulary.vocab_size, 9), vocabulary, *changes, keys={"trainer": KEY, "user": "b-long-secret"}) as one,
          serving(network(vocabulary.vocab_size, 9), vocabulary, *changes, keys={"trainer": KEY}) as two):
        yield [one, two]


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    """For settings that live as long as a module."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def remote(urls: list[str], **changes: Any) -> RemoteConfig:
    """Settings of these servers."""
    return RemoteConfig(endpoints=tuple(EndpointConfig(url=url, key_variable="TRAINER_KEY", retries=0) for url in urls), **changes)


def rollouts(count: int) -> list[Rollout]:
    """Fresh ones."""
    return [Rollout(problem=Source().problem(i // 2), group=i // 2, member=i % 2, seed=seed_of(5, i)) for i in range(count)]


def told(found: Any) -> dict[tuple[int, int], Any]:
    """Ids, ends and spans by rollout, without log-probabilities."""
    return {(r.group, r.member): (r.end, r.heard, [(s.token_ids, s.sampled, s.policy_version) for s in r.spans]) for r in found}


@pytest.mark.parametrize("piece", [256, 5])
def test_the_same_rollouts_as_in_process(piece: int, urls: list[str], run: Path, vocabulary: Tokenizer) -> None:
    """Worlds, ends, spans and versions too, whole or in pieces, after the servers took the weights; log-probabilities up to rounding."""
    model = network(vocabulary.vocab_size, 1)
    here = Sampler(model.eval(), slots=8, cache_tokens=1024, version=3).sample(rollouts(24))
    sampler = RemoteSampler(model, remote(urls, piece_tokens=piece), run, version=3)
    worlds: list[Episode | None] = []
    there = sampler.sample(rollouts(24), on_finished=lambda rollout, world: worlds.append(world))
    assert told(there.finished) == told(here.finished) and not there.unfinished and there.tokens == here.tokens
    assert {end for end, _, _ in told(here.finished).values()} >= {"stop", "world"} and sum(w is not None for w in worlds) == 12
    by_place = {(r.group, r.member): r.logprobs for r in here.finished}
    for rollout in there.finished:
        assert rollout.logprobs == pytest.approx(by_place[rollout.group, rollout.member], abs=1e-4)
    assert [endpoint.get("/models")["data"][0]["policy_version"] for endpoint in sampler.endpoints] == [3, 3]


def test_partial_rollouts_go_on_under_newer_weights(urls: list[str], run: Path, vocabulary: Tokenizer) -> None:
    """What was put aside keeps its ids, its world and the version of each span; what is too old begins again."""
    old, new = network(vocabulary.vocab_size, 1), network(vocabulary.vocab_size, 2)
    sampler = RemoteSampler(old, remote(urls[:1], piece_tokens=2), run)
    first = sampler.sample(rollouts(24), enough=6)
    assert len(first.finished) >= 6 and len(first.finished) + len(first.unfinished) == 24
    sampler.load(new, 1)
    rest = sampler.sample(first.unfinished)
    before = {(r.group, r.member): r for r in first.unfinished}
    assert told(rest.finished) == told(Sampler(new.eval(), slots=8, cache_tokens=1024, version=1).sample(first.unfinished).finished)
    mixed = [r for r in rest.finished if set(r.versions) == {0, 1}]
    for rollout in rest.finished:
        kept = before[rollout.group, rollout.member].sampled
        assert rollout.sampled[: len(kept)] == kept and set(rollout.versions[len(kept) :]) <= {1}
    assert mixed or not any(r.sampled for r in first.unfinished)
    pool = Pool(Source(), PoolConfig(prompts=4, group_size=2, share=0.3, most_stale=1), 0)
    with Grading() as grading:
        pool.iterate(sampler, grading)
        sampler.load(old, 2)
        second = pool.iterate(sampler, grading)
    assert all(len(set(r.versions)) == 1 for group in second.groups for r in group.rollouts)


def test_reinforcement_from_servers(urls: list[str], run: Path, vocabulary: Tokenizer, tmp_path: Path) -> None:
    """The rows are those of sampling in process, to rounding; the trainer's log-probabilities are the servers'."""
    config = RLConfig(steps=3, pool=PoolConfig(prompts=4, group_size=4), keep=KeepConfig(every=9),
                      sampling=SamplingConfig(slots=16, cache_tokens=2048))
    here = train(Start(model=network(vocabulary.vocab_size, 1), source=Source()), config, tmp_path / "here")
    far = replace(config, sampling=replace(config.sampling, remote=remote(urls, folder=run.parent / "far")))
    vocabulary.save(tmp_path / "there" / "tokenizer")
    there = train(Start(model=network(vocabulary.vocab_size, 1), source=Source()), far, tmp_path / "there")
    for one, two in zip(here, there, strict=True):
        assert two["largest_gap"] < 3e-4
        for name in ("tokens", "reward", "spent", "groups"):
            assert two[name] == pytest.approx(one[name], rel=1e-9), name
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-3)


def test_a_server_that_dies_and_one_that_is_left(urls: list[str], run: Path, vocabulary: Tokenizer) -> None:
    """Its groups are sampled by the other one; when none is left, an error says so, and worlds are closed."""
    model = network(vocabulary.vocab_size, 1)
    config = remote(urls, piece_tokens=4)
    dying = Endpoint(config.endpoints[1])
    sampler = RemoteSampler(model, config, run, endpoints=[Endpoint(config.endpoints[0]), dying])
    sampler.sample(rollouts(2))
    calls = []

    def post(path: str, body: Any) -> Any:
        calls.append(path)
        raise PolicyError("http://dead: ConnectError")

    dying.post = post  # type: ignore[method-assign]
    found = sampler.sample(rollouts(24))
    here = Sampler(model.eval(), slots=8, cache_tokens=1024).sample(rollouts(24))
    assert told(found.finished) == told(here.finished) and calls
    sampler.endpoints = [dying]
    with pytest.raises(PolicyError, match="dead"):
        sampler.sample(rollouts(24))


def test_who_may_exchange_weights(urls: list[str], run: Path, vocabulary: Tokenizer, tmp_path: Path) -> None:
    """Another key, another folder, another shape, no folder: refused, and what is served stays."""
    def ask(key: str, **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.post(urls[0].removesuffix("/v1") + exchange.PATH, json=body, headers=headers, timeout=60)

    before = httpx.get(f"{urls[0]}/models", headers={"x-api-key": KEY}, timeout=60).json()["data"][0]
    assert ask("", path=str(run)).status_code == 401 and ask("b-long-secret", path=str(run)).status_code == 403
    outside = save(network(vocabulary.vocab_size, 1), tmp_path / "outside", vocabulary)
    assert "reload_folders" in ask(KEY, path=str(outside)).json()["error"]["message"]
    (run.parent / "link").symlink_to(outside)
    assert ask(KEY, path=str(run.parent / "link")).status_code == 400
    other = save(network(vocabulary.vocab_size + 8, 1), run.parent / "other", vocabulary)
    assert "another shape" in ask(KEY, path=str(other)).json()["error"]["message"]
    for body in ({}, {"path": 3}, {"path": str(run), "version": -1}, {"path": str(run), "how": "now"}, {"path": str(run / "nowhere")}):
        assert ask(KEY, **body).status_code == 400, body
    assert httpx.get(f"{urls[0]}/models", headers={"x-api-key": KEY}, timeout=60).json()["data"][0] == before
    newer = save(network(vocabulary.vocab_size, 17), run.parent / "newer", vocabulary)
    good = ask(KEY, path=str(newer)).json()
    assert good["version"] == before["policy_version"] + 1 and good["fingerprint"] != before["weights_fingerprint"]
    with serving(network(vocabulary.vocab_size), vocabulary) as plain:
        assert httpx.post(plain.removesuffix("/v1") + exchange.PATH, json={"path": str(run)}, timeout=60).status_code == 403


def test_what_is_refused(urls: list[str], run: Path, vocabulary: Tokenizer) -> None:
    """Settings and rollouts that cannot be."""
    model = network(vocabulary.vocab_size, 1)
    for wrong, words in (({"piece_tokens": 0}, "piece_tokens"), ({"reload": "vllm"}, "layout")):
        with pytest.raises(ConfigError, match=words):
            remote(urls, **wrong)
    with pytest.raises(ConfigError, match="temperature 1"):
        RemoteSampler(model, remote(urls), run, temperature=0.5)
    sampler = RemoteSampler(model, remote(urls), run)
    ended = replace(rollouts(1)[0], end="stop")
    with pytest.raises(ConfigError, match="has ended"):
        sampler.sample([ended])
    long = replace(rollouts(1)[0], problem=replace(Source().problem(0), max_tokens=10**7))
    with pytest.raises(CapacityError, match="do not fit"):
        sampler.sample([long])
    with pytest.raises(ConfigError, match="nothing is sampled from servers here"):
        SamplingConfig(remote=remote(urls)).here(model, 0)


class OtherEngine:
    """Answers as vLLM does, from our own sampler's draws; `spoil` changes a choice before it is sent."""

    def __init__(self, vocabulary: Tokenizer, spoil: Any = lambda choice: choice) -> None:
        self.vocabulary, self.spoil, self.bodies, self.paths = vocabulary, spoil, [], []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """A request."""
        import json

        body = json.loads(request.content) if request.content else {}
        self.paths.append(request.url.path)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "theirs", "max_model_len": 4096}]})
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": self.vocabulary.encode(body["prompt"])})
        if request.url.path != "/v1/completions":
            self.bodies.append(body)
            return httpx.Response(200)
        ids = [50 + body["seed"] % 7] * (body["max_tokens"] - 1) + [body["stop_token_ids"][0]]
        choice = {"index": 0, "token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids), "tokens": ["?"] * len(ids)}}
        return httpx.Response(200, json={"choices": [self.spoil(choice)]})


@pytest.mark.parametrize(("kind", "path", "key"), [("vllm", "/collective_rpc", "method"),
                                                   ("sglang", "/update_weights_from_disk", "model_path")])
def test_engines_of_others(kind: Any, path: str, key: str, run: Path, vocabulary: Tokenizer, tmp_path: Path) -> None:
    """A checkpoint in the released layout, the documented routes, `return_token_ids`; a seed of its own for each piece."""
    engine = OtherEngine(vocabulary)
    config = RemoteConfig(endpoints=(EndpointConfig(url="http://other/v1", server="vllm", retries=0),), folder=tmp_path / "served",
                          layout="released", reload=kind, piece_tokens=8)
    endpoint = Endpoint(config.endpoints[0], httpx.Client(transport=httpx.MockTransport(engine)))
    sampler = RemoteSampler(network(vocabulary.vocab_size, 1), config, run, temperature=0.7, version=2, endpoints=[endpoint])
    found = sampler.sample(rollouts(2))
    assert [(len(r.sampled), r.end, set(r.versions)) for r in found.finished] == [(8, "stop", {2})] * 2
    assert path in engine.paths and key in engine.bodies[0] and (tmp_path / "served" / "config.json").exists()
    assert engine.paths.index(path) < engine.paths.index("/v1/completions")
    spoils = [lambda c: {**c, "token_ids": c["token_ids"][:-1]}, lambda c: {**c, "logprobs": None},
              lambda c: {**c, "token_ids": c["token_ids"][:3], "logprobs": {"token_logprobs": [-1.0] * 3}},
              lambda c: {**c, "logprobs": {"token_logprobs": [0.5] * 8}},
              lambda c: {**c, "logprobs": {"token_logprobs": [-9999.0, None] * 4}}]
    for spoil in spoils:
        engine.spoil = spoil
        with pytest.raises(PolicyError, match="not the ids that were asked for"):
            sampler.sample(rollouts(1))
