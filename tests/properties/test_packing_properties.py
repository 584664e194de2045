"""For every shape: no token is lost or repeated, targets follow tokens, resuming is exact, ranks share one stream."""

import json
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.data.mixture import Item, Mixture, State
from gnomon.data.packing import Batch, PackedBatches
from gnomon.data.shards import Shards

ENOUGH = settings(max_examples=60, deadline=None)


class Samples:
    """A generator of items of varying length, each token unique, some of them not to be cut."""

    def __init__(self, lengths: list[int], start: int, whole: bool) -> None:
        self.lengths, self.whole, self.start = lengths, whole, start
        self.calls, self.token = 0, start

    def next_item(self) -> Item:
        length = self.lengths[self.calls % len(self.lengths)]
        tokens = np.arange(self.token, self.token + length, dtype=np.int32)
        self.calls, self.token = self.calls + 1, self.token + length
        return Item(tokens=tokens, loss_mask=tokens % 3 != 0, whole=self.whole)

    def state(self) -> State:
        return {"calls": self.calls, "token": self.token}

    def restore(self, state: State) -> None:
        self.calls, self.token = state["calls"], state["token"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    folder: Path = tmp_path_factory.mktemp("shards")
    lengths = np.random.default_rng(0).geometric(0.08, size=40) + 1
    tokens = np.arange(lengths.sum(), dtype="<u4")
    (folder / "shard-00000.tokens").write_bytes(tokens.tobytes())
    np.save(folder / "shard-00000.documents.npy", np.stack([lengths, lengths, np.zeros_like(lengths)], axis=1).astype(np.int64))
    meta = {"format": 1, "shards": 1, "dtype": "<u4", "vocab_size": 10**6, "tokenizer": "t", "fingerprint": "f"}
    (folder / "meta.json").write_text(json.dumps(meta))
    return Shards.open(folder)


lengths = st.lists(st.integers(2, 40), min_size=1, max_size=6)
stages = st.tuples(st.sampled_from([2, 4, 8]), st.integers(2, 33), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.2, 0.5, 1.0]))
sources = st.fixed_dictionaries({"lengths": lengths, "whole": st.booleans(), "seed": st.integers(0, 2**32)})


def build(shards: Shards, source: dict[str, Any], rank: int = 0, world: int = 1) -> PackedBatches:
    generator = Samples(source["lengths"], 10**6, source["whole"])
    return PackedBatches(Mixture([(shards, 0.6), (generator, 0.4)], source["seed"]), 8, 16, rank, world, pad_id=7)


def run(batches: PackedBatches, plan: list[tuple[int, int, float, float]], steps: int) -> list[Batch]:
    result = []
    for batch_size, context, exponent, weight in plan:
        batches.set_stage(batch_size=batch_size, context=context, long_exponent=exponent, weights=(weight, 1.0))
        result += [batches.next() for _ in range(steps)]
    return result


def equal(a: Batch, b: Batch) -> bool:
    tensors = all(torch.equal(getattr(a, field.name), getattr(b, field.name)) for field in fields(Batch) if field.name != "images")
    return tensors and a.images == b.images


@given(lengths, st.booleans(), st.integers(1, 5), st.integers(2, 50))
@ENOUGH
def test_no_position_is_lost_or_repeated(lengths: list[int], whole: bool, rows: int, context: int) -> None:
    batches = PackedBatches(Mixture([(Samples(lengths, 100, whole), 1.0)]), rows, context, pad_id=7)
    taken = [batches.next() for _ in range(6)]
    lanes = [[token for batch in taken for token in batch.tokens[row][batch.token_mask[row]].tolist()] for row in range(rows)]
    documents, again = {}, Samples(lengths, 100, whole)
    while len(documents) <= sum(map(len, lanes)):
        item = again.next_item().tokens[:-1].tolist()
        documents[item[0]] = item
    for lane in lanes:  # whole documents one after the other, the last perhaps unfinished, each in one lane only
        while lane:
            document = documents.pop(lane[0])
            assert lane[: len(document)] == document[: len(lane)]
            lane = lane[len(document) :]
    assert batches.num_tokens == sum(int(batch.token_mask.sum()) for batch in taken)
    for batch in taken:
        real = batch.token_mask
        assert torch.equal(batch.targets[real], batch.tokens[real] + 1)
        assert torch.equal(batch.loss_mask[real], batch.targets[real] % 3 != 0)
        assert not batch.loss_mask[~real].any()
        assert (batch.tokens[~real] == 7).all()
        check_segments(batch, whole)


def check_segments(batch: Batch, whole: bool) -> None:
    bounds = batch.cu_seqlens.tolist()
    rows, context = batch.tokens.shape
    assert bounds[0] == 0
    assert bounds[-1] == rows * context
    assert all(start < stop for start, stop in zip(bounds, bounds[1:]))
    assert set(range(0, rows * context, context)) <= set(bounds)  # each row starts a segment
    flat, mask = batch.tokens.flatten(), batch.token_mask.flatten()
    for start, stop in zip(bounds, bounds[1:]):
        piece = flat[start:stop]
        assert mask[start] == mask[stop - 1]
        if mask[start]:
            assert torch.equal(piece, piece[0] + torch.arange(stop - start))
        else:
            assert whole
    places = [place for start, stop in zip(bounds, bounds[1:]) for place in range(stop - start)]
    assert batch.positions().flatten().tolist() == places


@given(sources, st.lists(stages, min_size=1, max_size=3), st.integers(0, 3), st.data())
@ENOUGH
def test_resuming_anywhere_gives_the_same_stream(
    shards: Shards, source: dict[str, Any], plan: list, steps: int, data: st.DataObject
) -> None:
    """Stop after any number of batches, in any stage or between two stages, go through JSON, go on: bit for bit the same."""
    stop = data.draw(st.integers(0, len(plan) - 1))
    inside = data.draw(st.integers(0, steps))
    straight = build(shards, source)
    expected = run(straight, plan, steps)
    first = build(shards, source)
    run(first, plan[:stop], steps)
    batch_size, context, exponent, weight = plan[stop]
    stage = {"batch_size": batch_size, "context": context, "long_exponent": exponent, "weights": (weight, 1.0)}
    if data.draw(st.booleans()):
        first.set_stage(**stage)
        for _ in range(inside):
            first.next()
    else:
        inside = 0
    text = json.dumps(first.state())
    assert len(text) < 2000
    second = build(shards, source)
    run(second, [(4, 9, 1.0, 0.3)], data.draw(st.integers(0, 2)))  # a position may be restored over any other
    second.restore(json.loads(text))
    second.set_stage(**stage)
    result = [second.next() for _ in range(steps - inside)] + run(second, plan[stop + 1 :], steps)
    wanted = expected[stop * steps + inside :]
    assert len(result) == len(wanted)
    assert all(map(equal, result, wanted))
    assert json.dumps(second.state()) == json.dumps(straight.state())


@given(sources, st.sampled_from([2, 4, 8]), st.integers(2, 33))
@ENOUGH
def test_ranks_share_the_rows_of_one_stream(shards: Shards, source: dict[str, Any], world: int, context: int) -> None:
    whole = build(shards, source)
    ranks = [build(shards, source, rank, world) for rank in range(world)]
    for one in (whole, *ranks):
        one.set_stage(context=context)
    for _ in range(3):
        batch = whole.next()
        parts = [rank.next() for rank in ranks]
        for rank, part in enumerate(parts):
            assert torch.equal(part.tokens, batch.tokens[rank::world])
            assert torch.equal(part.targets, batch.targets[rank::world])
            assert torch.equal(part.loss_mask, batch.loss_mask[rank::world])
            assert torch.equal(part.positions(), batch.positions()[rank::world])
        assert len({json.dumps(one.state()) for one in (whole, *ranks)}) == 1


@given(sources, st.integers(0, 4))
@ENOUGH
def test_the_number_of_ranks_may_change(shards: Shards, source: dict[str, Any], steps: int) -> None:
    one = build(shards, source)
    list(islice(one, steps))
    two = build(shards, source, rank=1, world=2)
    two.restore(json.loads(json.dumps(one.state())))
    assert torch.equal(two.next().tokens, one.next().tokens[1::2])
