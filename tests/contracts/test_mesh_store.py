"""Ranks that torchrun starts again do not meet the addresses of those that are gone."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from gnomon.parallel import mesh


def test_keys_of_an_earlier_start_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(kept, 0, 2)]))
    stores = []
    for restart in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        monkeypatch.setattr(mesh, "_joined", iter([0]))  # a new process counts from the start
        stores.append(mesh._store(timedelta(seconds=60)))
    stores[0].set("address", "gone")
    assert stores[0].check(["address"]) and not stores[1].check(["address"])
