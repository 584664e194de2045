"""What becomes of the tensors that a forward pass saves for the backward pass: kept, recomputed, quantised, offloaded (report §5.2.2).

A recipe annotates modules by name; the model knows nothing of it. While an annotated module runs, autograd's saved-tensor hooks take what
it saves: *quantise* keeps blocks of 128 values as FP8 with a scale each, *offload* moves values to the host, or from the host to a file.
*Recompute* keeps the module's inputs and runs it again. *Keep* is the default, and undoes an annotation of a module around it. Parameters,
integers and small tensors are always kept as they are. Read next: `loop.py`.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import wraps
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from gnomon.errors import ConfigError
from gnomon.extend import suggestion
from gnomon.model.router import recomputing
from gnomon.train.settings import ActivationRule

BLOCK = 128  # values with a scale of their own: K2's tile of 1 x 128
SMALL = 4096  # elements below which moving a tensor costs more than it frees


@dataclass(slots=True)
class Ledger:
    """Bytes of saved tensors that policies took, and what they were turned into, since the start."""

    taken: int = 0
    left: int = 0


@dataclass(frozen=True, slots=True)
class Blocks:
    """A tensor as FP8 (E4M3) in blocks of 128 with an fp32 scale each: relative error at most 1/16 of a block's normal values."""

    values: Tensor
    scales: Tensor
    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Blocks:
        """Round to nearest; the last block is filled up with zeros."""
        flat = tensor.detach().flatten().float()
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        scales = (padded.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max).clamp(min=torch.finfo(torch.float32).tiny)
        return cls((padded / scales).to(torch.float8_e4m3fn), scales, tensor.shape, tensor.dtype)

    @property
    def nbytes(self) -> int:
        """What is held."""
        return self.values.nbytes + self.scales.nbytes

    def tensor(self) -> Tensor:
        """The values back, in the type that they had."""
        flat = (self.values.float() * self.scales).flatten()[: self.shape.numel()]
        return flat.view(self.shape).to(self.dtype)


class Spill:
    """A file for tensors of a machine without a GPU; gone whenever none is in it."""

    def __init__(self) -> None:
        self.file: IO[bytes] | None = None
        self.live = self.end = 0

    def put(self, tensor: Tensor) -> int:
        """Write the bytes of a tensor; returns where they are."""
        self.file = self.file or tempfile.TemporaryFile()  # noqa: SIM115
        place, self.end, self.live = self.end, self.end + tensor.nbytes, self.live + 1
        self.file.seek(place)
        self.file.write(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return place

    def get(self, place: int, size: int) -> Tensor:
        """The bytes at a place."""
        assert self.file is not None  # what asks is in it
        self.file.seek(place)
        return torch.from_numpy(np.frombuffer(bytearray(self.file.read(size)), dtype=np.uint8))

    def drop(self) -> None:
        """A tensor is no longer needed."""
        self.live -= 1
        if self.live == 0 and self.file is not None:
            self.file.close()
            self.file, self.end = None, 0


class Away:
    """A tensor that is elsewhere until it is needed: in host memory, or in a file where it was in host memory already."""

    def __init__(self, tensor: Tensor, spill: Spill):
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.nbytes = 0 if tensor.device.type == "cpu" else tensor.nbytes
        self.host: Tensor | None = None
        if tensor.device.type == "cpu":
            self.spill, self.size, self.place = spill, tensor.nbytes, spill.put(tensor)
            weakref.finalize(self, spill.drop)
        else:
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.host.copy_(tensor.detach(), non_blocking=True)

    def tensor(self) -> Tensor:
        """The values back where they were."""
        if self.host is not None:
            return self.host.to(self.device, non_blocking=True)
        return self.spill.get(self.place, self.size).view(self.dtype).view(self.shape)


@dataclass(slots=True)
class _Hooks:
    """Pack and unpack for one policy; a tensor that is saved several times is packed once."""

    pack_one: Callable[[Tensor], Any]
    ledger: Ledger
    packed: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Any]]] = field(default_factory=dict)

    def pack(self, tensor: Tensor) -> Any:
        """What is held in place of a tensor."""
        if isinstance(tensor, nn.Parameter) or not tensor.is_floating_point() or tensor.numel() < SMALL or _of_parameter(tensor):
            return tensor
        before = self.packed.get(id(tensor))
        if before is not None and before[0]() is tensor and (held := before[1]()) is not None:
            return held
        made = _Held(self.pack_one(tensor))
        self.packed[id(tensor)] = weakref.ref(tensor), weakref.ref(made)
        self.ledger.taken += tensor.nbytes
        self.ledger.left += made.what.nbytes
        return made

    def unpack(self, held: Any) -> Tensor:
        """The tensor, or what comes nearest to it."""
        return held.what.tensor() if isinstance(held, _Held) else held


class _Held:
    """A packed tensor, shared by all that saved it."""

    def __init__(self, what: Any):
        self.what = what


def _of_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a view of a parameter: its memory stays whatever is saved of it."""
    return isinstance(tensor._base, nn.Parameter)


def attach(model: nn.Module, rules: Sequence[ActivationRule]) -> Ledger:
    """Annotate a model's modules; where several rules name one, the last counts. Returns the account of what is packed from then on.

    Raises `ConfigError` for a rule that names no module.
    """
    ledger, spill, names = Ledger(), Spill(), dict(model.named_modules())
    chosen: dict[str, str] = {}
    for rule in rules:
        found = [name for name in names if fnmatchcase(name, rule.modules)]
        if not found:
            hint = suggestion(rule.modules, [name for name in names if name])
            raise ConfigError(f"'activations.modules' is '{rule.modules}', which names no part of the model{hint}")
        chosen |= dict.fromkeys(found, rule.policy)
    packs: dict[str, Callable[[Tensor], Any]] = {"quantise": Blocks.of, "offload": lambda tensor: Away(tensor, spill)}
    hooks = {policy: _Hooks(pack, ledger) for policy, pack in packs.items()}
    for name, policy in chosen.items():
        _annotate(names[name], policy, hooks.get(policy))
    return ledger


def _annotate(module: nn.Module, policy: str, hooks: _Hooks | None) -> None:
    """Have a module run under a policy."""
    forward = module.forward

    @wraps(forward)
    def under(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **named)
        if policy == "recompute":
            return checkpoint(forward, *arguments, use_reentrant=False, context_fn=_count_once, **named)
        pack, unpack = (_same, _same) if hooks is None else (hooks.pack, hooks.unpack)
        with saved_tensors_hooks(pack, unpack):
            return forward(*arguments, **named)

    module.forward = under


def _same(tensor: Any) -> Any:
    return tensor


def _count_once() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), recomputing()
