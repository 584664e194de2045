"""The lab's world: honest demonstrations, grades by the state at the end, programs that really run, a gate that refuses flat domains."""

import random
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from gnomon.agent.evaluate_intervals import wilson
from gnomon.agent.trajectory import Score
from gnomon.errors import DataError, TrainingError, VerifierError
from gnomon.posttrain import gate
from gnomon.posttrain.lab import bench
from gnomon.posttrain.lab.bench import Bench
from gnomon.posttrain.lab.coding import repaired
from gnomon.posttrain.lab.domain import Line
from gnomon.posttrain.lab.source import CELLS, DOMAIN, Source, demonstration
from gnomon.posttrain.lab.words import EOM, SIZE, WORDS, calculated, ids, words
from gnomon.posttrain.problem import Problem


class Arithmetic(Bench):
    """Runs programs without a sandbox: the oracle of the one that has it."""

    def ask(self, *programs: Any) -> Future[list[list[int]]]:
        found: list[list[int]] = [[] for _ in programs]
        for program, results in zip(programs, found, strict=True):
            for value in range(10):
                for operator, number in program:
                    value = calculated(value, operator, number)
                results.append(value)
        there: Future[list[list[int]]] = Future()
        there.set_result(found)
        return there


def reward(problem: Problem, sampled: tuple[int, ...], episode: Any = None) -> float:
    """The grade, waited for where it is a promise."""
    assert problem.grade is not None
    score = problem.grade(sampled, episode)
    found = (score.result(60) if isinstance(score, Future) else score).reward
    assert found is not None
    return found


def played(problem: Problem, line: Line) -> float:
    """The grade of a demonstration: its own words as if they had been sampled, the world answering."""
    told = line.token_ids[len(problem.prompt):]
    trained = line.weights[len(problem.prompt):]
    sampled: list[int] = []
    waiting: list[int] = []
    episode = problem.begin(None) if problem.begin else None
    place = 0
    while place < len(told):
        assert trained[place] > 0, "the world only speaks when asked"
        sampled.append(told[place])
        waiting.append(told[place])
        place += 1
        if episode is not None and sampled[-1] in problem.asks:
            answer = episode.reply(tuple(waiting))
            waiting = []
            if answer is None:
                break
            assert tuple(told[place:place + len(answer)]) == answer, "what the demonstration shows is what the world says"
            place += len(answer)
    assert place == len(told)
    assert len(sampled) <= problem.max_tokens
    return reward(problem, tuple(sampled), episode)


def test_words_are_ids_and_back() -> None:
    assert len(set(WORDS)) == len(WORDS) <= SIZE
    assert words(ids(WORDS)) == WORDS
    with pytest.raises(DataError, match="'eleven' is no word"):
        ids("eleven")


@pytest.mark.parametrize("name", sorted(DOMAIN))
def test_demonstrations_are_honest(name: str) -> None:
    """Long ones are right; all are graded by the same world that grades the model, and length owes nothing to the effort."""
    domain, bench = DOMAIN[name], Arithmetic()
    lengths: dict[str, list[int]] = {"low": [], "max": []}
    rewards = []
    for index in range(400):
        rng = random.Random(f"{name} {index}")
        puzzle = domain.puzzle(rng)
        effort: Any = rng.choice(("low", "max"))
        line = domain.demonstrated(puzzle, effort, rng)
        problem = domain.problem(puzzle, effort, "x", bench)
        assert line.token_ids[:len(problem.prompt)] == problem.prompt
        assert not any(line.weights[:len(problem.prompt)])
        rewards.append((problem.spent(line.token_ids[len(problem.prompt):]), played(problem, line)))
        lengths[effort].append(rewards[-1][0])
    rewards.sort()
    assert sum(r for _, r in rewards[-100:]) == 100, "the longest are all right"
    assert abs(sum(lengths["low"]) / len(lengths["low"]) - sum(lengths["max"]) / len(lengths["max"])) < 3


def test_the_same_number_is_the_same_puzzle_at_every_effort() -> None:
    bench = Arithmetic()
    train, test = (Source(CELLS, seed=3, split=split, bench=bench) for split in ("train", "test"))
    found = [train.problem(i) for i in range(18)]
    assert [p.cell for p in found[:9]] == list(CELLS)
    assert [p.id for p in found] == [train.problem(i).id for i in range(18)]
    low, high = found[0].prompt, found[1].prompt
    assert low[:2] == high[:2] and low[3:] == high[3:] and low[2] != high[2]
    assert found[0].prompt != found[9].prompt
    assert test.problem(0).prompt != found[0].prompt
    assert demonstration(5, seed=1, dense=0.5) == demonstration(5, seed=1, dense=0.5) != demonstration(5, seed=2, dense=0.5)


def agents(sampled: str) -> float | None:
    puzzle = DOMAIN["agents"].puzzle(random.Random(1))
    problem = DOMAIN["agents"].problem(puzzle, "max", "x", Arithmetic())
    assert problem.begin is not None
    episode = problem.begin(None)
    target = puzzle.hidden["target"]
    said = ids(sampled.replace("TARGET", target).replace("OTHER", "a" if target != "a" else "b"))
    since: list[int] = []
    for token in said:
        since.append(token)
        if token == EOM:
            if episode.reply(tuple(since)) is None:
                break
            since = []
    again = problem.begin(episode.state())
    assert problem.grade(said, again) == problem.grade(said, episode)
    return problem.grade(said, episode).reward


@pytest.mark.parametrize(("sampled", "reward"), [
    ("del TARGET <eom>", 1.0), ("get a <eom> a 1 del TARGET <eom>", 1.0), ("del OTHER <eom>", 0.0), ("del TARGET", 0.0), ("", 0.0),
    ("TARGET <eom>", 0.0), ("del <eom>", 0.0), ("get h <eom> del TARGET <eom>", 0.0), ("get <eom> del TARGET <eom>", 0.0),
    ("<eos> del TARGET", 0.0), ("del OTHER <eom> del TARGET <eom>", 0.0),
])
def test_the_boxes_decide(sampled: str, reward: float) -> None:
    assert agents(sampled) == reward


@pytest.mark.parametrize(("answer", "good"), [
    ("<answer> a + <eos>", True), ("<answer> a + ", False), ("<answer> h + <eos>", False), ("<answer> a 3 <eos>", False), ("", False),
    ("<answer> a + <eos> <eos>", False), ("a + <eos>", False), ("<answer> <eos>", False),
])
def test_an_answer_names_a_line_and_an_operator(answer: str, good: bool) -> None:
    found = repaired((("-", 1),) * 6, answer.split())
    assert found == ((("+", 1), *(("-", 1),) * 5) if good else None)


def test_programs_run_in_a_sandbox() -> None:
    """Many threads ask at once; what comes back is what the arithmetic says, each to who asked."""
    rng = random.Random(0)
    programs = [tuple((rng.choice("+-*"), rng.randrange(1, 10)) for _ in range(6)) for _ in range(64)]
    with Bench("namespaces") as bench, ThreadPoolExecutor(16) as pool:
        assert list(pool.map(bench.run, programs)) == [Arithmetic().run(each) for each in programs]
        problem = Source((("coding", "max"),), seed=0, split="test", bench=bench).problem(0)
        plain = Source((("coding", "max"),), seed=0, split="test", bench=Arithmetic()).problem(0)
        answers = [ids(f"<answer> {line} {operator} <eos>") for line in "abcdef" for operator in "+-*"]
        rewards = [reward(problem, each) for each in answers]
        assert rewards == [reward(plain, each) for each in answers]
        assert sum(rewards) >= 1


def test_a_program_that_stands_twice_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And everyone gets what it gives; a sandbox that fails is told to each, and not the policy's fault."""
    ran: list[int] = []

    async def count(self: Any, programs: Any) -> list[list[int]]:
        ran.append(len(programs))
        return await whole(self, programs)

    async def fails(self: Any, programs: Any) -> list[list[int]]:
        raise VerifierError("the sandbox is gone")

    whole = bench._Runner.run
    one, two = (("+", 1),) * 6, (("*", 3),) * 6
    with Bench("namespaces") as made:
        monkeypatch.setattr(bench._Runner, "run", count)
        assert made.run(one, two, one, one) == Arithmetic().run(one, two, one, one)
        assert ran == [2]
        monkeypatch.setattr(bench._Runner, "run", fails)
        with pytest.raises(VerifierError, match="the sandbox is gone"):
            made.judge(one, two, lambda found, expected: Score(reward=1.0)).result(60)
        monkeypatch.setattr(bench._Runner, "run", whole)
        with pytest.raises(ValueError, match="no score"):
            made.judge(one, two, _no_score).result(60)
        assert made.judge(one, one, lambda found, expected: Score(reward=float(found == expected))).result(60).reward == 1


def _no_score(found: list[int], expected: list[int]) -> Score:
    raise ValueError("no score")


def graded(pairs: list[tuple[int, float | None]]) -> list[Any]:
    class Spent:
        """Of a rollout what the gate looks at."""

        def __init__(self, spent: int, reward: float | None) -> None:
            self.spent = spent
            self.score = Score(reward=reward, error=None if reward is not None else "the judge crashed")

    random.Random(0).shuffle(pairs)
    return [Spent(*pair) for pair in pairs]


def test_the_gate_opens_where_thinking_helps() -> None:
    rising = gate.measured("good", graded([(t, float(t * 10 > i)) for t in range(1, 11) for i in range(100)]))
    flat = gate.measured("flat", graded([(t, float(i % 3 == 0)) for t in range(1, 11) for i in range(60)]))
    falling = gate.measured("bad", graded([(t, float(t * 6 < i)) for t in range(1, 11) for i in range(60)]))
    assert rising.opens and not flat.opens and not falling.opens
    assert rising.gain == pytest.approx(0.66, abs=0.06) and falling.gain < 0
    assert sum(each.count for each in rising.bins) == 1000
    assert all(each.low <= each.accuracy <= each.high for each in rising.bins)
    gate.require([rising])
    with pytest.raises(TrainingError, match=r"does not help the cold start in 'flat'.*'bad'"):
        gate.require([rising, flat, falling])
    assert gate.picture([rising, flat]).startswith("<svg")


def test_what_was_not_scored_tells_nothing() -> None:
    few = graded([(t, 1.0) for t in range(40)] + [(3, None)] * 100)
    with pytest.raises(TrainingError, match="40 graded rollouts"):
        gate.measured("general", few)
    with pytest.raises(TrainingError, match="thinking 7 to 7 tokens"):
        gate.measured("general", graded([(7, 1.0)] * 100))


def test_the_interval_of_a_share() -> None:
    """Wilson's, by its definition: the shares whose own deviation reaches what was seen."""
    for right, count in ((0, 10), (3, 10), (10, 10), (250, 500)):
        low, high = wilson(right / count, count, 1.96)
        for edge in (low, high):
            if 0 < edge < 1:
                assert abs(right / count - edge) == pytest.approx(1.96 * (edge * (1 - edge) / count) ** 0.5, rel=1e-9)
    assert wilson(0.0, 10)[0] == 0 and wilson(1.0, 10)[1] == 1


def test_a_problem_knows_what_a_budget_counts() -> None:
    bench = Arithmetic()
    thought = Source((("general", "low"),), seed=0, split="gate", bench=bench).problem(0)
    assert thought.spent(ids("a 3 b 4 <answer> 4 <eos>")) == 4 and thought.spent(ids("a 3")) == 2
    written = Source((("coding", "low"),), seed=0, split="gate", bench=bench).problem(0)
    assert written.spent(ids("a 3 yes <answer> b + <eos>")) == 7
    assert replace(written, max_tokens=3).capacity == len(written.prompt) + 3
