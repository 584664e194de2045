"""Batches: what a row holds, what is learnt, shares of a mixture, long documents, and clear errors."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gnomon.data.mixture import Item, Mixture, ShuffledDocuments, State
from gnomon.data.packing import Batch, PackedBatches, one_pass
from gnomon.data.shards import Pieces, Shards
from gnomon.errors import CheckpointError, ConfigError, DataError


def make_shards(folder: Path, lengths: list[int], split: str = "train") -> Shards:
    """Shards whose document i of n tokens is i·1000 + 0 … n-1, written in the format on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = [np.arange(length, dtype="<u4") + 1000 * index for index, length in enumerate(lengths)]
    (folder / "shard-00000.tokens").write_bytes(b"".join(document.tobytes() for document in documents))
    np.save(folder / "shard-00000.documents.npy", np.array([(length, length, 0) for length in lengths], dtype=np.int64))
    meta = {"format": 1, "shards": 1, "dtype": "<u4", "vocab_size": 10**6, "tokenizer": "t", "fingerprint": f"f{lengths}"}
    (folder / "meta.json").write_text(json.dumps(meta))
    return Shards.open(folder, split)


class Counting:
    """A resumable generator: item n has `size` tokens n, n+1, … and learns every second one."""

    def __init__(self, size: int = 5, whole: bool = False, start: int = 0) -> None:
        self.number, self.size, self.whole = start, size, whole

    def next_item(self) -> Item:
        tokens = np.arange(self.number, self.number + self.size)
        self.number += self.size
        return Item(tokens=tokens, loss_mask=tokens % 2 == 0, whole=self.whole)

    def state(self) -> State:
        return {"number": self.number}

    def restore(self, state: State) -> None:
        self.number = state["number"]


def segments(batch: Batch) -> list[list[int]]:
    flat, bounds = batch.tokens.flatten().tolist(), batch.cu_seqlens.tolist()
    return [flat[start:stop] for start, stop in zip(bounds, bounds[1:])]


def same(a: Batch, b: Batch) -> bool:
    names = ("tokens", "targets", "loss_mask", "token_mask", "cu_seqlens")
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


def test_rows_by_hand() -> None:
    """Items 0…4, 5…9, …: four positions each; rows of six. A row goes on in the next batch with its own document."""
    batches = PackedBatches(Mixture([(Counting(), 1.0)]), batch_size=2, context=6)
    batch = batches.next()
    assert batch.tokens.tolist() == [[0, 1, 2, 3, 5, 6], [10, 11, 12, 13, 15, 16]]
    assert batch.targets.tolist() == [[1, 2, 3, 4, 6, 7], [11, 12, 13, 14, 16, 17]]
    assert batch.cu_seqlens.tolist() == [0, 4, 6, 10, 12]
    assert batches.next().tokens.tolist() == [[7, 8, 20, 21, 22, 23], [17, 18, 25, 26, 27, 28]]
    assert batch.loss_mask.tolist() == (batch.targets % 2 == 0).tolist()
    assert batch.token_mask.all()
    assert batch.positions().tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 1]]
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.cu_seqlens.dtype == torch.int32


def test_a_document_longer_than_the_context_becomes_consecutive_pieces(tmp_path: Path) -> None:
    batches = PackedBatches(Mixture([(make_shards(tmp_path, [21]), 1.0)]), batch_size=1, context=8)
    rows = [batches.next() for _ in range(3)]
    assert [row.tokens[0].tolist() for row in rows[:2]] == [list(range(8)), list(range(8, 16))]
    assert rows[0].targets[0].tolist() == list(range(1, 9))  # the target crosses the cut
    assert rows[0].cu_seqlens.tolist() == rows[1].cu_seqlens.tolist() == [0, 8]
    assert rows[2].tokens[0].tolist() == [16, 17, 18, 19, 0, 1, 2, 3]  # the last token is only a target
    assert rows[2].cu_seqlens.tolist() == [0, 4, 8]


def test_whole_items_are_not_cut_when_they_fit() -> None:
    batches = PackedBatches(Mixture([(Counting(whole=True), 1.0)]), batch_size=2, context=6, pad_id=99)
    batch = batches.next()
    assert batch.tokens.tolist() == [[0, 1, 2, 3, 99, 99], [10, 11, 12, 13, 99, 99]]
    assert batch.token_mask.tolist() == [[True] * 4 + [False] * 2] * 2
    assert not batch.loss_mask[:, 4:].any()
    assert batch.cu_seqlens.tolist() == [0, 4, 6, 10, 12]
    assert batches.num_tokens == 8
    longer = PackedBatches(Mixture([(Counting(size=10, whole=True), 1.0)]), batch_size=1, context=6)
    assert [longer.next().tokens[0].tolist() for _ in range(2)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 10, 11, 12]]


def test_fewer_rows_take_over_what_idle_lanes_left() -> None:
    """Three lanes hold items 0…8, 9…17, 18…26 half used; with one row they are finished in turn before a new item is drawn."""
    batches = PackedBatches(Mixture([(Counting(size=9), 1.0)]), batch_size=3, context=4)
    batches.next()
    batches.set_stage(batch_size=1, context=6)
    rows = [batches.next().tokens[0].tolist() for _ in range(3)]
    assert rows == [[4, 5, 6, 7, 13, 14], [15, 16, 22, 23, 24, 25], [27, 28, 29, 30, 31, 32]]


def test_micro_batches_are_the_rows() -> None:
    batch = PackedBatches(Mixture([(Counting(), 1.0)]), batch_size=6, context=7).next()
    parts = batch.split(3)
    assert torch.equal(torch.cat([part.tokens for part in parts]), batch.tokens)
    assert [piece for part in parts for piece in segments(part)] == segments(batch)
    assert all(part.cu_seqlens[0] == 0 and part.cu_seqlens[-1] == 14 for part in parts)
    assert same(batch.to("cpu"), batch)
    with pytest.raises(ConfigError, match="6 rows per rank cannot be cut into 4"):
        batch.split(4)


def test_shares_follow_the_weights_in_tokens() -> None:
    sources = [Counting(size=3), Counting(size=50, start=10**6), Counting(size=11, start=2 * 10**6)]
    mixture = Mixture([(sources[0], 0.5), (sources[1], 0.3), (sources[2], 0.2)])
    counts = np.zeros(3)
    for step in range(1, 4001):
        item = mixture.next_item()
        counts[int(item.tokens[0] // 10**6)] += item.tokens.size
        if step > 1000:
            assert counts / counts.sum() == pytest.approx([0.5, 0.3, 0.2], abs=0.01)
    # New weights hold from now on; they do not make up for the past.
    mixture.configure(weights=(0.1, 0.1, 0.8))
    served = np.zeros(3)
    for _ in range(1000):
        item = mixture.next_item()
        served[int(item.tokens[0] // 10**6)] += item.tokens.size
    assert served / served.sum() == pytest.approx([0.1, 0.1, 0.8], abs=0.01)
    mixture.configure(weights=(0.0, 1.0, 0.0))
    assert all(mixture.next_item().tokens[0] >= 10**6 for _ in range(50))


def test_every_document_once_per_epoch_in_a_new_order(tmp_path: Path) -> None:
    source = ShuffledDocuments(make_shards(tmp_path, [3] * 200), seed=5)
    epochs = [[int(source.next_item().tokens[0]) // 1000 for _ in range(200)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(200)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, list(range(200))]}) == 4
    other = ShuffledDocuments(make_shards(tmp_path, [3] * 200), seed=6)
    assert [int(other.next_item().tokens[0]) // 1000 for _ in range(200)] != epochs[0]


def test_pieces_are_shuffled_one_by_one_and_lose_no_target(tmp_path: Path) -> None:
    lengths = [2, 6, 7, 8, 40, 13]
    shards = make_shards(tmp_path, lengths)
    pieces = Pieces(shards, 6)
    assert len(pieces) == 1 + 1 + 1 + 2 + 7 + 2 and pieces.lengths.max() == 7 and pieces.lengths.min() == 2
    source = ShuffledDocuments(pieces, seed=3)
    items = [source.next_item().tokens.tolist() for _ in range(len(pieces))]
    pairs = sorted(pair for item in items for pair in zip(item, item[1:], strict=False))
    assert pairs == sorted((1000 * i + n, 1000 * i + n + 1) for i, length in enumerate(lengths) for n in range(length - 1))
    places = [index for index, item in enumerate(items) if item[0] // 1000 == 4]
    assert places != list(range(places[0], places[0] + 7))
    assert source.state()["fingerprint"] != ShuffledDocuments(shards, seed=3).state()["fingerprint"]


def test_the_order_never_changes_between_versions(tmp_path: Path) -> None:
    """The order of a seed is part of what a checkpoint means: golden values of raw Philox output."""
    source = ShuffledDocuments(make_shards(tmp_path, [3] * 8), seed=1)
    assert [int(source.next_item().tokens[0]) // 1000 for _ in range(16)] == [3, 5, 2, 7, 0, 6, 1, 4, 4, 0, 5, 6, 2, 7, 3, 1]


def visits(source: ShuffledDocuments, count: int) -> np.ndarray:
    return np.bincount([int(source.next_item().tokens[0]) // 1000 for _ in range(count)], minlength=len(source._shards))


def test_long_documents_come_more_often(tmp_path: Path) -> None:
    lengths = [10] * 60 + [40] * 30 + [90] * 8 + [900] * 2
    shards = make_shards(tmp_path, lengths)
    source = ShuffledDocuments(shards, seed=1, long_exponent=0.5)
    entries = len(source._order)
    seen = np.zeros(100)
    for epoch in range(20):
        assert source.state()["epoch"] == max(0, epoch - 1) or epoch == 0
        seen += visits(source, len(source._order) if epoch == 0 else _epoch_entries(source))
    per_epoch = seen / 20
    assert per_epoch[:60] == pytest.approx(np.ones(60))  # nobody is lost
    assert per_epoch[60:90].mean() == pytest.approx(2.0, rel=0.05)
    assert per_epoch[90:98].mean() == pytest.approx(3.0, rel=0.05)
    assert per_epoch[98:].mean() == pytest.approx(8.0)  # the cap, below √90
    assert entries > 100


def _epoch_entries(source: ShuffledDocuments) -> int:
    """Entries of the next epoch: peek with a copy of the position."""
    peek = ShuffledDocuments(source._shards, source._seed)
    state = source.state()
    peek.restore(state | {"epoch": state["epoch"] + 1, "cursor": 0})
    return len(peek._order)


def test_changing_the_exponent_in_an_epoch_loses_and_repeats_no_first_visit(tmp_path: Path) -> None:
    shards = make_shards(tmp_path, [10] * 50 + [20] * 50)
    source = ShuffledDocuments(shards, seed=3)
    before = [int(source.next_item().tokens[0]) // 1000 for _ in range(40)]
    source.set_long_exponent(1.0)
    after = []
    while source.state()["epoch"] == 0 and source.state()["cursor"] < len(source._order):
        after.append(int(source.next_item().tokens[0]) // 1000)
    assert set(before) | set(after) == set(range(100))
    short = [index for index in before + after if index < 50]
    assert sorted(short) == list(range(50))
    assert len(after) > 60


def test_one_pass_shows_each_position_once(tmp_path: Path) -> None:
    lengths = [5, 30, 2, 17, 9]
    shards = make_shards(tmp_path, lengths)
    for whole in (False, True):
        batches = list(one_pass(shards, 2, 10, pad_id=7, whole=whole))
        real = torch.cat([batch.tokens[batch.token_mask] for batch in batches])
        targets = torch.cat([batch.targets[batch.loss_mask] for batch in batches])
        expected = [1000 * index + place for index, length in enumerate(lengths) for place in range(length - 1)]
        assert real.tolist() == expected
        assert targets.tolist() == [token + 1 for token in expected]
    starts = [piece[0] for batch in batches for piece in segments(batch) if piece[0] != 7]
    assert starts == [0, 1000, 1006, 1016, 1026, 2000, 3000, 3006, 4000]  # only what is longer than a row of 10 was cut


def test_a_position_taken_between_two_changes_of_stage_is_exact() -> None:
    """Weights that change and change back without a batch in between still leave their mark on the shares."""

    def build() -> PackedBatches:
        return PackedBatches(Mixture([(Counting(size=7), 0.5), (Counting(size=30, start=10**6), 0.5)]), 2, 10)

    first = build()
    first.next()
    first.set_stage(weights=(0.9, 0.1))
    first.set_stage(weights=(0.5, 0.5))
    second = build()
    second.restore(json.loads(json.dumps(first.state())))
    assert all(same(first.next(), second.next()) for _ in range(20))


def test_positions_of_other_data_are_refused(tmp_path: Path) -> None:
    a, b = make_shards(tmp_path / "a", [9] * 9), make_shards(tmp_path / "b", [8] * 9)
    state = PackedBatches(Mixture([(a, 1.0)], seed=1), 2, 4).state()
    with pytest.raises(CheckpointError, match="belongs to other data: fingerprint"):
        PackedBatches(Mixture([(b, 1.0)], seed=1), 2, 4).restore(state)
    with pytest.raises(CheckpointError, match="belongs to other data: seed"):
        PackedBatches(Mixture([(a, 1.0)], seed=2), 2, 4).restore(state)
    with pytest.raises(CheckpointError, match="a mixture of 1 sources, this one has 2"):
        PackedBatches(Mixture([(a, 1.0), (b, 1.0)], seed=1), 2, 4).restore(state)


def test_arguments_that_do_not_fit(tmp_path: Path) -> None:
    shards = make_shards(tmp_path, [9] * 9)
    mixture = Mixture([(shards, 1.0)])
    with pytest.raises(ConfigError, match="batch_size = 6 rows cannot be shared by 4 ranks"):
        PackedBatches(mixture, 6, 8, rank=0, world=4)
    with pytest.raises(ConfigError, match="context = 1"):
        PackedBatches(mixture, 6, 1)
    with pytest.raises(ConfigError, match="seed = -1"):
        Mixture([(shards, 1.0)], seed=-1)
    with pytest.raises(ConfigError, match="at least one source"):
        Mixture([])
    for weights in ((0.0,), (-1.0,), (float("nan"),)):
        with pytest.raises(ConfigError, match="weights"):
            Mixture([(shards, weights[0])])
    with pytest.raises(ConfigError, match="expected 1 non-negative"):
        mixture.configure(weights=(1.0, 1.0))
    with pytest.raises(ConfigError, match="long_exponent"):
        mixture.configure(long_exponent=-1.0)
    with pytest.raises(DataError, match=r"held_out split of .* is empty"):
        Mixture([(Shards.open(tmp_path, "held_out"), 1.0)])


def test_a_generator_that_ends_is_named() -> None:
    class Finite(Counting):
        def next_item(self) -> Item:
            if self.number >= 10:
                raise StopIteration
            return super().next_item()

    batches = PackedBatches(Mixture([(Finite(), 1.0)]), 1, 6)
    batches.next()
    with pytest.raises(DataError, match="source 0 of the mixture has come to its end"):
        batches.next()


def test_a_generator_that_gives_nonsense_is_named() -> None:
    class Broken(Counting):
        def __init__(self, item: Item) -> None:
            super().__init__()
            self.item = item

        def next_item(self) -> Item:
            return self.item

    for item, match in (
        (Item(tokens=np.zeros(3)), "type float64"),
        (Item(tokens=np.zeros((2, 2), int)), "shape"),
        (Item(tokens=np.zeros(1, int)), "shape .1,. .*at least two"),
        (Item(tokens=np.zeros(3, int), loss_mask=np.ones(2, bool)), "loss mask bool"),
        (Item(tokens=np.zeros(3, int), loss_mask=np.ones(3)), "loss mask float64"),
    ):
        with pytest.raises(DataError, match=f"source 1 of the mixture gave .*{match}"):
            Mixture([(Counting(), 0.0), (Broken(item), 1.0)]).next_item()
