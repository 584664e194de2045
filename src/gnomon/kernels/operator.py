"""How an operator picks its implementation: the first candidate that does not refuse, else the reference.

An operator is a mathematical function `NAME` in `gnomon/kernels/FOLDER/reference.py`. A candidate is a module beside it
with the same function and `refuse_NAME(*args) -> str | None`, which returns the reason why it cannot take these inputs.
`GNOMON_KERNELS=reference` forces the meaning. `choices` tells what would run and why, which is what `gnomon kernels` prints.
"""

import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from gnomon.errors import ConfigError

FORCE = "GNOMON_KERNELS"


class Operator:
    """One operator: `Operator("kda", "chunk", cpu=("cpu",), cuda=("fla",), any=("fused",))`.

    `cpu` and `cuda` name candidate modules for tensors on that device; `any` names candidates for every device, tried after them.
    Calling it runs the first candidate that does not refuse. Numerics never depend on flags of a public signature.
    """

    def __init__(self, folder: str, name: str, *, cpu: tuple[str, ...] = (), cuda: tuple[str, ...] = (), any: tuple[str, ...] = ()):
        self.folder, self.name = folder, name
        self.candidates = {"cpu": cpu + any, "cuda": cuda + any}
        self._other_devices = any
        self._loaded: dict[str, tuple[Callable[..., Any], Callable[..., str | None]]] = {}
        self._reference: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        return f"Operator({self.folder}.{self.name})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on the device of the first tensor among the arguments.

        Autocast is off inside: an operator states its own rounding points, and the caller chooses the types that go in.
        """
        import torch

        device = _device(args, kwargs)
        run = self._choose(device, args, kwargs)
        if not torch.is_autocast_enabled(device):
            return run(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return run(*args, **kwargs)

    def _choose(self, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        if not reference_forced():
            for module in self.candidates.get(device, self._other_devices):
                run, refuse = self._candidate(module)
                if refuse(*args, **kwargs) is None:
                    return run
        return self.reference

    @property
    def reference(self) -> Callable[..., Any]:
        """The meaning: plain, differentiable PyTorch."""
        if self._reference is None:
            self._reference = getattr(self.module("reference"), self.name)
        return self._reference

    def module(self, candidate: str) -> ModuleType:
        """The module of a candidate, imported on first use."""
        return importlib.import_module(f"gnomon.kernels.{self.folder}.{candidate}")

    def choices(self, *args: Any, **kwargs: Any) -> list[tuple[str, str | None]]:
        """Each candidate for these inputs in order with its refusal (`None`: it would run), the reference last."""
        forced = f"{FORCE}=reference is set" if reference_forced() else None
        rows: list[tuple[str, str | None]] = []
        for module in self.candidates.get(_device(args, kwargs), self._other_devices):
            rows.append((module, forced or self._candidate(module)[1](*args, **kwargs)))
        return [*rows, ("reference", None)]

    def _candidate(self, name: str) -> tuple[Callable[..., Any], Callable[..., str | None]]:
        if name not in self._loaded:
            module = self.module(name)
            self._loaded[name] = getattr(module, self.name), getattr(module, f"refuse_{self.name}")
        return self._loaded[name]


def all_operators() -> Iterator[Operator]:
    """Every operator of every folder, found by looking: a new folder appears here on the day it is written."""
    import gnomon.kernels

    for info in pkgutil.iter_modules(gnomon.kernels.__path__):
        if info.ispkg:
            package = importlib.import_module(f"gnomon.kernels.{info.name}")
            yield from (value for value in vars(package).values() if isinstance(value, Operator))


def needs_grad(*tensors: Any) -> bool:
    """Whether autograd would need a backward through these inputs (non-tensors are ignored)."""
    import torch

    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)


def reference_forced() -> bool:
    """Whether the environment asks for the references everywhere."""
    value = os.environ.get(FORCE, "auto")
    if value not in ("auto", "reference"):
        raise ConfigError(f"environment variable {FORCE}={value!r}: expected 'auto' or 'reference'")
    return value == "reference"


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        device = getattr(value, "device", None)
        if device is not None:
            return str(device.type)
    return "cpu"
