"""Who teaches what: for each (domain, effort) a checkpoint, an adapter on one, or a server (report §4.1.3, eq. 15).

Routing is strict: a pair that no teacher has raises, and so does a teacher whose ids mean something else. Teachers that are here share one
network in which they sit in turn; a batch is sorted by teacher, so each is read at most once. What a teacher said about the same ids is
kept, by the content of both. Read next: `seat.py`, `remote_teacher.py`, `distill.py`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gnomon import config as toml
from gnomon.config import setting
from gnomon.errors import CheckpointError, ConfigError
from gnomon.model import runs
from gnomon.model.config import PRESETS, ModelConfig
from gnomon.posttrain.endpoint import Endpoint, EndpointConfig
from gnomon.posttrain.keeping import ends
from gnomon.posttrain.learner import Document
from gnomon.posttrain.remote_teacher import RemoteTeacher
from gnomon.posttrain.seat import Seat, Seated, all_scores, seated
from gnomon.posttrain.teaching import Mode, Said, Teacher

__all__ = ["Cell", "Mode", "Said", "TeacherConfig", "Teachers", "all_scores", "digest_of", "routed", "shape_of"]

Cell = tuple[str, str]
REMEMBERED_BYTES = 1 << 28
"""Of what teachers said: whole vocabularies of many documents would fill any memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """One teacher: a run, an adapter on a run, or a server."""

    domain: str = setting(doc="domain that it teaches")
    effort: str = setting(doc="effort that it teaches")
    run: Path | None = setting(None, "its run folder; the newest checkpoint counts")
    adapter: Path | None = setting(None, "folder of a LoRA adapter on `run`, in PEFT's layout")
    endpoint: EndpointConfig | None = setting(None, "a server that scores ids, in the place of a run")

    def __post_init__(self) -> None:
        if (self.run is None) == (self.endpoint is None):
            raise ConfigError(f"teacher {self.domain}/{self.effort} has {'neither' if self.run is None else 'both'} 'run' and 'endpoint'; "
                              "give one of them")
        if self.adapter is not None and self.run is None:
            raise ConfigError(f"teacher {self.domain}/{self.effort} has an 'adapter' and no 'run'; name the run that it belongs to")


class Teachers:
    """All teachers of a run. `student` is the folder whose tokenizer the ids belong to, where there is one.

    Raises `ConfigError` for a cell with two teachers, or a teacher whose vocabulary, special ids or tokenizer are not the student's;
    `PolicyError` for a server that does not answer.
    """

    def __init__(self, configs: Sequence[TeacherConfig], student: ModelConfig, *, tokenizer: Path | None = None, temperature: float = 1.0,
                 remembered: int = 4096, device: torch.device | str = "cpu") -> None:
        self.temperature, self.remembered = temperature, remembered
        self.where: dict[Cell, Teacher] = {}
        self.checkpoints: dict[Path, Path] = {}
        self._seat = Seat(student, device)
        made: dict[TeacherConfig, Teacher] = {}
        for each in configs:
            cell = each.domain, each.effort
            if cell in self.where:
                raise ConfigError(f"'teachers' names {each.domain}/{each.effort} twice; one teacher scores a sample")
            key = replace(each, domain="", effort="")
            if key not in made:
                made[key] = self._made(each, student, tokenizer)
            self.where[cell] = made[key]
        self._said: OrderedDict[bytes, Said] = OrderedDict()
        self._bytes = self.hits = 0

    def _made(self, config: TeacherConfig, student: ModelConfig, tokenizer: Path | None) -> Teacher:
        if config.endpoint is not None:
            return RemoteTeacher(Endpoint(config.endpoint), tokenizer)
        assert config.run is not None
        if config.run not in self.checkpoints:
            self.checkpoints[config.run] = _checked(config.run, student, tokenizer)
        return seated(self._seat, self.checkpoints[config.run], config.adapter)

    @property
    def reads(self) -> int:
        """Checkpoints that were read from the disk."""
        return self._seat.reads

    def names(self) -> dict[str, str]:
        """What tells each cell's teacher from others, wherever its folder lies."""
        names = {cell: teacher.name for cell, teacher in self.where.items()}
        for cell, teacher in self.where.items():
            if isinstance(teacher, Seated):
                names[cell] = teacher.name.replace(str(teacher.checkpoint), ends(teacher.checkpoint))
        return {"/".join(cell): name for cell, name in sorted(names.items())}

    def score(self, documents: Sequence[tuple[Cell, Document]], mode: Mode = "sampled", k: int = 64) -> list[Said]:
        """What the teacher of each document's cell says about it. Raises `ConfigError` for a cell without a teacher."""
        missing = sorted({cell for cell, _ in documents if cell not in self.where})
        if missing:
            known = ", ".join("/".join(cell) for cell in sorted(self.where))
            raise ConfigError(f"no teacher for {', '.join('/'.join(cell) for cell in missing)} (teachers: {known}); name one for each cell")
        keys = [self._key(cell, document, mode, k) for cell, document in documents]
        found = {key: self._said[key] for key in keys if key in self._said}
        self.hits += sum(key in found for key in keys)
        by_teacher: dict[str, tuple[Teacher, list[int]]] = {}
        for index, ((cell, _), key) in enumerate(zip(documents, keys, strict=True)):
            if key not in found:
                teacher = self.where[cell]
                by_teacher.setdefault(teacher.name, (teacher, []))[1].append(index)
        for teacher, indices in by_teacher.values():
            chosen = [documents[i][1] for i in indices]
            for index, said in zip(indices, teacher.ask(chosen, mode, k, self.temperature), strict=True):
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
        digest = hashlib.sha256(f"{self.where[cell].name}\n{mode}\n{k}\n{self.temperature}\n".encode())
        digest.update(repr((document.token_ids, document.mask)).encode())
        return digest.digest()


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
