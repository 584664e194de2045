"""Images as files: OCI layouts, and what `docker save` writes, as a folder or an archive; no daemon, no registry, no root.

Both name their parts by digest. Each blob is checked while it is read, each layer unpacked by `unpack.py` and found again by the digest of
its content, so that images which share layers share them here. Read next: `dockerfile.py`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import posixpath
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from gnomon.errors import CapacityError, DataError, GnomonError
from gnomon.extend import suggestion
from gnomon.sandbox.images import Image, checked
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.unpack import Bounds, Entry, unpack
from gnomon.units import format_bytes

_DOCUMENT_BYTES = 4 << 20
_MEMBERS = 10_000
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}
_TITLE = ("io.containerd.image.name", "org.opencontainers.image.ref.name")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Blob:
    """Where a layer lies, what it is called, how it is packed; `digest` is of the bytes as they lie, `content` of the tar inside."""

    path: str
    digest: str | None
    content: str


class _Source(Protocol):
    def read(self, name: str) -> bytes | None: ...

    def open(self, name: str) -> IO[bytes]: ...


def load(store: LayerStore, path: Path, name: str, *, tag: str | None = None, bounds: Bounds | None = None) -> Image:
    """Bring an image into the store under a name.

    `path` is a folder in OCI layout, or an archive of one, or what `docker save` (`podman save`) wrote; `tag` chooses among several.
    Raises `DataError` for one that is damaged, foreign or refused, `CapacityError` where it does not fit; the store is then as it was.
    """
    checked(name)
    bounds = bounds or Bounds()
    if path.is_dir():
        return _load(store, _Folder(path), path, (name, tag, bounds))
    try:
        with tarfile.open(path, tarinfo=Entry) as archive:
            return _load(store, _Archive(archive, path), path, (name, tag, bounds))
    except (tarfile.TarError, EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: no image ({error}); give an OCI layout or the file that `docker save NAME -o FILE` writes") from error
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file or folder") from error
    except RecursionError as error:
        raise DataError(f"{path}: nested too deeply") from error


def _load(store: LayerStore, source: _Source, path: Path, wanted: tuple[str, str | None, Bounds]) -> Image:
    name, tag, bounds = wanted
    if (text := source.read("manifest.json")) is not None:
        config, blobs = _docker(source, json_of(text, path), path, tag)
    elif (text := source.read("index.json")) is not None:
        config, blobs = _layout(source, json_of(text, path), path, tag)
    else:
        raise DataError(f"{path}: neither manifest.json nor index.json is in it; give an OCI layout or the output of `docker save`")
    layers: list[Path] = []
    held: list[Path] = []
    left = bounds.bytes
    try:
        for blob in blobs:
            layer, size = _layer(store, source, blob, path, Bounds(bytes=left, entries=bounds.entries, depth=bounds.depth))
            held.append(layer)
            left -= size
            layers.insert(0, layer)
        settings = config.get("config") or {}
        env = dict(pair.partition("=")[::2] for pair in settings.get("Env") or [])
        workdir, user = settings.get("WorkingDir") or "/", settings.get("User") or "root"
        return store.keep(Image(name=name, layers=tuple(layers), env=env, workdir=workdir, user=user))
    finally:
        store.release(held)


def _layer(store: LayerStore, source: _Source, blob: _Blob, path: Path, bounds: Bounds) -> tuple[Path, int]:
    """The layer of a blob, held; from the store if its content is there already. The size is nought then."""
    digest = "layer-" + blob.content.removeprefix("sha256:")
    if (found := store.cached(digest)) is not None:
        store.hold(found.layers)
        return found.layers[0], 0
    place = store.scratch()
    try:
        folder = place / "layer"
        folder.mkdir(mode=0o755)
        with source.open(blob.path) as raw:
            outer = _Checked(raw, blob.digest, f"{path}: {blob.path}", None)
            inner = _Checked(_decompressed(outer, path), blob.content, f"{path}: the content of {blob.path}", bounds.bytes + (1 << 30))
            size = unpack(inner, folder, f"{path}: {blob.path}", bounds)
            inner.verify()
            outer.verify()
        layer = store.seal(folder, durable=True)
    finally:
        store.discard(place)
    store.cache(digest, Image(name="scratch", layers=(layer,)))
    return layer, size


def _docker(source: _Source, manifests: Any, path: Path, tag: str | None) -> tuple[dict[str, Any], list[_Blob]]:
    """What `docker save` writes: one list of images, each with its files."""
    try:
        names = {title: item for item in manifests for title in item.get("RepoTags") or ["untagged"]}
        chosen = _chosen(names, path, tag)
        config = json_of(_document(source, chosen["Config"], path), path)
        contents = config["rootfs"]["diff_ids"]
        if len(contents) != len(chosen["Layers"]):
            raise DataError(f"{path}: {len(chosen['Layers'])} layers, but {len(contents)} digests of them")
        return config, [_Blob(path=p, digest=None, content=_digest(c, path)) for p, c in zip(chosen["Layers"], contents)]
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: manifest.json is not what `docker save` writes ({error!r})") from error


def _layout(source: _Source, index: Any, path: Path, tag: str | None) -> tuple[dict[str, Any], list[_Blob]]:
    """An OCI layout: an index of manifests, of which one fits the tag and the machine."""
    try:
        names: dict[str, Any] = {}
        for item in index["manifests"]:
            notes = item.get("annotations") or {}
            names[next((notes[key] for key in _TITLE if key in notes), "untagged")] = item
        chosen = _chosen(names, path, tag)
        for _ in range(4):  # an index may name an index
            document = json_of(_blob(source, chosen["digest"], path), path)
            if "manifests" not in document:
                break
            chosen = _for_this_machine(document["manifests"], path)
        config = json_of(_blob(source, document["config"]["digest"], path), path)
        contents = config["rootfs"]["diff_ids"]
        if len(contents) != len(document["layers"]):
            raise DataError(f"{path}: {len(document['layers'])} layers, but {len(contents)} digests of them")
        blobs = [_Blob(path=_place(item["digest"], path), digest=item["digest"], content=_digest(content, path))
                 for item, content in zip(document["layers"], contents)]
        return config, blobs
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not an OCI layout ({error!r} in its index or manifest)") from error


def _chosen(names: dict[str, Any], path: Path, tag: str | None) -> Any:
    if tag is None and len(names) == 1:
        return next(iter(names.values()))
    fits = [title for title in names if tag is not None and (title == tag or title.endswith((f"/{tag}", f":{tag}")))]
    if len(fits) != 1:
        near = suggestion(tag, list(names)) if tag else ""
        raise DataError(f"{path}: {'several images' if tag is None else f'no single image {tag!r}'}{near}; choose one with --tag: "
                        f"{', '.join(sorted(names)) or 'it has none'}")
    return names[fits[0]]


def _for_this_machine(items: Sequence[Any], path: Path) -> Any:
    machine = _ARCHITECTURES.get(platform.machine(), platform.machine())
    systems = [(item.get("platform") or {}, item) for item in items]
    for system, item in systems:
        if system.get("os", "linux") == "linux" and system.get("architecture", machine) == machine:
            return item
    known = ", ".join(f"{s.get('os')}/{s.get('architecture')}" for s, _ in systems)
    raise DataError(f"{path}: no image for linux/{machine} (it has: {known}); save it with --platform linux/{machine}")


def _digest(text: Any, path: Path) -> str:
    if not isinstance(text, str) or not text.startswith("sha256:") or len(text) != 71 or set(text[7:]) - set("0123456789abcdef"):
        raise DataError(f"{path}: {text!r} is no SHA-256 digest")
    return text


def _place(digest: str, path: Path) -> str:
    return f"blobs/sha256/{_digest(digest, path)[7:]}"


def _document(source: _Source, name: str, path: Path) -> bytes:
    found = source.read(name)
    if found is None:
        raise DataError(f"{path}: {name} is missing; save the image again")
    return found


def _blob(source: _Source, digest: str, path: Path) -> bytes:
    found = _document(source, _place(digest, path), path)
    if hashlib.sha256(found).hexdigest() != digest[7:]:
        raise DataError(f"{path}: {digest} has other content; save the image again")
    return found


def json_of(text: bytes, path: Path) -> Any:
    """A JSON document of an archive. Raises `DataError`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: a document of it is no JSON ({error})") from error


class _Folder:
    """A layout as a folder; links in it are not followed out of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    def read(self, name: str) -> bytes | None:
        try:
            with self.open(name) as file:
                return _bounded(file, name)
        except FileNotFoundError:
            return None

    def open(self, name: str) -> IO[bytes]:
        path = (self._folder / name).resolve()
        if not path.is_relative_to(self._folder):
            raise DataError(f"{self._folder}: '{name}' leads out of the folder")
        return path.open("rb")


class _Archive:
    """A layout, or the output of `docker save`, as a tar file."""

    def __init__(self, archive: tarfile.TarFile, path: Path) -> None:
        self._archive, self._path = archive, path
        self._members: dict[str, tarfile.TarInfo] = {}
        for member in archive:
            self._members[posixpath.normpath(member.name)] = member
            if len(self._members) > _MEMBERS:
                raise DataError(f"{path}: more than {_MEMBERS} files; it is a file system, not an image: unpack it and give the folder")

    def read(self, name: str) -> bytes | None:
        if posixpath.normpath(name) not in self._members:
            return None
        with self.open(name) as file:
            return _bounded(file, name)

    def open(self, name: str) -> IO[bytes]:
        place = posixpath.normpath(name)
        for _ in range(8):  # older archives have links between layers that are equal
            member = self._members.get(place)
            if member is None or not (member.issym() or member.islnk()):
                break
            place = posixpath.normpath(posixpath.join(posixpath.dirname(place) if member.issym() else "", member.linkname))
        found = self._archive.extractfile(member) if member is not None and member.isreg() else None
        if found is None:
            raise DataError(f"{self._path}: '{name}' is missing; save the image again")
        return found


def _bounded(file: IO[bytes], name: str) -> bytes:
    text = file.read(_DOCUMENT_BYTES + 1)
    if len(text) > _DOCUMENT_BYTES:
        raise DataError(f"'{name}' is larger than {format_bytes(_DOCUMENT_BYTES)}; no document of an image is")
    return text


class _Checked(io.RawIOBase):
    """Bytes as they pass: counted, bounded and hashed."""

    def __init__(self, source: IO[bytes], digest: str | None, what: str, limit: int | None) -> None:
        self._source, self._expected, self._what, self._limit = source, digest, what, limit
        self._hash, self._count = hashlib.sha256(), 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        try:
            piece = self._source.read(size if 0 <= size <= 1 << 20 else 1 << 20)
        except GnomonError:
            raise
        except Exception as error:  # whatever the program that unpacks says of damage
            raise DataError(f"{self._what}: damaged ({error}); save the image again") from error
        self._count += len(piece)
        if self._limit is not None and self._count > self._limit:
            raise CapacityError(f"{self._what}: unpacks to more than {format_bytes(self._limit)}; if that is meant, allow more "
                                "(gnomon sandbox build --max-size)")
        self._hash.update(piece)
        return piece

    def verify(self) -> None:
        """Read to the end. Raises `DataError` if the digest is another than was promised."""
        while self.read(1 << 20):
            pass
        if self._expected is not None and self._hash.hexdigest() != self._expected[7:]:
            raise DataError(f"{self._what}: its SHA-256 is not {self._expected}; it was damaged or changed, save the image again")


def _decompressed(stream: _Checked, path: Path) -> IO[bytes]:
    """The tar inside, whatever packed it; told by its first bytes, since media types are not always true."""
    buffered = io.BufferedReader(_Raw(stream), 1 << 16)
    head = buffered.peek(4)[:4]
    if head[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=buffered)  # type: ignore[return-value]
    if head == b"\x28\xb5\x2f\xfd":
        try:
            import zstandard
        except ImportError:
            raise DataError(f"{path}: its layers are packed with zstd; `pip install zstandard`, or save the image with gzip") from None
        return zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(buffered, read_across_frames=True)
    return buffered


class _Raw(io.RawIOBase):
    def __init__(self, stream: _Checked) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._stream.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)
