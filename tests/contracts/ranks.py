"""What programs under torchrun share: the ranks join, each works out every case, the first prints what all of them found."""

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

Case = tuple[str, Callable[[], dict[str, Any]]]


def compare_all(cases: Callable[[int], Iterable[Case]]) -> None:
    """Run `cases(number of ranks)` one after the other; JSON: name → a list with each rank's findings."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, found = dist.get_world_size(), {}
    for name, case in cases(ranks):
        every: list[dict[str, Any]] = [{} for _ in range(ranks)]
        dist.all_gather_object(every, case())
        found[name] = every
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
