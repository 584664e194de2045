"""How a run lies over the ranks of its mesh: what each rank holds, which tokens it gets, and how the parts become whole again.

Experts are cut over expert ranks; all else is whole on every rank. Context ranks get a stretch of each micro-batch. Gradients are added
over the ranks that hold the same piece, for all of them or for the one that keeps the optimiser's state of it. Checkpoints hold whole
tensors, so that a run may go on under another mesh.
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
from gnomon.model.multimodal import Multimodal
from gnomon.model.runs import model_tensors
from gnomon.model.transformer import Transformer
from gnomon.parallel import context, expert
from gnomon.parallel.axes import COPIES, TOKENS
from gnomon.parallel.gradients import Gradients, added, owned
from gnomon.parallel.mesh import Mesh
from gnomon.parallel.shard import Shards
from gnomon.train.eye import parameters
from gnomon.train.units import PATCHES, TABLES, head_rows, is_matrix


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A model that was spread over a mesh. `cut` names the parameters of which a rank has its share of the experts only."""

    mesh: Mesh
    cut: frozenset[str] = frozenset()
    context: context.Context | None = None
    exchange: Gradients | None = None
    shards: tuple[Shards, ...] = ()

    def parameters(self, model: Transformer, eye: Multimodal | None = None) -> list[tuple[str, Tensor]]:
        """What this rank's optimiser works on: all that it holds, or views of the pieces that it owns."""
        named = parameters(model, eye)
        owned_here = {name: view for shards in self.shards for name, view in shards.held.items()}
        elsewhere = {name for shards in self.shards for name in shards.parameters}
        return [(name, owned_here.get(name, p)) for name, p in named if name in owned_here or name not in elsewhere]

    def publish(self) -> None:
        """After the optimiser's step: everyone gets the weights that their owners changed."""
        for shards in self.shards:
            shards.publish()

    def own(self, piece: Batch) -> Batch:
        """This rank's stretch of a micro-batch whose rows it shares with other ranks."""
        return piece if self.context is None else self.context.stretch(piece)

    def norm(self, names: Sequence[str], norms: Tensor) -> Tensor:
        """The norm of all gradients from those of this rank's pieces, each counted once however many ranks hold it."""
        copies = [1 if self.shards else self.mesh.size(*self._holders(name)) for name in names]
        total = (norms.double() ** 2 / torch.tensor(copies, dtype=torch.float64, device=norms.device)).sum()
        total = total.to(self.mesh.device)
        self.mesh.sum(total)
        return total.sqrt().to(norms.dtype)

    def whole(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same with whole tensors, on the first rank; what others return is of no use. Names may have a prefix, as optimisers have."""
        return {name: self._joined(tensor) if self._parameter(name) in self.cut else tensor for name, tensor in named.items()}

    def share(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of whole tensors, what this rank holds."""
        ranks, index = self.mesh.size("expert"), self.mesh.index("expert")
        return {name: t.chunk(ranks)[index] if self._parameter(name) in self.cut else t for name, t in named.items()}

    def whole_states(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """An optimiser's whole state on the first rank, from those of all ranks; all must call."""
        elsewhere = {name for shards in self.shards for name in shards.parameters}
        joined = {name: t for name, t in own.items() if name.partition(".")[2] not in elsewhere}
        for shards in self.shards:
            for name, parameter in shards.parameters.items():
                for kind in ("momentum",) if is_matrix(name, parameter) else ("first", "second"):
                    whole = shards.joined(name, own.get(f"{kind}.{name}"))
                    if whole is not None:
                        joined[f"{kind}.{name}"] = whole
        return self.whole(joined)

    def share_states(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of an optimiser's whole state, that of what this rank's optimiser works on."""
        mine = self.share(named)
        for shards in self.shards:
            for name in shards.parameters:
                piece = shards.mine.get(name)
                for kind in ("momentum", "first", "second"):
                    whole = mine.pop(f"{kind}.{name}", None)
                    if whole is not None and piece is not None:
                        mine[f"{kind}.{name}"] = whole[piece.start : piece.stop]
        return mine

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


def spread(model: Transformer, mesh: Mesh, eye: Multimodal | None = None) -> Spread:
    """Lay a model over a mesh, in place, before its optimiser is made; tower and projector are whole on every rank.

    Raises `ConfigError` for experts that expert ranks cannot share, and for mixers that cannot be cut along the tokens.
    """
    cut: set[str] = set()
    if mesh.size("expert") > 1:
        for name, module in model.named_modules():
            if isinstance(module, RoutedExperts):
                expert.spread(module, mesh.group("expert"))
                cut |= {f"{name}.{weight}" for weight, _ in module.named_parameters()}
    shared = context.spread(model, mesh.group("context")) if mesh.size("context") > 1 else None
    held = {name: (p, COPIES if name in cut else TOKENS) for name, p in parameters(model, eye)}
    several = {name: (p, axes) for name, (p, axes) in held.items() if mesh.size(*axes) > 1}
    if not mesh.axes.zero:
        exchange = added([(p, mesh.group(*axes)) for p, axes in several.values()])
        return Spread(mesh=mesh, cut=frozenset(cut), context=shared, exchange=exchange if several else None)
    rows, shards = head_rows(model.config), []
    for axes in {axes: None for _, axes in several.values()}:
        pairs = [(name, p) for name, (p, own) in several.items() if own == axes]
        shards.append(Shards(pairs, {name: _granule(name, p, rows.get(name)) for name, p in pairs}, mesh.group(*axes)))
    exchange = owned(shards, list(several))
    return Spread(mesh=mesh, cut=frozenset(cut), context=shared, shards=tuple(shards), exchange=exchange if several else None)


def _granule(name: str, parameter: Tensor, heads: tuple[int, ...] | None) -> int:
    """Rows of a parameter that the optimiser takes together: a head, an expert, a whole matrix; one row of a table."""
    if is_matrix(name, parameter):
        alone = parameter.ndim > 2 and not name.endswith(PATCHES)
        return sum(heads) if heads else 1 if alone else parameter.shape[0]
    return 1 if name.endswith(TABLES) else parameter.shape[0]
