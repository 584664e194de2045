"""Verifiers beyond the first: budgets, pages, speed beside a reference, a judge with a rubric, and the public check that has a price."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sandbox_backends import namespaces

from gnomon.agent.diagnosis import Diagnosis
from gnomon.agent.policies.scripted import ScriptedPolicy
from gnomon.agent.rubric_judge import compare, tournament
from gnomon.agent.solution import Solution
from gnomon.agent.task import Check, Task
from gnomon.agent.trajectory import Score, Span, Trajectory, Turn
from gnomon.agent.validate import validate
from gnomon.agent.verifier import judge, opened
from gnomon.agent.verifiers import page, performance
from gnomon.agent.verifiers.page import parsed, selected
from gnomon.data.messages import Conversation, Message, Text
from gnomon.errors import DataError, VerifierError
from gnomon.sandbox.sandbox import Command, Limits, Result


def attempt(text: str, tokens: int = 0, seconds: float | None = None, notes: dict[str, Any] | None = None) -> Trajectory:
    span = Span(token_ids=tuple(range(tokens)), logprobs=(-1.0,) * tokens, loss_mask=(True,) * tokens, policy_version=0)
    message = Message(role="assistant", content=(Text(text=text),))
    turn = Turn(messages=(message,), spans=(span,) if tokens else (), seconds=seconds, notes=notes or {})
    return Trajectory(id="t", task_id="t").appended(turn)


def judged(kind: str, settings: dict[str, Any], trajectory: Trajectory) -> Score:
    return asyncio.run(judge(Task(id="t", prompt="Say 4.", check=Check(kind=kind, settings=settings)), trajectory))


EXACT = {"kind": "exact", "settings": {"answer": "4"}}


@pytest.mark.parametrize(("settings", "trajectory", "reward"), [
    ({"tokens": 10}, attempt("4", 10), 1.0), ({"tokens": 10}, attempt("4", 11), -1.0), ({"tokens": 10}, attempt("5", 10), 0.0),
    ({"tokens": 10}, attempt("5", 11), -1.0), ({"tokens": 10, "over": 0}, attempt("4", 11), 0.0),
    ({"tokens": 10}, attempt("4", notes={"spent": {"output_tokens": 10}}), 1.0),
    ({"tokens": 10}, attempt("4", notes={"spent": {"output_tokens": 11}}), -1.0), ({"turns": 1}, attempt("4"), 1.0),
    ({"turns": 1}, attempt("3").appended(attempt("4").turns[0]), -1.0), ({"seconds": 2.0}, attempt("4", seconds=1.5), 1.0),
    ({"seconds": 2.0}, attempt("4", seconds=2.5), -1.0), ({"tokens": 5}, attempt("4"), None), ({"seconds": 5.0}, attempt("4"), None),
])
def test_over_budget_replaces_the_reward_even_of_right_work(settings, trajectory, reward):
    score = judged("budget", {"check": EXACT, **settings}, trajectory)
    assert score.reward == reward and (score.error is None) == (reward is not None)


@pytest.mark.parametrize(("settings", "says"), [
    ({"tokens": 1}, "'check' is required"), ({"check": EXACT}, "set at least one"), ({"check": EXACT, "tokens": 0}, "'tokens'"),
    ({"check": {"kind": "exact"}, "tokens": 1}, "verifier 'exact'"), ({"check": EXACT, "tokens": 1, "token": 2}, "unknown field"),
])
def test_budgets_are_read_strictly(settings, says):
    with pytest.raises(DataError, match=says):
        opened(Check(kind="budget", settings=settings), "task t")


DOCUMENT = """<!doctype html><html><body><main id=m class="a b"><table><tr><th>Name<th>Sum</tr>
<tr><td>x</td><td data-k="v">4</td></tr></table><p>One <b>two</b><br>three</p></main><script>var p = "<p>no</p>"</script></body></html>"""


@pytest.mark.parametrize(("selector", "count"), [
    ("tr", 2), ("table td", 2), ("main.a.b table", 1), ("#m p", 1), ("#n p", 0), ("td[data-k]", 1), ("td[data-k='v']", 1),
    ("td[data-k=w]", 0),
    ("p b", 1), ("table p", 0), ("p", 1), ("* b", 1), ("main main", 0), ("br", 1),
])
def test_selectors(selector, count):
    assert len(selected(parsed(DOCUMENT), selector)) == count


def test_text_of_elements_and_documents_that_are_damaged():
    [paragraph] = selected(parsed(DOCUMENT), "p")
    assert "One" in paragraph.text and "two" in paragraph.text and "no" not in parsed(DOCUMENT).text
    assert parsed("<div>" * 5000 + "x").text == "x" and parsed("</p></b><p") is not None


class Machine:
    """A machine whose programs are a function of the test; a copy of it, and a fresh one, are itself."""

    def __init__(self, program: Callable[[Command], Result], files: dict[str, bytes] | None = None) -> None:
        self.program, self.files = program, dict(files or {})

    async def exec(self, command: Command) -> Result:
        return self.program(command)

    async def read(self, path: str, max_bytes: int = 0) -> bytes:
        return self.files[path]

    async def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        self.files[path] = data

    async def remove(self, path: str) -> None:
        del self.files[path]


def looked(verifier: Any, machine: Machine) -> Score:
    box: Any = machine
    return asyncio.run(verifier.score(Task(id="t", prompt="", image="host", check=Check(kind="x")), attempt(""), box))


def done(out: str = "", code: int = 0, err: str = "", seconds: float = 1.0) -> Result:
    return Result(code=code, stdout=out.encode(), stderr=err.encode(), seconds=seconds)


def test_a_page_is_built_opened_and_looked_at():
    elements = [{"selector": "tr", "least": 2, "most": 2}, {"selector": "td", "text": "4"}]
    table = {"path": "/app/index.html", "build": ["make"], "elements": elements}

    def programs(command: Command) -> Result:
        return done() if command.argv[0] in ("make", "/bin/sh") else done(DOCUMENT)

    site = {"/app/index.html": DOCUMENT.encode()}
    assert looked(page.Verifier(table), Machine(programs, site)).reward == 1.0
    fails = Machine(lambda command: done(code=1 if command.argv[0] == "make" else 0, out=DOCUMENT), site)
    assert looked(page.Verifier(table), fails).reward == 0.0
    error = 'x:INFO:CONSOLE:1] "Uncaught ReferenceError: nope is not defined", source: file:///app/index.html (1)'
    broken = Machine(lambda command: done(DOCUMENT, err=error if "chrom" in command.argv[0] else ""), site)
    assert "nope is not defined" in looked(page.Verifier(table), broken).evidence[0]
    for text, reward in [("<tr></tr>", 0.0), (DOCUMENT.replace(">4<", ">5<"), 0.0)]:
        assert looked(page.Verifier(table), Machine(lambda command, text=text: done(text), site)).reward == reward
    crashed = Machine(lambda command: done(code=139 if "chrom" in command.argv[0] else 0), site)
    with pytest.raises(VerifierError, match="status 139"):
        looked(page.Verifier(table), crashed)
    with pytest.raises(VerifierError, match="has no browser"):
        looked(page.Verifier({**table, "build": []}), Machine(lambda command: done(code=1), site))
    for wrong, says in [({"path": "x"}, "'path' is absolute"), ({**table, "elements": [{"selector": "a > b"}]}, "selector"),
                        ({"path": "/x"}, "'elements' or 'expressions'")]:
        with pytest.raises(DataError, match=says):
            page.Verifier(wrong)


CASES = [{"stdin": str(n), "stdout": f"{n}.5 x"} for n in range(4)]
FAST = {"argv": ["./mine"], "reference": {"argv": ["./theirs"], "files": {"/judge/theirs": "x"}}, "cases": CASES}


def timed(mine: float, says: Callable[[int, str], str] = lambda number, given: f"{given}.5 x") -> Machine:
    """Programs that take a time: the reference 1 s, the agent's another. `says` is what the agent's prints to its n-th input."""
    count = iter(range(100))

    def run(command: Command) -> Result:
        given = (command.stdin or b"").decode()
        return done(f"{given}.5 x") if command.argv == ("./theirs",) else done(says(next(count), given), seconds=mine)

    return Machine(run)


@pytest.mark.parametrize(("machine", "reward"), [
    (timed(1.0), 0.5), (timed(0.5), 1.0), (timed(0.1), 1.0), (timed(2.0), 0.25),
    (timed(0.01, lambda number, given: "0.5 x"), 0.0),  # the first answer again, kept from the first run
    (timed(0.01, lambda number, given: f"{given}.5001 x"), 0.0),  # rougher numbers
    (timed(0.01, lambda number, given: f"{given}.5 x" if number < 3 else ""), 0.0),
    (timed(0.01, lambda number, given: "nan x"), 0.0),
])
def test_speed_counts_only_for_right_answers(machine, reward):
    assert looked(performance.Verifier(FAST), machine).reward == pytest.approx(reward)


def test_the_reference_is_gone_before_the_agents_program_runs():
    order = []

    def run(command: Command) -> Result:
        order.append((command.argv[0], "/judge/theirs" in machine.files))
        return done(f"{(command.stdin or b'').decode()}.5 x")

    machine = Machine(run)
    assert looked(performance.Verifier(FAST), machine).reward == pytest.approx(0.5)
    assert order == [("./theirs", True)] * 4 + [("./mine", False)] * 4


def test_performance_in_detail():
    near = performance.Verifier({**FAST, "relative": 1e-2})
    assert looked(near, timed(1.0, lambda number, given: f"{given}.5001 x")).reward == pytest.approx(0.5)
    assert looked(near, timed(1.0, lambda number, given: f"{given}.5001 y")).reward == 0.0
    with pytest.raises(VerifierError, match="the reference fails case 0"):
        looked(performance.Verifier(FAST), Machine(lambda command: done("wrong")))
    for change, says in [({"cases": CASES[:2]}, "at least 3"), ({"cases": [CASES[0]] * 3}, "an input of its own"), ({"best": 1}, "'best'"),
                         ({"argv": []}, "argv"), ({"reference": {"argv": ["x"], "more": 1}}, "more")]:
        with pytest.raises(DataError, match=says):
            performance.Verifier({**FAST, **change})


def judging(better: str) -> Callable[[Conversation], str]:
    """A judge who prefers the artefact that has a word, and who keeps to the form."""
    def reply(conversation: Conversation) -> str:
        step = conversation.messages[-1].text
        artefacts = next(m.text for m in conversation.messages if "Step 1" in m.text).split("--- artefact B")
        if "Step 1" in step:
            return '{"A": "a text", "B": "another"}'
        if "Step 2" in step:
            return '```json\n[{"criterion": "right", "weight": 3}, {"criterion": "clear", "weight": 1}]\n```'
        points = [9 if better in text else 4 for text in artefacts]
        return json.dumps([{"criterion": name, "A": points[0], "B": points[1]} for name in ("right", "clear")])
    return reply


def test_the_judge_reads_then_writes_a_rubric_then_scores():
    policy = ScriptedPolicy(judging("good"))
    found = asyncio.run(compare(policy, "task", ("bad", "good")))
    assert found.winner == 1 and (found.first, found.second) == (0.4, 0.9) and found.pad["right"] == (3.0, 4.0, 9.0)
    assert asyncio.run(compare(policy, "task", ("good", "very good"))).winner is None
    assert asyncio.run(tournament(policy, "task", ["bad", "good", "bad too"])) == [0.25, 1.0, 0.25]


def test_what_is_too_long_loses_unread():
    unasked = ScriptedPolicy([])
    assert asyncio.run(compare(unasked, "t", ("good " * 50, "bad"), longest=100)).winner == 1
    assert asyncio.run(compare(unasked, "t", ("good " * 50, "bad " * 60), longest=100)).winner is None


@pytest.mark.parametrize("replies", [
    ["A is better"] * 9, ['{"A": "x", "B": "y"}', "[]", "[]"], ['{"A": "x", "B": "y"}', '[{"criterion": "c", "weight": NaN}]'] + ["no"] * 3,
    ['{"A": "x", "B": "y"}', '[{"criterion": "c", "weight": 1}]', *['[{"criterion": "c", "A": 11, "B": 0}]'] * 2],
    ['{"A": "x", "B": "y"}', '[{"criterion": "c", "weight": 1}]', *['[{"criterion": "d", "A": 1, "B": 0}]'] * 2],
])
def test_a_judge_out_of_form_is_an_error_and_no_score(replies):
    with pytest.raises(VerifierError, match="does not keep to the form"):
        asyncio.run(compare(ScriptedPolicy(replies), "t", ("a", "b")))


def test_an_answer_out_of_form_may_be_mended_once():
    replies = ["hm", '{"A": "x", "B": "y"}', '[{"criterion": "c", "weight": 1}]', '[{"criterion": "c", "A": 1, "B": 0}]']
    assert asyncio.run(compare(ScriptedPolicy(replies), "t", ("a", "b"))).winner == 0


def test_the_rubric_verifier_compares_both_ways():
    step = ['{"A": "x", "B": "y"}', '[{"criterion": "c", "weight": 1}]']
    first = [*step, '[{"criterion": "c", "A": 9, "B": 1}]']
    settings = {"policy": {"kind": "scripted", "replies": first}, "baseline": "theirs"}
    assert judged("rubric", settings, attempt("mine")).reward == 0.5  # who always says A has no opinion
    assert judged("rubric", {**settings, "longest": 4}, attempt("mine")).reward == 1.0  # the baseline is too long
    assert judged("rubric", settings, attempt(" ")).reward == 0.0
    assert judged("rubric", {**settings, "policy": {"kind": "scripted", "replies": ["?"] * 9}}, attempt("mine")).reward is None
    with pytest.raises(DataError, match="'policy'"):
        opened(Check(kind="rubric", settings={"baseline": "x"}), "t")


def test_public_checks_are_few_have_a_price_and_do_not_decide():
    limited = Check(kind="limited", settings={"check": EXACT, "submissions": 2, "free": 1, "penalty": 0.25})
    task = Task(id="t", prompt="", check=Check(kind="exact", settings={"answer": "5"}), diagnosis=limited)
    diagnosis = Diagnosis(task)
    hidden = Score(reward=1.0)
    assert diagnosis.penalised(hidden) == hidden

    def submitted(text: str) -> str:
        return asyncio.run(diagnosis.submit(attempt(text), None))

    first = submitted("3")
    assert "Public check: 0" in first and "1 of 2 submissions left" in first and "lowers the reward by 0.25" in first
    assert diagnosis.penalised(hidden).reward == 1.0
    assert "Public check: 1" in submitted("4") and diagnosis.penalised(hidden).reward == 0.75
    assert "All 2 submissions are used" in submitted("4") and diagnosis.used == 2
    assert diagnosis.penalised(Score(reward=0.0)).reward == 0.0 and diagnosis.penalised(Score(reward=-1.0)).reward == -1.0
    assert diagnosis.penalised(Score(reward=None, error="x")).reward is None
    assert diagnosis.penalised(hidden).metrics == {"submissions": 2.0, "before_penalty": 1.0}


def test_submissions_beside_each_other_are_no_more_than_allowed():
    limited = Check(kind="limited", settings={"check": EXACT, "submissions": 2})
    diagnosis = Diagnosis(Task(id="t", prompt="", check=Check(kind="exact"), diagnosis=limited))

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*[diagnosis.submit(attempt("4"), None) for _ in range(5)])

    told = asyncio.run(all_at_once())
    assert sum(text.startswith("Public check") for text in told) == 2 and diagnosis.used == 2


def test_a_public_check_that_fails_costs_nothing():
    broken = Task(id="t", prompt="", check=Check(kind="exact"), diagnosis=Check(kind="files", settings={"files": {"/a": {"number": 1}}}))
    diagnosis = Diagnosis(broken)
    assert "did not count" in asyncio.run(diagnosis.submit(attempt("x"), None)) and diagnosis.used == 0
    for wrong in (None, Check(kind="limited", settings={"check": EXACT, "penalty": 2}), Check(kind="exact"), Check(kind="limited")):
        with pytest.raises(DataError, match="diagnosis"):
            Diagnosis(Task(id="t", prompt="", check=Check(kind="exact"), diagnosis=wrong))


GOOD = """<h1>Sums</h1><input id=a><button id=go>Add</button><p id=sum></p><script>
const at = name => document.getElementById(name)
at('go').onclick = () => { at('sum').textContent = Number(at('a').value) + 1 }
</script>"""


@pytest.mark.slow
def test_a_page_in_a_real_browser():
    if not any(Path(path).exists() for path in page.BROWSERS):
        pytest.skip(f"no browser among {', '.join(page.BROWSERS)}")
    press = ("(() => { document.getElementById('a').value = '41'; document.getElementById('go').click(); "
             "return document.getElementById('sum').textContent === '42' })()")
    settings = {"path": "/app/index.html", "elements": [{"selector": "h1", "text": "sums"}, {"selector": "button#go", "most": 1}],
                "expressions": [press]}
    task = Task(id="page", prompt="", image="host", limits=Limits(memory_bytes=1 << 30, processes=512), workdir="/app",
                check=Check(kind="page", settings=settings), solution=Solution(files={"/app/index.html": GOOD.encode()}))

    async def main() -> Sequence[Any]:
        async with namespaces() as backend:
            lying = task.to_json()
            lying["solution"] = {"files": {"/app/index.html": GOOD.replace("+ 1", "+ 2")}}
            return [await validate(task, backend), await validate(Task.from_json(lying), backend)]

    right, wrong = asyncio.run(asyncio.wait_for(main(), 500))
    assert right.holds, right
    assert wrong.solved is not None and wrong.solved.reward == 0.0 and "is not true" in str(wrong.reason), wrong
