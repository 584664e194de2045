"""Which implementation of each operator would run here, and why the others would not: what `gnomon kernels` prints.

Each operator folder holds `sample.py` with `samples(device) -> {operator name: arguments}`: small typical inputs. The same inputs let the
contract test compare every implementation with the reference on the day it is written.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Column, Table

from gnomon.kernels import native
from gnomon.kernels.operator import Operator, all_operators

NO_CUDA = "no CUDA device here"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One implementation of one operator on one device; `inference` and `training` hold a refusal, or `None` if it takes the inputs."""

    operator: str
    device: str
    implementation: str
    inference: str | None
    training: str | None


def devices() -> tuple[str, ...]:
    """The devices of this machine that operators know."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def sample(operator: Operator, device: str, *, training: bool = False) -> tuple[Any, ...]:
    """Typical arguments of an operator; with `training`, floating-point tensors ask for gradients."""
    arguments: tuple[Any, ...] = operator.module("sample").samples(device)[operator.name]
    return _asking(arguments) if training else arguments


def _asking(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_asking(item) for item in value)
    asks = isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64, torch.bfloat16)
    return value.clone().requires_grad_() if asks else value


def survey() -> Iterator[Choice]:
    """Every implementation of every operator, in the order in which they are asked; those for a device that is absent say so."""
    for device in devices():
        for operator in tuple(all_operators()):
            with torch.no_grad():
                inference = operator.choices(*sample(operator, device))
            with torch.enable_grad():
                training = operator.choices(*sample(operator, device, training=True))
            for (name, refusal), (_, training_refusal) in zip(inference, training, strict=True):
                yield Choice(operator=_name(operator), device=device, implementation=name, inference=refusal, training=training_refusal)
    if "cuda" not in devices():
        for operator in tuple(all_operators()):
            for name in operator.candidates["cuda"]:
                if name not in operator.candidates["cpu"]:
                    yield Choice(operator=_name(operator), device="cuda", implementation=name, inference=NO_CUDA, training=NO_CUDA)


def _name(operator: Operator) -> str:
    return f"{operator.folder}.{operator.name}"


def table() -> Table:
    """The survey as a table: per operator and implementation "used", "next" in line, or the number of the reason why it refuses."""
    why = native.unavailable()
    title = f"C++ operators: {native.instruction_set() if why is None else 'absent: ' + why}"
    result = Table(*(Column(name, no_wrap=True) for name in ("operator", "device", "implementation", "inference", "training")), title=title)
    taken: set[tuple[str, str, str]] = set()
    reasons: dict[str, int] = {}
    before = None
    for choice in survey():
        cells = []
        for mode, refusal in (("inference", choice.inference), ("training", choice.training)):
            place = (choice.operator, choice.device, mode)
            if refusal is None:
                cells.append("next" if place in taken else "used")
                taken.add(place)
            else:
                cells.append(f"no ({reasons.setdefault(refusal, len(reasons) + 1)})")
        name = choice.operator if (choice.operator, choice.device) != before else ""
        before = (choice.operator, choice.device)
        result.add_row(name, choice.device, choice.implementation, *cells)
    result.caption = "\n".join(f"({number}) {reason}" for reason, number in reasons.items())
    result.caption_justify = "left"
    return result
