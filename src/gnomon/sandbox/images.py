"""What an image is, as a value, as JSON, and as a folder.

An image is a list of layers, top first, and how programs start in it. `host` images lie on the host's own `/usr`, read-only. Read next:
`layers.py`, the store; `oci.py`, `bootstrap.py` and `dockerfile.py`, where images come from.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnomon.errors import ConfigError, SandboxError
from gnomon.sandbox.sandbox import Snapshot

NAME = re.compile(r"[a-z0-9][a-z0-9._/:-]{0,119}")
"""Names of images: what registries allow, without surprises for file systems."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """What a sandbox starts from: layers, top first; `host` says that the host's `/usr` and what goes with it lie below them, read-only.

    `snapshot` is set where the image is one, and `memory`, a sealed folder of the backend that made it, where processes are part of it.
    """

    name: str
    layers: tuple[Path, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "root"
    host: bool = False
    snapshot: Snapshot | None = None
    memory: Path | None = None

    @property
    def digest(self) -> str:
        """A name for the content: layers never change, so their paths say it."""
        parts = [str(self.host), str(self.memory), *map(str, self.layers)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def checked(name: str) -> str:
    """A name for an image, if it can be one. Raises `ConfigError`."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"'{name}' is no name of an image; write at most 120 of a-z 0-9 . _ - / : and begin with a letter or digit")
    return name


def serialise(image: Image, layers: Path) -> str:
    """An image as JSON; layers inside the folder `layers` by name, others by path."""
    def short(path: Path) -> str:
        return path.name if path.parent == layers else str(path)

    record = {
        "format": 1, "name": image.name, "layers": [*map(short, image.layers)], "env": dict(image.env), "workdir": image.workdir,
        "user": image.user, "host": image.host, "snapshot": dataclasses.asdict(image.snapshot) if image.snapshot else None,
        "memory": short(image.memory) if image.memory else None,
    }
    return json.dumps(record, indent=1) + "\n"


def parse(text: str, layers: Path) -> Image:
    """The image of a JSON record. Raises `SandboxError` for one that is damaged or from a later gnomon."""
    try:
        record = json.loads(text)
        if record["format"] != 1:
            raise ValueError(f"format {record['format']}")
        image = _image(record, record["name"], tuple(layers / name for name in record["layers"]))
        return dataclasses.replace(image, memory=layers / record["memory"]) if record.get("memory") else image
    except (ValueError, KeyError, TypeError) as error:
        raise SandboxError(f"a record of an image in {layers.parent} cannot be read ({error}); remove the file, "
                           "then build the image again") from None


def folder_image(folder: Path) -> Image:
    """An image from a folder: a root file system, or a folder of layers with an `image.json` that lists them.

    `image.json` has `layers`, sub-folders, top first, and if wanted `env`, `workdir`, `user` and `host`. The folder is used where it lies
    and must not change while sandboxes use it. Raises `ConfigError` naming what is wrong.
    """
    folder = folder.absolute()
    if not folder.is_dir():
        raise ConfigError(f"image '{folder}': there is no such folder; name an image without a slash, or give a folder")
    listing = folder / "image.json"
    if not listing.is_file():
        return Image(name=str(folder), layers=(folder,))
    try:
        record = json.loads(listing.read_text(encoding="utf-8"))
        layers = tuple(folder / name for name in record["layers"])
        image = _image(record, str(folder), layers)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{listing}: {error}; it needs \"layers\": [\"top\", \"base\"] and may have env, workdir, user, host") from None
    for layer in layers:
        if not layer.is_dir() or layer.parent != folder:
            raise ConfigError(f"{listing}: layer '{layer.name}' is no sub-folder of {folder}")
    return image


def _image(record: dict[str, Any], name: str, layers: tuple[Path, ...]) -> Image:
    env, snapshot = record.get("env") or {}, record.get("snapshot")
    if not all(isinstance(key, str) and isinstance(value, str) for key, value in env.items()):
        raise ValueError("env must map names to text")
    return Image(name=name, layers=layers, env=env, workdir=str(record.get("workdir") or "/"), user=str(record.get("user") or "root"),
                 host=bool(record.get("host")), snapshot=Snapshot(**snapshot) if snapshot else None)
