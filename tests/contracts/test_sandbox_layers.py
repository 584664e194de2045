"""The store of layers: sealed once, merged truly, nothing lost by a crash and nothing left behind."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gnomon.errors import CapacityError, ConfigError, SandboxError
from gnomon.sandbox import layers, owners, trees
from gnomon.sandbox.images import Image
from gnomon.sandbox.layers import LayerStore


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "store")


def filled(folder: Path, files: dict[str, str | None]) -> Path:
    """A folder with files of these contents; `None` hides a name, a name that ends with a slash hides all below."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
            trees.make_opaque(path)
        elif text is None:
            trees.make_whiteout(path)
        else:
            path.write_text(text)
    return folder


def contents(folder: Path) -> dict[str, str]:
    """The regular files of a tree."""
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def program(store: LayerStore, text: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a store at hand, in a process of its own."""
    head = "import os, sys\nfrom pathlib import Path\nfrom gnomon.sandbox.layers import LayerStore\n"
    head += f"store = LayerStore(Path({str(store.root)!r}))\n"
    return subprocess.run([sys.executable, "-c", head + text], capture_output=True, text=True, check=False, timeout=60)


def test_a_snapshot_is_an_image_under_its_name(store):
    scratch = store.scratch()
    filled(scratch, {"etc/motd": "hello"})
    parent = store.seal(filled(store.scratch(), {"bin/sh": "#!"}))
    start = Image(name="base", layers=(parent,), env={"A": "1"}, workdir="/srv", user="alice", host=True)
    snapshot = store.adopt(scratch, "mine:1", (parent,), like=start, backend="namespaces")
    assert not scratch.exists()
    image = LayerStore(store.root).resolve("mine:1")
    assert image.layers[1:] == (parent,) and contents(image.layers[0]) == {"etc/motd": "hello"}
    assert (image.env, image.workdir, image.user, image.host, image.snapshot) == ({"A": "1"}, "/srv", "alice", True, snapshot)
    assert snapshot.parent == "base" and snapshot.bytes > 0 and not snapshot.memory


def test_names_are_checked_and_near_ones_suggested(store):
    store.adopt(filled(store.scratch(), {"a": ""}), "debian-12")
    with pytest.raises(ConfigError, match=r"unknown image 'debian-21'; did you mean 'debian-12'.*host, scratch, debian-12"):
        store.resolve("debian-21")
    with pytest.raises(ConfigError, match="no such folder"):
        store.resolve("/nowhere/at/all")
    for bad in ("../x", "A", "", "x" * 200, "a b"):
        with pytest.raises(ConfigError):
            store.keep(Image(name=bad))
    store.forget("debian-12")
    with pytest.raises(ConfigError):
        store.forget("debian-12")


def test_a_folder_of_layers_is_an_image_where_it_lies(store, tmp_path):
    folder = tmp_path / "mine"
    filled(folder, {"top/x": "1", "base/y": "2", "image.json": '{"layers": ["top", "base"], "env": {"K": "v"}, "user": "bob"}'})
    image = store.resolve(str(folder))
    assert image.layers == (folder / "top", folder / "base") and image.env == {"K": "v"} and image.user == "bob"
    assert store.resolve(str(folder / "base")).layers == (folder / "base",)
    (folder / "image.json").write_text('{"layers": ["../top"]}')
    with pytest.raises(ConfigError, match="no sub-folder"):
        store.resolve(str(folder))


def test_merging_means_what_an_overlay_means(tmp_path):
    """Against the rules written out by hand: later layers win, whiteouts hide, opaque folders hide all below, kinds may change."""
    low = filled(tmp_path / "0", {"a": "0", "b": "0", "d/x": "0", "d/y": "0", "e/x": "0", "f/x": "0", "g": "0"})
    (low / "link").symlink_to("a")
    mid = filled(tmp_path / "1", {"a": "1", "b": None, "d/x": None, "e/": None, "e/z": "1", "f": "file", "g/x": "1"})
    top = filled(tmp_path / "2", {"b": "2", "f": None, "h/deep/er": "2"})
    trees.merge([low, mid, top], tmp_path / "plain", whiteouts=False)
    want = {"a": "1", "b": "2", "d/y": "0", "e/z": "1", "g/x": "1", "h/deep/er": "2", "link": "1"}
    assert contents(tmp_path / "plain") == want
    assert os.readlink(tmp_path / "plain" / "link") == "a"
    trees.merge([mid, top], tmp_path / "upper", whiteouts=True)
    trees.merge([low, tmp_path / "upper"], tmp_path / "again", whiteouts=False)
    assert contents(tmp_path / "again") == want
    assert trees.is_opaque(tmp_path / "upper" / "e") and trees.is_whiteout(tmp_path / "upper" / "f", os.lstat(tmp_path / "upper" / "f"))
    assert os.stat(low / "g").st_ino == os.stat(tmp_path / "0" / "g").st_ino and contents(low)["g"] == "0"


def test_a_copy_has_rights_times_links_and_attributes(tmp_path):
    source = filled(tmp_path / "source", {"a": "text", "d/b": "x", "gone": None})
    os.link(source / "a", source / "twin")
    (source / "s").symlink_to("/etc/passwd")
    os.mkfifo(source / "pipe")
    os.chmod(source / "a", 0o4751)
    os.setxattr(source / "a", "user.note", b"kept")
    for path in (source / "a", source / "d"):
        os.utime(path, ns=(10**18, 10**18 + 7))
    trees.copy(source, tmp_path / "copy")
    copy = tmp_path / "copy"
    assert (copy / "a").stat().st_ino == (copy / "twin").stat().st_ino != (source / "a").stat().st_ino
    assert stat.S_IMODE((copy / "a").stat().st_mode) == 0o4751 and os.getxattr(copy / "a", "user.note") == b"kept"
    assert (copy / "a").stat().st_mtime_ns == (copy / "d").stat().st_mtime_ns == 10**18 + 7
    assert os.readlink(copy / "s") == "/etc/passwd" and stat.S_ISFIFO(os.lstat(copy / "pipe").st_mode)
    assert trees.is_whiteout(copy / "gone", os.lstat(copy / "gone"))


def test_removal_reaches_any_depth(tmp_path):
    """A program inside may nest folders until no path can name them."""
    top = tmp_path / "deep"
    top.mkdir()
    descriptor = os.open(top, os.O_RDONLY)
    for _ in range(400):
        os.mkdir("d" * 20, dir_fd=descriptor)
        inner = os.open("d" * 20, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    with pytest.raises(SandboxError, match="deeper than a path can name"):
        trees.copy(top, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    trees.remove(top)
    assert os.listdir(tmp_path) == []


def test_long_chains_are_merged_and_mean_the_same(store):
    base = store.seal(filled(store.scratch(), {"base": "b", "x": "base"}))
    chain: tuple[Path, ...] = (base,)
    for i in range(layers.MAX_DEPTH + 3):
        snapshot = store.adopt(filled(store.scratch(), {"x": str(i), f"only-{i}": "", f"only-{i - 2}": None}), f"step-{i}", chain)
        chain = store.resolve(snapshot.name).layers
        assert len(chain) <= layers.MAX_DEPTH and chain[-1] == base
    last = layers.MAX_DEPTH + 2
    flat = store.flat(store.resolve(f"step-{last}"))
    assert contents(flat) == {"base": "b", "x": str(last), f"only-{last}": "", f"only-{last - 1}": ""}
    assert store.flat(store.resolve(f"step-{last}")) == flat  # made once


def test_gc_takes_what_nothing_needs_and_only_that(store):
    kept = store.adopt(filled(store.scratch(), {"a": "1"}), "kept")
    held = store.seal(filled(store.scratch(), {"b": "2"}))
    store.adopt(filled(store.scratch(), {"c": "3"}), "gone")
    gone = store.resolve("gone").layers[0]
    scratch = store.scratch()
    for layer in (store.resolve("kept").layers[0], gone):
        store.release([layer])
    assert store.gc().layers == 0
    store.forget("gone")
    collected = store.gc()
    assert (collected.layers, collected.scratch) == (1, 0) and collected.bytes > 0
    assert not gone.exists() and held.exists() and scratch.exists() and store.resolve(kept.name)
    with pytest.raises(SandboxError, match="is gone"):
        store.hold([gone])
    store.release([held])
    store.discard(scratch)
    assert store.gc().layers == 1
    assert not os.listdir(store.root / "trash") and not os.listdir(store.root / "scratch")


def test_what_a_process_held_goes_when_it_dies(store):
    text = ("(place := store.scratch()).joinpath('x').write_text('y')\nlayer = store.seal(store.scratch())\n"
            "print(place, layer, flush=True)\nos.kill(os.getpid(), 9)")
    died = program(store, text)
    scratch, layer = map(Path, died.stdout.split())
    assert died.returncode == -9 and scratch.exists() and layer.exists()
    collected = store.gc()
    assert (collected.layers, collected.scratch) == (1, 1) and not scratch.exists() and not layer.exists()
    assert os.listdir(store.root / "owners") in ([], [owners.own(store.root / "owners").id])


def test_a_fork_is_an_owner_of_its_own(store):
    store.scratch()
    mine = owners.own(store.root / "owners")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, owners.own(store.root / "owners").id.encode())
        os._exit(0)
    other = os.read(read, 200).decode()
    os.waitpid(child, 0)
    assert other != mine.id
    assert owners.alive(store.root / "owners", mine.id) and not owners.alive(store.root / "owners", other)


@pytest.mark.parametrize("call", ["_flush", "rename", "_write"])
def test_power_cut_between_seal_and_answer_loses_nothing_acknowledged(store, call):
    """The process ends at each step in turn; what it acknowledged before is whole, and what it did not is collected."""
    text = f"""
def filled(text):
    folder = store.scratch()
    (folder / 'x').write_text(text)
    return folder
store.adopt(filled('first'), 'first')
def cut(*args): os._exit(7)
if {call!r} == 'rename': Path.rename = cut
else: LayerStore.{call} = cut
store.adopt(filled('second'), 'first')
"""
    assert program(store, text).returncode == 7
    assert contents(store.resolve("first").layers[0]) == {"x": "first"}
    store.gc()
    assert len(os.listdir(store.root / "layers")) == 1 and not os.listdir(store.root / "scratch")


def test_the_order_on_disk_is_contents_then_rename_then_record(store, monkeypatch):
    """What a power cut may undo is whatever was not flushed; so each step must be flushed before the next begins."""
    steps: list[str] = []
    rename, sync, flush = Path.rename, LayerStore._sync, LayerStore._flush
    monkeypatch.setattr(Path, "rename", lambda self, to: (steps.append(f"rename to {Path(to).parent.name}"), rename(self, to))[1])
    monkeypatch.setattr(LayerStore, "_sync", staticmethod(lambda folder: (steps.append(f"sync {folder.name}"), sync(folder))[1]))
    monkeypatch.setattr(LayerStore, "_flush", lambda self: (steps.append("flush"), flush(self))[1])
    store.adopt(filled(store.scratch(), {"x": "1"}), "one")
    assert steps == ["flush", "rename to layers", "sync layers", "rename to images", "sync images"]


def test_a_full_disk_leaves_nothing_half_made(store, tmp_path):
    """Copying between file systems onto one that is full; where root is missing, a limit on file sizes stands in."""
    source = filled(tmp_path / "source", {"small": "1"})
    (source / "large").write_bytes(b"x" * 2_000_000)
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        full = LayerStore(small / "store")
        with pytest.raises(CapacityError, match=r"no space left.*gnomon sandbox gc"):
            full.adopt(source, "big")
        assert (source / "large").stat().st_size == 2_000_000
        assert full.images() == [] and not os.listdir(full.root / "layers") and not os.listdir(full.root / "scratch")
        (small / "ballast").write_bytes(b"x" * (os.statvfs(small).f_bavail * 4096 - 8192))
        folder = filled(full.scratch(), {"x": "kept"})
        with pytest.raises(CapacityError):
            [full.keep(Image(name=f"n{i}", env={"pad": "x" * 5000})) for i in range(100)]
        whole = [image.name for image in full.images()]
        assert all(full.resolve(name).env for name in whole) and not list((full.root / "images").glob(".*"))
        with pytest.raises(CapacityError):
            full.adopt(folder, "late", like=Image(name="l", env={"pad": "x" * 20000}))
        assert contents(folder) == {"x": "kept"}
        (small / "ballast").unlink()
        full.adopt(folder, "late")
        assert contents(full.resolve("late").layers[0]) == {"x": "kept"}
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_many_threads_and_collections_at_once(store):
    done: list[int] = []

    def work(number: int) -> None:
        for i in range(8):
            name = f"n{number}"
            store.adopt(filled(store.scratch(), {"x": f"{number}.{i}"}), name)
            image = store.resolve(name)
            store.hold(image.layers)
            assert contents(image.layers[0]) == {"x": f"{number}.{i}"}
            store.release([*image.layers, *image.layers])
        done.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        store.gc()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(6))
    store.gc()
    assert len(os.listdir(store.root / "layers")) == 6


def test_a_root_that_others_can_write_is_refused(tmp_path):
    root = tmp_path / "open"
    root.mkdir()
    os.chmod(root, 0o777)
    with pytest.raises(SandboxError, match="chmod go-w"):
        LayerStore(root)


def test_folders_that_somebody_else_made_are_refused(tmp_path):
    if os.geteuid():
        pytest.skip("only root can give a folder to somebody else")
    root = tmp_path / "shared"
    root.mkdir()
    os.chmod(root, 0o1777)
    (root / "layers").mkdir()
    os.chown(root / "layers", 65534, 65534)
    with pytest.raises(SandboxError, match="not a folder of yours"):
        LayerStore(root)
    (root / "layers").rmdir()
    (root / "layers").symlink_to(tmp_path)
    with pytest.raises(SandboxError, match="not a folder of yours"):
        LayerStore(root)


def test_nobody_else_comes_to_the_layers(tmp_path):
    root = tmp_path / "store"
    (root / "layers").mkdir(parents=True, mode=0o755)
    assert (LayerStore(root).root / "layers").stat().st_mode & 0o077 == 0


def test_one_store_by_two_names_keeps_its_owner_alive(tmp_path):
    (tmp_path / "alias").symlink_to(tmp_path / "store")
    store = LayerStore(tmp_path / "store")
    store.scratch()
    alias = LayerStore(tmp_path / "alias")
    alias.gc()
    owner = owners.own(store.root / "owners")
    assert (store.root / "owners" / owner.id).exists()


def test_the_place_of_the_store(monkeypatch, tmp_path):
    monkeypatch.setenv("GNOMON_SANDBOX_HOME", str(tmp_path / "here"))
    assert layers.default_root() == tmp_path / "here"
    monkeypatch.delenv("GNOMON_SANDBOX_HOME")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert layers.default_root() == Path("/data/gnomon/sandbox")
