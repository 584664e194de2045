"""What programs for several ranks share: one process imports everything and forks, the ranks join, the first prints what all found.

A program is started as `python PROGRAM RANKS [RANKS …] [WORD …]`; it prints one line of JSON for each number of ranks. To fork is to
import once, which is most of what a small program on four ranks costs.
"""

import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

Case = tuple[str, Callable[[], dict[str, Any]]]
PATIENCE = timedelta(seconds=240)


def start(work: Callable[[], None], ranks: int) -> None:
    """Run `work` on so many ranks, whose environment is that of torchrun; one that fails ends all, and this process."""
    gc.collect()
    gc.freeze()  # what was imported is no rank's garbage
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe() for _ in range(ranks)]
    children = [fork.Process(target=_rank, args=(work, rank, ranks, pipes[rank][0]), daemon=True) for rank in range(ranks)]
    for child in children:
        child.start()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # after the fork: it has threads
    for _, end in pipes:
        end.send(store.port)
    left = set(children)
    while left:
        wait([child.sentinel for child in left])
        left = {child for child in left if child.is_alive()}
        failed = [child.exitcode for child in children if child.exitcode]
        if failed:
            for child in left:
                child.kill()
            sys.exit(f"a rank ended with {failed[0]}")


def _rank(work: Callable[[], None], rank: int, ranks: int, port: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="localhost", MASTER_PORT=str(port.recv()),
                      TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    torch.set_num_threads(1)
    work()
    sys.stdout.flush()


def compare_all(cases: Callable[[int], Iterable[Case]]) -> None:
    """Run `cases(number of ranks)` one after the other; JSON: name → a list with each rank's findings."""

    def work() -> None:
        dist.init_process_group("gloo", timeout=PATIENCE)
        ranks, found = dist.get_world_size(), {}
        for name, case in cases(ranks):
            every: list[dict[str, Any]] = [{} for _ in range(ranks)]
            dist.all_gather_object(every, case())
            found[name] = every
        if dist.get_rank() == 0:
            print(json.dumps(found))
        dist.destroy_process_group()

    for ranks in filter(str.isdigit, sys.argv[1:]):
        start(work, int(ranks))
