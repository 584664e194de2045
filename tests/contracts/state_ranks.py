"""A program for four ranks: steps of the optimiser where weights are cut, and checkpoints that go from mesh to mesh without a whole model.

Run by test_states.py.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from mesh_ranks import MuonConfig, Remembering, batch, built, head_rows, pinned
from ranks import Case, compare_all

from gnomon.model import router
from gnomon.parallel.axes import ROWS, Axes
from gnomon.parallel.mesh import Mesh, join
from gnomon.train import checkpoint, loop, ranks
from gnomon.train.muon import Muon
from gnomon.train.objective import Objective

MESHES: dict[str, dict[str, Any]] = {
    "data, weights cut": {"data": 4, "zero": 3}, "expert and data, weights cut": {"expert": 2, "data": 2, "zero": 3},
    "pipeline and context": {"pipeline": 2, "context": 2, "virtual": 2, "zero": 1}, "one after all": {"expert": 4},
}


class Parts(SimpleNamespace):
    """What a run works with, as far as steps and checkpoints look at it."""


def parts_of(mesh: Mesh, run: Path) -> Parts:
    """A run that starts."""
    model = built(torch.float64)
    spread = ranks.spread(model, mesh)
    optimizer = Muon(spread.parameters(model), MuonConfig(clip_gradient=1e-3), head_rows(model.config), spread.owners)
    batches = SimpleNamespace(state=dict, restore=lambda state: None)
    recipe = SimpleNamespace(run=run, seed=0, checkpoint=SimpleNamespace(keep=9))
    return Parts(mesh=mesh, model=model, spread=Remembering(spread), objective=Objective(model), optimizer=optimizer, eye=None,
                 batches=batches, recipe=recipe)


def step(parts: Any) -> None:
    """Forward, backward, clipping, Muon."""
    mesh = parts.mesh
    each = 8 // mesh.size(*ROWS)
    own = batch(range(mesh.index(*ROWS) * each, (mesh.index(*ROWS) + 1) * each))
    loop.backward(parts, own.split(min(each, max(2, mesh.axes.stages))))
    parts.optimizer.clip_gradient(None if mesh.world == 1 else parts.spread.norm)
    parts.optimizer.step(1e-2)
    parts.spread.publish()


def travel(run: Path) -> dict[str, Any]:
    """A step on each mesh, each of which takes up the checkpoint of the one before; what ranks held and sent where weights are cut."""
    report: dict[str, Any] = {"share": {}, "sent": {}}
    for number, axes in enumerate(MESHES.values()):
        with join("cpu", Axes(**axes)) as mesh:
            parts: Any = parts_of(mesh, run)
            loop.restore(parts)
            step(parts)
            loop.save(parts, number + 1, SimpleNamespace(sync=lambda: 0) if mesh.is_main else None)
            if axes.get("zero") == 3:
                model = loop._rows(parts)["model"]
                layers = [rows for name, rows in model.items() if name.startswith("model.layers.") and "bias" not in name]
                whole = sum(rows.local.nbytes * rows.count / max(1, len(rows.local)) for rows in layers)
                report["share"][number] = sum(rows.local.nbytes for rows in layers) / whole
                report["sent"][number] = sum(owner.sent for owner in parts.spread.owners)
            again: Any = parts_of(mesh, run)
            mesh.wait()
            loop.restore(again)
            for group, some in loop._rows(parts).items():  # the same mesh again: every bit
                other = loop._rows(again)[group]
                assert group == "run" or all(torch.equal(rows.local, other[name].local) for name, rows in some.items()), group
    return report


def compare() -> dict[str, Any]:
    """Weights and states after all steps, against one rank's."""
    router.kernels.route = pinned  # type: ignore[attr-defined]
    where: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where)
    run = Path(where[0])
    report = travel(run)
    saved = checkpoint.load(checkpoint.latest(run))
    alone: Any = parts_of(Mesh(), run / "nowhere")
    for _ in MESHES:
        step(alone)
    wanted = {"model": checkpoint.model_tensors(alone.model), "optimizer": alone.optimizer.state_dict()}
    worst = {}
    for group, tensors in wanted.items():
        assert tensors.keys() == saved.tensors[group].keys(), json.dumps(sorted(tensors.keys() ^ saved.tensors[group].keys()))
        pairs = [(saved.tensors[group][name].double(), tensor.detach().double()) for name, tensor in tensors.items()]
        worst[group] = max(float((a - b).norm() / b.norm()) for a, b in pairs if b.norm() > 1e-12)
    matrices = sum(tensor.nbytes for name, tensor in wanted["optimizer"].items() if name.startswith("momentum.model.layers."))
    return {**worst, **report, "matrices": matrices, "files": len(list((saved.path / "rows").glob("*.distcp")))}


def every_case(ranks_: int) -> Iterator[Case]:
    """One journey."""
    yield "journey", compare


if __name__ == "__main__":
    assert sys.argv[1] == "4"
    compare_all(every_case)
