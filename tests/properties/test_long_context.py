"""Long samples keep their guarantees, resume from a number, and need every piece of their evidence."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.data.images import RELEASED
from gnomon.data.long_context import LongConfig, LongContext
from gnomon.data.long_tasks import KINDS, RANGE, RANGES, draw, word
from gnomon.data.mixture import ItemSource, Mixture
from gnomon.data.packing import PackedBatches
from gnomon.data.tokenizer import Tokenizer, train_tokenizer
from gnomon.data.words import by_word
from gnomon.errors import CheckpointError, ConfigError, DataError

TEXT = "It was a quiet morning and nobody had anything to say about the weather, the harvest or the price of rope. "


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    random = np.random.default_rng(0)
    return train_tokenizer([TEXT * 20, *(" ".join(draw(kind, 5, random).evidence) for kind in KINDS for _ in range(50))], 1024)


@pytest.fixture(scope="module")
def documents(tokenizer: Tokenizer) -> list[np.ndarray]:
    """Documents of several lengths, closed as shards close them."""
    return [np.array([*tokenizer.encode(TEXT * count), tokenizer.document_end_id]) for count in (1, 3, 9, 40)]


@settings(max_examples=40)
@given(window=st.sampled_from([600, 1024, 3000, 8192]), tasks=st.integers(1, 3), index=st.integers(0, 2**40), seed=st.integers(0, 9),
       most=st.integers(4, 7))
def test_guarantees(tokenizer: Tokenizer, documents: list[np.ndarray], window: int, tasks: int, index: int, seed: int, most: int) -> None:
    config = LongConfig(window=window, tasks=1 if window < 2000 else tasks, pieces=(4, most), seed=seed, learn="answers")
    sample = LongContext(documents, tokenizer, config).sample(index)
    tokens, mask = sample.item.tokens, sample.item.loss_mask
    assert len(tokens) == window and sample.item.whole and mask is not None
    assert np.flatnonzero(tokens == tokenizer.document_end_id).tolist() == [window - 1]
    taken = np.zeros(window, int)
    for placed in sample.tasks:
        assert placed.span >= window / 2
        assert {4 * start // window for start, _ in placed.evidence} == {0, 1, 2, 3}
        for (start, length), text in zip(placed.evidence, placed.task.evidence, strict=True):
            assert tokenizer.decode(tokens[start : start + length].tolist()) == f"\n{text}\n"
            taken[start : start + length] += 1
        start, length = placed.answer
        assert tokenizer.decode(tokens[start : start + length].tolist()) == f" {placed.task.answer}\n"
        assert mask[start : start + length].all() and max(placed.distances) < window
        taken[start : start + length] += 1
    assert taken.max() == 1  # nothing lies over anything else
    assert mask.sum() == sum(placed.answer[1] for placed in sample.tasks)


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_piece_is_needed(kind: str) -> None:
    """Whatever the other values are, each value of the missing piece gives another answer: who misses it can only guess."""
    random = np.random.default_rng(1)
    every = range(RANGES.get(kind, RANGE))
    for pieces in (4, 6):
        names = [f"N{place}" for place in range(pieces)]
        values = random.integers(len(every), size=pieces).tolist()
        for missing in range(pieces):
            answers = Counter(KINDS[kind](names, [*values[:missing], value, *values[missing + 1 :]]).answer for value in every)
            assert len(answers) == len(every) >= 26
            others = {KINDS[kind](names, [*values[:missing], value, *values[missing + 1 :]]).evidence[other]
                      for value in (0, 1) for other in range(pieces) if other != missing}
            assert len(others) == pieces - 1  # the other pieces say nothing of the missing one
        assert KINDS[kind](names, values).answer not in KINDS[kind](names, values).question


@pytest.mark.parametrize("kind", list(KINDS))
def test_parts_of_an_answer_are_what_one_piece_decides(kind: str) -> None:
    names, values = [f"N{place}" for place in range(5)], [1, 2, 3, 4, 5]
    task = KINDS[kind](names, values)
    for changed, (first, past) in enumerate(task.parts):
        other = KINDS[kind](names, [value + 7 * (place == changed) for place, value in enumerate(values)])
        moved = [(a, b) for a, b in zip(task.parts, other.parts, strict=True) if task.answer[a[0]:a[1]] != other.answer[b[0]:b[1]]]
        assert moved == [((first, past), other.parts[changed])]
    assert len(task.parts) in (0, 5)


@settings(max_examples=30)
@given(kind=st.sampled_from(list(KINDS)), pieces=st.integers(4, 8), seed=st.integers(0, 10**6))
def test_words_are_encoded_as_their_text(tokenizer: Tokenizer, kind: str, pieces: int, seed: int) -> None:
    task = draw(kind, pieces, np.random.default_rng(seed))
    for text in (*task.evidence, task.question, f" {task.answer}\n", "two  spaces, a 12 345 and\n  more - so ", ""):
        assert by_word(tokenizer, [text]) == [tokenizer.encode(text)]


def test_a_thousand_words_are_different() -> None:
    assert len({word(value) for value in range(RANGE)}) == RANGE


def test_ablation_removes_one_piece_and_nothing_else(tokenizer: Tokenizer, documents: list[np.ndarray]) -> None:
    source = LongContext(documents, tokenizer, LongConfig(window=2048))
    sample = source.sample(5)
    for task, placed in enumerate(sample.tasks):
        for piece, (start, length) in enumerate(placed.evidence):
            cut = source.without(5, task, piece).tokens
            changed = np.flatnonzero(cut != sample.item.tokens)
            assert len(changed) and start <= changed[0] and changed[-1] < start + length
            assert placed.task.evidence[piece] not in tokenizer.decode(cut[: placed.answer[0]].tolist())


@settings(max_examples=20)
@given(tasks=st.integers(1, 3), index=st.integers(0, 2**40))
def test_without_text_between_the_pieces_nothing_else_changes(
    tokenizer: Tokenizer, documents: list[np.ndarray], tasks: int, index: int
) -> None:
    sample = LongContext(documents, tokenizer, LongConfig(tasks=tasks, strewn=False, learn="answers")).sample(index)
    tokens, mask = sample.item.tokens, sample.item.loss_mask
    pieces = sorted((start, length, text) for placed in sample.tasks
                    for (start, length), text in zip(placed.evidence, placed.task.evidence, strict=True))
    texts = [f"\n{text}\n" for *_, text in pieces]
    for placed in sample.tasks:
        texts.append(f"\nQuestion: {placed.task.question}\nAnswer: {placed.task.answer}\n")
        start, length = placed.answer
        assert tokenizer.decode(tokens[start : start + length].tolist()) == f" {placed.task.answer}\n"
    assert tokenizer.decode(tokens[:-1].tolist()) == "".join(texts) and tokens[-1] == tokenizer.document_end_id
    assert mask is not None and mask.sum() == sum(placed.answer[1] for placed in sample.tasks)


def test_a_stream_resumes_from_its_number(tokenizer: Tokenizer, documents: list[np.ndarray]) -> None:
    config = LongConfig(window=800, tasks=1, seed=4)
    source, again = LongContext(documents, tokenizer, config), LongContext(documents, tokenizer, config)
    assert isinstance(source, ItemSource)
    items = [source.next_item().tokens for _ in range(5)]
    assert len({item.tobytes() for item in items}) == 5
    state = source.state()
    rest = [source.next_item().tokens for _ in range(3)]
    again.restore(state)
    assert all(np.array_equal(a, again.next_item().tokens) for a in rest)
    with pytest.raises(CheckpointError, match="seed 4, here 5"):
        LongContext(documents, tokenizer, LongConfig(window=800, tasks=1, seed=5)).restore(state)


def test_samples_are_packed_whole_beside_text(tokenizer: Tokenizer, documents: list[np.ndarray]) -> None:
    source, alone = (LongContext(documents, tokenizer, LongConfig(tasks=1)) for _ in range(2))
    batches = PackedBatches(Mixture([(source, 1.0)], 0), 2, 1024, pad_id=tokenizer.pad_id)
    for context in (1024, 2048, 1024):  # samples fill the rows of each stage, and a position from another stage is found again
        batches.set_stage(context=context)
        alone.set_context(context)
        state, batch = batches.state(), batches.next()
        first = alone.sample(int(state["now"]["sources"][0]["index"])).item.tokens
        assert (batch.tokens[0].numpy() == first[:-1]).all() and (batch.targets[0].numpy() == first[1:]).all()
        batches.set_stage(context=3072)
        batches.restore(state)
        batches.set_stage(context=context)
        assert (batches.next().tokens == batch.tokens).all()


def test_what_cannot_be_built_is_one_error(tokenizer: Tokenizer, documents: list[np.ndarray]) -> None:
    with pytest.raises(ConfigError, match="leave no room"):
        LongContext(documents, tokenizer, LongConfig(window=120)).sample(0)
    with pytest.raises(ConfigError, match="do not fit apart"):
        LongContext(documents, tokenizer, LongConfig(window=1100, tasks=4, pieces=(12, 12), kinds=("total",))).sample(0)
    with pytest.raises(ConfigError, match="did you mean 'chain'"):
        LongConfig(kinds=("chian",))
    with pytest.raises(ConfigError, match="at least 4"):
        LongConfig(pieces=(2, 6))
    with pytest.raises(DataError, match="no documents"):
        LongContext([], tokenizer, LongConfig())
    with pytest.raises(DataError, match="empty"):
        LongContext([np.array([], np.int64)], tokenizer, LongConfig()).sample(0)


@settings(max_examples=5)
@given(index=st.integers(0, 2**40), learn=st.sampled_from(["all", "answers"]), share=st.sampled_from([0.3, 1.0]))
def test_evidence_in_pictures(tokenizer: Tokenizer, documents: list[np.ndarray], index: int, learn: str, share: float) -> None:
    """The same guarantees; what is to be read in a picture stands nowhere in the text, and pads are where images are."""
    config = LongConfig(window=8192, tasks=2, pictures=share, learn=learn, kinds=("code", "order", "chain", "total"))
    source = LongContext(documents, tokenizer, config, RELEASED)
    sample, pad = source.sample(index), tokenizer.special_ids["<|media_pad|>"]
    tokens, mask, images = sample.item.tokens, sample.item.loss_mask, sample.item.images
    places = np.concatenate([np.arange(image.start, image.start + image.count) for image in images])
    assert np.flatnonzero(tokens == pad).tolist() == places.tolist() and not mask[places].any()
    assert mask.all(where=tokens != pad) if learn == "all" else mask.sum() == sum(placed.answer[1] for placed in sample.tasks)
    in_pictures = 0
    for task, placed in enumerate(sample.tasks):
        assert placed.span >= 4096 and {4 * start // 8192 for start, _ in placed.evidence} == {0, 1, 2, 3}
        for piece, ((start, length), text) in enumerate(zip(placed.evidence, placed.task.evidence, strict=True)):
            inside = [image for image in images if start <= image.start < start + length]
            cut = source.without(index, task, piece)
            assert [image.start for image in cut.images] == [image.start for image in images if image not in inside]
            assert (cut.tokens == pad).sum() == (tokens == pad).sum() - sum(image.count for image in inside)
            if inside:
                in_pictures += 1
                assert len(inside) == 1 and inside[0].count == len(text) == inside[0].pixels.width // 28
                assert text not in tokenizer.decode(tokens[tokens != pad].tolist())
            else:
                assert tokenizer.decode(tokens[start : start + length].tolist()) == f"\n{text}\n"
    pieces = sum(len(placed.evidence) for placed in sample.tasks)
    assert in_pictures == pieces if share == 1 else in_pictures < pieces
    assert {4 * image.start // 8192 for image in images} == {0, 1, 2, 3}


def test_pictures_need_an_eye(tokenizer: Tokenizer, documents: list[np.ndarray]) -> None:
    with pytest.raises(ConfigError, match=r"'pictures' is 0\.5, but the model has no eye"):
        LongContext(documents, tokenizer, LongConfig(pictures=0.5))
    with pytest.raises(ConfigError, match=r"'pictures' is 1\.5"):
        LongConfig(pictures=1.5)
