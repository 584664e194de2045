"""Which backend: `open_backend("auto")` takes the first that works here, found out by making a sandbox with it.

What shares the host's kernel is never given to someone who asked for strong isolation: where nothing strong works, the error lists what was
tried, why it was not, and what would help. Read next: `sandbox.py`, the contract of what comes back.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gnomon.errors import ConfigError, GnomonError, Unsupported
from gnomon.extend import find, kinds
from gnomon.sandbox.layers import LayerStore
from gnomon.sandbox.registry import Registry
from gnomon.sandbox.sandbox import Backend, Capabilities, Isolation

ORDER: dict[Isolation, tuple[str, ...]] = {"standard": ("namespaces", "gvisor"), "strong": ("microvm", "gvisor", "e2b")}
"""What `auto` tries, in this order. Strong: hardware first, then a kernel in a process, then another machine."""

PROBE_SECONDS = 120.0

_PACKAGE = "gnomon.sandbox.backends"
_refused: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a probe found: capabilities, or the reason why there are none."""

    name: str
    capabilities: Capabilities | None = None
    reason: str = ""


async def open_backend(
    name: str = "auto", *, isolation: Isolation = "standard", store: LayerStore | None = None, registry: Registry | None = None
) -> Backend:
    """A backend that works here, probed; `close` it when done.

    `name` is `auto`, a file in `gnomon/sandbox/backends`, or `your_pkg.module:Class`. Raises `Unsupported`, listing each that was tried,
    where none works or none is as strong as `isolation` asks; `ConfigError` for an unknown name.
    """
    if isolation not in ORDER:
        raise ConfigError(f"isolation '{isolation}'; it is standard or strong")
    names = ORDER[isolation] if name == "auto" else (name,)
    tried = []
    for each in names:
        backend, verdict = await _probed(each, store, registry)
        if backend is not None and verdict.capabilities is not None:
            if isolation == "standard" or verdict.capabilities.isolation == "strong":
                return backend
            await backend.close()
            verdict = Verdict(name=each, reason="its isolation is standard, by what it says of itself")
        tried.append(f"{each}: {verdict.reason}")
    what = "no backend works here" if isolation == "standard" else "no backend with strong isolation works here"
    remedy = ("gnomon sandbox probe shows all backends" if isolation == "standard" else
              "install runsc (gVisor), use a machine with KVM, or set E2B_API_URL and E2B_API_KEY; isolation is never lowered by itself")
    raise Unsupported(f"{what}. Tried {'; '.join(tried)}. What helps: {remedy}")


async def survey(store: LayerStore | None = None) -> list[Verdict]:
    """Every backend that is installed, probed one after the other."""
    verdicts = []
    for name in kinds(_PACKAGE):
        backend, verdict = await _probed(name, store, None)
        if backend is not None:
            await backend.close()
        verdicts.append(verdict)
    return verdicts


async def _probed(name: str, store: LayerStore | None, registry: Registry | None) -> tuple[Backend | None, Verdict]:
    """A backend that works and what it can do, or why it does not; a refusal is remembered, since finding it out may take seconds."""
    if name in _refused:
        return None, Verdict(name=name, reason=_refused[name])
    if ":" not in name and name not in kinds(_PACKAGE) and name in {n for names in ORDER.values() for n in names}:
        return None, Verdict(name=name, reason="is not part of this installation")
    backend: Backend = find(_PACKAGE, name, "Backend")(store, registry)
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            return backend, Verdict(name=name, capabilities=await backend.probe())
    except TimeoutError:
        reason = f"did not answer within {PROBE_SECONDS:.0f} s"
    except (GnomonError, OSError, ImportError) as error:
        reason = str(error)
    await backend.close()
    _refused[name] = reason
    return None, Verdict(name=name, reason=reason)
