"""Made pictures: the picture decides the answer, the same number gives the same item, pads stand where images are."""

import re
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from PIL import Image, ImageDraw

from gnomon.data.chat import chat_format
from gnomon.data.drawing import COLOURS
from gnomon.data.images import RELEASED, prepare
from gnomon.data.messages import Conversation, Message, Text
from gnomon.data.mixture import Mixture
from gnomon.data.packing import PackedBatches
from gnomon.data.picture_code import RENDERED
from gnomon.data.picture_tasks import KINDS, MOVES, PLACES, Clip, Shown, stills
from gnomon.data.pictures import Pictures, PicturesConfig
from gnomon.data.tokenizer import Tokenizer, train_tokenizer
from gnomon.errors import CheckpointError, ConfigError, DataError


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    words = [f"{KINDS[kind](stream(i)).question} {KINDS[kind](stream(i)).answer}\n" for kind in KINDS for i in range(20)]
    return train_tokenizer(words, 400)


def stream(number: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=11, counter=[0, 0, 0, number]))


def shown(kind: str, count: int) -> list[Shown]:
    return [KINDS[kind](stream(number)) for number in range(count)]


def picture(task: Shown) -> Image.Image:
    image = next(part for part in task.parts if not isinstance(part, str))
    assert isinstance(image, Image.Image)
    return image


def near(image: Image.Image, colour: str) -> np.ndarray:
    """Where a picture has a colour of this name [H, W]."""
    pixels = np.asarray(image).astype(int)
    distance = {name: np.abs(pixels - value).sum(-1) for name, value in COLOURS.items()}
    return distance[colour] <= 40


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_number_is_the_same_picture_and_others_differ(kind: str) -> None:
    for number in range(5):
        one, again, other = (KINDS[kind](stream(n)) for n in (number, number, number + 1000))
        assert one.kind == kind
        assert (one.question, one.answer) == (again.question, again.answer)
        pixels = [[part.tobytes() for part in stills(task.parts) if not isinstance(part, str)] for task in (one, again, other)]
        assert pixels[0] == pixels[1]
        assert (one.answer, pixels[0]) != (other.answer, pixels[2])


def test_a_scene_is_what_its_words_say() -> None:
    for task in shown("scene", 60):
        image, found = picture(task), set()
        for row in range(3):
            for column in range(3):
                field = image.crop((28 * column + 4, 28 * row + 4, 28 * column + 24, 28 * row + 24))
                colours = [name for name in COLOURS if near(field, name).sum() > 25]
                found |= {(PLACES[3 * row + column], name) for name in colours}
        said = re.findall(r"(\w+) (\w+) (?:at|in) the (top \w+|middle \w+|bottom \w+|centre)", task.answer)
        assert found == {(place, colour) for colour, _, place in said}, task.answer


def test_shapes_have_their_outlines() -> None:
    """Share of the bounding box that a shape fills, by geometry."""
    share = {"circle": np.pi / 4, "square": 1.0, "triangle": 0.5, "diamond": 0.5, "cross": 5 / 9, "ring": np.pi / 4 * (1 - 0.6**2)}
    for task in shown("scene", 80):
        said = re.findall(r"(\w+) (\w+) (?:at|in) the", task.answer)
        if len(said) > 1 or said[0][1] not in share:
            continue
        inside = near(picture(task), said[0][0])
        rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
        box = (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
        assert inside.sum() / box == pytest.approx(share[said[0][1]], abs=0.17), task.answer


def test_bars_are_as_high_as_their_values() -> None:
    for task in shown("chart", 20):
        pixels = np.asarray(picture(task)).astype(int)
        for place, (_, value) in enumerate(re.findall(r"(\w) (\d)", task.answer)):
            column = pixels[:92, 28 * (place + 1) + 5]  # the middle of the bar
            height = (np.ptp(column, axis=1) > 30).sum() or (column.max(1) < 60).sum() - 1
            assert height == pytest.approx(int(value) * 84 / 9, abs=1.5), task.answer


def test_points_are_where_the_shape_is() -> None:
    asked = set()
    for task in shown("point", 60):
        colour = task.question.split()[3]
        inside, image = near(picture(task), colour), picture(task)
        rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
        middle = np.array([columns.min() + columns.max() + 1, rows.min() + rows.max() + 1]) / 2
        share = "from 0 to 1" in task.question
        asked.add(share)
        said = np.array([float(number) for number in re.findall(r"[\d.]+", task.answer)])
        assert said * (image.size if share else (1, 1)) == pytest.approx(middle, abs=2.6), task.question
    assert asked == {True, False}


def test_code_draws_its_picture() -> None:
    """A drawer of our own for the few elements that occur, eight times as large, so that edges match."""
    for task in shown("code", 25):
        large = Image.new("RGB", (84 * 8, 84 * 8))
        pen = ImageDraw.Draw(large)
        for element, rest in re.findall(r"<(rect|circle|polygon) ([^>]*)/>", task.answer):
            field = dict(re.findall(r'([\w-]+)="([^"]*)"', rest))
            if element == "rect":
                pen.rectangle([0, 0, large.width, large.height], fill=field["fill"])
            elif element == "polygon":
                pen.polygon([tuple(8 * float(v) for v in point.split(",")) for point in field["points"].split()], fill=field["fill"])
            else:
                x, y, r, stroke = (8 * float(field.get(name, 0)) for name in ("cx", "cy", "r", "stroke-width"))
                outer = r + stroke / 2
                pen.ellipse([x - outer, y - outer, x + outer, y + outer], fill=None if stroke else field["fill"],
                            outline=field.get("stroke"), width=round(stroke) or 1)
        difference = np.abs(np.asarray(large.reduce(8)).astype(int) - np.asarray(picture(task)).astype(int))
        assert difference.mean() < 1.5, task.answer  # edges only


@pytest.mark.parametrize(("kind", "lengths"), [("letter", (1, 3)), ("word", (4, 7)), ("phrase", (8, 11)), ("line", (12, 12)),
                                               ("label", (1, 12))])
def test_lines_have_their_letters(kind: str, lengths: tuple[int, int]) -> None:
    seen = set()
    for task in shown(kind, 60):
        image = picture(task)
        seen.add(len(task.answer))
        assert image.height == 28
        assert (image.height // 28) * -(-image.width // 28) == prepare(image).tokens
        if kind != "label":
            assert image.width == 28 * len(task.answer)  # each letter in a field of its own
    assert (min(seen), max(seen)) == lengths


def test_equal_letters_look_alike_and_others_do_not() -> None:
    """A field's pixels depend on its letter: dark where the same letter is dark elsewhere in the line."""
    masks: dict[str, list[np.ndarray]] = {}
    for task in shown("line", 40):
        pixels = np.asarray(picture(task).convert("L")).astype(float)
        inked = pixels < (pixels.min() + pixels.max()) / 2
        for place, letter in enumerate(task.answer):
            masks.setdefault(letter, []).append(inked[:, 28 * place : 28 * place + 28])
    alike = [np.mean([(a == b).mean() for a in each for b in each]) for each in masks.values()]
    one, other = (np.mean(masks[letter], 0) for letter in "OI")
    assert min(alike) > 0.75
    assert np.abs(one - other).mean() > 0.2


def test_a_shape_alone_is_what_its_words_say() -> None:
    for task in shown("shape", 40):
        _, colour, _ = task.answer.rstrip(".").split()
        assert picture(task).size == (28, 28)
        assert [name for name in COLOURS if near(picture(task), name).sum() > 25] == [colour]


def test_spelled_answers_have_a_token_for_each_letter(tokenizer: Tokenizer) -> None:
    source = Pictures(tokenizer, PicturesConfig(kinds=("line",), chat=0.0), RELEASED)
    sample = source.sample(0)
    start, length = sample.answer
    assert length == 1 + 12  # a space, then each letter by itself
    assert tokenizer.decode(sample.item.tokens[start : start + length]) == " " + sample.shown.answer


@pytest.mark.parametrize("chat", [0.0, 1.0])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "clip"])
def test_pads_stand_where_images_are_and_are_not_learnt(tokenizer: Tokenizer, kind: str, chat: float) -> None:
    pad = tokenizer.special_ids["<|media_pad|>"]
    source = Pictures(tokenizer, PicturesConfig(kinds=(kind,), chat=chat), RELEASED)
    for number in range(3):
        sample = source.sample(number)
        item, images = sample.item, sample.item.images
        pictures = [part for part in sample.shown.parts if not isinstance(part, str)]
        places = np.concatenate([np.arange(image.start, image.start + image.count) for image in images])
        assert np.flatnonzero(item.tokens == pad).tolist() == places.tolist()
        assert not item.loss_mask[places].any()
        assert item.loss_mask.sum() == len(item.tokens) - len(places)
        for image, drawn in zip(images, pictures, strict=True):
            assert np.array_equal(image.pixels.patches, prepare(drawn).patches)
            size = tokenizer.encode(f"image {drawn.width}x{drawn.height}")
            before = item.tokens[image.start - 2 - len(size) : image.start]
            assert before.tolist() == [tokenizer.special_ids["<|media_begin|>"], *size, tokenizer.special_ids["<|media_content|>"]]
        start, length = sample.answer
        assert tokenizer.decode(item.tokens[start : start + length]).strip() == sample.shown.answer


def test_a_clip_is_what_its_words_say() -> None:
    """The middle of what has the colour moves that way by at least five pixels a frame, and no other way."""
    seen = set()
    for task in shown("clip", 40):
        clip = task.parts[0]
        assert isinstance(clip, Clip)
        colour, move = re.fullmatch(r"The (\w+) \w+ (.*)\.", task.answer).groups()
        seen.add(move)
        middles = np.array([[np.mean(axis) for axis in np.nonzero(near(frame, colour))[::-1]] for frame in clip.frames])
        steps, (dx, dy) = np.diff(middles, axis=0), MOVES[move]
        assert 2 <= len(clip.frames) <= 8
        if (dx, dy) == (0, 0):
            assert np.abs(steps).max() < 0.5
        else:
            assert (steps @ (dx, dy)).min() > 4 and np.abs(steps @ (dy, dx)).max() < 0.5
    assert seen == set(MOVES)


@pytest.mark.parametrize("chat", [0.0, 1.0])
def test_clips_become_items_of_up_to_four_frames(tokenizer: Tokenizer, chat: float) -> None:
    """As a document; a conversation has no videos, so there its frames are images."""
    pad = tokenizer.special_ids["<|media_pad|>"]
    source, counts = Pictures(tokenizer, PicturesConfig(kinds=("clip",), chat=chat), RELEASED), set()
    for number in range(12):
        sample = source.sample(number)
        item, frames = sample.item, sample.shown.parts[0].frames
        counts.add(len(frames))
        groups = [[frame] for frame in frames] if chat else [frames[start : start + 4] for start in range(0, len(frames), 4)]
        assert [image.pixels.frames for image in item.images] == [len(group) for group in groups]
        places = np.concatenate([np.arange(image.start, image.start + image.count) for image in item.images])
        assert np.flatnonzero(item.tokens == pad).tolist() == places.tolist() and not item.loss_mask[places].any()
        for image, group in zip(item.images, groups, strict=True):
            assert image.count == 9
            assert np.array_equal(image.pixels.patches, np.concatenate([prepare(frame).patches for frame in group]))
        if not chat:
            titles = re.findall(r"video 84x84 (\d)-(\d)", tokenizer.decode([t for t in item.tokens.tolist() if t != pad]))
            ends = np.cumsum([len(group) for group in groups])
            assert titles == [(str(end - len(group) + 1), str(end)) for end, group in zip(ends, groups, strict=True)]
    assert min(counts) <= 4 < max(counts)


@pytest.mark.parametrize("chat", [0.0, 1.0])
def test_answers_alone_are_learnt_where_asked_for(tokenizer: Tokenizer, chat: float) -> None:
    one, other = (Pictures(tokenizer, PicturesConfig(kinds=("scene",), chat=chat, learn=learn), RELEASED).sample(2)
                  for learn in ("all", "answers"))
    assert np.array_equal(one.item.tokens, other.item.tokens)
    start = other.answer[0]
    assert not other.item.loss_mask[:start].any()
    assert other.item.loss_mask[start:].all() and one.item.loss_mask[start:].all()


def test_a_conversation_is_what_the_chat_format_writes(tokenizer: Tokenizer) -> None:
    sample = Pictures(tokenizer, PicturesConfig(kinds=("scene",), chat=1.0), RELEASED).sample(4)
    pad = tokenizer.special_ids["<|media_pad|>"]
    user = Message(role="user", content=(Text(text="@"), Text(text=sample.shown.question)))  # text in the image's place
    answer = Message(role="assistant", content=(Text(text=sample.shown.answer),))
    wanted = chat_format(tokenizer).encode(Conversation(messages=(user, answer), thinking=False), generate=False).tokens
    found, image = sample.item.tokens.tolist(), sample.item.images[0]
    assert found[image.start :].count(pad) == image.count
    rest = found[: found.index(tokenizer.special_ids["<|media_begin|>"])] + found[image.start + image.count + 1 :]
    assert rest == [token for token in wanted if token != tokenizer.encode("@")[0]]


def test_it_goes_on_where_it_was(tokenizer: Tokenizer) -> None:
    config = PicturesConfig(chat=0.5, seed=3)
    assert not set(config.kinds) & set(RENDERED)  # what needs other programs must be asked for
    source = Pictures(tokenizer, config, RELEASED)
    for _ in range(7):
        source.next_item()
    state, following = source.state(), [source.next_item() for _ in range(5)]
    again = Pictures(tokenizer, config, RELEASED)
    again.restore(state)
    for item in following:
        other = again.next_item()
        assert np.array_equal(item.tokens, other.tokens)
        assert all(np.array_equal(a.pixels.patches, b.pixels.patches) for a, b in zip(item.images, other.images, strict=True))
    with pytest.raises(CheckpointError, match="seed"):
        Pictures(tokenizer, PicturesConfig(seed=4), RELEASED).restore(state)


def test_packing_keeps_images_at_their_pads(tokenizer: Tokenizer) -> None:
    """Every vector of every image comes once, over a pad, however rows cut it."""
    config = PicturesConfig(kinds=("line", "chart", "document"), chat=0.3)
    source = Pictures(tokenizer, config, RELEASED)
    batches = PackedBatches(Mixture([(_Cut(source), 1.0)]), 4, 19, pad_id=tokenizer.pad_id)
    pad, seen = tokenizer.special_ids["<|media_pad|>"], {}
    for batch in islice(batches, 40):
        flat, covered = batch.tokens.flatten(), []
        for image in batch.images:
            assert bool((flat[image.start : image.start + image.count] == pad).all())
            covered += range(image.start, image.start + image.count)
            seen.setdefault(id(image.pixels), (image.pixels, []))[1].extend(range(image.skip, image.skip + image.count))
        assert sorted(covered) == (flat == pad).nonzero().flatten().tolist()
        parts = batch.split(2)
        assert sum(image.count for part in parts for image in part.images) == len(covered)
        for part in parts:
            assert all(bool((part.tokens.flatten()[i.start : i.start + i.count] == pad).all()) for i in part.images)
    whole = [sorted(places) == list(range(pixels.tokens)) for pixels, places in seen.values()]
    assert sum(whole) >= len(whole) - 4  # all but those in hand at the end
    assert len(whole) > 20


class _Cut:
    """The same items, free to be cut anywhere."""

    def __init__(self, source: Pictures) -> None:
        self._source = source

    def next_item(self):
        return replace(self._source.next_item(), whole=False)

    def state(self):
        return self._source.state()

    def restore(self, state) -> None:
        self._source.restore(state)


def test_what_does_not_fit_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"'kinds'.*did you mean 'line'"):
        PicturesConfig(kinds=("lines",))
    with pytest.raises(ConfigError, match="'chat' is 2"):
        PicturesConfig(chat=2)
    item = Pictures(tokenizer, PicturesConfig(), RELEASED).next_item()

    class Bad:
        def next_item(self):
            return replace(item, images=(item.images[0].moved(10_000),))

        def state(self):
            return {}

        def restore(self, state) -> None:
            pass

    with pytest.raises(DataError, match="outside its"):
        Mixture([(Bad(), 1.0)]).next_item()
