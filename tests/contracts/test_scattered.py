"""Questions about scattered evidence: a model that answers right, one that misses a single piece, and how both are counted."""

import numpy as np
import pytest
import torch

from gnomon.data.long_context import LongConfig, LongContext
from gnomon.data.long_tasks import KINDS, draw
from gnomon.data.tokenizer import Tokenizer, train_tokenizer
from gnomon.train import scattered

TEXT = "A quiet morning; nobody had anything to say about the harvest, the weather or the price of rope. "


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    random = np.random.default_rng(0)
    return train_tokenizer([TEXT * 20, *(" ".join(draw(kind, 5, random).evidence) for kind in KINDS for _ in range(20))], 600)


def source(tokenizer: Tokenizer, *kinds: str) -> LongContext:
    documents = [np.array([*tokenizer.encode(TEXT * count), tokenizer.document_end_id]) for count in (3, 9, 40)]
    return LongContext(documents, tokenizer, LongConfig(tasks=1, pieces=(4, 4), kinds=kinds))


class Knows(torch.nn.Module):
    """Says the next token of what it reads; `wrong` are places of each text, from its end, at which it says another."""

    def __init__(self, vocabulary: int, wrong: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.vocabulary, self.wrong, self.anchor = vocabulary, wrong, torch.nn.Parameter(torch.zeros(1))

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        said = ids.roll(-1, 1).clone()
        for place in self.wrong:
            said[:, -1 - place] = (said[:, -1 - place] + 1) % self.vocabulary
        return torch.nn.functional.one_hot(said, self.vocabulary).float()

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


@pytest.mark.parametrize("kind", KINDS)
def test_who_knows_all_has_all_right(tokenizer: Tokenizer, kind: str) -> None:
    answers = scattered.ask(Knows(tokenizer.vocab_size), [source(tokenizer, kind)], 1024, 3)
    assert [answer.kind for answer in answers] == [kind] * 3
    assert scattered.share(answers) == 1.0
    assert scattered.by_kind(answers) == {kind: (1.0, 3)}
    rows = scattered.by_distance(answers, [(0, 256), (256, 512), (512, 1100)])
    assert sum(row[3] for row in rows) == (12 if KINDS[kind](["a"] * 4, [1] * 4).parts else 0)
    assert all(row[2] == 1.0 for row in rows)


def test_a_missed_piece_counts_at_its_distance(tokenizer: Tokenizer) -> None:
    questions = source(tokenizer, "boxes")
    questions.set_context(1024)
    for index in range(4):
        placed = questions.sample(index).tasks[0]
        ids = questions.sample(index).item.tokens[placed.answer[0] : placed.answer[0] + placed.answer[1]].tolist()
        letter = placed.task.answer[placed.task.parts[2][0]]
        letters = [place for place, each in enumerate(ids) if tokenizer.decode([each]).strip(" =.\n") == letter]
        wrong = next(place for place in letters if tokenizer.decode(ids[: place + 1]).count("=") == 3)
        model = Knows(tokenizer.vocab_size, (len(ids) - wrong + 1,))
        answer = scattered.ask(model, [questions], 1024, index + 1)[index]
        assert not answer.right
        assert [right for _, right in answer.parts] == [True, True, False, True]
        assert [distance for distance, _ in answer.parts] == list(placed.distances)


def test_no_source_and_too_short_a_window_give_nothing(tokenizer: Tokenizer) -> None:
    model = Knows(tokenizer.vocab_size)
    assert scattered.ask(model, [], 1024, 3) == []
    assert scattered.ask(model, [source(tokenizer, "code")], 64, 3) == []
    assert scattered.share([]) is None
    assert scattered.by_kind([]) == {}
    assert scattered.by_distance([], [(0, 10)]) == ()
