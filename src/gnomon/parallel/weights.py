"""Layers whose weights, gradients and optimiser states are cut over the ranks that would hold copies: FSDP2, ZeRO's third stage.

torch's `fully_shard` gathers a layer's weights before it runs, forgets them afterwards, and gives each rank its rows of the summed
gradients. What this module adds: experts that expert ranks share already are cut over their own copies, sums instead of means, and
gradient rows that add up on the host where the recipe says so. Embedding, head and what else is no layer stays whole; `shard.py` shares
its states out. Read next: `owners.py`, which makes matrices whole again for the optimiser.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, share_comm_ctx
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A parameter of `whole` shape of which this rank holds the rows from `start`: `local`, a view that an optimiser works on."""

    parameter: nn.Parameter
    whole: tuple[int, ...]
    start: int
    local: Tensor
    group: dist.ProcessGroup | None


@dataclass(slots=True, kw_only=True)
class Weights:
    """The parameters that are cut, by name. `on_host`: their gradients add up in host memory while micro-batches run."""

    cuts: dict[str, Cut]
    on_host: bool = False
    _sums: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def deliver(self) -> None:
        """After the last backward pass: each rank's rows of the summed gradients become those of what its optimiser works on."""
        for name, cut in self.cuts.items():
            if self.on_host:
                summed = self._sums.pop(name, None)
            else:
                summed = None if cut.parameter.grad is None else _local(cut.parameter.grad)
            cut.parameter.grad = None
            cut.local.grad = None if summed is None else summed.to(cut.local.device)

    def listen(self) -> None:
        """Take each gradient to the host as soon as it is there."""
        for name, cut in self.cuts.items():
            if not cut.parameter.requires_grad:
                continue
            cut.parameter.register_post_accumulate_grad_hook(self._taking(name))

    def _taking(self, name: str) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            assert parameter.grad is not None  # the hook runs after it was set
            rows = _local(parameter.grad).to("cpu")
            self._sums[name] = self._sums[name].add_(rows) if name in self._sums else rows
            parameter.grad = None
        return take


def cut_layers(layers: Mapping[str, nn.Module], experts: Mapping[str, nn.Module], shared: dist.ProcessGroup | None,
               copies: dist.ProcessGroup | None, *, device: torch.device, alone: bool, on_host: bool) -> Weights:
    """Cut layers over the ranks of `shared`, their routed experts over those of `copies`, in place.

    `alone`: expert ranks share the experts and nobody has a copy, so they are not cut. Names are those of the modules in the model.
    """
    # a layer passes blocks of the depth stream on as they came; nobody writes into them, which is what the warning is about
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    cut: list[FSDPModule] = []
    named: dict[str, dist.ProcessGroup | None] = {}
    meshes: dict[int, DeviceMesh] = {}
    held = [p for module in experts.values() for p in module.parameters()] if alone else []
    for place, modules, group in (("experts", {} if alone else experts, copies), ("layers", layers, shared)):
        for name, module in modules.items():
            own = [n for n, p in module.named_parameters() if not isinstance(p, DTensor) and not any(p is other for other in held)]
            ignored = set(held) if place == "layers" else None
            made = fully_shard(module, mesh=meshes.setdefault(id(group), _mesh(group, device)), ignored_params=ignored)
            made.set_gradient_divide_factor(1.0)
            made.set_force_sum_reduction_for_comms(True)
            made.set_reduce_scatter_unused_params(True)
            cut.append(made)
            named |= {f"{name}.{n}": group for n in own}
    share_comm_ctx(cut)
    found = {}
    for name, module in layers.items():
        for inner, p in module.named_parameters():
            if isinstance(p, DTensor):
                group = named[f"{name}.{inner}"]
                found[f"{name}.{inner}"] = Cut(parameter=p, whole=tuple(p.shape), group=group, local=_local(p.detach()),
                                               start=start_of(p.shape[0], dist.get_rank(group), dist.get_world_size(group)))
    weights = Weights(cuts=found, on_host=on_host)
    if on_host:
        weights.listen()
    return weights


def start_of(rows: int, rank: int, ranks: int) -> int:
    """The first row of a rank's shard: shards are as equal as `torch.chunk` makes them, so that the last ones may be short or empty."""
    return min(rank * -(-rows // ranks), rows)


def rows_here(tensor: Tensor) -> tuple[Tensor, int]:
    """The rows of a tensor that are on this rank, and the number of the first; all of a whole one."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh = tensor.device_mesh
    return tensor.to_local(), start_of(tensor.shape[0], mesh.get_local_rank(), mesh.size())


def _mesh(group: dist.ProcessGroup | None, device: torch.device) -> DeviceMesh:
    assert group is not None  # gradients always have a group of their own
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=("copies",))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
