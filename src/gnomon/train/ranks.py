"""How a run lies over the ranks of its mesh: what each rank holds, which tokens it gets, and how the parts become whole again.

Experts are cut over expert ranks; all else is whole on every rank. Context ranks get a stretch of each micro-batch. Gradients are added
over the ranks that hold the same piece. Checkpoints hold whole tensors, so that a run may go on under another mesh.
Read next: `gnomon/parallel/axes.py`, `loop.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gnomon.data.packing import Batch
from gnomon.model.experts import RoutedExperts
from gnomon.model.runs import model_tensors
from gnomon.model.transformer import Transformer
from gnomon.parallel import context, expert
from gnomon.parallel.axes import COPIES, TOKENS
from gnomon.parallel.gradients import Gradients, gradients
from gnomon.parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A model that was spread over a mesh. `cut` names the parameters of which a rank has its share of the experts only."""

    mesh: Mesh
    cut: frozenset[str] = frozenset()
    context: context.Context | None = None
    exchange: Gradients | None = None

    def own(self, piece: Batch) -> Batch:
        """This rank's stretch of a micro-batch whose rows it shares with other ranks."""
        return piece if self.context is None else self.context.stretch(piece)

    def norm(self, names: Sequence[str], norms: Tensor) -> Tensor:
        """The norm of all gradients from those of this rank's pieces, each counted once however many ranks hold it."""
        copies = [self.mesh.size(*self._holders(name)) for name in names]
        total = (norms.double() ** 2 / torch.tensor(copies, dtype=torch.float64, device=norms.device)).sum()
        self.mesh.sum(total)
        return total.sqrt().to(norms.dtype)

    def whole(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same with whole tensors, on the first rank; what others return is of no use. Names may have a prefix, as optimisers have."""
        return {name: self._joined(tensor) if self._parameter(name) in self.cut else tensor for name, tensor in named.items()}

    def share(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of whole tensors, what this rank holds."""
        ranks, index = self.mesh.size("expert"), self.mesh.index("expert")
        return {name: t.chunk(ranks)[index] if self._parameter(name) in self.cut else t for name, t in named.items()}

    def whole_model(self, model: Transformer) -> Transformer | None:
        """A model that runs on the first rank alone: itself, or a copy where it is spread. Other ranks help and get none."""
        if self.mesh.size("expert", "context") == 1:
            return model if self.mesh.is_main else None
        tensors = self.whole(model_tensors(model))
        if not self.mesh.is_main:
            return None
        copy = Transformer(model.config).to(self.mesh.device)
        copy.load_state_dict(tensors)
        return copy

    def _holders(self, name: str) -> tuple[str, ...]:
        return COPIES if name in self.cut else TOKENS

    def _parameter(self, name: str) -> str:
        return name if name in self.cut else name.partition(".")[2]

    def _joined(self, own: Tensor) -> Tensor:
        """A piece of the experts with those of the other expert ranks; the ranks beside the first rank take part."""
        mesh = self.mesh
        if mesh.index(*COPIES) != 0:
            return own
        parts = [torch.empty_like(own) for _ in range(mesh.size("expert"))] if mesh.is_main else None
        dist.gather(own.contiguous(), parts, dst=0, group=mesh.group("expert"))
        return own if parts is None else torch.cat(parts)


def spread(model: Transformer, mesh: Mesh) -> Spread:
    """Lay a model over a mesh, in place, before its optimiser is made.

    Raises `ConfigError` for experts that expert ranks cannot share, and for mixers that cannot be cut along the tokens.
    """
    cut: set[str] = set()
    if mesh.size("expert") > 1:
        for name, module in model.named_modules():
            if isinstance(module, RoutedExperts):
                expert.spread(module, mesh.group("expert"))
                cut |= {f"{name}.{weight}" for weight, _ in module.named_parameters()}
    shared = context.spread(model, mesh.group("context")) if mesh.size("context") > 1 else None
    pairs = [(p, COPIES if name in cut else TOKENS) for name, p in model.named_parameters() if p.requires_grad]
    added = [(p, mesh.group(*axes)) for p, axes in pairs if mesh.size(*axes) > 1]
    return Spread(mesh=mesh, cut=frozenset(cut), context=shared, exchange=gradients(added) if added else None)
