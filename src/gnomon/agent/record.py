"""The one way to a model, for harnesses and programs alike: every answer becomes a turn, within the budget, once.

Which turn an answer continues is found from what the model read: where ids are known, the turn with the longest context that the prompt
begins with, to the id; else the turn with the longest history of messages. So what is put on record is what was sent and sampled, whatever
a client did to its history. Read next: `gateway.py`.
"""

from __future__ import annotations

import asyncio
import bisect
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

from gnomon.agent.diagnosis import Diagnosis
from gnomon.agent.fields import Fields
from gnomon.agent.message_json import tool_from_json, tool_to_json
from gnomon.agent.policy import Completion, Policy, Recalls, Sampling, Spent
from gnomon.agent.same import Rolling, unthought, words
from gnomon.agent.task import Budget
from gnomon.agent.trajectory import Span, Trajectory, Turn
from gnomon.agent.trajectory_file import TrajectoryFile
from gnomon.data.messages import Conversation, Message, Tool
from gnomon.errors import GnomonError

Purpose = Literal["compaction", "agent"]
REMEMBERED = 16  # answers that a client may ask for again


class BudgetSpent(GnomonError):
    """An attempt may use no more. A harness lets it pass: it ends the attempt, with the reason `budget`. `limit` names what is spent."""

    def __init__(self, limit: str, message: str) -> None:
        super().__init__(message)
        self.limit = limit


@dataclass(frozen=True, kw_only=True, slots=True)
class _Context:
    """What the model had read and said at the end of a turn: how many ids with which fingerprint, how many messages, which tools."""

    count: int = 0
    rolling: Rolling = field(default_factory=Rolling)
    messages: int = 0
    tools: tuple[Tool, ...] = ()


class Recorder:
    """One attempt: asks `policy` in a session of its own, and writes down what it answers.

    `record` is a trajectory, which grows in memory, or a file, which is written before an answer is given. An attempt that is resumed has
    turns already; they count. Calls may run beside each other. `clock` gives seconds. `diagnosis` is the public verifier that the
    attempt may ask until it ends, for harnesses that offer it. `part` names a step of a task that has several: it is a session of its own,
    and the seconds of earlier turns are not its.
    """

    def __init__(self, policy: Policy, record: Trajectory | TrajectoryFile, budget: Budget | None = None,
                 clock: Callable[[], float] = time.monotonic, *, diagnosis: Diagnosis | None = None, part: str | None = None) -> None:
        self.policy = policy
        self.diagnosis = diagnosis
        self.budget = budget or Budget()
        self.spent = Spent()
        self._file = record if isinstance(record, TrajectoryFile) else None
        self._kept = record.trajectory if isinstance(record, TrajectoryFile) else record
        self.session = self.trajectory.id if part is None else f"{self.trajectory.id}#{part}"
        self._clock = clock
        self._writing = asyncio.Lock()
        self._contexts: list[_Context] = []
        self._order: list[tuple[int, int, int]] = []  # ids, messages, turn: the longest last
        self._running: dict[str, asyncio.Task[Completion]] = {}
        self._answered: OrderedDict[str, Completion] = OrderedDict()
        self._asked = 0
        self._began = clock() - sum(turn.seconds or 0.0 for turn in (self.trajectory.turns if part is None else ()))
        self.closed = False
        for turn in self.trajectory.turns:
            self._remember(turn, _tools(turn))
            self._pay(_cost(turn))
        self._asked = len(self.trajectory.turns)
        if part is None:
            self._recall()

    @property
    def trajectory(self) -> Trajectory:
        """What happened so far."""
        return self._file.trajectory if self._file is not None else self._kept

    @property
    def turns(self) -> int:
        """How many answers are on record."""
        return len(self.trajectory.turns)

    @property
    def seconds_left(self) -> float | None:
        """How much of `budget.seconds` is left; None where there is no limit."""
        return None if self.budget.seconds is None else self.budget.seconds - (self._clock() - self._began)

    async def complete(self, conversation: Conversation, sampling: Sampling | None = None, *, purpose: Purpose | None = None,
                       origin: int | None = None, key: str | None = None, again: bool = False) -> Completion:
        """The policy's answer, put on record.

        `purpose` and `origin` (a turn) are for a conversation that begins a context of its own; where it continues a turn they say nothing.
        `key` names a request: while one of this name runs, another waits for the same answer, and with `again` one that was answered gets
        the recorded answer. Raises `BudgetSpent`, and what the policy raises; then nothing is recorded.
        """
        chosen = sampling or Sampling()
        if key is None:
            return await self._ask(conversation, chosen, purpose, origin)
        if again and key in self._answered:
            return self._answered[key]
        if key not in self._running:
            task = asyncio.create_task(self._ask(conversation, chosen, purpose, origin))
            self._running[key] = task
            task.add_done_callback(lambda done: self._ended(key, done))
        return await asyncio.shield(self._running[key])

    def check(self) -> None:
        """Raises `BudgetSpent` where nothing more may be asked."""
        if self.closed:
            raise BudgetSpent("attempt", "the attempt has ended")
        left = self.seconds_left
        for limit, spent, allowed in (
            ("turns", self._asked, self.budget.turns), ("tokens", self.spent.output_tokens, self.budget.tokens),
            ("dollars", self.spent.dollars, self.budget.dollars),
        ):
            if allowed is not None and spent >= allowed:
                raise BudgetSpent(limit, f"the budget of {allowed:g} {limit} is spent")
        if left is not None and left <= 0:
            raise BudgetSpent("seconds", f"the budget of {self.budget.seconds:g} seconds is spent")

    async def close(self) -> None:
        """End the attempt: what still runs is cancelled, what comes later is refused, the policy forgets the session."""
        self.closed, self.diagnosis = True, None
        running = [*self._running.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.policy.close(self.session)

    async def _ask(self, conversation: Conversation, sampling: Sampling, purpose: Purpose | None, origin: int | None) -> Completion:
        self.check()
        if self.budget.tokens is not None:
            left = self.budget.tokens - self.spent.output_tokens
            sampling = replace(sampling, max_tokens=min(left, sampling.max_tokens or left))
        self._asked += 1  # counted from the start, so that calls beside each other share the budget
        began, written = self._clock(), False
        try:
            completion = await self._within(self.policy.complete(self.session, conversation, sampling))
            async with self._writing:
                before = self.turns
                try:
                    await self._append(conversation, completion, self._clock() - began, purpose, origin)
                finally:
                    written = self.turns > before
        finally:
            if not written:
                self._asked -= 1
        return completion

    async def _within(self, answer: Any) -> Completion:
        """The answer, unless the seconds run out before it."""
        left = self.seconds_left
        deadline = asyncio.timeout(left)
        try:
            async with deadline:
                return await answer
        except TimeoutError:
            if not deadline.expired():
                raise
            raise BudgetSpent("seconds", f"the budget of {self.budget.seconds:g} seconds is spent") from None

    async def _append(self, conversation: Conversation, completion: Completion, seconds: float, purpose: Purpose | None,
                      origin: int | None) -> None:
        if self.closed:
            raise BudgetSpent("attempt", "the attempt has ended")
        parent = self._parent(conversation.messages, completion.prompt_ids)
        known = self._contexts[parent] if parent is not None else _Context(tools=self.trajectory.tools)
        notes: dict[str, Any] = {"spent": _cost_to_json(completion.spent)}
        if conversation.tools != known.tools:
            notes["tools"] = [tool_to_json(tool) for tool in conversation.tools]
        if completion.stop != "stop":
            notes["stop"] = completion.stop
        given = completion.prompt_ids[known.count :]
        spans = [Span(token_ids=given)] if given else []
        if parent is None and purpose is not None and origin is None and self.turns:
            origin = self.turns - 1
        turn = Turn(messages=(*conversation.messages[known.messages :], completion.message),
                    spans=(*spans, completion.sampled) if completion.sampled is not None else tuple(spans), parent=parent,
                    origin=origin if parent is None else None, purpose=purpose if parent is None else None, seconds=seconds, notes=notes)
        try:
            await self._write(turn)
        finally:
            if self.turns > len(self._contexts):  # it is on record, also where whoever asked is gone meanwhile
                self._remember(turn, conversation.tools)
                self._pay(completion.spent)

    async def _write(self, turn: Turn) -> None:
        """Onto the record. The disk is waited for beside the loop; whoever is cancelled meanwhile is so once the line is written."""
        if self._file is None:
            self._kept = self._kept.appended(turn)
            return
        writing = asyncio.ensure_future(asyncio.to_thread(self._file.append, turn))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait((writing,))
            raise

    def _parent(self, messages: Sequence[Message], ids: Sequence[int]) -> int | None:
        """The turn that an answer continues: the longest whose ids its prompt begins with, or whose messages its history begins with."""
        prints: dict[int, bytes] = {}
        for count, said, index in reversed(self._order):
            if said > len(messages) or count > len(ids) or bool(count) != bool(ids):
                continue
            kept = self.trajectory.messages(index) if not ids else ()
            if not ids and all(map(_continues, kept, messages)):
                return index
            if ids:
                if count not in prints:
                    prints[count] = Rolling(ids[:count]).digest
                if prints[count] == self._contexts[index].rolling.digest and self._same_roles(index, messages):
                    return index
        return None

    def _same_roles(self, index: int, messages: Sequence[Message]) -> bool:
        return all(kept.role == came.role for kept, came in zip(self.trajectory.messages(index), messages, strict=False))

    def _recall(self) -> None:
        """Tell a policy that keeps ids what an earlier process sampled, so that it keeps these too."""
        if not isinstance(self.policy, Recalls):
            return
        for turn in self.trajectory.turns:
            if turn.spans and turn.spans[-1].sampled:
                before = self.trajectory.token_ids(turn.parent) if turn.parent is not None else ()
                context = (*before, *chain.from_iterable(span.token_ids for span in turn.spans[:-1]))
                self.policy.recall(self.session, context, turn.spans[-1].token_ids, turn.messages[-1])

    def _remember(self, turn: Turn, tools: tuple[Tool, ...] | None) -> None:
        """The context at the end of a turn."""
        before = self._contexts[turn.parent] if turn.parent is not None else _Context(tools=self.trajectory.tools)
        ids = turn.token_ids
        context = _Context(count=before.count + len(ids), rolling=before.rolling.grown(ids), messages=before.messages + len(turn.messages),
                           tools=before.tools if tools is None else tools)
        bisect.insort(self._order, (context.count, context.messages, len(self._contexts)))
        self._contexts.append(context)

    def _pay(self, cost: Spent) -> None:
        mine = self.spent
        self.spent = Spent(prompt_tokens=mine.prompt_tokens + cost.prompt_tokens, cached_tokens=mine.cached_tokens + cost.cached_tokens,
                           output_tokens=mine.output_tokens + cost.output_tokens, dollars=mine.dollars + cost.dollars)

    def _ended(self, key: str, task: asyncio.Task[Completion]) -> None:
        self._running.pop(key, None)
        if not task.cancelled() and task.exception() is None:
            self._answered[key] = replace(task.result(), prompt_ids=())
            while len(self._answered) > REMEMBERED:
                self._answered.popitem(last=False)


def _continues(kept: Message, came: Message) -> bool:
    """Whether a message of a history is one on record. Where no ids are kept, thinking that a client does not send back is no change."""
    if kept.role != "assistant" or came.role != "assistant":
        return kept == came
    said, back = words(kept), words(came)
    return back in (said, unthought(said))


def _cost_to_json(cost: Spent) -> dict[str, Any]:
    return {name: value for name in ("prompt_tokens", "cached_tokens", "output_tokens", "dollars") if (value := getattr(cost, name))}


def _cost(turn: Turn) -> Spent:
    """What a turn on record cost."""
    return Spent(**turn.notes.get("spent", {}))


def _tools(turn: Turn) -> tuple[Tool, ...] | None:
    """The tools that a turn on record noted; None where they had not changed."""
    noted = turn.notes.get("tools")
    return None if noted is None else tuple(tool_from_json(Fields(tool, "notes.tools")) for tool in noted)
