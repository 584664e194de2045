"""Images from files: layouts and archives unpacked without a daemon, and everything hostile refused with one line."""

import gzip
import hashlib
import io
import json
import os
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from gnomon.errors import CapacityError, ConfigError, DataError, Unsupported
from gnomon.sandbox import bootstrap, oci, trees
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.unpack import Bounds, unpack

Put = Callable[[tarfile.TarFile], None]


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "store")


def entry(name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    """One entry of an archive, set by hand where `tarfile` would not write it."""
    info = tarfile.TarInfo(name)
    info.size, info.type, info.mode, info.mtime = len(content), kind, 0o755 if kind == tarfile.DIRTYPE else 0o644, 1_700_000_000
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


def archive(*entries: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    """The bytes of an archive."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for info, content in entries:
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


LOWER = [entry("etc", kind=tarfile.DIRTYPE), entry("etc/a", b"lower"), entry("etc/b", b"lower"), entry("opt", kind=tarfile.DIRTYPE),
         entry("opt/x", b"x"), entry("bin", kind=tarfile.SYMTYPE, linkname="usr/bin"), entry("usr/bin/tool", b"#!", mode=0o4755)]
UPPER = [entry("etc", kind=tarfile.DIRTYPE), entry("etc/.wh.a"), entry("etc/b", b"upper"), entry("opt", kind=tarfile.DIRTYPE),
         entry("opt/.wh..wh..opq"), entry("opt/y", b"y"), entry("twin", kind=tarfile.LNKTYPE, linkname="etc/b")]
SETTINGS = {"Env": ["PATH=/bin", "A=b=c"], "WorkingDir": "/srv", "User": "nobody"}


def docker_save(path: Path, layers: list[bytes], tags: tuple[str, ...] = ("demo:1",)) -> Path:
    """What `docker save` writes, by hand."""
    config = json.dumps({"config": SETTINGS, "rootfs": {"type": "layers", "diff_ids": [digest(layer) for layer in layers]}}).encode()
    names = [f"{hashlib.sha256(layer).hexdigest()}/layer.tar" for layer in layers]
    manifest = json.dumps([{"Config": "config.json", "RepoTags": [tag], "Layers": names} for tag in tags]).encode()
    files = [entry("config.json", config), entry("manifest.json", manifest), *(entry(n, data) for n, data in zip(names, layers))]
    path.write_bytes(archive(*files))
    return path


def layout(folder: Path, layers: list[bytes], pack: Callable[[bytes], bytes] = gzip.compress, machine: str = "amd64") -> Path:
    """An OCI layout with an index of indexes, by hand."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def keep(data: bytes) -> dict[str, object]:
        (blobs / digest(data)[7:]).write_bytes(data)
        return {"digest": digest(data), "size": len(data)}

    config = keep(json.dumps({"config": SETTINGS, "rootfs": {"diff_ids": [digest(layer) for layer in layers]}}).encode())
    manifest = keep(json.dumps({"config": config, "layers": [keep(pack(layer)) for layer in layers]}).encode())
    inner = keep(json.dumps({"manifests": [{**keep(b"{}"), "platform": {"os": "windows", "architecture": machine}},
                                           {**manifest, "platform": {"os": "linux", "architecture": machine}}]}).encode())
    (folder / "index.json").write_text(json.dumps({"manifests": [{**inner, "annotations": {oci._TITLE[1]: "latest"}}]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


def check(store: LayerStore, name: str) -> None:
    """The image of the two layers above is what a container of it would see."""
    image = store.resolve(name)
    assert (image.env, image.workdir, image.user, image.host) == ({"PATH": "/bin", "A": "b=c"}, "/srv", "nobody", False)
    upper, lower = image.layers
    assert trees.is_whiteout(upper / "etc/a", os.lstat(upper / "etc/a")) and trees.is_opaque(upper / "opt")
    assert (lower / "etc/a").read_text() == "lower" and stat.S_IMODE((lower / "usr/bin/tool").stat().st_mode) == 0o4755
    flat = store.flat(image)
    files = {str(path.relative_to(flat)) for path in flat.rglob("*") if path.is_file() and not path.is_symlink()}
    assert files - {"bin/tool"} == {"etc/b", "opt/y", "twin", "usr/bin/tool"} and os.readlink(flat / "bin") == "usr/bin"
    assert (flat / "twin").read_text() == "upper" and (flat / "etc/b").stat().st_mtime == 1_700_000_000


def test_what_docker_saved_becomes_an_image(store, tmp_path):
    path = docker_save(tmp_path / "image.tar", [archive(*LOWER), archive(*UPPER)])
    oci.load(store, path, "demo")
    check(store, "demo")
    packed = tmp_path / "image.tar.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert oci.load(store, packed, "again").layers == store.resolve("demo").layers  # the same content is the same layers
    for layer in store.resolve("demo").layers:
        assert layer.name in os.listdir(store.root / "layers")
    assert store.gc().layers == 0 and not os.listdir(store.root / "scratch")


def test_a_layout_becomes_an_image_as_folder_and_as_archive(store, tmp_path):
    folder = layout(tmp_path / "layout", [archive(*LOWER), archive(*UPPER)], machine=oci._ARCHITECTURES[os.uname().machine])
    oci.load(store, folder, "demo")
    check(store, "demo")
    with tarfile.open(tmp_path / "layout.tar", "w") as tar:
        tar.add(folder, ".")
    other = LayerStore(tmp_path / "other")
    oci.load(other, tmp_path / "layout.tar", "demo", tag="latest")
    check(other, "demo")


def test_layers_packed_with_zstd(store, tmp_path):
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    pack = zstandard.ZstdCompressor().compress
    folder = layout(tmp_path / "layout", [archive(*LOWER), archive(*UPPER)], pack, oci._ARCHITECTURES[os.uname().machine])
    oci.load(store, folder, "demo")
    check(store, "demo")


def test_a_tag_chooses_among_several(store, tmp_path):
    path = docker_save(tmp_path / "image.tar", [archive(*LOWER)], ("a/demo:1", "a/demo:2"))
    with pytest.raises(DataError, match=r"several images.*--tag: a/demo:1, a/demo:2"):
        oci.load(store, path, "demo")
    with pytest.raises(DataError, match="no single image 'demo:3'; did you mean"):
        oci.load(store, path, "demo", tag="demo:3")
    assert oci.load(store, path, "demo", tag="demo:2").layers


def test_another_machine_is_named(store, tmp_path):
    folder = layout(tmp_path / "layout", [archive(*LOWER)], machine="s390x")
    with pytest.raises(DataError, match=r"no image for linux/.*windows/s390x, linux/s390x.*--platform"):
        oci.load(store, folder, "demo")


def damage_blob(path: Path) -> None:
    blob = max((path / "blobs" / "sha256").iterdir(), key=lambda p: p.read_bytes()[:2] == b"\x1f\x8b")
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(bytes(data))


def test_damage_is_seen_and_leaves_the_store_as_it_was(store, tmp_path):
    machine = oci._ARCHITECTURES[os.uname().machine]
    damaged = layout(tmp_path / "damaged", [archive(*LOWER)], machine=machine)
    damage_blob(damaged)
    with pytest.raises(DataError):
        oci.load(store, damaged, "demo")
    lying = docker_save(tmp_path / "lying.tar", [archive(*LOWER)])
    data = lying.read_bytes()
    lying.write_bytes(data.replace(b"lower", b"l0wer", 1))
    with pytest.raises(DataError, match="SHA-256 is not"):
        oci.load(store, lying, "demo")
    lying.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError):
        oci.load(store, lying, "demo")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(DataError, match="no image"):
        oci.load(store, tmp_path / "text", "demo")
    with pytest.raises(DataError, match="no such file"):
        oci.load(store, tmp_path / "missing", "demo")
    with pytest.raises(ConfigError):
        oci.load(store, tmp_path / "text", "No Name")
    assert store.images() == [] and not os.listdir(store.root / "scratch")
    store.gc()
    assert not os.listdir(store.root / "layers")


HOSTILE = {
    "climbs": [entry("../../escaped", b"x")],
    "climbs inside": [entry("a/../../escaped", b"x")],
    "absolute": [entry("/escaped", b"x")],
    "through a link": [entry("d", kind=tarfile.SYMTYPE, linkname="/"), entry("d/escaped", b"x")],
    "through a relative link": [entry("d", kind=tarfile.SYMTYPE, linkname=".."), entry("d/escaped", b"x")],
    "folder over a link": [entry("d", kind=tarfile.SYMTYPE, linkname=".."), entry("d/", kind=tarfile.DIRTYPE), entry("d/../escaped", b"x")],
    "hard link out": [entry("h", kind=tarfile.LNKTYPE, linkname="../secret")],
    "hard link to the host": [entry("h", kind=tarfile.LNKTYPE, linkname="/etc/passwd")],
    "hard link through a link": [entry("d", kind=tarfile.SYMTYPE, linkname="/etc"), entry("h", kind=tarfile.LNKTYPE, linkname="d/passwd")],
    "hard link to nothing": [entry("h", kind=tarfile.LNKTYPE, linkname="not-there")],
    "hard link to a folder": [entry("d", kind=tarfile.DIRTYPE), entry("h", kind=tarfile.LNKTYPE, linkname="d")],
    "device": [entry("x/sda", kind=tarfile.BLKTYPE, devmajor=8, devminor=0)],
    "memory device": [entry("mem", kind=tarfile.CHRTYPE, devmajor=1, devminor=1)],
    "whiteout as device": [entry("gone", kind=tarfile.CHRTYPE, devmajor=0, devminor=0)],
    "whiteout of a parent": [entry("d/.wh...", b"")],
    "whiteout of nothing": [entry("d/.wh.", b"")],
    "file as folder": [entry("f", b"x"), entry("f/escaped", b"x")],
    "very deep": [entry("/".join(["d"] * 2000), kind=tarfile.DIRTYPE)],
    "empty link": [entry("l", kind=tarfile.SYMTYPE, linkname="")],
    "unknown kind": [entry("k", kind=b"Z", size=0)],
    "mad time": [entry("t", b"x", pax_headers={"mtime": "nan"})],
    "sparse": [entry("s", b"1\n0\n5\n" + b" " * 506, pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archives_are_refused_with_one_line(tmp_path, case):
    folder = tmp_path / "in" / "layer"
    folder.mkdir(parents=True)
    (tmp_path / "in" / "secret").write_text("secret")
    with pytest.raises(DataError, match=r"^layer.tar: (refused|damaged)") as caught:
        unpack(io.BytesIO(archive(*HOSTILE[case])), folder, "layer.tar")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert sorted(os.listdir(tmp_path / "in")) == ["layer", "secret"] and os.listdir(tmp_path) == ["in"]
    assert not Path("/escaped").exists() and os.stat(tmp_path / "in" / "secret").st_nlink == 1
    assert not any(stat.S_ISBLK(s.st_mode) or (stat.S_ISCHR(s.st_mode) and s.st_rdev) for _, s in trees.walk(folder))


def test_a_name_too_long_for_the_disk_is_refused(tmp_path):
    with pytest.raises(Exception, match=r"layer\.tar") as caught:
        unpack(io.BytesIO(archive(entry("n" * 300, b"x"))), tmp_path, "layer.tar")
    assert type(caught.value).__name__ in ("SandboxError", "DataError")


def test_bombs_stop_at_their_bounds(store, tmp_path):
    zeros = archive(entry("zeros", bytes(8_000_000)))
    with pytest.raises(CapacityError, match="--max-size"):
        unpack(io.BytesIO(zeros), tmp_path, "bomb", Bounds(bytes=1_000_000))
    many = archive(*(entry(f"f{i}") for i in range(50)))
    (tmp_path / "many").mkdir()
    with pytest.raises(CapacityError, match="20 entries"):
        unpack(io.BytesIO(many), tmp_path / "many", "bomb", Bounds(entries=20))
    path = docker_save(tmp_path / "bomb.tar", [archive(entry("a", bytes(600_000))), archive(entry("b", bytes(600_000)))])
    with pytest.raises(CapacityError):  # each fits, both do not
        oci.load(store, path, "bomb", bounds=Bounds(bytes=1_000_000))
    assert store.images() == [] and not os.listdir(store.root / "scratch")


def test_an_enormous_header_is_not_read_into_memory(tmp_path):
    info = tarfile.TarInfo("././@PaxHeader")
    info.type, info.size = tarfile.XHDTYPE, 1 << 40
    with pytest.raises(DataError, match="extended header"):
        unpack(io.BytesIO(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)), tmp_path, "layer.tar")


def test_foreign_attributes_and_overlay_marks_are_not_taken(tmp_path):
    marks = {f"SCHILY.xattr.{name}": "y" for name in ("trusted.overlay.opaque", "user.overlay.opaque", "security.capability", "user.note")}
    unpack(io.BytesIO(archive(entry("d", kind=tarfile.DIRTYPE, pax_headers=marks))), tmp_path, "layer.tar")
    assert os.listxattr(tmp_path / "d") == ["user.note"]


def test_entries_that_come_twice_and_folders_without_an_entry(tmp_path):
    unpack(io.BytesIO(archive(
        entry("a", b"first"), entry("a", b"second"), entry("d/e/f", b"x"), entry("d/e", b"a file now"), entry("w", kind=tarfile.DIRTYPE),
        entry("w/.wh.x"), entry("w/x", b"back"), entry(".wh.v"), entry("v", kind=tarfile.DIRTYPE),
        entry("r", kind=tarfile.DIRTYPE, mode=0o500),
        entry("r/inside", b"x"),
        entry("dev/null", kind=tarfile.CHRTYPE, devmajor=1, devminor=3), entry("p", kind=tarfile.FIFOTYPE),
    )), tmp_path, "layer.tar")
    assert (tmp_path / "a").read_text() == "second" and (tmp_path / "d" / "e").read_text() == "a file now"
    assert (tmp_path / "w" / "x").read_text() == "back" and trees.is_opaque(tmp_path / "v")
    assert stat.S_IMODE((tmp_path / "r").stat().st_mode) == 0o500 and (tmp_path / "r").stat().st_mtime == 1_700_000_000
    assert not (tmp_path / "dev").exists() and stat.S_ISFIFO(os.lstat(tmp_path / "p").st_mode)


def test_a_distribution_is_built_once(store, monkeypatch, tmp_path):
    """With a program in the place of mmdebstrap that counts its calls."""
    tool = tmp_path / "bin" / "mmdebstrap"
    tool.parent.mkdir()
    (tmp_path / "base.tar").write_bytes(archive(*LOWER, entry("dev/null", kind=tarfile.CHRTYPE, devmajor=1, devminor=3)))
    tool.write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path}/calls\n"
                    "for a in \"$@\"; do [ $a = nosuch ] && echo E: no such suite >&2 && exit 3; done\n"
                    f"cat {tmp_path}/base.tar\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    choice = bootstrap.Distribution(packages=("gcc", "python3"))
    image = bootstrap.bootstrap(store, choice, "debian")
    assert (image.layers[0] / "etc" / "a").read_text() == "lower" and store.resolve("debian").layers == image.layers
    assert bootstrap.bootstrap(store, bootstrap.Distribution(packages=("python3", "gcc")), "other").layers == image.layers
    assert (tmp_path / "calls").read_text().count("\n") == 1 and "--include=gcc,python3" in (tmp_path / "calls").read_text()
    assert bootstrap.bootstrap(store, choice, "debian", fresh=True).layers != image.layers
    with pytest.raises(DataError, match="mmdebstrap failed: E: no such suite; check"):
        bootstrap.bootstrap(store, bootstrap.Distribution(suite="nosuch"), "x")
    with pytest.raises(ConfigError, match="no name of a release"):
        bootstrap.bootstrap(store, bootstrap.Distribution(packages=("--hook=rm",)), "x")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unsupported, match="apt-get install mmdebstrap"):
        bootstrap.bootstrap(store, bootstrap.Distribution(suite="trixie"), "x")


@pytest.mark.slow
def test_a_real_distribution_can_be_built(store):
    """Minutes, and a package index."""
    if not bootstrap.shutil.which("mmdebstrap"):
        pytest.skip("mmdebstrap is not installed")
    try:
        image = bootstrap.bootstrap(store, bootstrap.Distribution(), "debian")
    except DataError as error:
        pytest.skip(f"no package index: {error}")
    shown = subprocess.run(["cat", image.layers[0] / "etc" / "os-release"], capture_output=True, text=True, check=True)
    assert "bookworm" in shown.stdout and (image.layers[0] / "usr/bin/dash").exists()
