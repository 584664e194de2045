"""Checkpoints of several ranks: each writes the rows that it holds and reads those that it needs, under whatever mesh they were written.

A module of its own, since torch's distributed checkpoints are slow to import and whoever only reads a run has no use for them.
Read next: `checkpoint.py`, `gnomon/parallel/rows.py`.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open

from gnomon.errors import CheckpointError
from gnomon.model.runs import ROWS, TENSORS, load_rows, read_state, stored_rows
from gnomon.parallel.mesh import Mesh
from gnomon.parallel.rows import Rows
from gnomon.train import checkpoint


def save(run: Path, step: int, state: Mapping[str, Any], held: Mapping[str, Mapping[str, Rows]], keep: int, mesh: Mesh) -> None:
    """`checkpoint.save` by several ranks, each of which writes rows that it holds; nobody has a whole tensor that was not whole before.

    All ranks must call, and see one folder. Rows that several hold are written by one of them.
    """
    here = nullcontext(checkpoint.places(run, step)[1])
    with checkpoint.written(run, step, state, keep, dcp.CheckpointException) if mesh.is_main else here as partial:
        mesh.wait()
        named = {f"{group}/{name}": rows for group, some in held.items() for name, rows in some.items() if group != "run" or mesh.is_main}
        dcp.save(named, storage_writer=dcp.FileSystemWriter(partial / ROWS))


def fill(path: Path, held: Mapping[str, Mapping[str, Rows]]) -> dict[str, Any]:
    """Read into the rows that a rank holds, whoever wrote them under whatever mesh; returns the checkpoint's `state`.

    Raises `CheckpointError` for a damaged checkpoint, and for tensors that are missing or have another shape, before any is changed.
    """
    state = read_state(path)
    try:
        if f"model{TENSORS}" in state["files"]:
            _fill_from_whole(path, held)
        else:
            there = {name: shape for name, (shape, _) in stored_rows(path / ROWS).items()}
            named = {f"{group}/{name}": rows for group, some in held.items() for name, rows in some.items()}
            _check_fits(path, named, there)
            load_rows(named, path / ROWS)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}; remove it to use the one before") from None
    return state


def _fill_from_whole(path: Path, held: Mapping[str, Mapping[str, Rows]]) -> None:
    """From files of whole tensors, of which only these rows are read."""
    for group, some in held.items():
        with safe_open(path / f"{group}{TENSORS}", "pt") as file:
            there = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            _check_fits(path, some, there)
            for name, rows in some.items():
                stop = rows.start + len(rows.local) if rows.local.ndim else 0
                rows.local.copy_(file.get_slice(name)[rows.start : stop] if rows.local.ndim else file.get_tensor(name))


def _check_fits(path: Path, held: Mapping[str, Rows], there: Mapping[str, tuple[int, ...]]) -> None:
    missing = sorted(held.keys() - there.keys())
    misshapen = sorted(f"{name} {there[name]} instead of {tuple(rows.size())}" for name, rows in held.items()
                       if name in there and there[name] != tuple(rows.size()))
    if missing or misshapen:
        raise CheckpointError(f"{path} does not fit the model: missing {missing[:5]}, misshapen {misshapen[:5]}")
