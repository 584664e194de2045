"""Many attempts: bounded, resumed, counted as they should be, written down, and shown as text whatever they say."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gnomon import config
from gnomon.agent import evaluate_page, evaluate_serving
from gnomon.agent.evaluate import Entrants, Evaluation, Planned, plan, slug
from gnomon.agent.evaluate_assembly import entrants
from gnomon.agent.evaluate_progress import Display
from gnomon.agent.evaluate_recipe import EvalRecipe, load
from gnomon.agent.evaluate_results import Column, Results, Row, row, summary
from gnomon.agent.evaluate_serving import overrides
from gnomon.agent.evaluate_table import show
from gnomon.agent.policies.scripted import ScriptedPolicy
from gnomon.agent.task import Check, Step, Task
from gnomon.agent.trajectory import Score, Span, StopReason, Trajectory, Turn
from gnomon.data.messages import Conversation, Image, Message, Text, ToolCall
from gnomon.data.tokenizer import train_tokenizer
from gnomon.errors import ConfigError, DataError, GnomonError, PolicyError, Unsupported

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
TASKS = tuple(Task(id=f"sum-{i}", prompt=f"What is {i} and {i}?", check=Check(kind="numeric", settings={"answer": 2 * i}))
              for i in range(4))


def said(role: str, text: str, **more: Any) -> Message:
    return Message(role=role, content=(Text(text=text),), **more)  # type: ignore[arg-type]


class Asks:
    """A harness that asks once, counts who is at it, and does what a test wants first."""

    name = "asks"

    def __init__(self) -> None:
        self.attempts: Counter[str] = Counter()
        self.now = self.most = 0
        self.first: Any = None

    async def run(self, task: Task, model: Any, box: Any, *, effort: str | None = None) -> StopReason:
        self.attempts[task.id] += 1
        self.now, self.most = self.now + 1, max(self.most, self.now + 1)
        try:
            if self.first is not None:
                await self.first(task)
            await asyncio.sleep(0)
            await model.complete(Conversation(messages=(said("user", task.prompt),)))
        finally:
            self.now -= 1
        return "finished"


def adds(conversation: Conversation) -> str:
    """Right for all sums but that of 3 and 3."""
    number = int(conversation.messages[-1].text.split()[2])
    return str(2 * number if number != 3 else 7)


class Notes:
    """A watch that remembers."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.ended: list[Row | None] = []
        self.kept = 0

    def begins(self, planned: Sequence[Planned], finished: Sequence[Row]) -> None:
        self.kept = len(finished)

    def attempt_begins(self, planned: Planned) -> None:
        pass

    def attempt_ends(self, planned: Planned, row: Row | None) -> None:
        self.ended.append(row)

    def notice(self, text: str) -> None:
        self.notices.append(text)


def recipe(folder: Path, **more: Any) -> EvalRecipe:
    return config.from_dict(EvalRecipe, {"folder": str(folder), "tasks": [{"kind": "jsonl"}], "policies": {"adds": {}},
                                         "harnesses": ["asks"], **more})


def entry(harness: Any, policy: Any = None, tasks: Sequence[Task] = TASKS, **more: Any) -> Entrants:
    return Entrants(tasks=tasks, policies={"adds": policy or ScriptedPolicy(adds)}, harnesses={"asks": harness}, **more)


def evaluated(settings: EvalRecipe, opened: Entrants) -> tuple[Results, Notes]:
    watch = Notes()
    return asyncio.run(Evaluation(settings, opened, watch).run()), watch


def test_tasks_by_columns_by_samples(tmp_path: Path) -> None:
    policies = {"a": ScriptedPolicy(adds), "b": ScriptedPolicy(adds)}
    opened = Entrants(tasks=TASKS[:2], policies=policies, harnesses={"h": Asks(), "k": Asks()})
    made = plan(recipe(tmp_path, samples=2, efforts=["low", "max"]), opened)
    assert len(made) == len({each.path for each in made}) == len({each.page for each in made}) == 2 * 2 * 2 * 2 * 2
    assert {each.rollout.task.id for each in made[:8]} == {"sum-0"}
    assert [each.sample for each in made] == [0] * 16 + [1] * 16
    assert made[0].rollout.effort == "low"
    assert plan(recipe(tmp_path), opened)[0].rollout.effort is None


def test_an_evaluation(tmp_path: Path) -> None:
    harness = Asks()
    results, watch = evaluated(recipe(tmp_path, samples=3, concurrency=2), entry(harness))
    [column] = results.columns
    assert column.reward.mean == 0.75
    assert (column.scored, column.excluded, column.missing, column.some, column.every) == (12, 0, 0, 0.75, 0.75)
    assert column.cost.turns == 1.0
    assert harness.most == 2
    assert len(watch.ended) == 12
    record = json.loads((tmp_path / "eval.json").read_text())
    assert record["columns"][0]["reward"]["mean"] == 0.75
    assert [each["reward"] for each in record["attempts"] if each["task"] == "sum-3"] == [0.0] * 3
    for attempt in record["attempts"]:
        assert (tmp_path / attempt["path"]).is_file()
        assert (tmp_path / attempt["page"]).is_file()
    assert "sum-3" in (tmp_path / "index.html").read_text()


def test_the_same_again_attempts_nothing(tmp_path: Path) -> None:
    first, _ = evaluated(recipe(tmp_path), entry(Asks()))
    harness = Asks()
    second, watch = evaluated(recipe(tmp_path), entry(harness))
    assert not harness.attempts
    assert watch.kept == 4
    assert second == first
    more, _ = evaluated(recipe(tmp_path, samples=2), entry(harness))
    assert harness.attempts == Counter({task.id: 1 for task in TASKS})
    assert len(more.rows) == 8


def test_what_has_changed_begins_anew(tmp_path: Path) -> None:
    evaluated(recipe(tmp_path), entry(Asks()))
    harness = Asks()
    changed = (replace(TASKS[0], prompt="What is 1 and 1?"), *TASKS[1:])
    results, watch = evaluated(recipe(tmp_path), entry(harness, tasks=changed))
    assert harness.attempts == Counter({"sum-0": 1})
    assert results.rows[0].reward == 0.0
    assert "1 attempts begin anew" in watch.notices[0]
    again = Asks()
    evaluated(recipe(tmp_path), entry(again, tasks=changed, made_of={"adds": {"settings": "others"}}))
    assert sum(again.attempts.values()) == 4


def test_failures_are_tried_again_at_once_and_by_the_next_run(tmp_path: Path) -> None:
    harness = Asks()

    async def fails_once(task: Task) -> None:
        if task.id == "sum-1" and harness.attempts[task.id] == 1:
            raise RuntimeError("hiccup")
        if task.id == "sum-2":
            raise RuntimeError("always")

    harness.first = fails_once
    results, _ = evaluated(recipe(tmp_path), entry(harness))
    assert harness.attempts["sum-1"] == 2
    [column] = results.columns
    assert (column.scored, column.excluded) == (3, 1)
    assert column.errors == {"RuntimeError: always": 1}
    assert column.reward.mean == pytest.approx(2 / 3)  # of the three that were scored
    assert column.reward.tasks == 3
    harness.first = None
    results, watch = evaluated(recipe(tmp_path), entry(harness))
    assert watch.kept == 3
    assert results.columns[0].reward.mean == 0.75


class Dead:
    """A policy that nobody reaches."""

    name = "dead"

    def __init__(self) -> None:
        self.asked = 0

    async def complete(self, session: str, conversation: Conversation, sampling: Any) -> Any:
        self.asked += 1
        raise PolicyError("nobody answers at http://127.0.0.1:9")

    async def close(self, session: str) -> None:
        pass


def test_a_dead_endpoint_is_given_up_and_others_go_on(tmp_path: Path) -> None:
    dead = Dead()
    opened = Entrants(tasks=TASKS, policies={"dead": dead, "adds": ScriptedPolicy(adds)}, harnesses={"asks": Asks()})
    settings = recipe(tmp_path, samples=5, concurrency=1, give_up_after=3, retries=0)
    results, watch = evaluated(settings, opened)
    assert dead.asked == 3
    first, second = results.columns
    assert (first.scored, first.excluded, first.missing) == (0, 3, 17)
    assert first.reward.mean is None
    assert second.scored == 20
    assert any("'dead' is given up after 3 failures" in text and "http://127.0.0.1:9" in text for text in watch.notices)
    assert json.loads((tmp_path / "eval.json").read_text())["columns"][0]["missing"] == 17


def test_what_stops_everything_leaves_results(tmp_path: Path) -> None:
    harness = Asks()

    async def full(task: Task) -> None:
        if task.id == "sum-2":
            raise OSError(28, "No space left on device")

    harness.first = full
    with pytest.raises(OSError, match="No space"):
        evaluated(recipe(tmp_path, concurrency=1), entry(harness))
    assert len(json.loads((tmp_path / "eval.json").read_text())["attempts"]) == 2
    harness.first = None
    results, watch = evaluated(recipe(tmp_path), entry(harness))
    assert (watch.kept, len(results.rows)) == (2, 4)


def test_one_evaluation_in_a_folder(tmp_path: Path) -> None:
    harness = Asks()

    async def meanwhile(task: Task) -> None:
        if task.id == "sum-0":
            with pytest.raises(ConfigError, match="another evaluation runs in"):
                await Evaluation(recipe(tmp_path), entry(Asks()), Notes()).run()

    harness.first = meanwhile
    assert len(evaluated(recipe(tmp_path), entry(harness))[0].rows) == 4


def test_figures_of_an_attempt() -> None:
    turn = Turn(messages=(said("assistant", "x"),), spans=(Span(token_ids=(1, 2)), Span(token_ids=(3,), policy_version=0)), seconds=1.5,
                notes={"spent": {"prompt_tokens": 7, "cached_tokens": 3, "output_tokens": 2, "dollars": 0.5}})
    trajectory = Trajectory(id="a", task_id="t", turns=(turn, turn), score=Score(reward=0.5, metrics={"m": 1.0}), stop_reason="budget",
                            seconds={"agent": 4.0, "judge": 1.0})
    found = row(trajectory, Column(policy="p", harness="h"), 1, "path")
    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens, found.dollars) == (14, 6, 4, 1.0)
    assert (found.seconds, found.model_seconds, found.turns, found.reward, found.stop_reason) == (5.0, 3.0, 2, 0.5, "budget")
    silent = row(replace(trajectory, turns=(replace(turn, notes={}),)), Column(policy="p", harness="h"), 1, "path")
    assert silent.output_tokens == 1  # of a policy that says nothing about costs, the ids on record


def rows(column: Column, rewards: dict[str, list[float | None]]) -> list[Row]:
    return [Row(id=f"{task}{i}", column=column, task=task, sample=i + 1, path="", page=f"pages/{task}-{i}.html", reward=reward,
                error=None if reward is not None else "SandboxLost: <b>gone</b>", stop_reason="finished", output_tokens=100, seconds=2.0)
            for task, values in rewards.items() for i, reward in enumerate(values)]


def two_columns() -> Results:
    first, second = Column(policy="p", harness="h"), Column(policy="p", harness="k", effort="max")
    a = rows(first, {"x": [0.0, 1.0], "y": [0.0, 0.0], "z<script>": [1.0, None]})
    b = rows(second, {"x": [1.0, 1.0], "y": [1.0, 0.0], "z<script>": [1.0, 1.0]})
    tasks = ("x", "y", "z<script>")
    return Results(columns=(summary(first, a, tasks, 6), summary(second, b, tasks, 8)), rows=(*a, *b), tasks=tasks, planned=14,
                   notices=("a <b>notice</b>",))


def test_summaries_and_differences() -> None:
    results = two_columns()
    first, second = results.columns
    assert first.reward.mean == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert (first.some, first.every, first.scored, first.excluded, first.missing) == (pytest.approx(2 / 3), pytest.approx(1 / 3), 5, 1, 0)
    assert second.missing == 2
    [(_, _, gain)] = results.differences
    assert gain.mean == pytest.approx((0.5 + 0.5 + 0.0) / 3)
    json.dumps(results.to_json(), allow_nan=False)


def test_the_table_in_a_terminal() -> None:
    from rich.console import Console

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(two_columns(), console)
    text = console.export_text()
    console.file.close()
    for part in ("p · k · max", "0.833", "6 of 8", "p · k · max against p · h: +0.333", "excluded, 1 of p · h: SandboxLost: <b>gone</b>"):
        assert part in text


def test_pages_show_text_as_text(tmp_path: Path) -> None:
    """Nothing that an agent, a task or a tool wrote becomes markup, not even what ends a script."""
    evil = "</script><script>alert(1)</script>\x00\u202e \ud800 ```\n<img src=x onerror=alert(2)>\n```"
    turns = (
        Turn(messages=(said("system", evil), said("user", evil), Message(role="assistant", reasoning=evil, tool_calls=(
            ToolCall(id=evil, name=evil, arguments=json.dumps({evil: evil, "n": [1]})), ToolCall(id="", name="x", arguments=evil))))),
        Turn(messages=(said("tool", evil * 3000, tool_call_id=evil, name=evil),), parent=0,
             notes={"tools": [{"name": evil}, 3], "spent": 3}),
        Turn(messages=(Message(role="user", content=(Image(data=b"<svg onload=alert(3)>", media_type="image/svg+xml"),
                                                     Image(data=b"png", media_type="image/png"))),), purpose="compaction", origin=1),
        Turn(messages=(said("assistant", "sub"),), purpose="agent", origin=2), Turn(messages=(said("assistant", "back"),), parent=0))
    task = Task(id="evil", prompt=evil, system=evil, image="host", files={"/<b>": evil.encode("utf-8", "replace")},
                check=Check(kind="exact", settings={"answer": evil}))
    score = Score(reward=None, error=evil, evidence=(evil,))
    trajectory = Trajectory(id="a", task_id="evil", turns=turns, score=score, stop_reason="failed")
    done = row(trajectory, Column(policy=evil, harness="h"), 1, "a.jsonl", "pages/h/evil.html")
    evaluate_page.write_attempt(tmp_path, Path(done.page), done, trajectory, task)
    results = Results(columns=(summary(done.column, [done], ("evil",), 1),), rows=(done,), tasks=("evil",), planned=1, notices=(evil,))
    evaluate_page.write(tmp_path, results)
    for path in ("pages/h/evil.html", "index.html", "pages.js"):
        text = (tmp_path / path).read_text(encoding="utf-8")
        assert text.count("<script") == (2 if path.endswith("html") else 0)
        assert "<img src=x" not in text
        assert "<svg onload" not in text
        assert not {"\x00", "\u202e"} & set(text) or path == "pages.js"
    page = (tmp_path / "pages/h/evil.html").read_text(encoding="utf-8")
    for part in ("Why it has no score", "compacted after turn 2", "called in turn 3", "Goes on from turn 1", "data:image/png;base64,"):
        assert part in page


def test_slugs_are_safe_and_differ() -> None:
    names = ["a", "a/b", "a b", "a-b", "..", "x" * 300, "x" * 301, "é", "A", "/"]
    made = [slug(name) for name in names]
    assert len(set(made)) == len(names)
    assert all(name and "/" not in name and len(name) < 100 and name not in (".", "..") for name in made)


@pytest.mark.parametrize(("change", "said"), [
    ({"samples": 0}, "'samples' is 0"), ({"concurrency": -1}, "'concurrency'"), ({"tasks": []}, "'tasks' names none"),
    ({"policies": {}}, "'policies' names none"), ({"efforts": ["hihg"]}, "did you mean 'high'"), ({"harnesses": ["a", "a"]}, "one twice"),
    ({"deadlines": {"agent": 0}}, "'agent' is 0"), ({"deadlines": {"install": -1}}, "'install' is -1"),
    ({"budget": {"turns": 0}}, "'turns' is 0"), ({"sample": 3}, "did you mean 'samples'")])
def test_what_a_recipe_can_have_wrong(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe(tmp_path, **change)


@pytest.mark.parametrize(("change", "error", "said"), [
    ({"tasks": [{"kind": "harbour"}]}, ConfigError, "did you mean 'harbor'"), ({"harnesses": ["minimall"]}, ConfigError, "did you mean"),
    ({"tasks": [{"kind": "jsonl", "path": "nowhere.jsonl"}]}, GnomonError, "nowhere.jsonl"),
    ({"policies": {"p": {"kind": "scriptd"}}}, ConfigError, "did you mean 'scripted'"),
    ({"policies": {"p": {"kind": "scripted", "settings": {"replys": []}}}}, GnomonError, "replies"),
    ({"policies": {"p": {"serve": "nowhere", "settings": {"url": "http://x"}}}}, ConfigError, "both 'serve' and 'settings.url'")])
def test_what_does_not_fit_is_said_before_anything_is_asked(tmp_path: Path, change: dict[str, Any], error: type, said: str) -> None:
    (tmp_path / "t.jsonl").write_text(TASKS[0].text + "\n")
    table = {"tasks": [{"kind": "jsonl", "path": str(tmp_path / "t.jsonl")}], "harnesses": ["minimal"],
             "policies": {"p": {"kind": "scripted", "settings": {"replies": ["2"]}}}, **change}

    async def opening() -> None:
        async with entrants(recipe(tmp_path, **table)):
            pass

    with pytest.raises(error, match=said):
        asyncio.run(opening())


def test_mixes_that_training_never_sees_can_be_attempted(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(TASKS[0].text + "\n")
    table = {"tasks": [{"kind": "jsonl", "path": str(tmp_path / "t.jsonl")}], "harnesses": ["bash"], "held_out_mixes": 2,
             "draw": {"harnesses": ["codex", "openclaw", "hermes"], "held_out": ["minimal"], "held_out_mixes": 0.5},
             "policies": {"p": {"kind": "scripted", "settings": {"replies": ["2"]}}}}

    async def opening() -> dict[str, str]:
        async with entrants(recipe(tmp_path, **table)) as opened:
            assert all(name in opened.made_of for name in opened.harnesses)
            return {name: each.name for name, each in opened.harnesses.items()}

    found = asyncio.run(opening())
    assert [*found] == [*found.values()] and {"bash", "minimal"} < set(found)
    assert len([name for name in found if name.startswith("mix-")]) == 2 and found == asyncio.run(opening())


@pytest.mark.parametrize(("task", "said"), [
    (replace(TASKS[0], diagnosis=Check(kind="limited")), "diagnosis"), (replace(TASKS[0], diagnosis=Check(kind="exakt")), "'exact'"),
    (replace(TASKS[0], check=Check(kind="exakt")), "did you mean 'exact'"), (replace(TASKS[0], check=Check(kind="exact")), "answer"),
    (replace(TASKS[0], check=Check(kind="steps"), steps=(Step(name="two", prompt="", check=Check(kind="exakt")),)), "step 'two'")])
def test_a_task_that_cannot_be_judged_is_refused_at_once(tmp_path: Path, task: Task, said: str) -> None:
    (tmp_path / "t.jsonl").write_text(task.text + "\n")
    table = {"tasks": [{"kind": "jsonl", "path": str(tmp_path / "t.jsonl")}], "harnesses": ["minimal"],
             "policies": {"p": {"kind": "scripted", "settings": {"replies": ["2"]}}}}

    async def opening() -> None:
        async with entrants(recipe(tmp_path, **table)):
            pass

    with pytest.raises((ConfigError, DataError, Unsupported), match=said):
        asyncio.run(opening())


class Thinks:
    """A policy that knows its efforts."""

    name = "thinks"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.efforts = settings["efforts"]


@pytest.mark.parametrize(("known", "asked", "said"), [
    (["low", "high", "max"], ["high", "medium"], "'efforts': 'medium': policy 'p' can be asked for none, low, high, max;"),
    ([], ["max"], "'max': policy 'p' can be asked for none;"), (["low", "high", "max"], ["none", "low"], None), (None, ["medium"], None)])
def test_an_effort_that_a_policy_does_not_know_is_refused_before_it_is_asked(
        tmp_path: Path, known: list[str] | None, asked: list[str], said: str | None) -> None:
    (tmp_path / "t.jsonl").write_text(TASKS[0].text + "\n")
    table = {"tasks": [{"kind": "jsonl", "path": str(tmp_path / "t.jsonl")}], "harnesses": ["minimal"], "efforts": asked,
             "policies": {"p": {"kind": f"{__name__}:Thinks", "settings": {"efforts": known}}}}

    async def opening() -> None:
        async with entrants(recipe(tmp_path, **table)):
            pass

    with pytest.raises(ConfigError, match=said) if said else contextlib.nullcontext():
        asyncio.run(opening())


def test_the_effort_of_a_run_is_looked_at_before_it_is_served(tmp_path: Path) -> None:
    pytest.importorskip("httpx", reason="a run that is served is reached over HTTP")
    train_tokenizer(["a few words"] * 4, 290).save(tmp_path / "run" / "tokenizer")
    table = {"tasks": [{"kind": "jsonl", "path": "nowhere.jsonl"}], "harnesses": ["minimal"], "efforts": ["medium"],
             "policies": {"p": {"serve": str(tmp_path / "run")}}}

    async def opening() -> None:
        async with entrants(recipe(tmp_path, **table)):
            pass

    with pytest.raises(ConfigError, match="policy 'p' can be asked for none, low, high, max"):
        asyncio.run(opening())
    assert not list(tmp_path.glob("*.log"))


def test_budgets_are_the_smaller_of_two(tmp_path: Path) -> None:
    task = Task.parse(json.dumps({**TASKS[0].to_json(), "budget": {"turns": 3, "seconds": 9.0}}))
    (tmp_path / "t.jsonl").write_text(task.text + "\n")
    table = {"tasks": [{"kind": "jsonl", "path": str(tmp_path / "t.jsonl")}], "harnesses": ["minimal"], "budget": {"turns": 5, "tokens": 7},
             "policies": {"p": {"kind": "scripted", "settings": {"replies": ["2"]}}}}

    async def opened() -> Task:
        async with entrants(recipe(tmp_path, **table)) as found:
            assert found.backend is None  # no task needs a machine
            return found.tasks[0]

    budget = asyncio.run(opened()).budget
    assert (budget.turns, budget.tokens, budget.seconds) == (3, 7, 9.0)


def test_the_recipe_that_ships(tmp_path: Path) -> None:
    shipped = load(RECIPES / "eval.toml")
    (tmp_path / "again.toml").write_text(config.to_toml(shipped, docs=True))
    assert load(tmp_path / "again.toml") == shipped


def test_settings_of_a_server_as_arguments() -> None:
    assert list(overrides({"port": 1, "cache": {"memory_bytes": 5, "name": "a \"b\""}, "page": False})) == [
        "port=1", "cache.memory_bytes=5", 'cache.name="a \\"b\\""', "page=false"]


def test_progress_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    with Display(Console(width=60)) as display:
        asyncio.run(Evaluation(recipe(tmp_path, concurrency=1), entry(Asks()), display).run())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 attempts in 1 column"
    assert lines[4].startswith("4/4 adds · asks, sum-3, attempt 1: reward 0 (finished, 1 turns")


def test_progress_in_a_terminal(tmp_path: Path) -> None:
    from io import StringIO

    from rich.console import Console

    text = StringIO()
    with Display(Console(width=100, file=text, force_terminal=True)) as display:
        asyncio.run(Evaluation(recipe(tmp_path), entry(Asks()), display).run())
    assert "reward so far" in text.getvalue()


def test_an_address_that_is_half_written_is_not_taken(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("gnomon 1 serves x at http://127.0.0.1:80", encoding="utf-8")

    class Process:
        looks = 0

        @property
        def returncode(self) -> None:
            self.looks += 1
            if self.looks == 2:
                log.write_text("gnomon 1 serves x at http://127.0.0.1:8080\n", encoding="utf-8")

    process: Any = Process()
    assert asyncio.run(evaluate_serving._address(process, tmp_path, log)) == "http://127.0.0.1:8080"
