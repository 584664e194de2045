"""A teacher behind an address: it is sent the ids of a rollout and says how likely it finds each.

Our server scores a prompt with `echo`, `logprobs` and no token of output; vLLM with `prompt_logprobs`. Both say nothing about the first id,
which nothing predicts; ids that come back are compared with those that were sent. Read next: `endpoint.py`, `teachers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from gnomon.errors import ConfigError, PolicyError
from gnomon.posttrain.endpoint import Endpoint
from gnomon.posttrain.learner import Document, in_pieces
from gnomon.posttrain.teaching import Mode, Said

REQUEST_TOKENS, REQUEST_PROMPTS = 8192, 64
"""Most ids and prompts of one request."""
TOLD = 1e-3
"""How far above zero a log-probability may be, for rounding."""

Row = list[tuple[float, Mapping[int, float]]]
"""For each id but the first: its log-probability, and those of the likeliest ids where they were asked for."""


class RemoteTeacher:
    """A teacher at an endpoint; `tokenizer` is the folder that the student's ids belong to. Raises what `Endpoint.check` raises."""

    def __init__(self, endpoint: Endpoint, tokenizer: Path | None) -> None:
        endpoint.check(tokenizer)
        self._endpoint = endpoint
        self.name = f"{endpoint.url} {endpoint.model} {endpoint.told.get('weights_fingerprint', '')}"

    def ask(self, documents: Sequence[Document], mode: Mode, k: int, temperature: float) -> list[Said]:
        """What it says about each document. Raises `ConfigError` for what the server cannot say, `PolicyError` where it does not answer."""
        self._check(mode, temperature)
        pieces = list(_pieces(documents))
        with ThreadPoolExecutor(self._endpoint.config.at_once, thread_name_prefix="teacher") as pool:
            rows = [row for found in pool.map(lambda piece: self._rows(piece, k if mode == "topk" else 0), pieces) for row in found]
        return [_said(document, row, k if mode == "topk" else 0) for document, row in zip(documents, rows, strict=True)]

    def _check(self, mode: Mode, temperature: float) -> None:
        if mode == "full" or (mode == "topk" and self._endpoint.config.server == "gnomon"):
            raise ConfigError(f"'mode' is '{mode}', and the teacher at {self._endpoint.url} tells log-probabilities of given ids alone; "
                              "use mode 'sampled', or a checkpoint as teacher")
        if temperature != 1:
            raise ConfigError(f"'sampling.temperature' is {temperature}, and the teacher at {self._endpoint.url} tells log-probabilities "
                              "of temperature 1; sample at that one, or use a checkpoint as teacher")

    def _rows(self, documents: list[Document], k: int) -> list[Row]:
        ids = [list(each.token_ids) for each in documents]
        ours = self._endpoint.config.server == "gnomon"
        asked: dict[str, Any] = {"prompt": ids, "temperature": 0, **(
            {"max_tokens": 0, "echo": True, "logprobs": 0, "cache": False} if ours else {"max_tokens": 1, "prompt_logprobs": k})}
        answer, _ = self._endpoint.post("/completions", asked)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            rows = [(_echoed if ours else _prompt_logprobs)(choice, sent) for choice, sent in zip(choices, ids, strict=True)]
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise PolicyError(f"{self._endpoint.url}: no log-probabilities of the ids that were sent ({type(error).__name__}: {error}); "
                              "a server of vLLM must allow 'prompt_logprobs'") from None
        return rows


def _pieces(documents: Sequence[Document]) -> Iterator[list[Document]]:
    for piece in in_pieces(list(documents), [len(each.token_ids) for each in documents], REQUEST_TOKENS):
        yield from (piece[i : i + REQUEST_PROMPTS] for i in range(0, len(piece), REQUEST_PROMPTS))


def _echoed(choice: Mapping[str, Any], sent: list[int]) -> Row:
    """Our server's answer: the prompt's own ids with their log-probabilities."""
    table = choice["logprobs"]
    if table["token_ids"] != sent or len(table["token_logprobs"]) != len(sent) or table["token_logprobs"][0] is not None:
        raise ValueError("other ids came back than were sent")
    return [(number(value), {}) for value in table["token_logprobs"][1:]]


def _prompt_logprobs(choice: Mapping[str, Any], sent: list[int]) -> Row:
    """vLLM's answer: at each place a table by id, in which the prompt's own id always is."""
    places = choice["prompt_logprobs"]
    if len(places) != len(sent) or places[0] is not None:
        raise ValueError("other ids came back than were sent")
    tables = [{int(name): number(entry["logprob"]) for name, entry in place.items()} for place in places[1:]]
    return [(table[token], table) for token, table in zip(sent[1:], tables, strict=True)]


def number(value: Any) -> float:
    """A log-probability out of JSON. Raises `ValueError` for what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value) or value > TOLD:
        raise ValueError(f"{value!r} is no log-probability")
    return float(value)


def _said(document: Document, row: Row, k: int) -> Said:
    """Only the places that were sampled count; the first id of a document never is."""
    places = [row[i - 1] for i, learnt in enumerate(document.mask) if learnt]
    own = torch.tensor([value for value, _ in places], dtype=torch.float32)
    if not k:
        return Said(logprobs=own)
    tops = [sorted(table.items(), key=lambda pair: -pair[1])[:k] for _, table in places]
    count = min((len(top) for top in tops), default=0)
    scores = torch.tensor([[p for _, p in top[:count]] for top in tops], dtype=torch.float32).reshape(len(tops), count)
    return Said(logprobs=own, scores=scores, ids=torch.tensor([[i for i, _ in top[:count]] for top in tops],
                                                              dtype=torch.int64).reshape(len(tops), count))
