"""Trees of files as overlay file systems keep them: copied faithfully, merged, measured, removed, however deep or hostile they are.

A *whiteout* hides a name of the layers below: a character device 0:0, which every user may make. An *opaque* folder hides all that lies
below it: an extended attribute, `trusted.overlay.opaque` for root and `user.overlay.opaque` for a file system that an ordinary user
mounted. Nothing here follows a symbolic link or recurses. Read next: `layers.py`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from gnomon.errors import CapacityError, SandboxError

OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WHITEOUT = ("trusted.overlay.whiteout", "user.overlay.whiteout")
_REDIRECT = ("trusted.overlay.redirect", "user.overlay.redirect")


@contextlib.contextmanager
def room(what: str, place: Path) -> Iterator[None]:
    """A full disk inside becomes a `CapacityError` that says what did not fit where; hostile names and rights, a `SandboxError`."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise CapacityError(f"{what}: no space left on the file system of {place} ({error.strerror}); free space there, run "
                                "`gnomon sandbox gc`, or set GNOMON_SANDBOX_HOME to a larger one") from error
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise SandboxError(f"{what}: folders nest deeper than a path can name ({error.strerror}); remove them and try again") from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise SandboxError(f"{what}: {error.filename or place}: {error.strerror}; give its owner the right to use it") from error
        raise


def is_whiteout(path: str | Path, status: os.stat_result) -> bool:
    """Whether an entry of a layer says that its name is gone."""
    if stat.S_ISCHR(status.st_mode):
        return status.st_rdev == 0
    return stat.S_ISREG(status.st_mode) and status.st_size == 0 and any(name in _WHITEOUT for name in _names(path))


def make_whiteout(path: Path) -> None:
    """Hide a name of the layers below. Raises `SandboxError` where the kernel is older than 5.8 and the user is not root."""
    try:
        os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
    except PermissionError as error:
        raise SandboxError(f"{path}: cannot make a whiteout ({error.strerror}); an ordinary user needs Linux 5.8 or newer") from error


def is_opaque(path: str | Path) -> bool:
    """Whether a folder hides what lies below it."""
    return any(name in OPAQUE and _get(path, name) == b"y" for name in _names(path))


def make_opaque(path: Path) -> None:
    """Hide what lies below a folder: in the form that the own overlay mounts read, and as root in both."""
    done = False
    for name in OPAQUE:
        with contextlib.suppress(OSError):
            os.setxattr(path, name, b"y", follow_symlinks=False)
            done = True
    if not done:
        raise SandboxError(f"{path}: the file system keeps no extended attributes, which layers need; "
                           "set GNOMON_SANDBOX_HOME to a folder on ext4, xfs, btrfs or tmpfs")


def measure(folder: Path) -> int:
    """Bytes that a tree takes on its disk; a file with several names counts once."""
    total, seen = 0, set()
    for entry, status in walk(folder):
        del entry
        if (key := (status.st_dev, status.st_ino)) not in seen:
            seen.add(key)
            total += status.st_blocks * 512
    return total


def walk(folder: Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """Every entry below a folder with its status; a folder comes before what it holds."""
    stack = [str(folder)]
    while stack:
        with os.scandir(stack.pop()) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                yield entry, status
                if stat.S_ISDIR(status.st_mode):
                    stack.append(entry.path)


def copy(source: Path, target: Path) -> None:
    """Copy a tree to a new folder: owners where allowed, modes, times, attributes, links, whiteouts. Sockets are left out.

    On a failure nothing is left of the copy. Raises `CapacityError` on a full disk.
    """
    with room(f"copying {source.name}", target.parent):
        try:
            merge([source], target, whiteouts=True, link=False)
        except BaseException:
            remove(target)
            raise


def merge(layers: Sequence[Path], target: Path, *, whiteouts: bool, link: bool = True) -> None:
    """Lay layers, lowest first, over each other into a new folder.

    With `whiteouts` the result hides what the layers hid of something below; without, it is a plain tree. With `link` files are shared with
    the layers, which must then never change. Raises `SandboxError` for a layer with redirected folders, which cannot be merged.
    """
    target.mkdir(mode=0o700)
    for layer in layers:
        _dress(layer, target, os.stat(layer), whiteouts)
        _lay(layer, target, whiteouts, link)


def _lay(layer: Path, target: Path, whiteouts: bool, link: bool) -> None:
    twins: dict[tuple[int, int], str] = {}
    folders: list[tuple[str, str, os.stat_result]] = []
    for entry, status in walk(layer):
        place = os.path.join(target, os.path.relpath(entry.path, layer))
        there = _status(place)
        if is_whiteout(entry.path, status):
            _clear(place, there)
            if whiteouts:
                make_whiteout(Path(place))
        elif stat.S_ISDIR(status.st_mode):
            if any(name in _REDIRECT for name in _names(entry.path)):
                raise SandboxError(f"{entry.path}: a renamed folder of an overlay mounted with redirect_dir=on cannot be merged")
            hides = is_opaque(entry.path) or (there is not None and not stat.S_ISDIR(there.st_mode))
            if hides:
                _clear(place, there)
            if hides or there is None:
                os.mkdir(place, 0o700)
            if hides and whiteouts:
                make_opaque(Path(place))
            folders.append((entry.path, place, status))
        else:
            _clear(place, there)
            _place(entry.path, place, status, twins, link)
    for path, place, status in reversed(folders):  # last, since what is put into a folder changes its time
        _dress(path, place, status, whiteouts)


def _place(path: str, place: str, status: os.stat_result, twins: dict[tuple[int, int], str], link: bool) -> None:
    """Put one entry that is no folder."""
    key = (status.st_dev, status.st_ino)
    if stat.S_ISSOCK(status.st_mode):
        return
    if link:
        with contextlib.suppress(OSError):  # another file system, or a file that only root may link
            os.link(path, place, follow_symlinks=False)
            return
    if status.st_nlink > 1 and key in twins:
        os.link(twins[key], place, follow_symlinks=False)
        return
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(path), place)
    elif stat.S_ISREG(status.st_mode):
        shutil.copyfile(path, place, follow_symlinks=False)
    else:
        os.mknod(place, status.st_mode, status.st_rdev)
    twins[key] = place
    _dress(path, place, status, whiteouts=True)


def _dress(path: str | Path, place: str | Path, status: os.stat_result, whiteouts: bool) -> None:
    """Give a copy the owner, attributes, mode and times of what it was copied from."""
    if os.geteuid() == 0:
        os.chown(place, status.st_uid, status.st_gid, follow_symlinks=False)
    for name in _names(path):
        if not name.startswith(("trusted.overlay.", "user.overlay.")) or (whiteouts and name in OPAQUE):
            with contextlib.suppress(OSError):
                os.setxattr(place, name, _get(path, name) or b"", follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        os.chmod(place, stat.S_IMODE(status.st_mode))
    os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)


def remove(path: Path) -> None:
    """Remove a file or tree; one that is not there is no error. Folders nested to any depth go, and such as forbid it to their owner."""
    status = _status(path)
    if status is None:
        return
    if not stat.S_ISDIR(status.st_mode):
        path.unlink(missing_ok=True)
        return
    names: list[str] = []
    levels = [[path.name]]
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while len(levels) > 1 or levels[0]:  # one folder is open at a time, and no path grows long
            if levels[-1]:
                names.append(levels[-1].pop())
                descriptor = _step(descriptor, names[-1])
                levels.append(_emptied(descriptor))
            else:
                descriptor = _step(descriptor, "..")
                levels.pop()
                os.rmdir(names.pop(), dir_fd=descriptor)
    finally:
        os.close(descriptor)


def _step(folder: int, name: str) -> int:
    """From an open folder, which is closed, to another; where that fails it stays open."""
    if os.geteuid() and name != "..":
        os.chmod(name, 0o700, dir_fd=folder)
    opened = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    os.close(folder)
    return opened


def _emptied(folder: int) -> list[str]:
    """Remove what is no folder from an open one; the names of its folders."""
    inner = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                inner.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=folder)
    return inner


def _clear(place: str, status: os.stat_result | None) -> None:
    if status is not None:
        remove(Path(place))


def _status(path: str | Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _names(path: str | Path) -> list[str]:
    try:
        return os.listxattr(path, follow_symlinks=False)
    except OSError:
        return []


def _get(path: str | Path, name: str) -> bytes | None:
    try:
        return os.getxattr(path, name, follow_symlinks=False)
    except OSError:
        return None
