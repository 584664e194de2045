"""The page of one attempt, to be read turn by turn: the score and why, the task, then what was read and said, with ids and seconds counted.

Texts are shown as text, however they look; long ones fold, and what is beyond `SHOWN` characters stays in the trajectory's file.
"""

from __future__ import annotations

import base64
import functools
import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gnomon.agent.evaluate_results import Row
from gnomon.agent.task import Step, Task
from gnomon.agent.trajectory import Score, Trajectory, Turn
from gnomon.data.messages import Image, Message, ToolCall
from gnomon.units import format_bytes, format_count, format_dollars, format_seconds

SHOWN = 100_000
BRIEF = 6
"""Lines of a system message that need not be folded away."""
FOLDER = Path(__file__).parent / "page"
PICTURES = frozenset(("image/png", "image/jpeg", "image/gif", "image/webp"))
_FENCE = re.compile(r"^(`{3,})[^\n`]*\n(.*?)\n?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
{style}</style></head><body data-root="{root}" data-page="{page}">{bar}<main>
{body}
</main><script src="{root}pages.js"></script><script>
{script}</script></body></html>
"""

ENDS = {"finished": "finished", "budget": "budget spent", "deadline": "deadline passed", "refused": "refused: too many unusable calls",
        "failed": "failed, by no fault of the policy"}


@functools.cache
def style() -> str:
    """What all pages look like."""
    return (FOLDER / "style.css").read_text(encoding="utf-8")


@functools.cache
def script() -> str:
    """What all pages can do."""
    return (FOLDER / "page.js").read_text(encoding="utf-8")


def escaped(text: str) -> str:
    """Text as HTML: no markup, and no characters that cannot be seen or that turn the line around."""
    return html.escape(_UNPRINTABLE.sub("\ufffd", text))


def look(reward: float | None, error: str | None = None) -> str:
    """The class that gives a reward its colour."""
    if reward is None or error is not None:
        return "off"
    return "good" if reward >= 1.0 else "part" if reward > 0.0 else "bad"


def shown(reward: float | None) -> str:
    """A reward in few letters."""
    return "none" if reward is None else f"{reward:.2f}".removesuffix(".00") if abs(reward) < 1000 else f"{reward:.3g}"


def page(row: Row, trajectory: Trajectory, task: Task, root: str) -> str:
    """The page; `root` is the way from it to the evaluation's folder."""
    bar = (f'<div class="bar"><div><a href="{root}index.html">Evaluation</a><span class="where">{escaped(row.column.name)}</span>'
           '<a id="previous" href="#">← previous</a><a id="next" href="#">next →</a></div></div>')
    body = [f"<h1>{escaped(task.id)}</h1>", f"<p class=soft>{escaped(row.column.name)}, attempt {row.sample}</p>", _chips(row),
            "<p id=siblings></p>", _why(trajectory.score, task), _task(task), *_turns(trajectory),
            "<p class='soft small'>Keys: j and k go from turn to turn, n and p to the next and previous attempt.</p>"]
    title = escaped(f"{shown(row.reward)} · {task.id} · {row.column.name}")
    return PAGE.format(title=title, root=root, page=html.escape(row.page), bar=bar, body="\n".join(body), style=style(), script=script())


def _chips(row: Row) -> str:
    tokens = f"{format_count(row.prompt_tokens)} tokens read ({format_count(row.cached_tokens)} cached), " if row.prompt_tokens else ""
    reward = "not scored" if row.reward is None else f"reward {row.reward:g}"
    chips = [f'<span class="chip {look(row.reward, row.error)}">{reward}</span>']
    texts = [ENDS.get(row.stop_reason, row.stop_reason), f"{row.turns} turn{'s' * (row.turns != 1)}",
             f"{tokens}{format_count(row.output_tokens)} written",
             f"{format_seconds(row.seconds)}, {format_seconds(row.model_seconds)} of it the policy's"]
    texts += [format_dollars(row.dollars)] if row.dollars else []
    return "<p>" + "".join([*chips, *(f'<span class="chip">{escaped(text)}</span>' for text in texts)]) + "</p>"


def _why(score: Score | None, task: Task) -> str:
    if score is None:
        return ""
    check = json.dumps(dict(task.check.settings), indent=2, ensure_ascii=False)[:SHOWN]
    kind = _details(f"what the verifier '{task.check.kind}' was told, hidden from the agent", _code(check))
    if score.error is not None:
        kind = f"<p>{escaped(score.error[:SHOWN])}</p>{kind}"
    evidence = "".join(f"<li>{escaped(line[:SHOWN])}</li>" for line in score.evidence)
    metrics = ", ".join(f"{escaped(name)} <b>{value:g}</b>" for name, value in score.metrics.items())
    title = "Why it has no score" if score.reward is None else "Why this score"
    return (f'<div class="card{" problem" * (score.reward is None)}"><b>{title}</b>'
            + (f'<ul class="evidence">{evidence}</ul>' if evidence else "") + (f"<p>{metrics}</p>" if metrics else "") + kind + "</div>")


def _task(task: Task) -> str:
    facts = [("machine", task.image or "none"), ("folder", task.workdir), ("user", task.user), ("domain", task.domain),
             ("may reach", ", ".join(task.network.allow)), ("budget", ", ".join(f"{v:g} {k}" for k, v in task.budget.to_json().items())),
             ("kept for the verifier", ", ".join(task.artifacts))]
    said = " · ".join(f"{name}: {escaped(str(value))}" for name, value in facts if value)
    steps = "".join(_step(number, step) for number, step in enumerate(task.steps, 1))
    files = "".join(_details(f"{path} ({format_bytes(len(data))})", _code(data[:SHOWN].decode("utf-8", "replace")))
                    for path, data in sorted(task.files.items()))
    system = _details("system message", f'<div class="text">{escaped(task.system[:SHOWN])}</div>') if task.system else ""
    solution = json.dumps(task.solution.to_json(), indent=2, ensure_ascii=False)[:SHOWN] if task.solution else ""
    hidden = _details("its solution, hidden from the agent", _code(solution)) if solution else ""
    return (f'<h2>The task</h2><div class="card"><div class="text" data-fold="of the task">{escaped(task.prompt[:SHOWN])}</div>'
            f"<p class='soft small'>{said}</p>{system}{files}{hidden}</div>{steps}")


def _step(number: int, step: Step) -> str:
    """A step of the task: its words, and what the agent does not see."""
    check = _details(f"what the verifier '{step.check.kind}' was told, hidden from the agent",
                     _code(json.dumps(step.check.to_json(), indent=2, ensure_ascii=False)[:SHOWN]))
    return (f'<div class="card"><b>Step {number}: {escaped(step.name)}</b><div class="text" data-fold="of the step">'
            f"{escaped(step.prompt[:SHOWN])}</div>{check}</div>")


def _details(title: str, body: str, *, opened: bool = False) -> str:
    return f"<details{' open' * opened}><summary>{escaped(title)}</summary>{body}</details>"


def _code(text: str) -> str:
    return f"<pre>{escaped(text)}</pre>"


def _turns(trajectory: Trajectory) -> list[str]:
    if not trajectory.turns:
        return ["<h2>What happened</h2>", "<p class=soft>Nothing: the policy gave no answer.</p>"]
    marks = "".join(f'<a href="#t{i + 1}"{" class=new" if turn.parent is None and i else ""} title="{escaped(_sort(turn))}">{i + 1}</a>'
                    for i, turn in enumerate(trajectory.turns))
    lines = ["<h2>What happened</h2>", f'<div class="strip">{marks}</div>']
    for i, turn in enumerate(trajectory.turns):
        heading = _heading(trajectory, i)
        lines += [f"<h3>{escaped(text)}</h3>" for text in _steps(trajectory, i)]
        lines += [f'<div class="context">{escaped(heading)}</div>'] if heading else []
        lines.append(f'<section class="turn" id="t{i + 1}"><div class="meta">{_meta(i, turn)}</div><div>{_tools(turn)}'
                     f"{''.join(map(_message, turn.messages))}</div></section>")
    return [*lines, *(f"<h3>{escaped(text)}</h3>" for text in _steps(trajectory, len(trajectory.turns)))]


def _steps(trajectory: Trajectory, index: int) -> list[str]:
    """How the steps ended that ended before a turn, and after the one before it."""
    return [f"Step '{step.name}' ends: {ENDS[step.stop_reason]}; "
            + (f"reward {step.score.reward:g}" if step.score.reward is not None else f"not scored: {step.score.error}")
            for step in trajectory.steps if step.turns == index]


def _sort(turn: Turn) -> str:
    calls = [call.name for message in turn.messages if message.role == "assistant" for call in message.tool_calls]
    return ", ".join(calls) or "an answer"


def _heading(trajectory: Trajectory, index: int) -> str:
    """What stands above a turn that does not go on from the one before it."""
    turn = trajectory.turns[index]
    came = f" turn {turn.origin + 1}" if turn.origin is not None else " the turn before"
    if turn.parent is None:
        names = {"compaction": f"A new context: the history was compacted after{came}", "agent": f"Another agent, called in{came}"}
        return names.get(turn.purpose or "", "A context of its own") if index else ""
    return "" if turn.parent == index - 1 else f"Goes on from turn {turn.parent + 1}: what came after it is not in this context"


def _meta(index: int, turn: Turn) -> str:
    sampled = [span for span in turn.spans if span.sampled]
    ids, given = sum(len(s.token_ids) for s in sampled), sum(len(s.token_ids) for s in turn.spans if not s.sampled)
    logprobs = [value for span in sampled for value in span.logprobs]
    spent = turn.notes.get("spent")
    lines = [f"<b>{index + 1}</b>", format_seconds(turn.seconds) if turn.seconds is not None else ""]
    if ids or given:
        lines += [f"{given:,} ids given", f"{ids:,} sampled"]
    elif isinstance(spent, Mapping) and isinstance(spent.get("output_tokens"), int):
        lines += [f"{spent['output_tokens']:,} tokens"]
    lines += [f"log-prob {sum(logprobs) / len(logprobs):.2f}"] if logprobs else []
    versions = sorted({span.policy_version for span in sampled if span.policy_version})
    lines += [f"weights {', '.join(map(str, versions))}"] if versions else []
    lines += ["cut by a limit"] if turn.notes.get("stop") == "length" else []
    return "<br>".join(line for line in lines if line)


def _tools(turn: Turn) -> str:
    tools = turn.notes.get("tools")
    if not isinstance(tools, (list, tuple)) or not tools:
        return ""
    names = ", ".join(str(tool.get("name", "?")) if isinstance(tool, Mapping) else "?" for tool in tools)
    return _details(f"tools from here on: {names}", _code(json.dumps(tools, indent=2, ensure_ascii=False)[:SHOWN]))


def _message(message: Message) -> str:
    role = message.role + (f" {message.name}" if message.name else "")
    parts = [f'<div class="role"><span>{escaped(role)}</span><span class=mono>{escaped(message.tool_call_id or "")}</span></div>']
    if message.reasoning:
        parts.append(f'<div class="reasoning text" data-fold="of the thinking">{escaped(message.reasoning[:SHOWN])}</div>')
    for part in message.content:
        parts.append(_picture(part) if isinstance(part, Image) else _text(part.text, message.role == "tool"))
    if message.role == "system" and message.text.count("\n") > BRIEF:
        parts[1:] = [_details(f"{message.text.count(chr(10)) + 1} lines", "".join(parts[1:]))]
    parts += map(_call, message.tool_calls)
    if message.tools:
        parts.append(f"<p class=soft>more tools: {escaped(', '.join(tool.name for tool in message.tools))}</p>")
    return f'<div class="said {message.role}">{"".join(parts)}</div>'


def _text(text: str, code: bool) -> str:
    if not text:
        return ""
    lines = text.count("\n") + 1
    size = f"{lines:,} lines" if lines > 1 else f"{len(text):,} characters"
    more = f"<p class=soft>{len(text) - SHOWN:,} characters more are in the trajectory's file</p>" if len(text) > SHOWN else ""
    if code:
        return f'<pre data-fold="{size}">{escaped(text[:SHOWN])}</pre>{more}'
    return f'<div class="text" data-fold="{size}">{_fenced(text[:SHOWN])}</div>{more}'


def _fenced(text: str) -> str:
    """Text whose fenced blocks stand out; nothing else of it is read as markup."""
    found, at = [], 0
    for block in _FENCE.finditer(text):
        found += [escaped(text[at : block.start()].rstrip("\n")), f"<pre>{escaped(block[2])}</pre>"]
        at = block.end()
    return "".join([*found, escaped(text[at:].lstrip("\n") if at else text)])


def _picture(image: Image) -> str:
    if image.media_type not in PICTURES:
        return f"<p class=soft>an image of type {escaped(image.media_type)}, {format_bytes(len(image.data))}</p>"
    return f'<img alt="" src="data:{image.media_type};base64,{base64.b64encode(image.data).decode("ascii")}">'


def _call(call: ToolCall) -> str:
    try:
        arguments: Any = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        body = f"<dl><dd style='grid-column:1/-1'><pre>{escaped(call.arguments[:SHOWN])}</pre></dd></dl>"
    else:
        body = "<dl>" + "".join(f"<dt>{escaped(str(name))}</dt><dd>{_value(value)}</dd>" for name, value in arguments.items()) + "</dl>"
    return f'<div class="call"><b class="mono">{escaped(call.name)}</b>{body}</div>'


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2)
    return f'<pre data-fold="{text.count(chr(10)) + 1:,} lines">{escaped(text[:SHOWN])}</pre>'
