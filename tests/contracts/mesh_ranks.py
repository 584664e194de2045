"""A program for four ranks: a whole step on every axis and every pair of axes gives the loss and gradients of one rank.

Routing is pinned: a table says which experts a token goes to, so that rounding cannot flip a choice; the router's weights stay
differentiable. Run by test_mesh_equality.py.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from ranks import Case, compare_all

from gnomon.data.packing import Batch
from gnomon.kernels.router.reference import weigh
from gnomon.model import router
from gnomon.model.config import ModelConfig, preset
from gnomon.model.transformer import Transformer
from gnomon.parallel.axes import ROWS, Axes
from gnomon.parallel.mesh import Mesh, join
from gnomon.train import ranks
from gnomon.train.loop import backward
from gnomon.train.muon import Muon
from gnomon.train.objective import Objective
from gnomon.train.settings import MuonConfig
from gnomon.train.units import head_rows

LENGTH, COUNT, VOCABULARY = 24, 8, 64
PINNED = torch.rand(VOCABULARY, 8, generator=torch.Generator().manual_seed(4)).topk(3, -1).indices  # [V, k]
SEEN: dict[str, torch.Tensor] = {}

PAIRS: dict[str, dict[str, Any]] = {
    "expert and data": {"expert": 2, "data": 2, "zero": 1}, "context and data": {"context": 2, "data": 2, "zero": 1},
    "expert and data, weights cut": {"expert": 2, "data": 2, "zero": 3, "gradients_on_host": True},
    "expert and context": {"expert": 2, "context": 2}, "pipeline and data": {"pipeline": 2, "data": 2, "virtual": 2, "zero": 1},
    "pipeline and expert": {"pipeline": 2, "expert": 2, "zero": 3}, "pipeline and context": {"pipeline": 2, "context": 2, "virtual": 2},
}
SINGLE: dict[str, dict[str, Any]] = {
    "data, weights cut": {"data": 4, "zero": 3}, "context, weights cut": {"context": 4, "zero": 3},
    "expert, weights cut": {"expert": 4, "zero": 3}, "pipeline and data, weights cut": {"pipeline": 2, "data": 2, "virtual": 2, "zero": 3},
    "data": {"data": 4}, "data, states shared out": {"data": 4, "zero": 1}, "expert": {"expert": 4}, "context": {"context": 4},
    "pipeline": {"pipeline": 4}, "expert and data, states everywhere": {"expert": 2, "data": 2},
    "expert and context, states shared out": {"expert": 2, "context": 2, "zero": 1},
}


def pinned(scores: torch.Tensor, bias: torch.Tensor, choice: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In place of the router's choice: the table's."""
    ids = PINNED[SEEN["tokens"]]
    return ids, weigh(scores, ids, choice), (scores + bias).detach().amax(-1)


def small() -> ModelConfig:
    """Four layers with both mixers, experts in all but the first."""
    made = preset("tiny", ("num_hidden_layers=4", f"vocab_size={VOCABULARY}", "hidden_size=32", "intermediate_size=48",
                           "tie_word_embeddings=false", "attn_res_block_size=1", 'layer_pattern=["kda","mla"]'))
    return replace(made, moe=replace(made.moe, num_experts=8, num_experts_per_token=3, moe_intermediate_size=32,
                                     routed_expert_hidden_size=32))


def built(dtype: torch.dtype) -> Transformer:
    """The same weights wherever it is called; depth reads are no plain averages."""
    model = Transformer(small()).initialise(5).to(dtype)
    random = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "res_proj" in name and parameter.requires_grad:
            parameter.data.copy_(torch.randn(parameter.shape, generator=random))
    return model


def batch(rows: range) -> Batch:
    """Rows of the step: two documents each, the loss where a mask says."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (COUNT, LENGTH + 1), generator=random)
    mask = torch.rand(COUNT, LENGTH, generator=random) < 0.8
    own, bounds = slice(rows.start, rows.stop), [0]
    for row in rows:
        bounds += [bounds[-1] + 5 + 2 * row, bounds[-1] + LENGTH]
    return Batch(tokens=tokens[own, :-1], targets=tokens[own, 1:], loss_mask=mask[own], token_mask=torch.ones_like(mask[own]),
                 cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


class Remembering:
    """How a model lies over ranks, that also says which tokens the forward pass is about to see."""

    def __init__(self, spread: ranks.Spread):
        self.spread = spread

    def __getattr__(self, name: str) -> Any:
        return getattr(self.spread, name)

    def own(self, piece: Batch) -> Batch:
        """This rank's part of a micro-batch."""
        mine = self.spread.own(piece)
        SEEN["tokens"] = mine.tokens.flatten()
        return mine


def step(mesh: Mesh, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor], ranks.Spread]:
    """One rank's part of a step: the loss of all ranks, the gradients that this rank ends up with, and how the model lay."""
    model = built(dtype)
    spread = ranks.spread(model, mesh)
    held = spread.parameters(model)
    parts: Any = SimpleNamespace(spread=Remembering(spread), mesh=mesh, objective=Objective(model),
                                 optimizer=Muon(held, MuonConfig(), head_rows(model.config), spread.owners))
    each = COUNT // mesh.size(*ROWS)
    own = batch(range(mesh.index(*ROWS) * each, (mesh.index(*ROWS) + 1) * each))
    losses, count = backward(parts, own.split(min(each, max(2, mesh.axes.stages))))
    total = torch.stack(losses).double().sum()
    mesh.sum(total)
    return total.item() / count, {name: p.grad for name, p in held if p.grad is not None}, spread


@cache
def alone(dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    """The step of one rank."""
    return step(Mesh(), dtype)[:2]


def part_of(spread: ranks.Spread, name: str, whole: torch.Tensor) -> torch.Tensor:
    """Of a whole gradient, what this rank has."""
    if name in spread.cut:
        whole = whole.chunk(spread.mesh.size("expert"))[spread.mesh.index("expert")]
    if spread.weights is not None and name in spread.weights.cuts:
        own = spread.weights.cuts[name]
        whole = whole[own.start : own.start + len(own.local)]
    for shards in spread.shards:
        if name in shards.mine:
            whole = whole[shards.mine[name].start : shards.mine[name].stop]
    return whole


def apart(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Relative differences: the largest of a parameter, and that of all gradients as one vector."""
    pairs = [(found[name].double(), wanted[name].double()) for name in found]
    each = [float((a - b).norm() / b.norm()) for a, b in pairs if b.norm() > 1e-9]
    square = sum(float((a - b).square().sum()) for a, b in pairs), sum(float(b.square().sum()) for _, b in pairs)
    return max(each, default=0.0), (square[0] / max(square[1], 1e-30)) ** 0.5


def compare(axes: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The step on a mesh and on one rank, both against one rank in fp64."""
    with join("cpu", Axes(**axes)) as mesh:
        loss, found, spread = step(mesh, dtype)
    exact_loss, exact = alone(torch.float64)
    one_loss, one = alone(dtype)
    exact, one = ({name: part_of(spread, name, gradients[name]) for name in found} for gradients in (exact, one))
    return {"names": sorted(found), "all": sorted(alone(dtype)[1]), "loss": abs(loss - exact_loss) / exact_loss,
            "one's loss": abs(one_loss - exact_loss) / exact_loss, "gradients": apart(found, exact), "one's gradients": apart(one, exact),
            "gradients against one": apart(found, one)}


def every_mesh(ranks_: int) -> Iterator[Case]:
    """Pairs in fp64, which is the equality; with `all` single axes too, and fp32, whose sums depend on their order."""
    router.kernels.route = pinned  # type: ignore[attr-defined]
    for name, axes in ({**PAIRS, **SINGLE} if "all" in sys.argv else PAIRS).items():
        for dtype in (torch.float64, torch.float32) if "all" in sys.argv else (torch.float64,):
            yield f"{name}, {dtype}", partial(compare, axes, dtype)


if __name__ == "__main__":
    compare_all(every_mesh)
