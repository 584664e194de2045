"""The guest's drives: read-only file systems (erofs) of the agent's Python, of an image's files and of the host's `/usr`, each made once.

A guest has a kernel of its own, which cannot look into the host's folders: what it reads must lie on a drive. Sharing folders (virtiofs,
9p) would do, but a machine that uses them can be neither kept on disk nor copied. Drives are made with `mkfs.erofs` and found again by what
went into them; machines and snapshots have hard links to theirs, so that a newer one takes nothing away.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from gnomon.errors import CapacityError, SandboxError, Unsupported
from gnomon.sandbox.gvisor import bundle
from gnomon.sandbox.images import Image
from gnomon.sandbox.layers import LayerStore, default_root

LEFT_OUT = ("share/doc", "share/man", "share/info", "share/locale", "share/lintian", "lib/modules", "lib/firmware", "lib/debug", "src")
"""Parts of `/usr` that no program needs to run."""

NEEDLESS = shutil.ignore_patterns("test", "tests", "idlelib", "lib2to3", "tkinter", "ensurepip", "dist-packages", "site-packages",
                                  "pydoc_data", "turtledemo", "distutils", "config-*")  # fmt: skip
BUILD_SECONDS = 1800.0


class Drives:
    """The drives of one store; those that do not depend on it are shared with the user's other stores on the same file system."""

    def __init__(self, store: LayerStore) -> None:
        self.store, self.own = store, store.root / "microvm"
        self.own.mkdir(mode=0o700, exist_ok=True)
        self.shared = self.own
        with contextlib.suppress(OSError, SandboxError):
            common = LayerStore(default_root()).root / "microvm"
            common.mkdir(mode=0o700, exist_ok=True)
            if common.stat().st_dev == self.own.stat().st_dev:
                self.shared = common

    def of(self, image: Image) -> tuple[list[Path], bool]:
        """The drives of an image: Python first, then its files, top first; and whether the last is the host's `/usr`."""
        if image.host and image.layers and os.geteuid() != 0:
            raise Unsupported(f"microvm: image {image.name} has layers over the host's /usr, which only root can lay out; use a full image")
        found = [self.python()]
        if image.layers:
            found.append(self._layer(image))
        if image.host or not image.layers:
            found.append(self._skeleton())
        return [*found, self.usr()] if image.host else found, image.host

    def python(self) -> Path:
        """The host's Python with what the agent needs of it, under the names that `bundle.foreign_python` knows."""
        program, library = Path("/usr/bin/python3").resolve(), Path("/usr/lib")
        if not os.access(program, os.X_OK):
            raise Unsupported("microvm: the agent inside needs /usr/bin/python3; `apt-get install python3-minimal`")
        standard = library / program.name
        modules = sorted((standard / "lib-dynload").glob("*.so"))
        digest = hashlib.sha256(repr([(str(path), path.stat().st_mtime_ns) for path in (program, *modules)]).encode()).hexdigest()[:16]
        target = self.shared / f"python-{digest}.erofs"
        if not target.exists():
            with self._staging() as place:
                for path in (program, *_libraries([program, *modules])):
                    there = place / ("bin/python3" if path == program else _name_below(path))
                    there.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, there)
                    there.chmod(0o755)
                shutil.copytree(standard, place / "lib" / program.name, ignore=NEEDLESS, symlinks=True)
                self._make(target, place, "-x-1", "--all-root")
        return target

    def usr(self) -> Path:
        """The host's `/usr` as it is now, but for what no program needs."""
        exclusions = "|".join(map(re.escape, LEFT_OUT))
        options = ["-x-1", f"--exclude-regex=^({exclusions})(/|$)"]
        if os.geteuid() != 0:
            options += ["--all-root", *(f"--exclude-path={path}" for path in _closed(Path("/usr")))]
        target = self.shared / f"usr-{_stamp(Path('/usr'))}.erofs"
        if not target.exists():
            self._make(target, Path("/usr"), *options)
            for other in self.shared.glob("usr-*.erofs"):
                if other != target and other.stat().st_nlink == 1:
                    other.unlink(missing_ok=True)
        return target

    def _skeleton(self) -> Path:
        """Links, empty folders and a small `/etc`, as every sandbox on the host's `/usr` has them."""
        folder = bundle.host_root(self.own)
        target = self.own / f"root-{folder.stat().st_mtime_ns}.erofs"
        if not target.exists():
            self._make(target, folder, "-x-1", "--all-root")
        return target

    def _layer(self, image: Image) -> Path:
        """The files of an image, which never change."""
        target = self.own / f"image-{image.digest}.erofs"
        if not target.exists():
            self._make(target, self.store.flat(image), *([] if os.geteuid() == 0 else ["-x-1", "--all-root"]))
        return target

    def _make(self, target: Path, folder: Path, *options: str) -> None:
        program = shutil.which("mkfs.erofs")
        if program is None:
            raise Unsupported("microvm: no mkfs.erofs to make the guest's drives with; `apt-get install erofs-utils`")
        for stale in target.parent.glob(".*.erofs-*"):  # of one that was killed
            with contextlib.suppress(FileNotFoundError):
                if time.time() - stale.stat().st_mtime > BUILD_SECONDS:
                    stale.unlink()
        fresh = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
        words = [program, "--quiet", "--preserve-mtime", *options, str(fresh), str(folder)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
            if done.returncode != 0:
                kind = CapacityError if "No space" in done.stderr else SandboxError
                raise kind(f"microvm: mkfs.erofs of {folder} ended with status {done.returncode}: {done.stderr.strip()[-1000:]}")
            fresh.chmod(0o644)  # qemu runs as a user of its own
            fresh.rename(target)
        finally:
            fresh.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _staging(self) -> Iterator[Path]:
        place = self.store.scratch()
        try:
            yield place
        finally:
            self.store.discard(place)


def _libraries(programs: list[Path]) -> list[Path]:
    """The shared libraries that the host's programs load, the loader among them."""
    said = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=False).stdout
    return sorted({Path(found) for found in re.findall(r"(?:=> |^\s+)(/\S+) \(0x", said, re.MULTILINE)})


def _name_below(library: Path) -> str:
    """Where a library goes: beside the others; the loader to the place that its programs name."""
    if library.name.startswith("ld-linux"):
        return f"lib64/{library.name}" if "x86-64" in library.name else f"lib/{library.name}"
    common = next((found.name for found in sorted(Path("/usr/lib").glob(f"{os.uname().machine}-linux-gnu"))), "lib")
    return f"lib/{common}/{library.name}"


def _stamp(folder: Path) -> str:
    """A name for the present content of a tree: every folder's time of change, which whatever adds, removes or renames a file moves."""
    digest = hashlib.sha256()
    left_out = {str(folder / name) for name in LEFT_OUT}
    stack = [str(folder)]
    while stack:
        place = stack.pop()
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            below = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name != "__pycache__")
            stack += [path for path in below if path not in left_out]
            digest.update(f"{place} {os.stat(place).st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def _closed(folder: Path) -> list[str]:
    """What below a folder this user may not read, relative to it."""
    found = []
    for place, folders, names in os.walk(folder):
        for name in [*folders, *names]:
            path = os.path.join(place, name)
            if not os.path.islink(path) and not os.access(path, os.R_OK | (os.X_OK if name in folders else 0)):
                found.append(os.path.relpath(path, folder))
    return found
