"""How a run lies over the ranks of its mesh: what each rank holds, which tokens it gets, and how the parts become whole again.

Experts are cut over expert ranks, layers over pipeline ranks. Context ranks get a stretch of each micro-batch. Gradients are added
over the ranks that hold the same piece: for all of them, for the one that keeps the optimiser's state of it, or, where a layer's weights
are cut as well, for each rank its rows. What a rank holds of a tensor are always some rows of it, which is how checkpoints take them.
Read next: `gnomon/parallel/axes.py`, `loop.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from gnomon.data.packing import Batch
from gnomon.model.experts import RoutedExperts
from gnomon.model.multimodal import Multimodal
from gnomon.model.runs import model_tensors
from gnomon.model.transformer import Transformer
from gnomon.parallel import context, expert, pipeline
from gnomon.parallel.axes import COPIES, TOKENS
from gnomon.parallel.gradients import Gradients, added, owned
from gnomon.parallel.mesh import Mesh
from gnomon.parallel.owners import Owners
from gnomon.parallel.rows import Rows
from gnomon.parallel.shard import Shards
from gnomon.parallel.weights import Weights, cut_layers, rows_here
from gnomon.train.eye import parameters
from gnomon.train.units import PATCHES, TABLES, head_rows, is_matrix, row_spans


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A model that was spread over a mesh. `cut` names the parameters of which a rank has its share of the experts only; `weights` are
    those of layers that are cut over copies, and `owners` make their matrices whole for the optimiser."""

    mesh: Mesh
    cut: frozenset[str] = frozenset()
    context: context.Context | None = None
    exchange: Gradients | None = None
    shards: tuple[Shards, ...] = ()
    pipeline: pipeline.Pipeline | None = None
    weights: Weights | None = None
    owners: tuple[Owners, ...] = ()

    def parameters(self, model: Transformer, eye: Multimodal | None = None) -> list[tuple[str, Tensor]]:
        """What this rank's optimiser works on: all that it holds, or views of the pieces that it owns."""
        named = parameters(model, eye)
        owned_here = {name: view for shards in self.shards for name, view in shards.held.items()}
        owned_here |= {name: cut.local for name, cut in (self.weights.cuts if self.weights else {}).items()}
        elsewhere = {name for shards in self.shards for name in shards.parameters}
        return [(name, owned_here.get(name, p)) for name, p in named if name in owned_here or name not in elsewhere]

    def arm(self) -> None:
        """The backward pass that follows is the last one of the step."""
        if self.exchange is not None:
            self.exchange.arm()

    def finish(self) -> None:
        """After that pass: the summed gradients are where the optimiser looks for them."""
        if self.exchange is not None:
            self.exchange.finish()
        if self.weights is not None:
            self.weights.deliver()

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
        copies = [1 if self.mesh.axes.zero else self.mesh.size(*self._holders(name)) for name in names]
        total = (norms.double() ** 2 / torch.tensor(copies, dtype=torch.float64, device=norms.device)).sum()
        total = total.to(self.mesh.device)
        self.mesh.sum(total)
        return total.sqrt().to(norms.dtype)

    def rows(self, name: str, tensor: Tensor, *, state: bool = False) -> Rows:
        """What this rank holds of a tensor of the model, or (`state`) of what the optimiser keeps for a parameter, as rows of the whole."""
        local, start = rows_here(tensor)
        count = tensor.shape[0] if tensor.ndim else None
        cuts = self.weights.cuts if self.weights else {}
        if state and name in cuts:
            start, count = cuts[name].start, cuts[name].whole[0]
        for shards in self.shards if state else ():
            if name in shards.mine:
                start, count = shards.mine[name].start, shards.parameters[name].shape[0]
        if name in self.cut:
            assert count is not None  # experts are stacks
            start, count = start + count * self.mesh.index("expert"), count * self.mesh.size("expert")
        return Rows.of(local, start, count)

    def whole(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's tensors whole, and those of all stages, on the first rank; what others return is of no use."""
        here = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in named.items()}
        joined = {name: self._joined(tensor) if name in self.cut else tensor for name, tensor in here.items()}
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

    def whole_model(self, model: Transformer) -> Transformer | None:
        """A model that runs on the first rank alone: itself, or a copy where it is spread. Other ranks help and get none."""
        if self.mesh.size("expert", "context", "pipeline") == 1 and self.weights is None:
            return model if self.mesh.is_main else None
        tensors = self.whole(model_tensors(model))
        if not self.mesh.is_main:
            return None
        copy = Transformer(model.config).to(self.mesh.device)
        copy.load_state_dict(tensors)
        return copy

    def _holders(self, name: str) -> tuple[str, ...]:
        return COPIES if name in self.cut else TOKENS

    def _joined(self, own: Tensor) -> Tensor:
        """A piece of the experts with those of the other expert ranks, on the first of them in each stage; further copies are left out."""
        mesh = self.mesh
        if mesh.index(*COPIES) != 0:
            return own
        parts = [torch.empty_like(own) for _ in range(mesh.size("expert"))] if mesh.index("expert") == 0 else None
        dist.gather(own.contiguous(), parts, group=mesh.group("expert"), group_dst=0)
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
    return spread if stages is None else replace(spread, pipeline=stages)


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
    weights = _cut_layers(model, mesh) if mesh.axes.zero == 3 and mesh.size(*TOKENS) > 1 else None
    several = {name: pair for name, pair in several.items() if weights is None or name not in weights.cuts}
    for axes in {axes: None for _, axes in several.values()}:
        pairs = [(name, p) for name, (p, own) in several.items() if own == axes]
        shards.append(Shards(pairs, {name: _granule(name, p, rows.get(name)) for name, p in pairs}, mesh.group(*axes)))
    exchange = owned(shards, list(several))
    return Spread(mesh=mesh, cut=frozenset(cut), context=shared, shards=tuple(shards), exchange=exchange if several else None,
                  weights=weights, owners=() if weights is None else _owners(weights, rows))


def _cut_layers(model: Transformer, mesh: Mesh) -> Weights:
    """Layers cut over the ranks that would hold copies of them, experts that are shared over the ranks that would hold copies of those."""
    layers = {f"model.layers.{i}": layer for i, layer in enumerate(model.model.layers) if not isinstance(layer, pipeline.Elsewhere)}
    shared = mesh.size("expert") > 1
    experts = {f"{layer}.{name}": module for layer, part in layers.items() for name, module in part.named_modules()
               if shared and isinstance(module, RoutedExperts)}
    return cut_layers(layers, experts, mesh.group(*TOKENS), mesh.group(*COPIES), device=mesh.device, alone=mesh.size(*COPIES) == 1,
                      on_host=mesh.axes.gradients_on_host)


def _owners(weights: Weights, rows: Mapping[str, tuple[int, ...]]) -> tuple[Owners, ...]:
    """For each group of ranks the matrices that lie over it, as the optimiser divides them."""
    groups = {id(cut.group): cut.group for cut in weights.cuts.values()}
    return tuple(Owners(weights.cuts, {name: row_spans(cut.whole, rows.get(name)) if is_matrix(name, cut.whole) else ()
                                       for name, cut in weights.cuts.items() if cut.group is group}, group) for group in groups.values())


def _granule(name: str, parameter: Tensor, heads: tuple[int, ...] | None) -> int:
    """Rows of a parameter that the optimiser takes together: a head, an expert, a whole matrix; one row of a table."""
    if is_matrix(name, parameter.shape):
        alone = parameter.ndim > 2 and not name.endswith(PATCHES)
        return sum(heads) if heads else 1 if alone else parameter.shape[0]
    return 1 if name.endswith(TABLES) else parameter.shape[0]
