"""The engine against the plain loop: the same tokens, whatever else runs, however it ends, whatever is asked of it."""

import json
import math
from dataclasses import replace

import pytest
import torch
from inference_models import config, model, tokens

from gnomon.data.tokenizer import train_tokenizer
from gnomon.errors import CapacityError, ConfigError
from gnomon.kernels import native
from gnomon.model import generate as plain
from gnomon.model.inference import InferenceModel
from gnomon.serve.constrain import LONGEST
from gnomon.serve.engine import Engine, EngineSettings
from gnomon.serve.pages import Memory
from gnomon.serve.prefix import PrefixCache
from gnomon.serve.request import Finished, Grammar, Request, Sampled, Sampling, Started
from gnomon.serve.runner import TorchRunner
from gnomon.serve.scheduler import ScheduleSettings

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
GREEDY = Sampling(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def network():
    return model()


@pytest.fixture(scope="module")
def runner(network):
    return InferenceModel.from_transformer(network, "fp32")


@pytest.fixture(scope="module")
def tokenizer():
    words = "the quick brown fox {\"name\": \"a\", \"age\": 12, [true, false, null]} jumps over 0123456789 lazy dogs; "
    return train_tokenizer([words * 40], 340)


@pytest.fixture(scope="module")
def talker(tokenizer):
    """A runner whose vocabulary is that of the tokenizer."""
    return InferenceModel.from_transformer(model(config(vocab_size=tokenizer.vocab_size)), "fp32")


def engine_of(runner, memory=1 << 24, cache=True, tokenizer=None, clock=None, **settings):
    """An engine over a fresh memory, with or without a prefix cache."""
    schedule = ScheduleSettings(**{k: settings.pop(k) for k in list(settings) if k in ScheduleSettings.__slots__})
    settings = EngineSettings(memory_bytes=memory, schedule=schedule, **settings)
    more = {} if clock is None else {"clock": clock}
    return Engine(runner, settings, PrefixCache(Memory(runner, memory)) if cache else None, tokenizer, **more)


def ask(name="a", prompt=40, sampling=GREEDY, seed=0, **more):
    """A request with a random prompt of so many tokens, or with this one."""
    ids = tuple(tokens(prompt, seed=seed).tolist()) if isinstance(prompt, int) else tuple(prompt)
    return Request(id=name, prompt=ids, sampling=sampling, **more)


def finish(engine, *requests):
    """Run until nothing is left; events by request."""
    engine.submit_many(requests)
    said = {}
    while not engine.idle:
        for name, event in engine.step():
            said.setdefault(name, []).append(event)
    return said


def ids(events):
    return [event.id for event in events if isinstance(event, Sampled)]


def expected(network, request):
    """What the plain loop gives; it does not yield a stop id."""
    sampling = plain.Sampling(temperature=0, max_tokens=request.sampling.max_tokens)
    return list(plain.generate(network, list(request.prompt), sampling))


@pytest.mark.parametrize("cache", [True, False])
def test_greedy_tokens_are_those_of_the_plain_loop_in_any_company(runner, cache):
    engine = engine_of(runner, cache=cache)
    requests = [ask(f"r{n}", n, seed=n) for n in (1, 3, 63, 64, 65, 200)]
    together = finish(engine, *requests)
    for request in requests:
        assert ids(together[request.id]) == expected(runner, request)
        alone = finish(engine_of(runner, cache=cache), request)[request.id]
        assert [event for event in alone if isinstance(event, Sampled)] == [e for e in together[request.id] if isinstance(e, Sampled)]
        assert isinstance(alone[0], Started) and isinstance(alone[-1], Finished)
        assert alone[-1].reason == "length" and alone[-1].usage.output_tokens == 12


def test_a_transformer_runs_too(network, runner):
    torch_runner = TorchRunner(network)
    request = ask("r", 100, Sampling(temperature=0.0, max_tokens=3, top_logprobs=2))
    other = ask("s", 7, Sampling(temperature=0.0, max_tokens=2), seed=3)
    first, again = (finish(engine_of(r), request, other)["r"] for r in (torch_runner, runner))
    assert ids(first) == ids(again) == expected(network, request)
    for ours, theirs in zip(first[1:-1], again[1:-1], strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert not engine_of(torch_runner).exact and engine_of(runner).exact


def test_a_transformer_goes_on_from_the_cache(network):
    engine = engine_of(TorchRunner(network))
    request = ask("r", 70, Sampling(temperature=0.0, max_tokens=2))
    assert ids(finish(engine, request)["r"]) == ids(finish(engine, request)["r"]) == expected(network, request)
    assert engine.stats().cache.cached_tokens == 64


def test_a_cached_prompt_gives_the_same_bits_and_says_what_was_cached(runner):
    request = ask("r", 150, Sampling(temperature=0.7, max_tokens=80, seed=5, top_logprobs=3))
    engine = engine_of(runner)
    cold, warm = finish(engine, request)["r"], finish(engine, request)["r"]
    longer = ask("s", [*request.prompt, *ids(cold), 5, 6, 7], Sampling(temperature=0.7, max_tokens=10, seed=1))
    turn, fresh = finish(engine, longer)["s"], finish(engine_of(runner), longer)["s"]
    assert cold[1:-1] == warm[1:-1] and turn[1:-1] == fresh[1:-1]
    assert warm[-1].usage.cached_tokens == warm[0].cached_tokens == 128 and "128 of 150" in warm[0].cache_note
    assert turn[-1].usage.cached_tokens == 192
    off = finish(engine, ask("off", request.prompt, request.sampling, cache=False))["off"]
    assert off[1:-1] == cold[1:-1] and off[0].cached_tokens == 0


def test_the_context_ends_where_memory_or_settings_say(runner):
    engine = engine_of(runner, max_tokens=50)
    said = finish(engine, ask("a", 45, Sampling(temperature=0.0, max_tokens=100)))["a"]
    assert said[-1].reason == "length" and said[-1].usage.output_tokens == 5
    with pytest.raises(CapacityError, match="50 tokens and a sequence may have 50"):
        engine.submit(ask("b", 50))
    with pytest.raises(CapacityError, match="'max_tokens' is 1000000"):
        engine_of(runner, max_tokens=1_000_000)
    small = engine_of(runner, memory=Memory(runner, 1 << 24).bytes_for(200))
    assert small.max_tokens == 256
    said = finish(small, ask("a", 240, Sampling(temperature=0.0, max_tokens=100)))["a"]
    assert said[-1].reason == "length" and said[-1].usage.output_tokens == 16


@pytest.mark.parametrize(("request_", "error"), [
    (ask(prompt=[]), "'prompt' is empty"), (ask(prompt=[1, 61]), "outside the vocabulary of 61: \\[61\\]"), (ask(prompt=[-1]), "outside"),
    (ask(sampling=Sampling(logit_bias=((61, 1.0),))), "'logit_bias' has 61"),
    (ask(sampling=Sampling(logit_bias=((1, math.inf),))), "'logit_bias' has 1: inf"),
    (ask(sampling=Sampling(stop=("x",))), "'stop' needs the vocabulary"),
    (ask(sampling=Sampling(grammar=Grammar(kind="regex", text="a+"))), "'grammar' needs the vocabulary"),
])
def test_requests_that_cannot_be_are_refused_and_the_engine_goes_on(runner, request_, error):
    engine = engine_of(runner)
    engine.submit(ask("good"))
    with pytest.raises(ConfigError, match=error):
        engine.submit(request_)
    with pytest.raises(ConfigError, match="'id' is 'good'"):
        engine.submit(ask("good"))
    assert finish(engine)["good"][-1].reason == "length"


def test_a_stop_id_is_reported_and_ends(runner):
    request = ask()
    third = expected(runner, request)[2]
    said = finish(engine_of(runner), ask(sampling=replace(GREEDY, stop_ids=frozenset({third}))))["a"]
    assert said[-1].reason == "stop" and ids(said) == expected(runner, request)[:3]


def test_a_stop_string_ends_across_tokens(talker, tokenizer):
    engine = engine_of(talker, tokenizer=tokenizer)
    free = ids(finish(engine, ask(sampling=Sampling(max_tokens=60, seed=2)))["a"])
    text = tokenizer.decode_bytes(free)
    at = next(i for i in range(10, 80) if text[i : i + 3].isascii())
    stop = text[at : at + 3].decode()
    said = finish(engine, ask(sampling=Sampling(max_tokens=60, seed=2, stop=("never this", stop))))["a"]
    assert said[-1].reason == "stop" and said[-1].stop_string == stop
    out = tokenizer.decode_bytes(ids(said))
    assert stop.encode() in out and stop.encode() not in tokenizer.decode_bytes(ids(said)[:-1])


def test_cancelled_requests_end_and_free_their_memory(runner):
    engine = engine_of(runner)
    engine.submit(ask("a", 200))
    engine.submit(ask("b", 30))
    engine.step()
    assert engine.cancel("a") and not engine.cancel("nobody")
    said = finish(engine)
    assert said["a"][-1].reason == "cancelled" and said["b"][-1].reason == "length"
    assert engine.cache.memory.live_bytes == 0 and not engine.cancel("a")


def test_a_deadline_ends_what_runs_and_what_waits(runner):
    now = [0.0]
    engine = engine_of(runner, clock=lambda: now[0], max_sequences=1)
    engine.submit(ask("a", 10, deadline_seconds=5.0))
    engine.submit(ask("b", 20, seed=1, deadline_seconds=2.0))
    engine.submit(ask("c", 20, seed=2))
    engine.step()
    now[0] = 3.0
    assert [(name, event.reason) for name, event in engine.step() if isinstance(event, Finished)] == [("b", "deadline")]
    now[0] = 6.0
    said = finish(engine)
    assert said["a"][-1].reason == "deadline" and said["a"][-1].usage.seconds == 6.0
    assert said["c"][-1].reason == "length" and said["c"][-1].usage.queue_seconds == 6.0


def test_requests_with_one_prompt_compute_it_once(runner):
    engine = engine_of(runner)
    many = [ask(f"r{i}", 300, Sampling(max_tokens=5, seed=i)) for i in range(16)]
    said = finish(engine, *many)
    assert engine.stats().prompt_tokens == 300
    for request in many:
        alone = finish(engine_of(runner), request)[request.id]
        assert alone[1:-1] == said[request.id][1:-1]
    assert said["r3"][-1].usage.cached_tokens == 300 and said["r0"][-1].usage.cached_tokens == 0


def test_a_later_request_joins_a_prompt_that_is_on_its_way(runner):
    engine = engine_of(runner, step_tokens=64)
    engine.submit(ask("a", 300))
    engine.step()
    engine.submit(ask("b", 300, Sampling(max_tokens=3, seed=1)))
    engine.cancel("a")  # the one that waits for it takes its place, and goes on where it was
    said = finish(engine)
    assert said["b"][-1].reason == "length" and said["b"][-1].usage.cached_tokens == 64
    assert said["b"][1:-1] == finish(engine_of(runner), ask("b", 300, Sampling(max_tokens=3, seed=1)))["b"][1:-1]


def test_followers_may_be_cancelled_and_wait_where_there_is_no_room(runner):
    engine = engine_of(runner, max_sequences=2)
    many = [ask(f"r{i}", 100, Sampling(max_tokens=5, seed=i)) for i in range(5)]
    engine.submit_many(many)
    engine.cancel("r1")
    said = finish(engine)
    assert said["r1"][-1].reason == "cancelled"
    for i in (0, 2, 3, 4):
        assert said[f"r{i}"][1:-1] == finish(engine_of(runner), many[i])[f"r{i}"][1:-1]


def test_prompt_log_probabilities(network, runner):
    request = ask("p", 150, Sampling(max_tokens=1), prompt_logprobs=True)
    exact = torch.log_softmax(network(torch.tensor([request.prompt])).detach()[0], -1)
    wanted = exact[torch.arange(149), torch.tensor(request.prompt[1:])]
    engine = engine_of(runner, step_tokens=64)
    for _ in range(2):  # what is cached has no logits
        said = finish(engine, request)["p"][-1]
        assert torch.tensor(said.prompt_logprobs) == pytest.approx(wanted, abs=1e-4)
    one = finish(engine, ask("one", 1, Sampling(max_tokens=1), prompt_logprobs=True))["one"][-1]
    assert one.prompt_logprobs == ()
    assert finish(engine, ask("no", 5))["no"][-1].prompt_logprobs is None


def test_little_memory_puts_the_youngest_aside_and_changes_no_token(runner):
    memory = Memory(runner, 1 << 24)
    budget = 3 * memory.slot_bytes + 7 * memory.page_bytes
    many = [ask(f"r{i}", 60 + i, Sampling(max_tokens=80, seed=i, presence_penalty=0.5), seed=i) for i in range(4)]
    for cache in (True, False):
        engine = engine_of(runner, memory=budget, cache=cache)
        said = finish(engine, *many)
        assert engine.stats().preemptions > 0 and engine.cache.memory.live_bytes == 0
        for request in many:
            assert said[request.id][-1].reason == "length"
            alone = finish(engine_of(runner), request)[request.id]
            assert alone[1:-1] == said[request.id][1:-1]


def test_damaged_weights_end_a_request_with_an_error(network):
    broken = InferenceModel.from_transformer(network, "fp32")
    whole = broken.forward

    def forward(rows, pool, *, logits=True):
        outputs = whole(rows, pool, logits=logits)
        outputs.logits[0] = torch.nan
        return outputs

    broken.forward = forward
    said = finish(engine_of(broken), ask("a", 5), ask("b", 5, seed=1))
    assert said["a"][-1].reason == "error" and "not finite" in said["a"][-1].error and said["b"][-1].reason in ("error", "length")


def test_a_failed_step_can_be_told_to_all_and_the_engine_goes_on(runner):
    engine = engine_of(runner)
    engine.submit_many([ask("a", 100), ask("b", 100, GREEDY)])
    engine.step()
    assert [(name, event.reason, event.error) for name, event in engine.fail("why")] == [("a", "error", "why"), ("b", "error", "why")]
    assert engine.idle and engine.cache.memory.live_bytes == 0
    assert finish(engine, ask("c"))["c"][-1].reason == "length"


@pytest.mark.parametrize("seed", range(6))
def test_a_grammar_makes_a_random_model_speak_json(talker, tokenizer, seed):
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0,
              "maximum": 99}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}},
              "required": ["name", "age", "tags"], "additionalProperties": False}
    sampling = Sampling(max_tokens=2000, seed=seed, grammar=Grammar(kind="json_schema", text=json.dumps(schema)))
    said = finish(engine_of(talker, tokenizer=tokenizer), ask(sampling=sampling))["a"]
    out = [token for token in ids(said) if token not in tokenizer.stop_ids]
    value = json.loads(tokenizer.decode_bytes(out))
    assert said[-1].reason == "stop" and set(value) == {"name", "age", "tags"} and 0 <= value["age"] <= 99


def test_a_grammar_waits_for_the_end_of_thinking_and_regular_expressions_end(talker, tokenizer):
    engine = engine_of(talker, tokenizer=tokenizer)
    free = ids(finish(engine, ask(sampling=Sampling(max_tokens=40, seed=4)))["a"])
    after = tuple(free[10:12])
    begins = next(i for i in range(1, 40) if tuple(free[i - 1 : i + 1]) == after) + 1
    sampling = Sampling(max_tokens=40, seed=4, grammar=Grammar(kind="regex", text="(yes|no)!", after=after))
    said = finish(engine, ask(sampling=sampling))["a"]
    assert ids(said)[:begins] == free[:begins]
    assert tokenizer.decode_bytes(ids(said)[begins:]) in (b"yes!", b"no!") and said[-1].reason == "stop"


@pytest.mark.parametrize("grammar", [
    Grammar(kind="regex", text="a("), Grammar(kind="json_schema", text="{"), Grammar(kind="json_schema", text="[]"),
    Grammar(kind="json_schema", text='{"type": "objekt"}'), Grammar(kind="regex", text=r"a[^\s\S]"),
    Grammar(kind="json_schema", text="false"), Grammar(kind="json_schema", text='{"type": "integer", "minimum": 2, "maximum": 1}'),
    Grammar(kind="regex", text="a" * (LONGEST + 1)), Grammar(kind="lark", text="start: unknown"),
])
def test_grammars_that_cannot_be_are_refused(talker, tokenizer, grammar):
    engine = engine_of(talker, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="'grammar'"):
        engine.submit(ask(sampling=Sampling(grammar=grammar)))
    assert engine.idle


def test_a_grammar_that_gives_up_is_an_error_and_not_the_end_of_an_answer(talker, tokenizer):
    class GivesUp:
        """A constraint that goes on for three tokens."""

        stop_ids, steps = frozenset({1}), 0

        def allowed(self):
            if self.steps == 3:
                raise ConfigError("the grammar cannot go on: enough")

        def add(self, token):
            self.steps += 1
            return False

    engine = engine_of(talker, tokenizer=tokenizer)
    engine.submit(ask(sampling=Sampling(max_tokens=40, grammar=Grammar(kind="regex", text="a+"))), GivesUp())
    said = finish(engine)["a"]
    assert len(ids(said)) == 3 and said[-1].reason == "error" and "the grammar cannot go on" in said[-1].error
