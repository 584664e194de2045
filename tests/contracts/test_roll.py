"""The roll names who did not sign off, and only where ranks could not talk."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from gnomon.errors import TrainingError
from gnomon.parallel.roll import Roll, is_lost, named


def test_who_has_not_signed_off_is_missing() -> None:
    store = dist.HashStore()
    first, second, third = (Roll(store, rank, 4) for rank in range(3))
    for roll in (first, second, third):
        roll.mark(7)
    second.mark(8)
    assert first.missing(grace=0.05)[1].startswith("rank 2 (process ")  # 0 and nobody else signed off
    third.missing(grace=0.05)
    one, other = first.missing(grace=0.05)
    assert one.startswith("rank 1 (process ") and one.endswith("last seen at step 8)")
    assert other == "rank 3 (never seen, before its first step)"


def test_ranks_that_share_the_store_wait_as_long_as_before() -> None:
    """A rank that comes late to the first exchange, while another prepares the text, is no lost rank."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1800))
    Roll(dist.PrefixStore("roll", store), 0, 2).mark(1)
    assert store.timeout == timedelta(seconds=1800)


def test_only_lost_connections_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lost, own = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), RuntimeError("shapes do not fit")
    assert is_lost(lost) and is_lost(dist.DistBackendError("NCCL")) and not is_lost(own)
    roll = Roll(dist.HashStore(), 0, 2)
    monkeypatch.setattr(Roll, "missing", lambda self: ["rank 1 (process 5 on a, last seen at step 3)"])
    with pytest.raises(TrainingError, match=r"rank 1 \(process 5 on a, last seen at step 3\) died or hangs.*mesh\.patience"), named(roll):
        raise lost
    with pytest.raises(RuntimeError, match="shapes do not fit"), named(roll):
        raise own
    monkeypatch.setattr(Roll, "missing", lambda self: [])
    with pytest.raises(RuntimeError, match="Connection closed"), named(roll):
        raise lost
