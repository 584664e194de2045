"""Per-Head Muon for matrices, AdamW for the rest, one learning rate for both (report §2.5; Moonlight 2502.16982).

For each unit (one head's map, one expert's matrix, one projection), with its momentum M:

    M <- mu M + G,   O = NewtonSchulz(G + mu M),   W <- W - lr (0.2 sqrt(max(A, B)) O + lambda W)

An orthogonal [A, B] matrix has RMS 1/sqrt(max(A, B)), so the factor gives every update the RMS 0.2 that AdamW shows. Units of
equal shape are orthogonalised in batches, across parameters. Read next: `units.py`, `qk_clip.py`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gnomon.errors import CheckpointError
from gnomon.kernels.newton_schulz import newton_schulz
from gnomon.train.settings import MuonConfig
from gnomon.train.units import TABLES, is_matrix, split

UPDATE_RMS = 0.2  # Moonlight eq. 4: what AdamW's updates measure
BATCH_ELEMENTS = {"cpu": 1 << 20}  # elements orthogonalised together: on a CPU what its cache holds
MOST_SHARDED_ELEMENTS = 1 << 24  # of matrices that are whole on one rank at a time, where ranks have rows of them
MOST_BATCH_ELEMENTS = 1 << 24  # on other devices; bounds the working memory of a step


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive units of one part: views of their weights, and their directions."""

    weight: Tensor
    direction: Tensor


class Sharded(Protocol):
    """Parameters of which this rank has some rows: their shapes when whole, and how each matrix becomes whole on its owner."""

    shapes: dict[str, tuple[int, ...]]

    def apply(self, rows: Mapping[str, Tensor], work: Callable[[list[Tensor]], list[Tensor]], most: int) -> dict[str, Tensor]:
        """What `work` makes of the matrices, as this rank's rows of it."""


class Muon:
    """Muon and AdamW over named parameters; state is by name, so it survives a change of order or of sharding.

    `head_rows` is `units.head_rows(config)`. `sharded` tells of parameters of which only some rows are here; the others are whole.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], config: MuonConfig,
                 head_rows: Mapping[str, tuple[int, ...]], sharded: Sequence[Sharded] = ()) -> None:
        named = dict(parameters)
        self.config, self.sharded = config, sharded
        self.shapes = {name: shape for part in sharded for name, shape in part.shapes.items()}
        self.head_rows = dict(head_rows) if config.per_head else {}
        self.matrices = {name: p for name, p in named.items() if config.matrices and self._is_matrix(name, p)}
        self.others = {name: p for name, p in named.items() if name not in self.matrices}
        self.momentum = {name: torch.zeros_like(p) for name, p in self.matrices.items()}
        self.first = {name: torch.zeros_like(p) for name, p in self.others.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.others.items()}
        self.steps = 0

    def _is_matrix(self, name: str, tensor: Tensor) -> bool:
        return is_matrix(name, self.shapes.get(name, tensor.shape))

    def parameters(self) -> list[Tensor]:
        """Every parameter, matrices first."""
        return [*self.matrices.values(), *self.others.values()]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters():
            parameter.grad = None

    def clip_gradient(self, total: Callable[[list[str], Tensor], Tensor] | None = None) -> Tensor:
        """Scale all gradients so that their global norm is at most `clip_gradient`; returns the norm before.

        `total` makes the global norm out of those of the named gradients [P], where other ranks have others.
        """
        named = {name: p.grad for name, p in (*self.matrices.items(), *self.others.items()) if p.grad is not None}
        gradients = list(named.values())
        norms = torch.stack(torch._foreach_norm(gradients)).float() if gradients else torch.zeros(0)
        norm = torch.linalg.vector_norm(norms) if total is None else total(list(named), norms)
        if self.config.clip_gradient is not None and gradients:
            torch._foreach_mul_(gradients, (self.config.clip_gradient / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update from the gradients that are present, which are consumed; a parameter without one stays as it is."""
        self.steps += 1
        self._step_matrices(learning_rate)
        tables = [name for name, p in self.others.items() if name.endswith(TABLES) or self._is_matrix(name, p)]
        self._step_others(tables, learning_rate, self.config.weight_decay)
        self._step_others([name for name in self.others if name not in tables], learning_rate * self.config.vector_rate, 0.0)

    def _step_matrices(self, learning_rate: float) -> None:
        names = [name for name, p in self.matrices.items() if p.grad is not None]
        if not names:
            return
        directions = [_gradient(self.matrices[name]) for name in names]
        momenta = [self.momentum[name] for name in names]
        torch._foreach_mul_(momenta, self.config.momentum)
        torch._foreach_add_(momenta, directions)
        torch._foreach_add_(directions, momenta, alpha=self.config.momentum)  # Nesterov, in the gradient's own memory
        torch._foreach_mul_([self.matrices[name] for name in names], 1.0 - learning_rate * self.config.weight_decay)
        here = dict(zip(names, directions, strict=True))
        for part in self.sharded:
            rows = {name: here.pop(name) for name in part.shapes if name in here}
            for name, update in part.apply(rows, self._updates, MOST_SHARDED_ELEMENTS).items():
                self.matrices[name].sub_(update, alpha=learning_rate * UPDATE_RMS)
        for blocks in self._batches(list(here), list(here.values())):
            stack = torch.cat([block.direction for block in blocks]) if len(blocks) > 1 else blocks[0].direction
            update, scale = self._orthogonal(stack), learning_rate * UPDATE_RMS * max(stack.shape[-2:]) ** 0.5
            for block, piece in zip(blocks, update.split([len(block.direction) for block in blocks]), strict=True):
                block.weight.sub_(piece, alpha=scale)

    def _updates(self, matrices: list[Tensor]) -> list[Tensor]:
        """Of each matrix, which may have different shapes, the orthogonal one times the root of its longer side."""
        found: dict[int, Tensor] = {}
        shapes = [tuple(matrix.shape) for matrix in matrices]
        for shape in dict.fromkeys(shapes):
            places = [place for place, other in enumerate(shapes) if other == shape]
            size = max(1, _batch_elements(matrices[places[0]]) // max(1, shape[0] * shape[1]))
            for first in range(0, len(places), size):
                some = places[first : first + size]
                found |= zip(some, self._orthogonal(torch.stack([matrices[place] for place in some])) * max(shape) ** 0.5, strict=True)
        return [found[place] for place in range(len(matrices))]

    def _batches(self, names: list[str], directions: list[Tensor]) -> Iterator[list[_Block]]:
        """Blocks of equal shape that are orthogonalised together."""
        by_shape: dict[tuple[int, ...], list[_Block]] = defaultdict(list)
        for name, direction in zip(names, directions, strict=True):
            rows = self.head_rows.get(name)
            pairs = zip(split(name, self.matrices[name], rows), split(name, direction, rows), strict=True)
            for weight, stack in pairs:
                for block in self._limited(weight, stack):
                    by_shape[tuple(block.direction.shape[-2:])].append(block)
        for shape, blocks in by_shape.items():
            batch: list[_Block] = []
            for block in blocks:
                if batch and sum(len(b.direction) for b in [*batch, block]) * shape[0] * shape[1] > _batch_elements(block.weight):
                    yield batch
                    batch = []
                batch.append(block)
            yield batch

    def _limited(self, weight: Tensor, stack: Tensor) -> Iterator[_Block]:
        """The units of one part, in blocks of bounded size."""
        size = max(1, _batch_elements(weight) // (stack.shape[-2] * stack.shape[-1]))
        for first in range(0, stack.shape[0], size):
            yield _Block(weight[first : first + size], stack[first : first + size])

    def _orthogonal(self, stack: Tensor) -> Tensor:
        dtype = torch.bfloat16 if stack.is_cuda else None  # bf16 products on an accelerator; on a CPU fp32 is as fast
        return newton_schulz(stack, self.config.newton_schulz_steps, compute_dtype=dtype)

    def _step_others(self, names: list[str], learning_rate: float, weight_decay: float) -> None:
        names = [name for name in names if self.others[name].grad is not None]
        if not names:
            return
        beta1, beta2 = self.config.adam_betas
        weights, gradients = [self.others[n] for n in names], [_gradient(self.others[n]) for n in names]
        first, second = [self.first[n] for n in names], [self.second[n] for n in names]
        torch._foreach_lerp_(first, gradients, 1.0 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1.0 - beta2)
        root = torch._foreach_sqrt(second)
        torch._foreach_div_(root, (1.0 - beta2**self.steps) ** 0.5)
        torch._foreach_add_(root, self.config.adam_epsilon)
        torch._foreach_mul_(weights, 1.0 - learning_rate * weight_decay)
        torch._foreach_addcdiv_(weights, first, root, -learning_rate / (1.0 - beta1**self.steps))

    def state_dict(self) -> dict[str, Tensor]:
        """All state as flat named tensors, which is what a checkpoint writes."""
        groups = {"momentum": self.momentum, "first": self.first, "second": self.second}
        tensors = {f"{group}.{name}": t for group, tensors in groups.items() for name, t in tensors.items()}
        return {**tensors, "steps": torch.tensor(self.steps)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over the state of `state_dict`; raises `CheckpointError` when names or shapes differ, before changing anything."""
        own = self.state_dict()
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        misshapen = [f"{n} {tuple(state[n].shape)} instead of {tuple(own[n].shape)}" for n in own.keys() & state.keys()
                     if state[n].shape != own[n].shape]
        if missing or unknown or misshapen:
            raise CheckpointError(f"optimiser state does not fit the model: missing {missing[:5]}, unknown {unknown[:5]}, "
                                  f"misshapen {sorted(misshapen)[:5]}")
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.steps = int(state["steps"])


def _batch_elements(tensor: Tensor) -> int:
    return BATCH_ELEMENTS.get(tensor.device.type, MOST_BATCH_ELEMENTS)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None  # narrowed for the type checker: names are those with a gradient
    return parameter.grad
