"""Copies of a writable layer that keep what an overlay means by it: owners, modes, times, attributes, hard links, deletions, holes.

Every step goes through a descriptor of the folder it is in and follows no link: not even a program that still ran could lead the copy
out of the layer.
"""

from __future__ import annotations

import contextlib
import os
import stat

CHUNK = 1 << 20
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
Links = dict[tuple[int, int], str]


def inside(folder: int, name: str) -> str:
    """A path to an entry of an open folder."""
    return f"/proc/self/fd/{folder}/{name}"


def copy_attributes(source: str, target: str, status: os.stat_result) -> None:
    """Owner, mode, extended attributes and times. An owner that does not exist here is left as it is."""
    with contextlib.suppress(PermissionError):
        os.lchown(target, status.st_uid, status.st_gid)
    if not stat.S_ISLNK(status.st_mode):
        os.chmod(target, stat.S_IMODE(status.st_mode))
    for name in os.listxattr(source, follow_symlinks=False):
        try:
            os.setxattr(target, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)
        except OSError as error:
            if name.startswith(("trusted.overlay.", "user.overlay.")):
                raise OSError(error.errno, f"attribute {name} cannot be kept", target) from None
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)


def copy_data(source: str, target: str, size: int) -> None:
    """The content of a file, skipping holes."""
    read = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    write = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(write, size)
        at = 0
        while at < size:
            try:
                at = os.lseek(read, at, os.SEEK_DATA)
            except OSError:  # only a hole is left
                break
            end = os.lseek(read, at, os.SEEK_HOLE)
            while at < end:
                data = os.pread(read, min(CHUNK, end - at), at)
                if not data:
                    return
                at += os.pwrite(write, data, at)
    finally:
        os.close(read)
        os.close(write)


def copy_tree(source: str, target: str) -> None:
    """Copy a folder into another that exists and is empty."""
    here = os.open(source, FOLDER)
    there = os.open(target, FOLDER)
    try:
        copy_folder(here, there, {})
        copy_attributes(inside(here, "."), inside(there, "."), os.fstat(here))
    finally:
        os.close(here)
        os.close(there)


def copy_folder(here: int, there: int, links: Links) -> None:
    """Copy what an open folder holds. `links` says where a file with further names has been copied to."""
    for name in os.listdir(here):
        path, copy = inside(here, name), inside(there, name)
        status = os.lstat(path)
        if stat.S_ISDIR(status.st_mode):
            os.mkdir(copy, 0o700)
            below, beneath = os.open(name, FOLDER, dir_fd=here), os.open(name, FOLDER, dir_fd=there)
            try:
                copy_folder(below, beneath, links)
            finally:
                os.close(below)
                os.close(beneath)
        elif status.st_nlink > 1 and (status.st_dev, status.st_ino) in links:
            os.link(links[status.st_dev, status.st_ino], copy, follow_symlinks=False)
            continue
        elif stat.S_ISREG(status.st_mode):
            copy_data(path, copy, status.st_size)
        elif stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(path), copy)
        else:  # a deletion is a device of number 0; pipes and sockets keep their place
            os.mknod(copy, status.st_mode, status.st_rdev)
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            links[status.st_dev, status.st_ino] = os.readlink(f"/proc/self/fd/{there}") + f"/{name}"
        copy_attributes(path, copy, status)
