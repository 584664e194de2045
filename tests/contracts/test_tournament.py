"""Groups without a grader: every pair is compared in both orders, what is too long loses unread, a judge that fails leaves no reward."""

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from gnomon.agent.policies.scripted import ScriptedPolicy, say
from gnomon.agent.trajectory import Score
from gnomon.data.messages import Conversation
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import ConfigError
from gnomon.parallel.mesh import Mesh
from gnomon.posttrain.partial import Group, Iteration
from gnomon.posttrain.problem import Problem
from gnomon.posttrain.rl import apart
from gnomon.posttrain.rollout import Rollout, chosen
from gnomon.posttrain.tournament import Tournament, TournamentConfig, answer, lengths

END, STOP = 5, 6
SETTINGS = TournamentConfig(judge={"kind": "scripted"}, sigma=2.0)


class Judge:
    """Gives an artefact as many points as the digit in it; `seen` are the pairs that it was shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def __call__(self, conversation: Conversation) -> Any:
        """The next step's answer."""
        shown = conversation.messages[1].text
        pair = tuple(part.split("---\n", 1)[1].split("\n---", 1)[0] for part in shown.split("--- artefact ")[1:])
        step = sum(message.role == "assistant" for message in conversation.messages)
        if step == 0:
            self.seen.append(pair)  # type: ignore[arg-type]
            return say(json.dumps({"A": "read", "B": "read"}))
        if step == 1:
            return say(json.dumps([{"criterion": "worth", "weight": 2}]))
        a, b = (next((int(c) for c in text if c.isdigit()), 0) for text in pair)
        return say(json.dumps([{"criterion": "worth", "A": a, "B": b}]))


def group(vocabulary: Tokenizer, *answers: str, grade: Any = None) -> Group:
    """Answers to one problem, each after a thought."""
    problem = Problem(id="essay", prompt=tuple(vocabulary.encode("Write.")), domain="essays", effort="max", grade=grade, think_end=END,
                      stop_ids=frozenset({STOP}), max_tokens=500)
    unjudged = Score(reward=None, error="nobody")
    made = []
    for member, text in enumerate(answers):
        ids = (40, 41, END, *vocabulary.encode(text), STOP)
        made.append(Rollout(problem=problem, group=0, member=member, seed=member, spans=(chosen(ids, (-1.0,) * len(ids), 0),), end="stop",
                            score=unjudged))
    return Group(number=0, problem=problem, rollouts=tuple(made))


def rewards(found: Group) -> list[float | None]:
    """Of each member."""
    return [each.score.reward if each.score else None for each in found.rollouts]


def test_the_share_of_comparisons_that_an_answer_won(vocabulary: Tokenizer) -> None:
    """Better than all 1, than none 0, a draw half; a group that a program grades is left alone."""
    judge = Judge()
    graded = group(vocabulary, "worth 1", grade=lambda sampled, world: Score(reward=1.0))
    groups = [group(vocabulary, "worth 9", "worth 2", "worth 2"), graded]
    found = Tournament(SETTINGS, vocabulary, policy=ScriptedPolicy(judge)).judged(groups)
    assert rewards(found[0]) == [1.0, 0.25, 0.25] and found[1] is graded
    assert len(judge.seen) == 6 and {tuple(sorted(pair)) for pair in judge.seen} == {("worth 2", "worth 9"), ("worth 2", "worth 2")}


def test_what_is_too_long_or_empty_loses_unread(vocabulary: Tokenizer) -> None:
    """By ids of the answer, not of the thinking, against sigma times the cold start's; two that are too long both lose."""
    cold = group(vocabulary, "worth 5", "worth 5")
    l0 = lengths(cold.rollouts, "cold")
    assert l0.tokens == {("essays", ""): float(len(vocabulary.encode("worth 5")))}
    assert answer(cold.rollouts[0]) == tuple(vocabulary.encode("worth 5"))
    judge = Judge()
    long = "worth 9 " * 5
    found = Tournament(SETTINGS, vocabulary, l0, policy=ScriptedPolicy(judge)).judged([group(vocabulary, long, long, "worth 1", " ")])[0]
    assert rewards(found) == [0.0, 0.0, 1.0, 0.0] and not judge.seen
    assert [each.score.metrics["too_long"] for each in found.rollouts if each.score] == [1.0, 1.0, 0.0, 1.0]
    thoughtless = replace(cold.rollouts[0], spans=(chosen((40, 41), (-1.0, -1.0), 0),))
    assert answer(thoughtless) == ()


def test_a_judge_that_fails_leaves_its_group_without_rewards(vocabulary: Tokenizer) -> None:
    policy = ScriptedPolicy(lambda conversation: say("I like both."))
    found = Tournament(SETTINGS, vocabulary, policy=policy).judged([group(vocabulary, "worth 1", "worth 2")])[0]
    assert rewards(found) == [None, None]
    assert all(each.score is not None and "does not keep to the form" in (each.score.error or "") for each in found.rollouts)


def test_it_is_off_unless_asked_for(vocabulary: Tokenizer) -> None:
    """A problem that nobody can judge stops the run with its name; settings that cannot be are refused."""
    made = Iteration(groups=(group(vocabulary, "worth 1", "worth 2"),), carried=0, dropped=0, failed=0, sampled_tokens=0, steps=0)
    with pytest.raises(ConfigError, match="problem essay has no grader"):
        apart(made, None)
    learnt, kept = apart(made, Tournament(SETTINGS, vocabulary, policy=ScriptedPolicy(Judge())))
    assert rewards(learnt.groups[0]) == [0.0, 1.0] and not kept.groups
    for wrong in ({"judge": {}}, {"sigma": 0.0}, {"at_once": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            replace(SETTINGS, **wrong)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks(Mesh):
    """Two of them, one after the other: the second one hears what the first one brought."""

    said: list[Any]

    def gather(self, own: Any) -> list[Any]:
        """Of both."""
        self.said.append(own)
        return [self.said[0], own]


def test_one_rank_asks_and_all_hear(vocabulary: Tokenizer) -> None:
    """The second rank has the first one's rewards, and asks nobody."""
    judge, said, groups = Judge(), list[Any](), [group(vocabulary, "worth 9", "worth 2", "worth 2")]
    first = Tournament(SETTINGS, vocabulary, policy=ScriptedPolicy(judge), mesh=Ranks(rank=0, world=2, said=said)).judged(groups)
    asked = len(judge.seen)
    second = Tournament(SETTINGS, vocabulary, policy=ScriptedPolicy(judge), mesh=Ranks(rank=1, world=2, said=said)).judged(groups)
    assert rewards(first[0]) == rewards(second[0]) == [1.0, 0.25, 0.25] and len(judge.seen) == asked and said[1] == []
