"""A subset of Dockerfiles, built inside sandboxes: FROM, RUN, COPY, ENV, WORKDIR, USER; each step found again by what went into it.

A step runs in a sandbox of its own that starts from the image so far, and what it wrote becomes one more layer. Nothing is built with
rights that a sandbox does not have, and nothing is fetched unless the network allows it. Read next: `layers.py`, where layers are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shlex
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gnomon.errors import ConfigError, DataError, GnomonError, SandboxError
from gnomon.extend import suggestion
from gnomon.sandbox import trees
from gnomon.sandbox.images import Image, checked
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.sandbox import MEGABYTE, Backend, Command, Limits, Network, Sandbox, Spec

SUPPORTED = ("FROM", "RUN", "COPY", "ENV", "WORKDIR", "USER")
LEFT_OUT = ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK")
"""Lines that say how a container is started or described; a sandbox runs the program it is given, so they mean nothing here."""

Say = Callable[[str], object]
_VARIABLE = re.compile(r"\\(\$)|\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One instruction: its line, word, and the rest with continuations joined."""

    line: int
    word: str
    rest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Building:
    """How steps are run: limits, network and time of each, and whether earlier results are used."""

    limits: Limits = field(default_factory=lambda: Limits(memory_bytes=2048 * MEGABYTE, disk_bytes=2048 * MEGABYTE, processes=1024))
    network: Network = field(default_factory=Network)
    step_seconds: float = 1800.0
    cached: bool = True


def parse(text: str, name: str = "Dockerfile") -> list[Instruction]:
    """The instructions of a file. Raises `ConfigError` naming the line for what is not in the subset."""
    found: list[Instruction] = []
    parts: list[str] = []
    start = 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        start = start if parts else number
        parts.append(line.strip().removesuffix("\\").rstrip() if line.rstrip().endswith("\\") else line.strip())
        if not line.rstrip().endswith("\\"):
            found.append(_instruction(" ".join(parts), start, name))
            parts = []
    if parts:
        raise ConfigError(f"{name}:{start}: the file ends in the middle of an instruction; remove the last backslash")
    if not found or found[0].word != "FROM":
        raise ConfigError(f"{name}: it must begin with FROM: `host`, `scratch`, or an image that `gnomon sandbox images` lists")
    return found


def _instruction(text: str, line: int, name: str) -> Instruction:
    word, _, rest = text.partition(" ")
    word, rest = word.upper(), rest.strip()
    place = f"{name}:{line}"
    if word not in SUPPORTED and word not in LEFT_OUT:
        near = suggestion(word, SUPPORTED)
        raise ConfigError(f"{place}: {word} is not supported{near} (supported: {', '.join(SUPPORTED)})")
    if not rest:
        raise ConfigError(f"{place}: {word} needs an argument")
    if word in ("RUN", "COPY") and "<<" in rest and re.search(r"<<-?['\"]?\w+", rest):
        raise ConfigError(f"{place}: here-documents are not supported; write the file beside the Dockerfile and COPY it")
    if word == "FROM" and len(rest.split()) > 1:
        raise ConfigError(f"{place}: FROM takes one image here; platforms and stages (AS) are not supported, build each as an image")
    return Instruction(line=line, word=word, rest=rest)


async def build(
    backend: Backend, store: LayerStore, file: Path, name: str, *, how: Building | None = None, say: Say = lambda _: None,
) -> Image:
    """Build a Dockerfile, with its folder as context, into an image of the store.

    `say` is told of each step. Raises `ConfigError` for the file, `DataError` for a step that fails, with the end of its output.
    """
    checked(name)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; give a Dockerfile, or the folder that has one") from None
    work = _Build(backend, store, file, how or Building())
    image = Image(name="scratch")
    for instruction in parse(text, str(file)):
        say(f"{instruction.line}: {instruction.word} {instruction.rest}")
        if instruction.word in LEFT_OUT:
            say(f"   {instruction.word} is left out: a sandbox runs the program that it is given")
            continue
        image = await work.step(image, instruction, say)
    return store.keep(replace(image, name=name, snapshot=None))


class _Build:
    """One build: where steps run, and how each changes the image."""

    def __init__(self, backend: Backend, store: LayerStore, file: Path, how: Building) -> None:
        self._backend, self._store, self._file, self._how = backend, store, file, how

    async def step(self, image: Image, instruction: Instruction, say: Say) -> Image:
        place = f"{self._file}:{instruction.line}"
        rest = instruction.rest
        if instruction.word == "FROM":
            return self._start(_filled(rest, image.env), place)
        if instruction.word == "ENV":
            return replace(image, env={**image.env, **_pairs(rest, image.env, place)})
        if instruction.word == "USER":
            return replace(image, user=_filled(rest, image.env))
        if instruction.word == "WORKDIR":
            image = replace(image, workdir=os.path.normpath(os.path.join(image.workdir, _filled(rest, image.env))))
            return await self._cached(image, ["WORKDIR", image.workdir], place, lambda sandbox: _folder(sandbox, image.workdir, place), say)
        if instruction.word == "COPY":
            copy = _Copy.parse(rest, image, self._file.parent, place)
            return await self._cached(image, ["COPY", rest, *copy.digests()], place, copy.run, say)
        argv = _argv(rest, place)
        command = Command(argv=argv, timeout_seconds=self._how.step_seconds, env=dict(image.env), cwd=image.workdir, user=image.user)
        return await self._cached(image, ["RUN", *argv], place, lambda sandbox: _run(sandbox, command, place), say)

    def _start(self, name: str, place: str) -> Image:
        try:
            return self._store.resolve(name)
        except ConfigError as error:
            raise ConfigError(f"{place}: FROM {name}: {error}. Images are not fetched from registries: where one can be reached, run "
                              f"`docker pull {name} && docker save {name} -o image.tar`, then `gnomon sandbox build --archive image.tar "
                              f"--name {name}` here") from None

    async def _cached(
        self, image: Image, parts: Sequence[str], place: str, work: Callable[[Sandbox], Awaitable[None]], say: Say,
    ) -> Image:
        """The image with one more layer: found again if the same was done to the same, else made in a sandbox."""
        text = "\0".join([image.digest, image.workdir, image.user, *(f"{k}={v}" for k, v in sorted(image.env.items())), "", *parts])
        digest = "step-" + hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
        if self._how.cached and (found := self._store.cached(digest)) is not None:
            say("   found, built before")
            return replace(image, layers=found.layers, host=found.host)
        before = f"build-{secrets.token_hex(8)}"
        self._store.keep(replace(image, name=before))  # what this step starts from, by a name that a sandbox can be made of
        after = f"{before}-done"
        try:
            sandbox = await self._backend.create(Spec(
                image=before, limits=self._how.limits, network=self._how.network, workdir="/", ttl_seconds=self._how.step_seconds + 600))
            try:
                await work(sandbox)
                await sandbox.snapshot(after)
            finally:
                await sandbox.kill()
            made = self._store.resolve(after)
            self._store.cache(digest, made)
        except (ConfigError, DataError):
            raise
        except GnomonError as error:
            raise type(error)(f"{place}: {error}") from error
        finally:
            for name in (before, after):
                self._forget(name)
        return replace(image, layers=made.layers, host=made.host)

    def _forget(self, name: str) -> None:
        with contextlib.suppress(ConfigError):  # not made
            self._store.forget(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Copy:
    """`COPY SOURCE … TARGET`: files of the context, their place, their owner."""

    sources: tuple[Path, ...]
    target: str
    into: bool
    owner: str | None
    place: str

    @classmethod
    def parse(cls, rest: str, image: Image, context: Path, place: str) -> "_Copy":
        words = [_filled(word, image.env) for word in shlex.split(rest)]
        flags = [word for word in words if word.startswith("--")]
        names = [word for word in words if not word.startswith("--")]
        owner = next((flag.removeprefix("--chown=") for flag in flags if flag.startswith("--chown=")), None)
        if any(not flag.startswith("--chown=") for flag in flags):
            raise ConfigError(f"{place}: COPY has only the option --chown=USER[:GROUP] here; not {' '.join(flags)}")
        if len(names) < 2:
            raise ConfigError(f"{place}: COPY needs a source and a target")
        sources = tuple(path for name in names[:-1] for path in _matching(context, name, place))
        into = names[-1].endswith("/") or names[-1] in (".", "..")
        if len(sources) > 1 and not into:
            raise ConfigError(f"{place}: COPY of several sources needs a folder as target; end it with a slash")
        return cls(sources=sources, target=os.path.normpath(os.path.join(image.workdir, names[-1])), into=into, owner=owner, place=place)

    def digests(self) -> list[str]:
        """What is copied, by content."""
        return [line for source in self.sources for line in (source.name, _content(source, self.place))]

    async def run(self, sandbox: Sandbox) -> None:
        for source in self.sources:
            target = f"{self.target.rstrip('/')}/{source.name}" if self.into and source.is_file() else self.target
            await sandbox.upload(source, target)
            if self.owner is not None:
                await _run(sandbox, Command(argv=("chown", "-R", self.owner, target), cwd="/", user="root"), self.place)


def _matching(context: Path, name: str, place: str) -> list[Path]:
    """The files of the context that a source names; none leads out of it."""
    root = context.resolve()
    relative = name.lstrip("/") or "."
    found = sorted(root.glob(relative)) if any(c in relative for c in "*?[") else [root / relative]
    for path in found:
        if not path.resolve().is_relative_to(root):
            raise ConfigError(f"{place}: COPY {name}: leads out of {context}; copy the file there first")
    if not found or not all(path.exists() for path in found):
        raise ConfigError(f"{place}: COPY {name}: no such file in {context}")
    return found


def _content(source: Path, place: str) -> str:
    """A digest of a file or tree: names, rights and bytes; times and owners do not matter."""
    total = hashlib.sha256()
    entries = [(str(source), source.stat())]
    if source.is_dir():
        entries += [(entry.path, status) for entry, status in trees.walk(source)]
    for path, status in sorted(entries, key=lambda item: item[0]):
        relative = os.path.relpath(path, source)
        total.update(f"{relative}\0{stat.S_IMODE(status.st_mode):o}\0{stat.S_IFMT(status.st_mode):o}\0".encode("utf-8", "surrogateescape"))
        if stat.S_ISREG(status.st_mode):
            with open(path, "rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        elif stat.S_ISLNK(status.st_mode):
            total.update(os.readlink(path).encode("utf-8", "surrogateescape"))
        elif not stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"{place}: {path} is no file, folder or link; it cannot be copied")
    return total.hexdigest()


def _filled(text: str, env: Mapping[str, str]) -> str:
    """`$NAME` and `${NAME}` replaced; an unknown one is empty, as in a shell."""
    return _VARIABLE.sub(lambda match: match[1] or env.get(match[2] or match[3], ""), text)


def _pairs(rest: str, env: Mapping[str, str], place: str) -> dict[str, str]:
    """`A=1 B="two words"`, or the older `A one value`."""
    first = rest.split(maxsplit=1)
    if "=" not in first[0]:
        if len(first) != 2:
            raise ConfigError(f"{place}: ENV needs NAME=VALUE")
        return {first[0]: _filled(first[1], env)}
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise ConfigError(f"{place}: ENV: {error}; write NAME=\"VALUE\"") from None
    if any("=" not in word for word in words):
        raise ConfigError(f"{place}: ENV: '{next(w for w in words if '=' not in w)}' is no NAME=VALUE; put values with spaces in quotes")
    return {word.partition("=")[0]: _filled(word.partition("=")[2], env) for word in words}


def _argv(rest: str, place: str) -> tuple[str, ...]:
    """A shell line, or a JSON list of words."""
    if rest.startswith("--"):
        raise ConfigError(f"{place}: RUN has no options here; not {rest.split(maxsplit=1)[0]}")
    if rest.startswith("["):
        import json

        try:
            words = json.loads(rest)
            if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
                return tuple(words)
        except ValueError:
            pass  # `[ -e file ]` is a shell line too
    return ("/bin/sh", "-c", rest)


async def _run(sandbox: Sandbox, command: Command, place: str) -> None:
    result = await sandbox.exec(command)
    if result.code or result.timed_out:
        lines = [line for line in (result.stdout + result.stderr).decode("utf-8", "replace").splitlines() if line.strip()][-3:]
        why = f"it ran longer than {command.timeout_seconds:.0f} s" if result.timed_out else f"exit status {result.code}"
        raise DataError(f"{place}: {' '.join(command.argv)[:200]}: {why}: {'; '.join(lines) or 'no output'}")


async def _folder(sandbox: Sandbox, path: str, place: str) -> None:
    """A folder that is there, whether or not the image has the programs to make one."""
    try:
        await sandbox.list(path, 1)
    except SandboxError:
        marker = f"{path.rstrip('/')}/.made"
        await sandbox.write(marker, b"")
        await sandbox.remove(marker)
