"""Checkpoints at rest: packed with a known error, and on a disk that outlives processes, however they end."""

import dataclasses
import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from cache_worlds import CONFIG, HashModel, World
from inference_models import config, tokens

from gnomon.errors import CheckpointError, ConfigError
from gnomon.model.inference_state import StatePool
from gnomon.model.parts import KDAConfig
from gnomon.serve.cache_settings import CacheSettings
from gnomon.serve.checkpoints import PackedState, pack, unpack
from gnomon.serve.segments import Segment, SegmentName, read, read_name, write

PROMPT = tokens(60, seed=1).tolist()


def world(folder, slots=40, pages=400, **more):
    """A cache on a folder."""
    probe = HashModel().new_pool(1, 8, 8)
    return World(HashModel(), budget=slots * probe.slot_bytes + pages * probe.page_bytes, disk=folder, **more)


def say(w, prompt, **more):
    """A request from start to end; how many tokens were cached."""
    talk = w.open(prompt, **more)
    while talk.todo:
        w.step([(talk, talk.todo[:16])])
    w.close(talk)
    w.check()
    return talk.held.cached_tokens


def files(folder):
    """The segments that are there."""
    return sorted(folder.glob("*.segment"))


def test_prefixes_outlive_the_process(tmp_path):
    w = world(tmp_path)
    say(w, PROMPT, boundaries=(24,))
    w.restart()
    talk = w.open([*PROMPT, 1, 2, 3])
    assert talk.held.cached_tokens == 56 and "56 of 63 tokens cached" in talk.held.note
    w.step([(talk, talk.todo)])
    w.close(talk)
    w.restart()
    assert say(w, PROMPT[:30] + [7] * 9) == 24, "the turn in the middle is there as well"
    assert say(w, PROMPT, salt="mine") == 0
    assert w.cache.stats().disk.read == 1
    w.finish()


def test_memory_and_disk_together_give_the_deepest(tmp_path):
    w = world(tmp_path, slots=6, pages=16)
    say(w, PROMPT, boundaries=(24,))
    for seed in range(3):
        say(w, tokens(70, seed=10 + seed).tolist())
    assert say(w, PROMPT) == 56
    w.finish()


def test_a_running_server_serves_what_it_wrote_and_forgot(tmp_path):
    w = world(tmp_path)
    say(w, PROMPT)
    w.cache.disk.close()
    w.cache.clear()
    assert say(w, PROMPT) == 56
    w.finish()


@pytest.mark.parametrize("other", ["fingerprint", "hash_block", "matrices", "latent_type", "version"])
def test_a_folder_of_another_model_is_refused(tmp_path, other):
    world(tmp_path).finish()
    path = tmp_path / "cache.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {other: "other"}))
    with pytest.raises(ConfigError, match=rf"belongs to another model or version: '{other}' is 'other' there.*choose another folder"):
        world(tmp_path)


def test_a_folder_that_is_none_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be used: .*choose another"):
        world(tmp_path / "file")
    (tmp_path / "cache.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cache.json' cannot be read; choose another folder or remove"):
        world(tmp_path)
    (tmp_path / "cache.json").unlink()
    (tmp_path / "00.segment").write_text("")
    with pytest.raises(ConfigError, match=r"has segments but no cache.json"):
        world(tmp_path)


@pytest.mark.parametrize("damage", ["flipped", "cut", "renamed", "emptied", "absent", "forged"])
def test_damage_is_a_miss_and_never_a_wrong_state(tmp_path, damage):
    w = world(tmp_path)
    say(w, PROMPT)
    w.restart()
    (path,) = [p for p in files(tmp_path) if read_name(p).stop == 56]
    if damage == "flipped":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "forged":
        segment = read(path)
        write(path, dataclasses.replace(segment, tokens=segment.tokens[::-1]))
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "renamed":
        path.write_bytes(next(p for p in files(tmp_path) if p != path).read_bytes()) if len(files(tmp_path)) > 1 else path.write_bytes(b"")
    else:
        path.write_bytes(b"") if damage == "emptied" else path.unlink()
    if damage in ("cut", "emptied"):
        w.restart()
        assert not path.exists()
    assert say(w, PROMPT) == 0
    w.finish()


def test_a_process_that_is_killed_leaves_whole_files_only(tmp_path):
    program = (
        "import sys, pathlib; from gnomon.serve.segments import *; from gnomon.serve.checkpoints import PackedState; import torch\n"
        "folder = pathlib.Path(sys.argv[1]); print('ready', flush=True)\n"
        "for i in range(10**6):\n"
        "    state = PackedState(form='fp32', matrices=torch.rand(2, 4, 64, 64), scales=None, conv=torch.rand(9), error=0.0)\n"
        "    name = SegmentName(parent=bytes(16), digest=i.to_bytes(16, 'big'), start=0, stop=8)\n"
        "    piece = Segment(name=name, tokens=bytes(32), latents=torch.rand(8, 2, 9), state=state, error=0.0)\n"
        "    write(folder / f'{name.digest.hex()}.segment', piece)\n"
    )
    world(tmp_path).finish()
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 30
        while len(files(tmp_path)) < 5 and time.monotonic() < deadline:
            time.sleep(0.003)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    there = files(tmp_path)
    assert len(there) >= 5
    for path in there:
        assert read(path).name.digest.hex() == path.stem
    w = world(tmp_path)
    assert not list(tmp_path.glob(".*.tmp")) and len(files(tmp_path)) == len(there)
    w.cache.close()


def test_what_the_writer_cannot_take_is_dropped(tmp_path):
    w = world(tmp_path, disk_queue_bytes=10)
    say(w, PROMPT)
    w.restart()
    assert files(tmp_path) == [] and say(w, PROMPT) == 0
    assert w.cache.stats().disk.dropped >= 1
    w.finish()


def test_a_disk_that_fails_stops_nobody(tmp_path, caplog):
    folder = tmp_path / "cache"
    w = world(folder)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    say(w, PROMPT)
    w.cache.disk.close()
    assert w.cache.stats().disk.failed >= 1 and "cannot write" in caplog.text
    assert say(w, PROMPT) == 56, "memory still has it"
    w.finish()


def test_the_folder_keeps_its_budget(tmp_path):
    w = world(tmp_path, disk_bytes=6000)
    for seed in range(12):
        say(w, PROMPT[:24] + tokens(30, seed=seed).tolist(), boundaries=(24,))
        w.cache.disk.close()
        assert sum(path.stat().st_size for path in files(tmp_path)) == w.cache.stats().disk.bytes <= 6000
    assert w.cache.stats().disk.evicted > 0
    w.restart()
    assert say(w, PROMPT[:24] + [1] * 9) == 24, "what the others build on stays"
    w.finish()


@pytest.mark.parametrize(("form", "bytes_each", "bound"), [("fp32", 4, 0.0), ("bf16", 2, 2**-8), ("int8", 1, 2**-6)])
def test_packing_says_what_it_lost(form, bytes_each, bound):
    pool = StatePool(config(), 2, 1)
    pool.matrices[0] = torch.randn(pool.matrices.shape[1:]) * torch.logspace(-6, 3, 16)[:, None]
    pool.matrices[0, 0, 1] = 0.0
    pool.conv[0] = torch.randn(pool.conv.shape[1:])
    state = pack(pool, 0, form)
    unpack(state, pool, 1)
    exact, there = pool.matrices[0].double(), pool.matrices[1].double()
    lost = max(float((there[i, j] - exact[i, j]).norm() / exact[i, j].norm().clamp(min=1e-30)) for i in range(3) for j in range(3))
    assert state.error == pytest.approx(lost, rel=1e-3) and state.error <= bound
    assert torch.equal(pool.conv[0], pool.conv[1])
    if form != "fp32":
        assert float(((there - exact).abs() / exact.abs().amax(-1, keepdim=True).clamp(min=1e-30)).max()) <= bound
    rest = pool.conv[0].nbytes + (0 if state.scales is None else state.scales.nbytes)
    assert state.bytes == pool.matrices[0].numel() * bytes_each + rest
    with pytest.raises(ConfigError, match="no form of a checkpoint; choose one of: fp32, bf16, int8"):
        pack(pool, 0, "fp8")
    with pytest.raises(ConfigError, match="'resting' is 'fp8'"):
        CacheSettings(resting="fp8")


class Wide(HashModel):
    """A model with states large enough to be worth packing; it does not look at them."""

    config = dataclasses.replace(CONFIG, mixers=CONFIG.mixers | {"kda": KDAConfig(num_heads=1, head_dim=64)})

    def run(self, jobs, pool):
        """States of random numbers."""
        for held, _, new, copies in jobs:
            assert new
            for slot in (held.slot, *(slot for _, slot in copies)):
                pool.matrices[slot], pool.conv[slot] = torch.randn(pool.matrices.shape[1:]), torch.randn(pool.conv.shape[1:])


def test_packed_checkpoints_are_more_and_say_so():
    long, kept = tokens(400, seed=2).tolist(), []
    for resting in ("fp32", "bf16", "int8"):
        w = World(Wide(), budget=9 * 20_000, block=8, page_tokens=8, resting=resting)
        say(w, long, boundaries=tuple(range(40, 400, 40)))
        kept.append(w.cache.stats().checkpoints)
        held = [w.cache.open([*long[:cut], 0]) for cut in range(40, 400, 60)]
        assert all(each.cached_tokens for each in held)
        assert any("the state was packed, which changed it by up to" in each.note for each in held) == (resting != "fp32")
        assert (w.cache.stats().worst_error > 0) == (resting != "fp32")
    assert kept[0] < kept[1] < kept[2]


def test_a_segment_is_read_as_it_was_written(tmp_path):
    state = PackedState(form="int8", matrices=torch.arange(8, dtype=torch.int8).view(1, 2, 2, 2), scales=torch.rand(1, 2, 2, 1),
                        conv=torch.rand(1, 3, 4), error=0.01)
    name = SegmentName(parent=bytes(16), digest=bytes([7] * 16), start=8, stop=16)
    segment = Segment(name=name, tokens=bytes(range(32)), latents=torch.rand(8, 2, 9).bfloat16(), state=state, error=0.02)
    path = tmp_path / "07.segment"
    assert write(path, segment) == path.stat().st_size
    there = read(path)
    assert (there.name, there.tokens, there.error, there.state.error, there.state.form) == (name, segment.tokens, 0.02, 0.01, "int8")
    for a, b in ((there.latents, segment.latents), (there.state.matrices, state.matrices), (there.state.scales, state.scales)):
        assert a.dtype == b.dtype and torch.equal(a, b)
    assert read_name(path) == name
    path.write_bytes(b"gnomonPC\xff\xff\x00\x00{}")
    with pytest.raises(CheckpointError, match="no segment of a cache"):
        read_name(path)
