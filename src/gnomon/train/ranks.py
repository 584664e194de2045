"""How a run lies over the ranks of its mesh: what each rank holds, which tokens it gets, and how the parts become whole again.

Experts are cut over expert ranks, layers over pipeline ranks. Context ranks get a stretch of each micro-batch. Gradients are added
over the ranks that hold the same piece, for all of them or for the one that keeps the optimiser's state of it. Checkpoints hold whole
tensors, so that a run may go on under another mesh.
Read next: `gnomon/parallel/axes.py`, `loop.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gnomon.data.packing import Batch
from gnomon.model.experts import RoutedExperts
from gnomon.model.multimodal import Multimodal
from gnomon.model.runs import model_tensors
from gnomon.model.transformer import Transformer
from gnomon.parallel import context, expert, pipeline
from gnomon.parallel.axes import COPIES, TOKENS
from gnomon.parallel.gradients import Gradients, added, owned
from gnomon.parallel.mesh import Mesh
from gnomon.parallel.shard import Shards
from gnomon.train.eye import parameters
from gnomon.train.units import PATCHES, TABLES, head_rows, is_matrix


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A model that was spread over a mesh. `cut` names the parameters of which a rank has its share of the experts only; `held` all that
    it has of the model, where a pipeline leaves the rest to others."""

    mesh: Mesh
    cut: frozenset[str] = frozenset()
    context: context.Context | None = None
    exchange: Gradients | None = None
    shards: tuple[Shards, ...] = ()
    pipeline: pipeline.Pipeline | None = None
    held: frozenset[str] | None = None

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

    def of_all_layers(self, loads: Tensor) -> Tensor:
        """Loads [L, E] of the layers that this rank holds, as those of all layers with experts, in their order."""
        if self.pipeline is None:
            return loads
        config = self.pipeline.model.config
        held = {layer for stage in self.pipeline.stages for layer in self.pipeline.cuts.layers[stage]}
        rows = [layer for layer in range(config.num_hidden_layers) if config.is_moe_layer(layer)]
        experts = 0 if config.moe is None else config.moe.num_experts
        every = torch.zeros(len(rows), experts, dtype=torch.int64, device=self.mesh.device)
        own = [place for place, layer in enumerate(rows) if layer in held]
        if own:
            every[own] = loads.to(every.device)
        self.mesh.sum(every, "pipeline")
        return every

    def norm(self, names: Sequence[str], norms: Tensor) -> Tensor:
        """The norm of all gradients from those of this rank's pieces, each counted once however many ranks hold it."""
        copies = [1 if self.shards else self.mesh.size(*self._holders(name)) for name in names]
        total = (norms.double() ** 2 / torch.tensor(copies, dtype=torch.float64, device=norms.device)).sum()
        total = total.to(self.mesh.device)
        self.mesh.sum(total)
        return total.sqrt().to(norms.dtype)

    def whole(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same with whole tensors, and those of all stages, on the first rank; what others return is of no use.

        Names may have a prefix, as optimisers have.
        """
        joined = {name: self._joined(tensor) if self._parameter(name) in self.cut else tensor for name, tensor in named.items()}
        return self._of_all_stages(joined) if self.mesh.size("pipeline") > 1 and self.mesh.index(*TOKENS) == 0 else joined

    def _of_all_stages(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Each stage's tensors, sent to the first rank."""
        group = self.mesh.group("pipeline")
        if not self.mesh.is_main:
            dist.send_object_list([[(name, tuple(t.shape), t.dtype) for name, t in own.items()]], 0, group, self.mesh.device)
            for tensor in own.values():
                dist.send(tensor.detach().to(self.mesh.device).contiguous(), 0, group)
            return own
        for source in self.mesh.axes.groups(["pipeline"])[0][1:]:
            listed: list[Any] = [None]
            dist.recv_object_list(listed, source, group, self.mesh.device)
            for name, shape, dtype in listed[0]:
                own[name] = torch.empty(shape, dtype=dtype, device=self.mesh.device)
                dist.recv(own[name], source, group)
        return own

    def share(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of whole tensors, what this rank holds."""
        ranks, index = self.mesh.size("expert"), self.mesh.index("expert")
        if self.held is not None:
            named = {name: t for name, t in named.items() if name in self.held or self._parameter(name) in self.held or "." not in name}
        return {name: t.chunk(ranks)[index] if self._parameter(name) in self.cut else t for name, t in named.items()}

    def whole_states(self, own: Mapping[str, Tensor], *, matrices: bool) -> dict[str, Tensor]:
        """An optimiser's whole state on the first rank, from those of all ranks; all must call. `matrices`: whether it orthogonalises."""
        elsewhere = {name for shards in self.shards for name in shards.parameters}
        joined = {name: t for name, t in own.items() if name.partition(".")[2] not in elsewhere}
        for shards in self.shards:
            for name, parameter in shards.parameters.items():
                for kind in ("momentum",) if matrices and is_matrix(name, parameter) else ("first", "second"):
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
        if self.mesh.size("expert", "context", "pipeline") == 1:
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

    Raises `ConfigError` for experts that expert ranks cannot share, for mixers that cannot be cut along the tokens, and for a model that
    cannot be cut into the stages of a pipeline.
    """
    stages, axes = None, mesh.axes
    if mesh.size("pipeline") > 1:
        stages = pipeline.cut(model, axes.pipeline, axes.virtual, mesh.index("pipeline"), mesh.group("pipeline"), mesh.device)
    spread = _spread(model, mesh, eye)
    return spread if stages is None else replace(spread, pipeline=stages, held=frozenset(model.state_dict()))


def _spread(model: Transformer, mesh: Mesh, eye: Multimodal | None) -> Spread:
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
