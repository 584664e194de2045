"""The store of layers: what images and snapshots are made of, on disk, shared by all processes of a user.

An image is a list of *layers*, folders that an overlay mounts over each other, and how programs start in it. A layer is sealed once and
never changes. A snapshot is one more layer, moved into the store by a rename, so that its cost does not depend on its size. Layers that
were built from something are found again by the digest of what they were built from; a snapshot's layer has a random name.

::

    ROOT/layers/NAME/       a sealed layer            ROOT/scratch/OWNER.NAME/   not sealed; goes when its owner is gone
    ROOT/images/NAME.json   an image or snapshot      ROOT/holds/OWNER/NAME      a live process needs this layer
    ROOT/cache/DIGEST.json  the result of a build     ROOT/owners/OWNER          locked while that process lives

Nothing acknowledged is lost by a power cut: contents reach the disk before the rename, the rename before the record, the record before the
answer. What lies in between is found by `gc`. Read next: `images.py` for where images come from.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, unquote

from gnomon.errors import ConfigError, SandboxError
from gnomon.extend import suggestion
from gnomon.sandbox import owners, trees
from gnomon.sandbox.images import Image, checked, folder_image, parse, serialise
from gnomon.sandbox.sandbox import Snapshot

MAX_DEPTH = 32
"""Layers that one mount names; a longer chain is merged, all but the lowest, since a mount's options have one page."""

_FOLDERS = ("layers", "images", "cache", "scratch", "holds", "owners", "trash", "reach", "gvisor")


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What `gc` took away."""

    layers: int = 0
    scratch: int = 0
    records: int = 0
    bytes: int = 0


def default_root() -> Path:
    """`GNOMON_SANDBOX_HOME`, else `/var/lib/gnomon` for root, else `gnomon/sandbox` in the user's data folder."""
    if chosen := os.environ.get("GNOMON_SANDBOX_HOME"):
        return Path(chosen)
    if os.geteuid() == 0:
        return Path("/var/lib/gnomon")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "gnomon" / "sandbox"


class LayerStore:
    """Layers, images, scratch folders, and who needs them; any number of processes may use one store at a time.

    Raises `SandboxError` for a root that other users can write: whoever can change a layer can change what runs.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or default_root()).resolve()  # one name for one store: locks are per process and file
        with trees.room("making the store of sandboxes", self.root):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.root.stat()
            if status.st_uid != os.geteuid() or (status.st_mode & 0o022 and not status.st_mode & 0o1000):
                raise SandboxError(f"{self.root} can be written by other users; `chmod go-w` it, or let GNOMON_SANDBOX_HOME name your own")
            for name in _FOLDERS:
                self._own_folder(self.root / name)
        self._guard = threading.Lock()
        self._counts: dict[str, int] = {}
        self._pid = os.getpid()

    @staticmethod
    def _own_folder(folder: Path) -> None:
        """Make a folder of the store; in a root like `/tmp` somebody else may have made it before, to fill it with what root would run."""
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
            raise SandboxError(f"{folder} is not a folder of yours; remove it, or let GNOMON_SANDBOX_HOME name an empty folder")
        if status.st_mode & 0o077:  # layers hold set-user programs, which are harmless only where nobody else comes
            folder.chmod(0o700)

    # --- images -------------------------------------------------------------------------------------------------------------------

    def resolve(self, image: str) -> Image:
        """The image of a name: `host`, `scratch`, an image or snapshot of the store, or the path of a folder.

        Raises `ConfigError` for an unknown name, with the nearest one.
        """
        if image == "host":
            return Image(name=image, host=True)
        if image == "scratch":
            return Image(name=image)
        if image.startswith(("/", "./", "../")):
            return folder_image(Path(image))
        try:
            text = self._record(image).read_text(encoding="utf-8")
        except FileNotFoundError:
            known = ["host", "scratch", *(entry.name for entry in self.images())]
            raise ConfigError(f"unknown image '{image}'{suggestion(image, known)} (images: {', '.join(known[:12])}"
                              f"{', …' if len(known) > 12 else ''}; a folder is written with a slash; `gnomon sandbox build` "
                              "makes images)") from None
        return parse(text, self.root / "layers")

    def images(self) -> list[Image]:
        """The images and snapshots of the store, by name."""
        return sorted((self.resolve(unquote(path.stem)) for path in (self.root / "images").glob("*.json")), key=lambda image: image.name)

    def keep(self, image: Image) -> Image:
        """Record an image under its name, in place of one that had it; on disk when this returns."""
        with self._locked(fcntl.LOCK_SH):
            self._write(self._record(image.name), serialise(image, self.root / "layers"))
        return image

    def forget(self, name: str) -> None:
        """Drop a name; its layers stay until `gc` finds that nothing needs them. Raises `ConfigError` for an unknown one."""
        self.resolve(name)
        if not self._record(name).exists():
            raise ConfigError(f"'{name}' is no image of the store; there is nothing to forget")
        self._record(name).unlink(missing_ok=True)
        self._sync(self.root / "images")

    def cached(self, digest: str) -> Image | None:
        """The image that was built from what `digest` is the digest of, if it is still there."""
        path = self.root / "cache" / f"{digest}.json"
        try:
            image = parse(path.read_text(encoding="utf-8"), self.root / "layers")
        except FileNotFoundError:
            return None
        if not all(layer.is_dir() for layer in image.layers):
            return None
        os.utime(path)
        return image

    def cache(self, digest: str, image: Image) -> Image:
        """Let `cached` find an image."""
        with self._locked(fcntl.LOCK_SH):
            self._write(self.root / "cache" / f"{digest}.json", serialise(image, self.root / "layers"))
        return image

    # --- layers -------------------------------------------------------------------------------------------------------------------

    def scratch(self) -> Path:
        """A new empty folder of this process; `gc` removes it once the process is gone. Give it back with `seal`, `adopt` or `discard`."""
        owner = owners.own(self.root / "owners")
        path = self.root / "scratch" / f"{owner.id}.{secrets.token_hex(6)}"
        with trees.room("making a scratch folder", self.root):
            path.mkdir(mode=0o755)
        return path

    def discard(self, folder: Path) -> None:
        """Remove a scratch folder, or any tree, at once out of sight and then for good."""
        trash = self.root / "trash" / secrets.token_hex(8)
        try:
            folder.rename(trash)
        except FileNotFoundError:
            return
        except OSError:  # on another file system
            trash = folder
        trees.remove(trash)

    def seal(self, folder: Path, *, durable: bool = False) -> Path:
        """Make a finished folder a layer and hold it: moved where it is on the store's file system, else copied and removed.

        It lives while something holds or records it. With `durable` its contents are on the disk when this returns. A failure leaves
        `folder` as it was. Raises `CapacityError` on a full disk.
        """
        layer = self.root / "layers" / secrets.token_hex(8)
        if folder.stat().st_dev != self.root.stat().st_dev:
            with self._workplace() as source:
                trees.copy(folder, source / "copy")
                self._move(source / "copy", layer, durable)
            self.discard(folder)
        else:
            self._move(folder, layer, durable)
        return layer

    def _move(self, folder: Path, layer: Path, durable: bool) -> None:
        with trees.room(f"sealing {folder.name}", self.root):
            if durable:
                self._flush()
            with self._locked(fcntl.LOCK_SH):
                self._mark(layer.name, 1)
                try:
                    folder.rename(layer)
                except BaseException:
                    self._mark(layer.name, -1)
                    raise
            if durable:
                self._sync(layer.parent)

    def adopt(
        self, folder: Path, name: str | None = None, parents: tuple[Path, ...] = (), *,
        like: Image | None = None, backend: str = "", size_bytes: int | None = None, durable: bool = True,
    ) -> Snapshot:
        """Keep a finished folder, over the layers that it was written on (top first), as an image.

        Without a name it gets a random one. `like` is the image that the sandbox started from: environment, user, folder, whether the host
        lies below. `size_bytes` saves counting. The caller holds the new layer, see `release`. On a failure the folder is as it was.
        """
        identity = secrets.token_hex(8)
        start = like or Image(name="scratch")
        name = checked(name or f"snapshot-{identity}")
        size = trees.measure(folder) if size_bytes is None else size_bytes
        layer = self.seal(folder, durable=durable)
        snapshot = Snapshot(id=identity, name=name, backend=backend, memory=False, bytes=size, created_seconds=time.time(),
                            parent=like.name if like else None)
        try:
            layers = self.shortened((layer, *parents), host=start.host)
            self.keep(replace(start, name=name, layers=layers, snapshot=snapshot))
        except BaseException:
            with contextlib.suppress(OSError):
                layer.rename(folder)
            self.release([layer])
            raise
        return snapshot

    def shortened(self, layers: tuple[Path, ...], *, host: bool = False) -> tuple[Path, ...]:
        """The same content in few layers: a chain longer than `MAX_DEPTH` has all but the lowest merged, with files shared, not copied.

        The merged layer is held by this process. `host`: the host's folders lie below, so that the lowest layer hides things as well.
        """
        if len(layers) <= MAX_DEPTH:
            return layers
        lowest = () if host else layers[-1:]
        with self._workplace() as place, trees.room("merging a chain of layers", self.root):
            trees.merge([*reversed(layers[: len(layers) - len(lowest)])], place / "merged", whiteouts=True)
            return (self.seal(place / "merged", durable=True), *lowest)

    def flat(self, image: Image) -> Path:
        """One plain folder with all that an image's layers hold, for what cannot mount layers; made once, files shared with the layers.

        Raises `SandboxError` for an image that is the host's `/usr` and nothing else.
        """
        if not image.layers:
            raise SandboxError(f"image '{image.name}' has no layers of its own to lay out as a folder; choose another image")
        if len(image.layers) == 1 and not image.host:
            return image.layers[0]
        digest = f"flat-{image.digest}"
        if (found := self.cached(digest)) is not None:
            return found.layers[0]
        with self._workplace() as place, trees.room(f"laying out image {image.name}", self.root):
            trees.merge([*reversed(image.layers)], place / "flat", whiteouts=image.host)
            layer = self.seal(place / "flat")
        self.cache(digest, replace(image, layers=(layer,)))
        self.release([layer])
        return layer

    def hold(self, layers: Iterable[Path]) -> None:
        """Say that this process needs layers, so that `gc` leaves them alone; counted. Raises `SandboxError` if one is already gone."""
        wanted = [*layers]
        with self._locked(fcntl.LOCK_SH):
            for layer in wanted:
                self._mark(layer.name, 1, known=layer.parent == self.root / "layers")
            missing = [layer for layer in wanted if not layer.is_dir()]
        if missing:
            self.release(wanted)
            raise SandboxError(f"layer {missing[0]} is gone; its image was replaced or removed meanwhile, or is damaged: build it again")

    def release(self, layers: Iterable[Path]) -> None:
        """Take back one `hold`, `seal` or `adopt` of each layer."""
        for layer in layers:
            self._mark(layer.name, -1, known=layer.parent == self.root / "layers")

    # --- order and cleanliness ----------------------------------------------------------------------------------------------------

    def gc(self, *, cache_seconds: float = 30 * 86400.0) -> Collected:
        """Remove what nothing needs: layers neither recorded nor held, folders of processes that are gone, build results long unused."""
        doomed: list[Path] = []
        with self._locked(fcntl.LOCK_EX):
            stale = [path for path in (self.root / "cache").glob("*.json") if time.time() - path.stat().st_mtime > cache_seconds]
            for path in stale:
                path.unlink(missing_ok=True)
            needed = self._needed()
            living = {owner: owners.alive(self.root / "owners", owner) for owner in os.listdir(self.root / "owners")}
            for owner in os.listdir(self.root / "holds"):
                if living.get(owner):
                    needed.update(os.listdir(self.root / "holds" / owner))
                else:
                    trees.remove(self.root / "holds" / owner)
            doomed += [path for path in (self.root / "layers").iterdir() if path.name not in needed]
            layers = len(doomed)
            doomed += [path for path in (self.root / "scratch").iterdir() if not living.get(path.name.partition(".")[0])]
            trash = [self.root / "trash" / secrets.token_hex(8) for _ in doomed]
            for path, place in zip(doomed, trash):
                path.rename(place)
        size = 0
        for place in (self.root / "trash").iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process empties it too
                size += trees.measure(place)
                trees.remove(place)
        return Collected(layers=layers, scratch=len(doomed) - layers, records=len(stale), bytes=size)

    def _needed(self) -> set[str]:
        needed: set[str] = set()
        for folder in ("images", "cache"):
            for path in (self.root / folder).glob("*.json"):
                image = parse(path.read_text(encoding="utf-8"), self.root / "layers")
                needed.update(layer.name for layer in (*image.layers, *filter(None, [image.memory])))
        return needed

    def _record(self, name: str) -> Path:
        return self.root / "images" / f"{quote(checked(name), safe='')}.json"

    def _mark(self, name: str, change: int, known: bool = True) -> None:
        if not known:
            return
        with self._guard:
            if self._pid != os.getpid():  # a fork holds nothing of its parent's
                self._pid, self._counts = os.getpid(), {}
            self._counts[name] = self._counts.get(name, 0) + change
            path = self.root / "holds" / owners.own(self.root / "owners").id / name
            if change > 0 and self._counts[name] == 1:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                path.touch()
            elif self._counts[name] <= 0:
                del self._counts[name]
                path.unlink(missing_ok=True)

    def _write(self, path: Path, text: str) -> None:
        """A file whole or not at all, and on the disk: written beside its place, flushed, renamed, the folder flushed."""
        beside = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}")
        with trees.room(f"writing {path.name}", self.root):
            try:
                descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                try:
                    view = memoryview(text.encode())
                    while view:
                        view = view[os.write(descriptor, view):]
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                beside.rename(path)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise
            self._sync(path.parent)

    @contextlib.contextmanager
    def _workplace(self) -> Iterator[Path]:
        """A scratch folder for as long as the block takes."""
        place = self.scratch()
        try:
            yield place
        finally:
            self.discard(place)

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        """Many may add, one collects."""
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, how)
            yield
        finally:
            os.close(descriptor)

    def _flush(self) -> None:
        """All of the store's file system to the disk, in one call whatever the number of files."""
        descriptor = os.open(self.root, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(self.root))
        finally:
            os.close(descriptor)

    @staticmethod
    def _sync(folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system without it keeps nothing anyway
                raise
        finally:
            os.close(descriptor)
