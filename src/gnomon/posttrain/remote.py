"""Rollouts from servers: the same rollouts as in process, sampled by one or several engines that take the newer weights between iterations.

Weights are written into one folder, and each server is told to read it; what it samples from there on carries the new version. A rollout is
asked for in pieces of `piece_tokens` ids, so that it can be put aside between two, and each piece goes on with the draws of its seed: from
our own server come the ids that `policy.py` would have drawn. A group stays with one server, whose cache knows its prompt; where that one
dies, the others take its rollouts, and where all are dead the iteration ends with an error and the run goes on from its last checkpoint.
With partial rollouts it is the clock that decides who has finished, unlike in process. Read next: `endpoint.py`, `partial.py`.
"""

from __future__ import annotations

import math
import queue
import shutil
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from gnomon.agent.policies.endpoint import VERSION
from gnomon.agent.trajectory import Span
from gnomon.config import setting
from gnomon.errors import CapacityError, ConfigError, PolicyError
from gnomon.model.runs import folder_of
from gnomon.model.transformer import Transformer
from gnomon.parallel.mesh import Mesh
from gnomon.posttrain.endpoint import Endpoint, EndpointConfig
from gnomon.posttrain.grading import FAILURES
from gnomon.posttrain.keeping import set_apart
from gnomon.posttrain.policy import Sampled
from gnomon.posttrain.problem import Episode
from gnomon.posttrain.remote_teacher import number
from gnomon.posttrain.rollout import Rollout, chosen, given, seed_of
from gnomon.posttrain.slots import Finished

Steps = tuple[tuple[str, Mapping[str, Any]], ...]
RELOADS: Mapping[str, Steps] = MappingProxyType({
    "gnomon": (("/admin/reload", {"path": "FOLDER", "version": "VERSION"}),),
    "vllm": (("/collective_rpc", {"method": "reload_weights"}), ("/reset_prefix_cache", {})),
    "sglang": (("/update_weights_from_disk", {"model_path": "FOLDER"}),),
})
"""Routes beside /v1 and their bodies, in order. vLLM's belong to its development mode and read the folder that it was started with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteConfig:
    """Servers that sample."""

    endpoints: tuple[EndpointConfig, ...] = setting(doc="servers; a group stays with one of them")
    folder: Path | None = setting(None, "where newer weights are written, which servers must see under this name; none: RUN/served")
    layout: Literal["run", "released"] = setting("run", "run: a run folder, for gnomon; released: a checkpoint that other engines read")
    reload: Literal["gnomon", "vllm", "sglang"] = setting("gnomon", "whose routes tell a server to read the folder")
    piece_tokens: int = setting(256, "ids of one request; a rollout can be put aside after each")

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ConfigError("'endpoints' is empty; name at least one server")
        if self.piece_tokens < 1:
            raise ConfigError(f"'piece_tokens' is {self.piece_tokens}; it must be at least 1")
        if self.layout == "run" and self.reload != "gnomon":
            raise ConfigError(f"'reload' is '{self.reload}', whose engines read checkpoints of the release; set layout = 'released'")


class RemoteSampler:
    """In the place of `policy.Sampler`. `run` is the folder of the run, with its tokenizer; `endpoints` are those of `config`, if made.

    Raises `ConfigError` where a server's ids are not ours, or for a temperature whose log-probabilities it does not tell.
    """

    def __init__(self, model: Transformer, config: RemoteConfig, run: Path, *, temperature: float = 1.0, version: int = 0,
                 endpoints: Sequence[Endpoint] | None = None, mesh: Mesh | None = None) -> None:
        self.config, self.temperature, self.version, self._mesh = config, temperature, version, mesh or Mesh()
        self.folder = (config.folder or run / "served").resolve()
        self.endpoints = [Endpoint(each) for each in config.endpoints] if endpoints is None else list(endpoints)
        self._tokenizer = run / "tokenizer"
        for endpoint in self.endpoints:
            endpoint.check(self._tokenizer if self._tokenizer.is_dir() else None)
            if endpoint.config.server == "gnomon" and temperature != 1:
                raise ConfigError(f"'temperature' is {temperature}, and {endpoint.url} tells log-probabilities of temperature 1; sample "
                                  "at that one")
        self.load(model, version)

    def load(self, model: Transformer, version: int) -> None:
        """Take the weights that the model has when it samples next; spans sampled from here on carry `version`."""
        self.version = version
        self._model: Transformer | None = model

    def sample(self, rollouts: Sequence[Rollout], *, enough: int | None = None, on_finished: Finished | None = None) -> Sampled:
        """As `policy.Sampler.sample`; raises `PolicyError` when no server answers any more."""
        for rollout in rollouts:
            self._check(rollout)
        self.send()
        wanted = len(rollouts) if enough is None else min(enough, len(rollouts))
        return _Work(self, rollouts, on_finished).run(wanted)

    def send(self) -> None:
        """Have the servers take the weights of the last `load`, if they have not yet; of several ranks the first one does, and all wait."""
        if self._model is None:
            return
        if self._mesh.is_main:
            self._send(self._model)
        self._model = None
        self._mesh.wait()

    def close(self) -> None:
        """There is nothing to give back."""

    def _check(self, rollout: Rollout) -> None:
        problem = rollout.problem
        if rollout.end is not None:
            raise ConfigError(f"problem {problem.id}: its rollout has ended; sample one that has not")
        room = min((int(each.told.get("max_model_len") or problem.capacity) for each in self.endpoints), default=0)
        if problem.capacity > room:
            raise CapacityError(f"problem {problem.id}: {problem.capacity} ids do not fit the context of {room} that a server has; lower "
                                "'max_tokens', or serve with a longer one")

    def _send(self, model: Transformer) -> None:
        """Write the weights, and have every server read them."""
        if self.config.layout == "run":
            shutil.rmtree(folder_of(self.folder), ignore_errors=True)  # after a resume versions go back, and the newest counts
            set_apart(self.folder, self.version, 0, model)
            self._copy_tokenizer()
        else:
            from gnomon.data.tokenizer import Tokenizer
            from gnomon.model.weights import save_pretrained

            save_pretrained(model, self.folder, tokenizer=Tokenizer.load(self._tokenizer))
        names = {"FOLDER": str(self.folder), "VERSION": self.version}
        with ThreadPoolExecutor(len(self.endpoints)) as pool:
            list(pool.map(lambda endpoint: _reload(endpoint, RELOADS[self.config.reload], names), self.endpoints))

    def _copy_tokenizer(self) -> None:
        target = self.folder / "tokenizer"
        if not target.is_dir():
            from gnomon.data.tokenizer import Tokenizer

            Tokenizer.load(self._tokenizer).save(target)


def _reload(endpoint: Endpoint, steps: Steps, names: Mapping[str, Any]) -> None:
    for path, body in steps:
        endpoint.beside(path, {name: names.get(str(value), value) for name, value in body.items()})


@dataclass(slots=True, eq=False)
class _Grown:
    """What a thread made of a rollout: `error` where it could not."""

    place: int
    rollout: Rollout
    world: Episode | None = None
    tokens: int = 0
    requests: int = 0
    error: Exception | None = None


class _Work:
    """One call of `sample`: threads take rollouts in their order and grow them until enough have finished."""

    def __init__(self, sampler: RemoteSampler, rollouts: Sequence[Rollout], on_finished: Finished | None) -> None:
        self.sampler, self.rollouts, self.on_finished = sampler, rollouts, on_finished
        self.waiting = deque(range(len(rollouts)))
        self.results: queue.SimpleQueue[_Grown] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.dead: set[int] = set()

    def run(self, wanted: int) -> Sampled:
        """Sample until `wanted` have finished."""
        count = min(len(self.rollouts), sum(each.config.at_once for each in self.sampler.endpoints))
        threads = [threading.Thread(target=self._thread, daemon=True, name="rollout") for _ in range(count)]
        finished: list[Rollout] = []
        aside: dict[int, Rollout] = {}
        tokens = requests = 0
        error: Exception | None = None
        for thread in threads:
            thread.start()
        for _ in self.rollouts:  # each comes back, grown or as it was
            grown = self.results.get()
            tokens, requests = tokens + grown.tokens, requests + grown.requests
            error = error or grown.error
            if grown.rollout.end is None:
                aside[grown.place] = _put_aside(grown)
            else:
                finished.append(grown.rollout)
                self._hand_on(grown)
            if error is not None or len(finished) >= wanted:
                self.stop.set()
        for thread in threads:
            thread.join()
        if error is not None:
            raise error
        unfinished = [aside[place] for place in sorted(aside)]
        return Sampled(finished=tuple(finished), unfinished=tuple(unfinished), steps=requests, tokens=tokens)

    def _hand_on(self, grown: _Grown) -> None:
        if self.on_finished is not None:
            self.on_finished(grown.rollout, grown.world)
        elif grown.world is not None:
            grown.world.close()

    def _thread(self) -> None:
        while True:
            try:
                place = self.waiting.popleft()
            except IndexError:
                return
            grown = _Grown(place=place, rollout=self.rollouts[place])
            ended = False
            try:
                if not self.stop.is_set():
                    self._grow(grown)
                ended = True
            except FAILURES as error:  # of a server, or of a world, which is somebody else's program
                grown.error = error
            finally:  # whatever it was, nobody waits for this rollout in vain
                if not ended:
                    grown.error = grown.error or PolicyError(f"problem {grown.rollout.problem.id}: the thread of its rollout ended")
                    grown.rollout = replace(grown.rollout, end=None)
                self.results.put(grown)

    def _grow(self, grown: _Grown) -> None:
        """Piece by piece, until it ends or is to be put aside."""
        growing = _Growing(grown.rollout)
        grown.world = growing.world
        try:
            while growing.end is None and not self.stop.is_set():
                count = min(self.sampler.config.piece_tokens, growing.problem.max_tokens - growing.count)
                ids, logprobs = self._ask(growing, count)
                grown.tokens, grown.requests = grown.tokens + len(ids), grown.requests + 1
                growing.add(ids, logprobs, self.sampler.version)
        finally:
            grown.rollout = growing.left(self.sampler.version)

    def _ask(self, growing: _Growing, count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The next ids from the group's server, or from another one where that is dead."""
        endpoints = self.sampler.endpoints
        first = growing.rollout.group % len(endpoints)
        last: PolicyError | None = None
        for index in (*range(first, len(endpoints)), *range(first)):
            if index in self.dead:
                continue
            try:
                return _piece(endpoints[index], growing, count, self.sampler)
            except PolicyError as error:
                last = error
                self.dead.add(index)
        raise last or PolicyError("no server answers any more; start one, then start the same command again")


class _Growing:
    """A rollout while it is sampled."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout, self.problem = rollout, rollout.problem
        self.ids, self.spans, self.count = list(rollout.token_ids), list(rollout.spans), len(rollout.sampled)
        self.heard, self.end = rollout.heard, rollout.end
        self.world: Episode | None = None if self.problem.begin is None else self.problem.begin(rollout.world)
        self._open: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())

    @property
    def stops(self) -> list[int]:
        """Ids after which somebody must look."""
        return sorted(self.problem.stop_ids | (self.problem.asks if self.world is not None else frozenset()))

    def add(self, ids: tuple[int, ...], logprobs: tuple[float, ...], version: int) -> None:
        """A piece was sampled."""
        self.ids += ids
        self.count += len(ids)
        self._open = self._open[0] + ids, self._open[1] + logprobs
        if ids[-1] in self.problem.stop_ids:
            self.end = "stop"
        elif ids[-1] in self.problem.asks and self.world is not None:
            self._hear(self.world, version)
        if self.end is None and self.count >= self.problem.max_tokens:
            self.end = "length"

    def _hear(self, world: Episode, version: int) -> None:
        self._close(version)
        sampled = tuple(i for span in self.spans if span.sampled for i in span.token_ids)
        said = world.reply(sampled[self.heard :])
        self.heard = self.count
        if said is None:
            self.end = "world"
        elif said:
            self.spans.append(given(tuple(said)))
            self.ids += said
            if sum(len(span.token_ids) for span in self.spans if not span.sampled) > self.problem.room:
                raise ConfigError(f"problem {self.problem.id}: its world said more than the {self.problem.room} ids of 'room'")

    def _close(self, version: int) -> None:
        if self._open[0]:
            self.spans.append(chosen(*self._open, version))
            self._open = ((), ())

    def left(self, version: int) -> Rollout:
        """The rollout as far as it came; its world stays open."""
        self._close(version)
        return replace(self.rollout, spans=tuple(self.spans), end=self.end, heard=self.heard, world=None)


def _put_aside(grown: _Grown) -> Rollout:
    """An unfinished rollout with the state of its world, which is closed."""
    if grown.world is None:
        return grown.rollout
    try:
        return replace(grown.rollout, world=grown.world.state())
    finally:
        grown.world.close()


def _piece(endpoint: Endpoint, growing: _Growing, count: int, sampler: RemoteSampler) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Up to `count` ids more. Raises `PolicyError` for an answer that is not what was asked for."""
    seed, ours = growing.rollout.seed, endpoint.config.server == "gnomon"
    body: dict[str, Any] = {"prompt": growing.ids, "max_tokens": count, "temperature": sampler.temperature, "logprobs": 0,
                            "stop_token_ids": growing.stops, "ignore_eos": True}
    body |= {"seed": seed, "first_draw": growing.count} if ours else {
        "seed": seed_of(seed, growing.count), "return_token_ids": True, "skip_special_tokens": False}
    answer, headers = endpoint.post("/completions", body)
    if ours and headers.get(VERSION) != str(sampler.version):
        raise PolicyError(f"{endpoint.url} has the weights of version {headers.get(VERSION)} and not {sampler.version}; somebody else "
                          "exchanges its weights")
    try:
        ids, logprobs = _read(answer["choices"][0])
        stopped = bool(ids) and ids[-1] in growing.stops
        if not 0 < len(ids) <= count or len(ids) != len(logprobs) or (len(ids) < count and not stopped):
            raise ValueError(f"{len(ids)} ids of {count} and {len(logprobs)} log-probabilities, last id {ids[-1:]}")
        if any(i in growing.stops for i in ids[:-1]):
            raise ValueError("ids go on after one that stops")
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise PolicyError(f"{endpoint.url}: not the ids that were asked for ({type(error).__name__}: {error})") from None
    return ids, logprobs


def _read(choice: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    table = choice["logprobs"]
    ids = choice.get("token_ids") or table["token_ids"]
    logprobs = tuple(number(value) for value in table["token_logprobs"])
    if any(math.isinf(value) for value in logprobs):
        raise ValueError("an id was sampled that has no probability")
    return Span(token_ids=tuple(ids)).token_ids, logprobs
