"""The policy in process: rollouts that do not depend on their neighbours, worlds that answer, unfinished ones that go on."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gnomon.agent.trajectory import Score
from gnomon.errors import CapacityError, ConfigError, TrainingError
from gnomon.model.config import ModelConfig, preset
from gnomon.model.transformer import Transformer
from gnomon.posttrain import rollout as records
from gnomon.posttrain.learner import Learner, LearnerConfig, document, sampled_routes
from gnomon.posttrain.policy import Sampler
from gnomon.posttrain.problem import Problem
from gnomon.posttrain.rollout import Rollout, seed_of
from gnomon.posttrain.slots import draw

SHAPE = ("vocab_size=64", "hidden_size=32", "num_hidden_layers=4", "intermediate_size=64", "mixers.kda.num_heads=2",
         "mixers.kda.head_dim=16", "mixers.mla.num_attention_heads=2", "mixers.mla.q_lora_rank=none", "mixers.mla.kv_lora_rank=32",
         "mixers.mla.qk_nope_head_dim=16", "mixers.mla.qk_rope_head_dim=8", "mixers.mla.v_head_dim=16", "moe.num_experts=8",
         "moe.num_experts_per_token=2", "moe.moe_intermediate_size=32", "moe.num_shared_experts=1", "moe.routed_expert_hidden_size=32",
         "initializer_range=0.3")
STOP, ASK = 1, 2


def shape() -> ModelConfig:
    """A model of a moment."""
    return preset("tiny", SHAPE)


@pytest.fixture(scope="module")
def model() -> Transformer:
    """Untrained weights, large enough that its answers differ."""
    return Transformer(shape()).initialise(3).eval()


def right(sampled: tuple[int, ...], world: Any) -> Score:
    """Anything is worth 1."""
    return Score(reward=1.0)


def problem(number: int, **changes: Any) -> Problem:
    """A problem whose prompt tells it from the others."""
    return Problem(**{"id": str(number), "prompt": (3, 4 + number % 40, 5), "domain": "general", "effort": "max", "grade": right,
                      "max_tokens": 24, "stop_ids": frozenset({STOP})} | changes)


def rollouts(count: int, **changes: Any) -> list[Rollout]:
    """Fresh rollouts."""
    return [Rollout(problem=problem(i, **changes), group=i, member=0, seed=seed_of(7, i)) for i in range(count)]


class Echo:
    """A world that says the last sampled ids but one, and ends after `turns` replies."""

    def __init__(self, state: Any, turns: int = 3) -> None:
        self.heard: list[list[int]] = [] if state is None else state
        self.turns, self.closed = turns, 0

    def reply(self, sampled: tuple[int, ...]) -> tuple[int, ...] | None:
        self.heard.append(list(sampled))
        return None if len(self.heard) == self.turns else (sampled[0], 9)

    def state(self) -> Any:
        return self.heard

    def close(self) -> None:
        self.closed += 1


def by_id(found: Any) -> dict[str, Rollout]:
    """Rollouts by problem."""
    return {r.problem.id: r for r in found}


def test_a_rollout_is_the_same_whatever_runs_beside_it(model: Transformer) -> None:
    """Slots, neighbours and order change nothing."""
    wide = by_id(Sampler(model, slots=16).sample(rollouts(12)).finished)
    narrow = by_id(Sampler(model, slots=3).sample(rollouts(12)[::-1]).finished)
    assert wide.keys() == narrow.keys() and len({r.sampled for r in wide.values()}) > 6
    for name, r in wide.items():
        assert narrow[name].sampled == r.sampled
        assert narrow[name].logprobs == pytest.approx(r.logprobs, abs=1e-6)


def test_log_probabilities_are_the_trainers(model: Transformer) -> None:
    """A forward pass over the whole rollout, observations included, gives what the sampler noted."""
    made = Sampler(model, slots=8).sample(rollouts(8, begin=Echo, asks=frozenset(range(2, 30)), room=8)).finished
    assert any(len(r.spans) > 2 for r in made)
    for r in made:
        ids = torch.tensor([r.token_ids])
        with torch.no_grad():
            scores = model(ids[:, :-1]).log_softmax(-1)[0]
        found = scores.gather(1, ids[0, 1:, None])[:, 0][torch.tensor(r.mask[1:])]
        assert found.numpy() == pytest.approx(np.array(r.logprobs), abs=1e-4)


def test_it_ends_at_a_stop_id_at_the_limit_or_when_the_world_says_so(model: Transformer) -> None:
    """And says which of the three."""
    ended = Sampler(model).sample(rollouts(40)).finished
    for r in ended:
        assert (r.end == "stop") == (r.sampled[-1] == STOP), "kept in the answer"
        assert r.end == "stop" or len(r.sampled) == 24
    worlds: list[Echo] = []

    def begin(state: Any) -> Echo:
        worlds.append(Echo(state, turns=2))
        return worlds[-1]

    made = Sampler(model).sample(rollouts(6, begin=begin, asks=frozenset(range(64)), room=4, stop_ids=frozenset())).finished
    assert [r.end for r in made] == ["world"] * 6 and all(w.closed == 1 for w in worlds)
    assert all(r.spans[1].token_ids == (r.sampled[0], 9) and not r.spans[1].sampled for r in made)


def test_an_unfinished_one_goes_on_where_it_stood(model: Transformer) -> None:
    """Put aside, written to JSON, resumed: the ids are those of a rollout that was never interrupted; versions say who chose what."""
    fields = {"begin": Echo, "asks": frozenset(range(2, 12)), "room": 8}
    whole = by_id(Sampler(model, slots=16).sample(rollouts(16, **fields)).finished)
    first = Sampler(model, slots=16, version=4).sample(rollouts(16, **fields), enough=6)
    assert len(first.finished) >= 6 and first.unfinished
    back = [records.from_json(r.to_json(), r.problem) for r in first.unfinished]
    assert [replace(r, problem=b.problem) for r, b in zip(first.unfinished, back, strict=True)] != []
    sampler = Sampler(model, slots=16, version=5)
    second = sampler.sample(back).finished
    for name, r in by_id((*first.finished, *second)).items():
        assert r.sampled == whole[name].sampled and r.mask == whole[name].mask and r.end == whole[name].end
    grown = [r for r in second if set(r.versions) == {4, 5}]
    assert grown and all(list(r.versions) == sorted(r.versions) and r.oldest == 4 for r in grown)


def test_what_does_not_fit_waits_or_is_refused(model: Transformer) -> None:
    """The cache bounds what runs at once."""
    made = Sampler(model, slots=16, cache_tokens=64).sample(rollouts(6))
    assert len(made.finished) == 6
    with pytest.raises(CapacityError, match="'cache_tokens' to 103"):
        Sampler(model, cache_tokens=64).sample(rollouts(1, max_tokens=100))
    with pytest.raises(ConfigError, match="id 64 is outside"):
        Sampler(model).sample(rollouts(1, prompt=(64,)))
    with pytest.raises(ConfigError, match="'room'"):
        Sampler(model).sample(rollouts(6, begin=Echo, asks=frozenset(range(64)), room=1, stop_ids=frozenset()))
    with pytest.raises(ConfigError, match="'prompt' is empty"):
        problem(1, prompt=())


def test_members_of_a_group_read_their_prompt_once(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six who begin with the same forty ids are those that six prompts of their own would have been; only one reads them."""
    prompt = tuple(range(3, 43))
    same = [Rollout(problem=problem(0, prompt=prompt), group=0, member=m, seed=seed_of(7, m)) for m in range(6)]
    sampler, read = Sampler(model, slots=8), list[int]()
    forward = sampler.runner.forward

    def noted(rows: Any, pool: Any, **more: Any) -> Any:
        read.append(int(rows.bounds[-1]))
        return forward(rows, pool, **more)

    monkeypatch.setattr(sampler.runner, "forward", noted)
    together = {r.member: r for r in sampler.sample([*same, *rollouts(2)]).finished if r.problem.prompt == prompt}
    assert read[0] == 40 + 2 * 3 and max(read[1:]) <= 8 and len({r.sampled for r in together.values()}) > 2
    for r in same:
        (alone,) = Sampler(model, slots=1).sample([r]).finished
        assert together[r.member].sampled == alone.sampled and together[r.member].logprobs == pytest.approx(alone.logprobs, abs=1e-6)


def test_the_number_at_work_follows_the_cache(model: Transformer) -> None:
    """Nobody begins in a cache that is nearly full; where it overflows, who came last goes on later from where it stood, with its world."""
    fields = {"max_tokens": 60, "stop_ids": frozenset(), "begin": Echo, "asks": frozenset(range(2, 6)), "room": 8}
    wide = by_id(Sampler(model, slots=12).sample(rollouts(12, **fields)).finished)
    sampler = Sampler(model, slots=12, cache_tokens=13 * 32, cache_share=1.0)
    tight = sampler.sample(rollouts(12, **fields))
    assert tight.set_back > 0 and by_id(tight.finished).keys() == wide.keys()
    for r in tight.finished:
        assert r.sampled == wide[r.problem.id].sampled and r.mask == wide[r.problem.id].mask
    again = sampler.sample(rollouts(12, **fields))
    assert [r.problem.id for r in again.finished] == [r.problem.id for r in tight.finished] and again.set_back == tight.set_back
    calm = Sampler(model, slots=12, cache_tokens=13 * 32, cache_share=0.4).sample(rollouts(12, **fields))
    assert calm.set_back < tight.set_back and calm.steps > tight.steps / 2 and len(calm.finished) == 12
    aside = sampler.sample(rollouts(12, **fields), enough=1)
    assert len(aside.unfinished) == 11 and all(r.world is not None for r in aside.unfinished if r.spans)
    with pytest.raises(ConfigError, match="'cache_share' is 0"):
        Sampler(model, cache_share=0)


def test_experts_are_written_down(model: Transformer) -> None:
    """Those of each id are the ones that the trainer's forward pass chooses, also after a pause and for who took over a prompt."""
    same = {"prompt": (3, 4, 5, 6), "begin": Echo, "asks": frozenset(range(2, 20)), "room": 8}
    sampler = Sampler(model, slots=8)
    sampler.record = True
    first = sampler.sample(rollouts(12, **same), enough=4)
    back = [records.from_json(json.loads(json.dumps(r.to_json())), r.problem) for r in first.unfinished]
    assert any(r.experts is not None and len(r.experts) for r in back)
    documents = [document(r) for r in (*first.finished, *sampler.sample(back).finished)]
    chosen, own = sampled_routes(documents), Learner(model, LearnerConfig(), 1).routes_of(documents)
    read = torch.cat([torch.arange(len(d.token_ids) - 1) < len(d.experts) for d in documents if d.experts is not None])
    for mine, theirs in zip(chosen, own, strict=True):
        assert (mine.sort(1).values == theirs.sort(1).values)[read].float().mean() > 0.99 and len(mine) == len(theirs)
    assert sampled_routes([*documents, document(Sampler(model).sample(rollouts(1)).finished[0])]) == (), "one does not know"


def test_new_weights_take_over(model: Transformer) -> None:
    """`load` samples from what the model has now."""
    other = Transformer(shape()).initialise(3)
    sampler = Sampler(other, slots=8)
    before = sampler.sample(rollouts(8)).finished
    with torch.no_grad():
        other.model.embed_tokens.weight.mul_(-1.5)
    sampler.load(other, 1)
    after = sampler.sample(rollouts(8)).finished
    assert by_id(before)["3"].sampled != by_id(after)["3"].sampled
    assert {v for r in after for v in r.versions} == {1}


def test_draws_follow_the_distribution() -> None:
    """Many draws of one row have its frequencies; the log-probability is that of the temperature; greedy takes the largest."""
    logits = np.tile(np.array([[0.0, 1.0, 2.0, -1.0]], dtype=np.float32), (20_000, 1))
    for temperature in (1.0, 0.5):
        weights = np.exp(logits[0] / temperature)
        ids, logprobs = draw(logits, np.arange(20_000, dtype=np.uint64), np.zeros(20_000, dtype=np.uint64), temperature)
        assert np.bincount(ids, minlength=4) / 20_000 == pytest.approx(weights / weights.sum(), abs=0.02)
        assert logprobs == pytest.approx(np.log(weights / weights.sum())[ids], abs=1e-6)
    assert set(draw(logits, np.zeros(20_000, dtype=np.uint64), np.zeros(20_000, dtype=np.uint64), 0.0)[0]) == {2}
    with pytest.raises(TrainingError, match="version 7"):
        draw(np.full((1, 4), np.nan, dtype=np.float32), np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.uint64), 1.0, 7)


def test_what_counts_towards_the_budget() -> None:
    """Thinking tokens of general tasks, everything of agents' tasks."""
    assert problem(0, think_end=8).spent((5, 6, 8, 7, 1)) == 2
    assert problem(0, think_end=8).spent((5, 6)) == 2
    assert problem(0).spent((5, 6, 8, 7, 1)) == 5
