"""Who teaches what: a checkpoint for each (domain, effort), all of them in the memory of one (report §4.1.3, eq. 15).

Routing is strict: a pair that no teacher has raises, and so does a teacher whose ids mean something else. Teachers share one network whose
weights are read in turn; a batch is sorted by teacher, so each is read at most once. What a teacher said about the same ids is kept, by
the content of both. Read next: `distill.py`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gnomon import config as toml
from gnomon.config import setting
from gnomon.errors import CheckpointError, ConfigError
from gnomon.model import runs
from gnomon.model.config import PRESETS, ModelConfig
from gnomon.model.transformer import Transformer
from gnomon.posttrain.learner import Document, hidden_states, in_pieces, stream

Cell = tuple[str, str]
Mode = Literal["sampled", "topk", "full"]
MICRO_TOKENS = 16_384
REMEMBERED_BYTES = 1 << 28
"""Of what teachers said: whole vocabularies of many documents would fill any memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """One teacher."""

    domain: str = setting(doc="domain that it teaches")
    effort: str = setting(doc="effort that it teaches")
    run: Path = setting(doc="its run folder; the newest checkpoint counts")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Said:
    """What a teacher says about a document: log-probabilities of its sampled ids; with `topk` also the likeliest `ids` [n, k] of each
    place with their `scores`; with `full` `scores` [n, V] of the whole vocabulary."""

    logprobs: Float[Tensor, "n"]
    scores: Float[Tensor, "n k"] | None = None
    ids: Int[Tensor, "n k"] | None = None

    @property
    def nbytes(self) -> int:
        """What is held."""
        return sum(t.nbytes for t in (self.logprobs, self.scores, self.ids) if t is not None)


class Teachers:
    """All teachers of a run. `student` is the folder whose tokenizer the ids belong to, where there is one.

    Raises `ConfigError` for a cell with two teachers, or a teacher whose vocabulary, special ids or tokenizer are not the student's.
    """

    def __init__(self, configs: Sequence[TeacherConfig], student: ModelConfig, *, tokenizer: Path | None = None, temperature: float = 1.0,
                 remembered: int = 4096, device: torch.device | str = "cpu") -> None:
        self.where: dict[Cell, Path] = {}
        for each in configs:
            if (each.domain, each.effort) in self.where:
                raise ConfigError(f"'teachers' names {each.domain}/{each.effort} twice; one teacher scores a sample")
            self.where[each.domain, each.effort] = each.run
        self.temperature, self.remembered, self.device = temperature, remembered, device
        self.checkpoints = {run: _checked(run, student, tokenizer) for run in dict.fromkeys(self.where.values())}
        self._network: Transformer | None = None
        self._holds: Path | None = None
        self._said: OrderedDict[bytes, Said] = OrderedDict()
        self._bytes = self.reads = self.hits = 0

    def score(self, documents: Sequence[tuple[Cell, Document]], mode: Mode = "sampled", k: int = 64) -> list[Said]:
        """What the teacher of each document's cell says about it. Raises `ConfigError` for a cell without a teacher."""
        missing = sorted({cell for cell, _ in documents if cell not in self.where})
        if missing:
            known = ", ".join("/".join(cell) for cell in sorted(self.where))
            raise ConfigError(f"no teacher for {', '.join('/'.join(cell) for cell in missing)} (teachers: {known}); name one for each cell")
        keys = [self._key(cell, document, mode, k) for cell, document in documents]
        found = {key: self._said[key] for key in keys if key in self._said}
        self.hits += sum(key in found for key in keys)
        by_run: dict[Path, list[int]] = {}
        for index, ((cell, _), key) in enumerate(zip(documents, keys, strict=True)):
            if key not in found:
                by_run.setdefault(self.where[cell], []).append(index)
        for run, indices in by_run.items():
            network = self._read(run)
            chosen = [documents[i][1] for i in indices]
            for index, said in zip(indices, _ask(network, chosen, mode, k, self.temperature), strict=True):
                found[keys[index]] = said
                self._remember(keys[index], said)
        return [found[key] for key in keys]

    def _remember(self, key: bytes, said: Said) -> None:
        """Keep it, and forget the oldest while there is too much."""
        if key not in self._said:
            self._said[key], self._bytes = said, self._bytes + said.nbytes
        while len(self._said) > self.remembered or self._bytes > REMEMBERED_BYTES:
            self._bytes -= self._said.popitem(last=False)[1].nbytes

    def _key(self, cell: Cell, document: Document, mode: Mode, k: int) -> bytes:
        path = self.checkpoints[self.where[cell]]
        digest = hashlib.sha256(f"{path}\n{mode}\n{k}\n{self.temperature}\n".encode())
        digest.update(repr((document.token_ids, document.mask)).encode())
        return digest.digest()

    def _read(self, run: Path) -> Transformer:
        """The one network, with this teacher's weights in it."""
        if self._network is None:
            self._network = Transformer(shape_of(run)).to(self.device).eval().requires_grad_(False)
        if self._holds != run:
            self._holds = None  # while the weights are a mixture
            path = self.checkpoints[run]
            runs.restore_model(self._network, runs.load(path, self.device).tensors["model"], path)
            self._holds = run
            self.reads += 1
        return self._network


@torch.no_grad()
def _ask(network: Transformer, documents: Sequence[Document], mode: Mode, k: int, temperature: float) -> list[Said]:
    found: list[Said] = []
    for part in in_pieces(list(documents), [len(each.token_ids) for each in documents], MICRO_TOKENS):
        piece = stream(part, network.model.embed_tokens.weight.device)
        scores = all_scores(network, hidden_states(network, piece), temperature)
        sizes = piece.lengths.tolist()
        own = scores.gather(1, piece.targets[:, None])[:, 0].split(sizes)
        if mode == "sampled":
            found += [Said(logprobs=o) for o in own]
        elif mode == "full":
            found += [Said(logprobs=o, scores=s) for o, s in zip(own, scores.split(sizes), strict=True)]
        else:
            top, ids = scores.topk(min(k, scores.shape[1]), -1)
            found += [Said(logprobs=o, scores=s, ids=i) for o, s, i in zip(own, top.split(sizes), ids.split(sizes), strict=True)]
    return found


def all_scores(network: Transformer, hidden: Float[Tensor, "n D"], temperature: float) -> Float[Tensor, "n V"]:
    """Log-probabilities of the whole vocabulary, in fp32."""
    logits = network.head(hidden).float()
    return (logits / temperature if temperature else logits).log_softmax(-1)


def shape_of(run: Path) -> ModelConfig:
    """The shape of a run folder's model. Raises `CheckpointError` for a folder that is none."""
    path = run / "recipe.toml"
    if not path.exists():
        raise CheckpointError(f"{run} is no run folder: {path.name} is missing; give the folder of a run that has trained")
    return toml.from_dict(ModelConfig, toml.read_toml(path, PRESETS).get("model", {}), str(path))


def _checked(run: Path, student: ModelConfig, tokenizer: Path | None) -> Path:
    """The newest checkpoint of a teacher whose ids are the student's."""
    teacher = shape_of(run)
    for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(teacher, name) != getattr(student, name):
            raise ConfigError(f"teacher {run} has '{name}' {getattr(teacher, name)}, the student {getattr(student, name)}; "
                              "ids must mean the same to both")
    if teacher != student:
        raise ConfigError(f"teacher {run} has another shape than the student; teachers come from the student's own cold start")
    theirs = run / "tokenizer"
    if tokenizer is not None and theirs.is_dir() and digest_of(theirs) != digest_of(tokenizer):
        raise ConfigError(f"teacher {run} has another tokenizer than {tokenizer}; ids must mean the same to both")
    path = runs.latest(run)
    if path is None:
        raise CheckpointError(f"teacher {run} has no checkpoint yet; let it train until the first one")
    return path


def digest_of(folder: Path) -> str:
    """What the files of a tokenizer's folder say."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def routed(teachers: Mapping[Cell, Path]) -> tuple[TeacherConfig, ...]:
    """Teachers from a table."""
    return tuple(TeacherConfig(domain=domain, effort=effort, run=run) for (domain, effort), run in teachers.items())
