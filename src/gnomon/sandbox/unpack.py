"""From a tar stream to the folder of a layer, trusting nothing in it.

Names are resolved one folder at a time without following links, so that nothing is written outside whatever the archive says. What an
image has no need for is refused with one line: names that climb, hard links out of the layer, device nodes (those in `dev/` are left out, a
sandbox has its own), sparse files, bombs. `.wh.NAME` and `.wh..wh..opq` become whiteouts and opaque folders. Read next: `oci.py`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from gnomon.errors import CapacityError, DataError
from gnomon.sandbox import trees
from gnomon.units import format_bytes

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_PIECE = 1 << 20
_HEADER_BYTES = 1 << 20  # of one extended header: names and attributes, kept in memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """How large an archive may turn out: bytes and entries when unpacked, depth of folders."""

    bytes: int = 16 << 30
    entries: int = 2_000_000
    depth: int = 100


class Readable(Protocol):
    """Bytes in order."""

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes; none at the end."""
        ...


class Entry(tarfile.TarInfo):
    """An entry whose headers are small and whose content is what it says."""

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        if self.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.SOLARIS_XHDTYPE) \
                and not 0 <= self.size <= _HEADER_BYTES:
            raise DataError(f"an extended header of {self.size} bytes; at most {_HEADER_BYTES} make sense")
        if self.type == tarfile.GNUTYPE_SPARSE:
            raise _sparse(self)
        return super()._proc_member(tar)  # type: ignore[misc]

    def _proc_gnusparse_00(self, next: tarfile.TarInfo, *_: Any) -> None:
        raise _sparse(next)

    def _proc_gnusparse_01(self, next: tarfile.TarInfo, *_: Any) -> None:
        raise _sparse(next)

    def _proc_gnusparse_10(self, next: tarfile.TarInfo, *_: Any) -> None:
        raise _sparse(next)


def _sparse(entry: tarfile.TarInfo) -> DataError:
    return DataError(f"'{entry.name}' is a sparse file; pack the archive without --sparse")


def unpack(stream: Readable, folder: Path, source: str, bounds: Bounds | None = None) -> int:
    """Fill an empty folder from an uncompressed tar stream; returns the bytes of its files.

    Owners are kept for root; times, modes, links and `user.` attributes always. Raises `DataError` with `source` and the entry for what is
    refused or damaged, `CapacityError` where it is larger than `bounds` or the disk. What was written until then stays: use a scratch
    folder.
    """
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    writer = _Writer(root, bounds or Bounds(), source)
    try:
        with trees.room(f"unpacking {source}", folder):
            with tarfile.open(fileobj=cast(Any, stream), mode="r|", tarinfo=Entry, errorlevel=1) as tar:
                for entry in tar:
                    cast(Any, tar).members.clear()  # it would keep all of them
                    writer.put(tar, entry)
            while stream.read(_PIECE):  # to the end, so that all of it is counted and checked
                pass
            writer.finish()
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise DataError(f"{source}: damaged ({error}); make the archive again") from error
    except DataError as error:
        raise DataError(f"{source}: refused: {error}") from None
    finally:
        writer.close()
        os.close(root)
    return writer.bytes


class _Writer:
    """Puts entries below an open folder."""

    def __init__(self, root: int, bounds: Bounds, source: str) -> None:
        self.bytes = self.entries = 0
        self._root, self._bounds, self._source = root, bounds, source
        self._parent: tuple[tuple[str, ...], int] | None = None
        self._folders: dict[tuple[str, ...], tarfile.TarInfo] = {}

    def put(self, tar: tarfile.TarFile, entry: tarfile.TarInfo) -> None:
        parts = self._parts(entry.name)
        self.entries += 1
        self.bytes += entry.size if entry.isreg() else 0
        if self.entries > self._bounds.entries or self.bytes > self._bounds.bytes:
            raise CapacityError(f"{self._source}: more than {self._bounds.entries:,} entries or {format_bytes(self._bounds.bytes)} when "
                                "unpacked; if that is meant, allow more (gnomon sandbox build --max-size)")
        if not parts:
            if entry.isdir():
                self._folders[()] = entry
            return
        if entry.ischr() or entry.isblk():
            if parts[0] == "dev":
                return
            raise DataError(f"'{entry.name}' is a device; remove it from the image, sandboxes have a /dev of their own")
        name, folder = parts[-1], self._folder(parts[:-1])
        if name == _OPAQUE:
            _opaque(folder)
        elif name.startswith(_WHITEOUT):
            self._hide(folder, name.removeprefix(_WHITEOUT), entry.name)
        else:
            self._place(tar, entry, parts, folder)

    def _place(self, tar: tarfile.TarFile, entry: tarfile.TarInfo, parts: tuple[str, ...], folder: int) -> None:
        name, there = parts[-1], _status(parts[-1], folder)
        hidden = there is not None and stat.S_ISCHR(there.st_mode)
        if there is not None and not (entry.isdir() and stat.S_ISDIR(there.st_mode)):
            self._remove(name, folder, there)
            there = None
        if entry.isdir():
            if there is None:
                os.mkdir(name, 0o700, dir_fd=folder)
            if hidden:
                with _opened(name, folder) as inner:
                    _opaque(inner)
            self._folders[parts] = entry
            return
        if entry.islnk():
            self._link(entry, name, folder)
            return
        if entry.issym():
            if not entry.linkname:
                raise DataError(f"'{entry.name}' is a link to nothing")
            os.symlink(entry.linkname, name, dir_fd=folder)
        elif entry.isreg():
            self._write(tar, entry, name, folder)
        elif entry.isfifo():
            os.mkfifo(name, 0o600, dir_fd=folder)
        else:
            raise DataError(f"'{entry.name}' is of an unknown kind ({entry.type!r})")
        _dress(entry, name, folder)

    def finish(self) -> None:
        """Rights and times of folders, last, since writing into them needs the one and changes the other."""
        for parts, entry in sorted(self._folders.items(), key=lambda item: -len(item[0])):
            if parts:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # replaced by a later entry
                    folder = self._folder(parts[:-1], make=False)
                    with _opened(parts[-1], folder):
                        _dress(entry, parts[-1], folder)
            else:
                _dress(entry, ".", self._root)

    def close(self) -> None:
        if self._parent is not None:
            os.close(self._parent[1])
            self._parent = None

    def _parts(self, name: str) -> tuple[str, ...]:
        parts = tuple(part for part in name.split("/") if part not in ("", "."))
        if name.startswith("/") or ".." in parts:
            raise DataError(f"the name '{name}' leads out of the image")
        if len(parts) > self._bounds.depth:
            raise DataError(f"'{name[:60]}…' lies {len(parts)} folders deep")
        return parts

    def _folder(self, parts: tuple[str, ...], make: bool = True) -> int:
        """The folder of this name, made if it is not there; never through a link. It stays open until the next call."""
        if self._parent is not None and self._parent[0] == parts:
            return self._parent[1]
        descriptor = os.dup(self._root)
        try:
            for i, part in enumerate(parts):
                there = _status(part, descriptor)
                if make and there is not None and stat.S_ISLNK(there.st_mode):
                    raise DataError(f"'{'/'.join(parts)}' goes through the link '{'/'.join(parts[: i + 1])}'")
                if make and there is not None and not stat.S_ISDIR(there.st_mode):
                    raise DataError(f"'{'/'.join(parts[: i + 1])}' is no folder, but has entries")
                if make and there is None:
                    os.mkdir(part, 0o755, dir_fd=descriptor)
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
        except BaseException:
            os.close(descriptor)
            raise
        self.close()
        self._parent = parts, descriptor
        return descriptor

    def _hide(self, folder: int, name: str, full: str) -> None:
        """A whiteout speaks of the layers below; what this layer has itself under the name stays."""
        if name in ("", ".", "..") or name.startswith(_WHITEOUT):
            raise DataError(f"'{full}' hides no name")
        there = _status(name, folder)
        if there is None:
            trees.make_whiteout(Path(f"/proc/self/fd/{folder}/{name}"))
        elif stat.S_ISDIR(there.st_mode):
            with _opened(name, folder) as inner:
                _opaque(inner)

    def _link(self, entry: tarfile.TarInfo, name: str, folder: int) -> None:
        target = self._parts(entry.linkname)
        holder = os.dup(folder)
        try:
            if not target:
                raise DataError(f"'{entry.name}' is a hard link to nothing")
            place = self._folder(target[:-1])
            there = _status(target[-1], place)
            if there is None or not (stat.S_ISREG(there.st_mode) or stat.S_ISLNK(there.st_mode)):
                raise DataError(f"'{entry.name}' is a hard link to '{entry.linkname}', which is no file before it in this layer")
            os.link(target[-1], name, src_dir_fd=place, dst_dir_fd=holder, follow_symlinks=False)
        finally:
            os.close(holder)

    def _write(self, tar: tarfile.TarFile, entry: tarfile.TarInfo, name: str, folder: int) -> None:
        content = tar.extractfile(entry)
        assert content is not None
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            while piece := content.read(_PIECE):
                view = memoryview(piece)
                while view:
                    view = view[os.write(descriptor, view):]
        finally:
            os.close(descriptor)

    def _remove(self, name: str, folder: int, status: os.stat_result) -> None:
        """An archive may have a name twice; the last one counts."""
        if stat.S_ISDIR(status.st_mode):
            trees.remove(Path(os.readlink(f"/proc/self/fd/{folder}"), name))
        else:
            os.unlink(name, dir_fd=folder)


def _dress(entry: tarfile.TarInfo, name: str, folder: int) -> None:
    """Owner, rights, attributes and time."""
    if os.geteuid() == 0:
        os.chown(name, entry.uid, entry.gid, dir_fd=folder, follow_symlinks=False)
    if not entry.issym():
        os.chmod(name, entry.mode & 0o7777, dir_fd=folder)
        for key, value in entry.pax_headers.items():
            kind, _, attribute = key.partition("SCHILY.xattr.")
            if not kind and attribute.startswith("user.") and not attribute.startswith("user.overlay."):
                with contextlib.suppress(OSError):
                    os.setxattr(f"/proc/self/fd/{folder}/{name}", attribute, value.encode("utf-8", "surrogateescape"))
    time = max(0, int(entry.mtime * 10**9))
    os.utime(name, ns=(time, time), dir_fd=folder, follow_symlinks=False)


def _opaque(folder: int) -> None:
    trees.make_opaque(Path(os.readlink(f"/proc/self/fd/{folder}")))


def _status(name: str, folder: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _opened(name: str, folder: int) -> Iterator[int]:
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
