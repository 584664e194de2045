"""What `gnomon sandbox` does: one coroutine for each word after it, each returning an exit status. Read `words.py` first."""

from __future__ import annotations

import argparse
import asyncio
import base64
import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gnomon.errors import ConfigError, SandboxError
from gnomon.sandbox import listing, owners, reaper, terminal, words
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.open import open_backend, survey
from gnomon.sandbox.reach import call
from gnomon.sandbox.registry import Registry
from gnomon.sandbox.sandbox import Backend, Command, Network, Process
from gnomon.units import parse_bytes, parse_seconds

KILLED = 128
"""Added to the number of the signal that ended a program, as a shell does."""

TIMED_OUT = 124
_terminals: dict[str, terminal.Shown] = {}
GRACE_SECONDS = 60.0
"""How long a sandbox may outlive its program's time, to copy out and keep what there is."""


async def run(parsed: argparse.Namespace) -> int:
    """A program in a sandbox of its own."""
    if not parsed.argv and not parsed.detach:
        raise ConfigError("which program? for example: gnomon sandbox run -- python3 -c 'print(6 * 7)'")
    spec = words.spec(parsed)
    if parsed.detach:
        return await asyncio.to_thread(_detach, parsed, dataclasses.asdict(spec))
    async with _opened(parsed) as (backend, _):
        later = dataclasses.replace(spec, ttl_seconds=parse_seconds(parsed.timeout) + GRACE_SECONDS)
        async with await backend.create(later) as sandbox:
            for source, path in parsed.copy:
                await sandbox.upload(Path(source), path)
            program = Command(argv=tuple(parsed.argv), timeout_seconds=spec.ttl_seconds)
            process = await sandbox.start(program, stdin=parsed.stdin)
            if parsed.stdin:
                _feed(process)
            async for chunk in process.output():
                _show(chunk.stream, chunk.data)
            result = await process.wait()
            for path, target in parsed.fetch:
                await sandbox.download(path, Path(target))
            if parsed.keep:
                await sandbox.snapshot(parsed.keep)
        if result.timed_out:
            _show("stderr", f"gnomon: ended after {parsed.timeout}\n".encode())
        return TIMED_OUT if result.timed_out else result.code if result.code >= 0 else KILLED - result.code


async def ls(parsed: argparse.Namespace) -> int:
    """What exists."""
    registry = Registry(LayerStore())
    rows = await asyncio.to_thread(lambda: [listing.row(record, registry.why_dead(record)) for record in registry.list()])
    listing.show(listing.sandboxes(rows), rows, parsed.json)
    return 0


async def exec(parsed: argparse.Namespace) -> int:  # the name of the word
    """A program in a sandbox of another process."""
    registry = Registry(LayerStore())
    record = registry.get(words.one(registry, parsed.id))
    assert record is not None
    if (why := registry.why_dead(record)) is not None:
        raise SandboxError(f"sandbox {record.id} is dead: {why}; `gnomon sandbox gc` removes it")
    wish = {"do": "exec", "id": record.id, "argv": parsed.argv, "timeout_seconds": parse_seconds(parsed.timeout)}
    status = 0
    async for answer in call(registry.store, record.owner.id, wish):
        for stream in ("stdout", "stderr"):
            if stream in answer:
                _show(stream, base64.b64decode(answer[stream]))
        if "code" in answer:
            code = int(answer["code"])
            status = TIMED_OUT if answer.get("timed_out") else code if code >= 0 else KILLED - code
    return status


async def kill(parsed: argparse.Namespace) -> int:
    """Ends sandboxes, through their owner where it listens, else by what they have outside themselves."""
    registry = Registry(LayerStore())
    if not parsed.ids and not parsed.all:
        raise ConfigError("which sandboxes? name their ids (gnomon sandbox ls), or --all")
    ids = [record.id for record in registry.list()] if parsed.all else [words.one(registry, prefix) for prefix in parsed.ids]
    failed = []
    for id in ids:
        try:
            await _end(registry, id)
            listing.say(f"ended {id}")
        except (SandboxError, OSError) as error:
            failed.append(f"{id}: {error}")
    if failed:
        raise SandboxError("; ".join(failed))
    return 0


async def _end(registry: Registry, id: str) -> None:
    record = registry.get(id)
    if record is None:
        return  # it has just ended
    if owners.alive(registry.store.root / "owners", record.owner.id):
        try:
            async for _ in call(registry.store, record.owner.id, {"do": "kill", "id": id}):
                pass
            return
        except SandboxError:
            if not record.traces.processes:  # nothing to end it by
                raise
    await asyncio.to_thread(reaper.end, registry, record, by_force=True)


async def gc(parsed: argparse.Namespace) -> int:
    """Ends what nobody owns, removes what nothing needs."""
    registry = Registry(LayerStore())
    swept = await asyncio.to_thread(reaper.sweep, registry)
    collected = await asyncio.to_thread(registry.store.gc, cache_seconds=0.0 if parsed.cache else 30 * 86400.0)
    listing.swept(swept, collected)
    if swept.failed:
        raise SandboxError("; ".join(f"{id}: {why}" for id, why in swept.failed))
    return 0


async def probe(parsed: argparse.Namespace) -> int:
    """Which backends work here."""
    verdicts = await survey(LayerStore())
    rows = [dataclasses.asdict(verdict) for verdict in verdicts]
    listing.show(listing.backends(verdicts), rows, parsed.json)
    return 0 if any(verdict.capabilities for verdict in verdicts) else 1


async def images(parsed: argparse.Namespace) -> int:
    """Images and snapshots."""
    store = LayerStore()
    for name in parsed.forget:
        store.forget(name)
    if parsed.forget:
        listing.say(f"forgot {', '.join(parsed.forget)}; `gnomon sandbox gc` gives back the space")
        return 0
    rows = await asyncio.to_thread(lambda: [listing.image_row(image) for image in store.images()])
    listing.show(listing.images(rows), rows, parsed.json)
    return 0


async def build(parsed: argparse.Namespace) -> int:
    """Makes an image."""
    store = LayerStore()
    sources = [parsed.source, parsed.archive, parsed.folder, parsed.debian]
    if sum(source is not None for source in sources) != 1:
        raise ConfigError("what to build from? give one of: a Dockerfile or its folder, --archive, --folder, --debian")
    if parsed.archive:
        from gnomon.sandbox import oci, unpack

        bounds = unpack.Bounds(bytes=parse_bytes(parsed.max_size))
        await asyncio.to_thread(oci.load, store, parsed.archive, parsed.name, tag=parsed.tag, bounds=bounds)
    elif parsed.debian:
        from gnomon.sandbox import bootstrap

        choice = bootstrap.Distribution(suite=parsed.debian, packages=tuple(filter(None, parsed.packages.split(","))), mirror=parsed.mirror)
        await asyncio.to_thread(bootstrap.bootstrap, store, choice, parsed.name, fresh=parsed.fresh)
    elif parsed.folder:
        await asyncio.to_thread(_copied, store, parsed.folder, parsed.name)
    else:
        from gnomon.sandbox import dockerfile

        file = parsed.source / "Dockerfile" if parsed.source.is_dir() else parsed.source
        how = dockerfile.Building(network=Network(allow=tuple(parsed.allow)), cached=not parsed.fresh)
        async with _opened(parsed) as (backend, opened):
            await dockerfile.build(backend, opened, file, parsed.name, how=how, say=listing.say)
    listing.say(f"image {parsed.name}: gnomon sandbox run --image {parsed.name} -- …")
    return 0


def _copied(store: LayerStore, folder: Path, name: str) -> None:
    from gnomon.sandbox import trees
    from gnomon.sandbox.images import checked

    checked(name)
    image = store.resolve(str(folder.absolute()))
    place = store.scratch()
    try:
        layers = []
        for number, layer in enumerate(image.layers):
            trees.copy(layer, place / str(number))
            layers.append(store.seal(place / str(number), durable=True))
        store.keep(dataclasses.replace(image, name=name, layers=tuple(layers)))
    finally:
        store.discard(place)


async def serve(parsed: argparse.Namespace) -> int:
    """The E2B API, until it is interrupted."""
    try:
        from gnomon.sandbox import server
        from gnomon.sandbox.server_desk import Settings
    except ImportError as error:
        raise ConfigError(f"gnomon sandbox serve needs {error.name}: pip install 'gnomon[serve]'") from None
    keys = server.keys_of(os.environ.get("E2B_API_KEY"))
    if not keys:
        raise ConfigError("gnomon sandbox serve lets nobody in without a key: set E2B_API_KEY to one of 16 characters or more, as in "
                          "E2B_API_KEY=e2b_$(python3 -c 'import secrets; print(secrets.token_hex(20))')")
    templates = {"base": "host", **words.pairs(parsed.template, "--template")}
    settings = Settings(keys=keys, templates=templates, default_seconds=parse_seconds(parsed.timeout))
    async with _opened(parsed) as (backend, store):
        running = server.server(server.build(backend, settings, store), parsed.host, parsed.port)
        serving = asyncio.ensure_future(running.serve())
        sweeper = reaper.Sweeper(Registry(store))
        sweeper.start()
        try:
            while not running.started and not serving.done():
                await asyncio.sleep(0.02)
            if running.started:
                address = server.address_of(running)
                listing.say(f"serving sandboxes ({backend.name}) at {address}\nexport E2B_API_URL={address} E2B_SANDBOX_URL={address}")
            await serving
        finally:
            await asyncio.to_thread(sweeper.stop)
    return 0


@asynccontextmanager
async def _opened(parsed: argparse.Namespace) -> AsyncIterator[tuple[Backend, LayerStore]]:
    """A backend and its store; what others left behind is ended first."""
    store = LayerStore()
    registry = Registry(store)
    await asyncio.to_thread(reaper.sweep, registry)
    backend = await open_backend(parsed.backend, isolation=parsed.isolation, store=store, registry=registry)
    try:
        yield backend, store
    finally:
        await backend.close()
        registry.close()


def _detach(parsed: argparse.Namespace, spec: dict[str, Any]) -> int:
    """Start a keeper in a session of its own; says the sandbox's id."""
    if parsed.copy or parsed.fetch or parsed.keep or parsed.stdin:
        raise ConfigError("--copy, --fetch, --keep and --stdin do not go with --detach; use exec on the running sandbox")
    wish = {"backend": parsed.backend, "isolation": parsed.isolation, "argv": parsed.argv, "spec": spec}
    keeper = subprocess.Popen([sys.executable, "-m", "gnomon.sandbox.keeper"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, start_new_session=True, cwd="/")
    assert keeper.stdin is not None and keeper.stdout is not None
    with keeper.stdin, keeper.stdout:
        keeper.stdin.write(json.dumps(wish).encode())
        keeper.stdin.close()
        line = keeper.stdout.readline()
    answer = json.loads(line) if line else {"error": "its keeper ended without a word"}
    if "error" in answer:
        keeper.wait()
        raise SandboxError(answer["error"])
    keeper.returncode = 0  # it goes on by itself; nobody here waits for it
    listing.say(answer["id"])
    return 0


def _show(stream: str, data: bytes) -> None:
    """Bytes as they come, which need not be text; on a terminal letters and colours alone."""
    target = sys.stdout if stream == "stdout" else sys.stderr
    if target.isatty():
        data = _terminals.setdefault(stream, terminal.Shown()).of(data)
    target.buffer.write(data)
    target.buffer.flush()


def _feed(process: Process) -> None:
    """Standard input to a program, from a thread that nobody waits for: a read from a terminal cannot be ended."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        while True:
            data = os.read(0, 65_536)
            job = asyncio.run_coroutine_threadsafe(process.write(data) if data else process.close_stdin(), loop)
            try:
                job.result()
            except Exception:  # noqa: BLE001 - the program has ended and reads no more
                return
            if not data:
                return

    threading.Thread(target=read, daemon=True).start()


