"""The rows of a step: chunks of sequences, end to end, as the runner takes them. Read next: `engine.py`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gnomon.model.inference_state import PackedRows
from gnomon.serve.runner import Runner
from gnomon.serve.scheduler import Chunk
from gnomon.serve.sequence import Running, Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Rows `first` … of the logits that say how likely `ids` of a prompt were."""

    sequence: Sequence
    first: int
    ids: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A step: rows for the runner, who samples from which row of the logits, and which rows score a prompt."""

    rows: PackedRows
    sampling: list[tuple[Running, int]]
    scored: list[Scored]


def pack(chunks: list[Chunk], runner: Runner) -> Batch:
    """Lay the chunks end to end. Only the rows are wanted that somebody samples from, or that score a prompt.

    Where images are among the rows, all rows come as vectors: those of images, and for the others what the runner looks up.
    """
    count = len(chunks)
    tokens: list[int] = []
    bounds, wanted, copies = [0], list[int](), list[tuple[int, int, int]]()
    sampling: list[tuple[Running, int]] = []
    scored: list[Scored] = []
    tables = [chunk.running.held.table for chunk in chunks]
    pages = np.zeros((count, max(len(table) for table in tables)), dtype=np.int32)
    for place, chunk in enumerate(chunks):
        sequence, held = chunk.running.sequence, chunk.running.held
        pages[place, : len(tables[place])] = tables[place]
        tokens += sequence.tokens[chunk.start : chunk.stop]
        bounds.append(len(tokens))
        copies += [(place, seen, slot) for seen, slot in held.copies(chunk.start, chunk.stop)]
        if sequence.request.prompt_logprobs and len(sequence.prompt_logprobs) == chunk.start < len(sequence.request.prompt) - 1:
            ids = list(sequence.request.prompt[chunk.start + 1 : chunk.stop + 1])
            scored.append(Scored(sequence, len(wanted), ids))
            wanted += range(bounds[place], bounds[place] + len(ids))
        if chunk.stop == len(sequence.tokens):
            if not wanted or wanted[-1] != len(tokens) - 1:
                wanted.append(len(tokens) - 1)
            sampling.append((chunk.running, len(wanted) - 1))
    words, vectors = _inputs(chunks, tokens, bounds, runner)
    rows = PackedRows(
        tokens=words, embeddings=vectors, bounds=torch.tensor(bounds), past=torch.tensor([chunk.start for chunk in chunks]),
        slots=torch.tensor([chunk.running.held.slot for chunk in chunks]), pages=torch.from_numpy(pages),
        wanted=torch.tensor(wanted, dtype=torch.int64), copies=torch.tensor(copies, dtype=torch.int64) if copies else None,
    )
    return Batch(rows, sampling, scored)


def _inputs(chunks: list[Chunk], tokens: list[int], bounds: list[int], runner: Runner
            ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What the rows bring: either ids, or vectors where a chunk reaches into an image."""
    found: list[tuple[int, torch.Tensor]] = []
    for place, chunk in enumerate(chunks):
        for image in chunk.running.sequence.request.images:
            low, high = max(image.start, chunk.start), min(image.start + len(image.vectors), chunk.stop)
            if low < high:
                vectors = torch.from_numpy(image.vectors[low - image.start : high - image.start])
                found.append((bounds[place] + low - chunk.start, vectors))
    ids = torch.tensor(tokens)
    if not found:
        return ids, None
    for first, vectors in found:
        ids[first : first + len(vectors)] = 0  # no ids of the vocabulary; their rows are replaced
    rows = runner.embed(ids)
    for first, vectors in found:
        rows[first : first + len(vectors)] = vectors
    return None, rows
