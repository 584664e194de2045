"""Agents as rollouts: tasks of `gnomon.agent`, attempted in machines of their own by a policy that is served and learns.

A harness is drawn for each group, the same for all of its members, from a seed; a share of the groups gets one that training never sees:
those are scored beside the others and not learnt from, so that a policy which learnt names of tools by heart is found out (report
§4.2.1). An attempt is whole machinery: deadlines, budgets, a verifier that looks at what is left; what the machine did wrong has no
reward and is in no mean. Attempts go on while the trainer learns, and their later answers come from newer weights; only a killed process
begins them anew. Each is a file of `RUN/attempts`, to the token, and `remote.py` has the servers. Read next: `rl.py`;
`gnomon.agent.rollout`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gnomon.agent import rollout as attempts
from gnomon.agent import task_source
from gnomon.agent.evaluate_recipe import BudgetSettings, DeadlineSettings, EffortName
from gnomon.agent.harness.composed import Composed
from gnomon.agent.harness.draw import Dice, Draw
from gnomon.agent.harness.draw import Sampler as Harnesses
from gnomon.agent.harness.spec import Draws, HarnessSpec, Part
from gnomon.agent.policies.endpoint import Endpoint, EndpointPolicy
from gnomon.agent.policy import Completion, Sampling
from gnomon.agent.task import Task
from gnomon.agent.trajectory import Sample, Score, Span, Trajectory
from gnomon.config import setting
from gnomon.data.chat import ChatFormat
from gnomon.data.messages import Conversation, Message, Text
from gnomon.errors import ConfigError, DataError
from gnomon.model.transformer import Transformer
from gnomon.posttrain.policy import Sampled
from gnomon.posttrain.problem import Episode, Problem
from gnomon.posttrain.remote import RemoteSampler
from gnomon.posttrain.rollout import End, Rollout, chosen, given, seed_of
from gnomon.posttrain.slots import Finished
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.open import open_backend
from gnomon.sandbox.sandbox import Backend

ENDLESS = 1 << 30
"""Most ids of an attempt: its budget and the server's context bound it, not the pool."""
CUT = ("budget", "deadline")


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentsConfig:
    """Tasks that agents attempt, and how."""

    tasks: tuple[dict[str, Any], ...] = setting(doc="sources of tasks: `kind`, its settings, `limit` or `match`, as in recipes/eval.toml")
    domain: str = setting("agents", "domain of the cell")
    effort: EffortName = setting("max", "effort of the cell, which the policy reads; none: nothing is said")
    draw: Draw = setting(factory=Draw, doc="what a group's harness is drawn from, and what is held out")
    held_out: float = setting(0.1, "share of the groups whose harness is one that is held out; they are scored and not learnt from")
    held_out_mixes: int = setting(4, "mixes that are held out beside draw.held_out")
    concurrency: int = setting(8, "attempts at a time")
    answer_tokens: int | None = setting(None, "ids of one answer at most; none: what the context holds")
    chat_format: str | None = setting(None, "xtml or kimi_linear; none: the one whose markers the tokenizer names")
    backend: str = setting("auto", "sandbox backend: namespaces, gvisor, …")
    deadlines: DeadlineSettings = setting(factory=DeadlineSettings, doc="how long the parts of an attempt may take")
    budget: BudgetSettings = setting(factory=BudgetSettings, doc="what one attempt may use")

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("'tasks' names none; recipes/eval.toml shows how")
        if not 0 <= self.held_out < 1:
            raise ConfigError(f"'held_out' is {self.held_out}; it is a share of the groups, from 0 to less than 1")
        if self.concurrency < 1:
            raise ConfigError(f"'concurrency' is {self.concurrency}; it must be at least 1")


@dataclass(slots=True, eq=False)
class Ended:
    """The world of an attempt that has ended: nothing but its score."""

    score: Score

    def reply(self, sampled: tuple[int, ...]) -> tuple[int, ...] | None:
        """It says nothing."""
        return None

    def state(self) -> Any:
        """There is nothing to go on with."""
        return None

    def close(self) -> None:
        """There is nothing to give back."""


def _scored(sampled: tuple[int, ...], world: Episode | None) -> Score:
    """The verifier has judged already."""
    assert isinstance(world, Ended)
    return world.score


class AgentSource:
    """Tasks in turn, each with the harness of its group."""

    def __init__(self, config: AgentsConfig, chat: ChatFormat) -> None:
        self.config, self.chat = config, chat
        self.sources = [task_source.opened(table, f"agents.tasks[{i}]") for i, table in enumerate(config.tasks)]
        self.tasks = list(task_source.every(self.sources))
        self._harnesses = Harnesses(config.draw)
        self._first = chat.encode(Conversation(messages=(Message(role="user", content=(Text(text="."),)),))).tokens[0]

    def task(self, index: int) -> Task:
        """The task of a group."""
        return self.tasks[index % len(self.tasks)]

    def held_out(self, index: int) -> bool:
        """Whether a group's harness is one that training never sees."""
        return Dice(f"{self.config.draw.seed}\0held out\0{index}").share() < self.config.held_out

    def harness(self, index: int) -> HarnessSpec:
        """The harness of a group. An attempt is one context: what would begin another (summaries, agents that are called) is left out.

        Raises `ConfigError` where there is none to draw.
        """
        machine = self.task(index).image is not None
        if self.held_out(index):
            kept = self._harnesses.held_out(self.config.held_out_mixes, machine=machine)
            if not kept:
                raise ConfigError("'held_out' is a share of the groups, and no harness is held out; name some in 'draw.held_out'")
            spec = Dice(f"{self.config.draw.seed}\0which\0{index}").pick(kept)
        else:
            spec = self._harnesses.drawn(str(index), machine=machine)
        draws = Draws(max_tokens=self.config.answer_tokens, temperature=1.0, top_p=1.0)
        return replace(spec, context=Part(kind="none"), agents=replace(spec.agents, depth=0), sampling=draws)

    def problem(self, index: int) -> Problem:
        """By number: its id names the group, so that the same number is the same task under the same harness."""
        return Problem(id=f"{index}/{self.task(index).id}", prompt=(self._first,), domain=self.config.domain, effort=self.config.effort,
                       grade=_scored, max_tokens=ENDLESS, held_out=self.held_out(index))


class AgentSampler:
    """In the place of `policy.Sampler`, for problems of an `AgentSource`; `servers` have the policy. Attempts live in another thread."""

    def __init__(self, source: AgentSource, servers: RemoteSampler, run: Path, backend: Backend | None = None) -> None:
        self.source, self.servers, self.folder = source, servers, run / "attempts"
        self._backend = backend
        self._running: dict[tuple[int, int, int], Future[Rollout]] = {}
        self._policies: set[_Served] = set()
        self._begun: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="agents")
        self._thread.start()
        self._room = asyncio.Semaphore(source.config.concurrency)
        self._ready = False

    @property
    def version(self) -> int:
        """Of the weights that answer."""
        return self.servers.version

    def load(self, model: Transformer, version: int) -> None:
        """Take the weights when attempts go on; answers from there on carry `version`."""
        self.servers.load(model, version)

    def sample(self, rollouts: Sequence[Rollout], *, enough: int | None = None, on_finished: Finished | None = None) -> Sampled:
        """As `policy.Sampler.sample`. What has not ended goes on behind the caller's back, and is waited for by the next call."""
        self.servers.send()
        for served in self._policies:
            served.policy.version = self.version
        if not self._ready:
            self._call(self._prepare()).result()
            self._ready = True
        for each in rollouts:
            if _key(each) not in self._running:
                self._running[_key(each)] = self._call(self._attempt(each))
        wanted = len(rollouts) if enough is None else min(enough, len(rollouts))
        mine = [self._running[_key(each)] for each in rollouts]
        while sum(future.done() for future in mine) < wanted:
            wait([future for future in mine if not future.done()], return_when=FIRST_COMPLETED)
        finished: list[Rollout] = []
        unfinished: list[Rollout] = []
        for each, future in zip(rollouts, mine, strict=True):
            if not future.done():
                unfinished.append(each)
                continue
            del self._running[_key(each)]
            ended = future.result()
            assert ended.score is not None
            finished.append(replace(ended, score=None))
            if on_finished is not None:
                on_finished(finished[-1], Ended(ended.score))
        tokens = sum(len(each.sampled) for each in finished)
        return Sampled(finished=tuple(finished), unfinished=tuple(unfinished), steps=len(finished), tokens=tokens)

    def close(self) -> None:
        """End what still runs, with its machines."""
        if self._loop.is_closed():
            return
        self._running.clear()
        self._call(self._end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _prepare(self) -> None:
        """The backend and the images of the tasks, where any needs a machine."""
        if self._backend is None and any(task.image is not None for task in self.source.tasks):
            self._backend = await open_backend(self.source.config.backend)
        if self._backend is not None:
            for source in self.source.sources:
                await source.prepare(self._backend, LayerStore())

    async def _end(self) -> None:
        await _ended(set(self._begun))  # these end what they began themselves; a connection that is being made must not be cut from outside
        await _ended({task for task in asyncio.all_tasks() if task is not asyncio.current_task()})
        if self._backend is not None:
            await self._backend.close()

    async def _attempt(self, rollout: Rollout) -> Rollout:
        """One attempt, from its machine to its score."""
        config, index = self.source.config, int(rollout.problem.id.partition("/")[0])
        limits = config.deadlines
        task, spec = within(self.source.task(index), config.budget), self.source.harness(index)
        if (own := asyncio.current_task()) is not None:
            self._begun.add(own)
            own.add_done_callback(self._begun.discard)
        async with self._room:
            served = _Served(self._policy(rollout.group), rollout.seed)
            self._policies.add(served)
            try:
                wanted = attempts.Rollout(id=f"{rollout.group}-{rollout.member}", task=task, harness=Composed(spec), policy=served,
                                          effort=None if config.effort == "none" else config.effort, group=str(rollout.group))
                name = "-".join(map(str, _key(rollout)))
                found = await attempts.attempt(wanted, self.folder / f"{name}.jsonl", self._backend, attempts.Deadlines(
                    install=limits.install, machine=limits.machine, agent=limits.agent, judge=limits.judge, grace=limits.grace))
            finally:
                self._policies.discard(served)
        return recorded(rollout, found, spec.name)

    def _policy(self, group: int) -> EndpointPolicy:
        """The policy of a group: its server stays the same, so that the beginning that members share is known there."""
        chosen = self.servers.endpoints[group % len(self.servers.endpoints)]
        endpoint = Endpoint(url=chosen.url, model=chosen.model, key=chosen.key, server=chosen.config.server, retries=chosen.config.retries,
                            timeout_seconds=chosen.config.timeout_seconds, policy_version=self.version)
        return EndpointPolicy(endpoint, self.source.chat)


@dataclass(slots=True, eq=False)
class _Served:
    """A policy whose draws follow from the rollout's seed."""

    policy: EndpointPolicy
    seed: int
    calls: int = 0
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.policy.name

    async def complete(self, session: str, conversation: Conversation, sampling: Sampling) -> Completion:
        """The answer, drawn under a seed of its own."""
        self.calls += 1
        return await self.policy.complete(session, conversation, replace(sampling, seed=seed_of(self.seed, self.calls)))

    async def close(self, session: str) -> None:
        """Forget a session."""
        await self.policy.close(session)


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel tasks, once each, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _key(rollout: Rollout) -> tuple[int, int, int]:
    return rollout.group, rollout.member, int(rollout.notes.get("attempt", 0))


def within(task: Task, budget: BudgetSettings) -> Task:
    """A task whose budget is the smaller of its own and the recipe's."""
    limits: dict[str, Any] = {name: min((value for value in (getattr(task.budget, name), getattr(budget, name)) if value is not None),
                                        default=None) for name in ("tokens", "turns", "dollars")}
    return replace(task, budget=replace(task.budget, **limits))


def recorded(rollout: Rollout, found: Trajectory, harness: str) -> Rollout:
    """A rollout with what a trajectory has kept: ids, log-probabilities and versions, its score. Raises `DataError` for a beginning that is
    not the problem's."""
    score = found.score or Score(reward=None, error="the attempt was not judged")
    samples = [sample for sample in found.samples() if any(sample.loss_mask)]
    notes = {**rollout.notes, "harness": harness, "stop": found.stop_reason, "contexts": len(samples)}
    end: End = "length" if found.stop_reason in CUT else "world"
    if not samples:  # no answer came: its machine or its server failed, or it may not have asked
        return replace(rollout, spans=(), end=end, score=score, notes=notes)
    longest = max(samples, key=lambda sample: sum(sample.loss_mask))
    first = len(rollout.problem.prompt)
    if longest.token_ids[:first] != rollout.problem.prompt:
        raise DataError(f"attempt {found.id} begins with {longest.token_ids[:first]}, its problem with {rollout.problem.prompt}")
    return replace(rollout, spans=_spans(longest, first), end=end, score=score, notes=notes)


def _spans(sample: Sample, first: int) -> tuple[Span, ...]:
    """Consecutive ids of one origin, from position `first` on."""
    spans: list[Span] = []
    start = first
    for place in range(first + 1, len(sample.token_ids) + 1):
        if place < len(sample.token_ids) and _origin(sample, place) == _origin(sample, start):
            continue
        part, version = slice(start, place), _origin(sample, start)
        spans.append(given(sample.token_ids[part]) if version is None else chosen(sample.token_ids[part], sample.logprobs[part], version))
        start = place
    return tuple(spans)


def _origin(sample: Sample, place: int) -> int | None:
    """The version that sampled an id, None for what was given."""
    return sample.policy_versions[place] if sample.loss_mask[place] else None
