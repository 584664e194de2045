"""A Debian or Ubuntu as an image, made by `mmdebstrap` or `debootstrap`, once for each choice of release and packages.

Both read a distribution's package index, so they need its mirror; everything else about sandboxes works without a network. Read next:
`dockerfile.py`, to go on from such an image.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gnomon.errors import ConfigError, DataError, Unsupported
from gnomon.sandbox.images import Image, checked
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.unpack import unpack

_WORD = re.compile(r"[a-z0-9][a-z0-9.+:=~-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """What to install: a release such as `bookworm`, packages beside the smallest set, a mirror other than the machine's own."""

    suite: str = "bookworm"
    packages: tuple[str, ...] = ()
    mirror: str | None = None

    @property
    def digest(self) -> str:
        """A name for this choice on this architecture."""
        text = "\n".join(["debian", os.uname().machine, self.suite, self.mirror or "", *sorted(set(self.packages))])
        return "bootstrap-" + hashlib.sha256(text.encode()).hexdigest()


def bootstrap(store: LayerStore, choice: Distribution, name: str, *, fresh: bool = False) -> Image:
    """The distribution as an image under a name; made in a minute or two the first time, found again after that unless `fresh`.

    Raises `ConfigError` for words that are no names of packages, `Unsupported` where neither program is installed, `DataError` with their
    last lines where they fail.
    """
    checked(name)
    for word in (choice.suite, *choice.packages):
        if not _WORD.fullmatch(word):
            raise ConfigError(f"'{word}' is no name of a release or package")
    if not fresh and (found := store.cached(choice.digest)) is not None:
        return store.keep(replace(found, name=name))
    place = store.scratch()
    try:
        folder = place / "layer"
        folder.mkdir(mode=0o755)
        if program := shutil.which("mmdebstrap"):
            _streamed(_mmdebstrap(program, choice), folder)
        elif (program := shutil.which("debootstrap")) and os.geteuid() == 0:
            _run(_debootstrap(program, choice, folder))
            shutil.rmtree(folder / "dev", ignore_errors=True)
            (folder / "dev").mkdir()
        else:
            raise Unsupported("neither mmdebstrap nor, as root, debootstrap is installed; `apt-get install mmdebstrap`, or load an image "
                              "that `docker save` wrote")
        layer = store.seal(folder, durable=True)
    finally:
        store.discard(place)
    image = Image(name=name, layers=(layer,), env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"})
    try:
        store.cache(choice.digest, image)
        return store.keep(image)
    finally:
        store.release([layer])


def _mmdebstrap(program: str, choice: Distribution) -> list[str]:
    packages = [f"--include={','.join(choice.packages)}"] if choice.packages else []
    mode = [] if os.geteuid() == 0 else ["--mode=unshare"]
    return [program, "--variant=minbase", "--format=tar", "--quiet", *mode, *packages, choice.suite, "-", *filter(None, [choice.mirror])]


def _debootstrap(program: str, choice: Distribution, folder: Path) -> list[str]:
    packages = [f"--include={','.join(choice.packages)}"] if choice.packages else []
    return [program, "--variant=minbase", *packages, choice.suite, str(folder), *filter(None, [choice.mirror])]


def _streamed(command: Sequence[str], folder: Path) -> None:
    """Run a program that writes an archive, and unpack it as it comes."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        assert process.stdout is not None
        failure: DataError | None = None
        try:
            unpack(process.stdout, folder, Path(command[0]).name)
        except DataError as error:
            failure = error
        finally:
            process.stdout.close()
            code = process.wait()
        errors.seek(0)
        if code or failure:
            raise _failed(command, errors.read(), failure)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        raise _failed(command, done.stdout + done.stderr, None)


def _failed(command: Sequence[str], output: bytes, failure: DataError | None) -> DataError:
    lines = [line for line in output.decode("utf-8", "replace").splitlines() if line.strip()][-3:]
    why = "; ".join(lines) or str(failure or "no reason given")
    return DataError(f"{Path(command[0]).name} failed: {why}; check the names of the packages and that the mirror can be reached")
