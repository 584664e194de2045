"""Cleaning: copies and near copies go, different texts stay; binary matter, logs and files cut off are known."""

import base64
import json

import numpy as np
import pytest

from gnomon.data.cleaning import HASHES, CleanConfig, Cleaner, cleaned, is_binary, is_cut_off, is_log, minima
from gnomon.data.corpus import open_corpus
from gnomon.errors import ConfigError

WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "lnrst"]


def prose(seed: int, count: int = 400) -> str:
    random = np.random.default_rng(seed)
    return " ".join(WORDS[index] for index in random.integers(len(WORDS), size=count))


def edited(text: str, changes: int, seed: int) -> str:
    words, random = text.split(), np.random.default_rng(seed)
    for place in random.choice(len(words), size=changes, replace=False):
        words[place] = "other"
    return " ".join(words)


def common(one: str, other: str, run: int = 5) -> float:
    """Share of common word runs, counted."""
    sets = [{tuple(text.split()[i : i + run]) for i in range(len(text.split()) - run + 1)} for text in (one, other)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_signatures_estimate_what_is_common() -> None:
    for seed in range(12):
        one = prose(seed)
        other = edited(one, 4 * seed, seed + 100)
        found = float((minima(one, 5) == minima(other, 5)).mean())
        assert found == pytest.approx(common(one, other), abs=5 * 0.5 / HASHES**0.5)


def test_copies_go_and_others_stay() -> None:
    texts = [prose(seed) for seed in range(20)]
    near = [edited(text, 2, seed) for seed, text in enumerate(texts)]
    spaced = ["\n".join(text.split()) for text in texts]
    far = [edited(text, 60, seed) for seed, text in enumerate(texts)]
    cleaner = Cleaner(CleanConfig())
    assert all(cleaner.keeps(text) for text in texts)
    assert not any(cleaner.keeps(text) for text in spaced)
    assert not any(cleaner.keeps(text) for text in near)
    assert all(cleaner.keeps(text) for text in far)
    assert cleaner.dropped == {"copy": 20, "near copy": 20}
    keeps_near = Cleaner(CleanConfig(near=0))
    assert all(keeps_near.keeps(text) for text in texts + near)


def test_the_first_of_equals_stays_and_order_decides() -> None:
    pairs = [(prose(seed % 5), f"{seed}.txt") for seed in range(10)]
    assert [source for _, source in cleaned(pairs, CleanConfig())] == ["0.txt", "1.txt", "2.txt", "3.txt", "4.txt"]


def test_binary_matter_and_logs_are_known() -> None:
    noise = bytes(np.random.default_rng(0).integers(0, 256, 3000, dtype=np.uint8).tolist())
    assert is_binary(noise.decode("latin-1"))
    assert is_binary(noise.decode("utf-8", "replace"))
    assert is_binary("image: " + base64.b64encode(noise).decode())
    assert not is_binary(prose(1))
    assert not is_binary("\tdef f():\r\n\treturn '中文 ünï'\n" * 20)
    stamped = "\n".join(f"2026-01-{day:02d} 10:00:00 worker {day} took {day * 7} ms" for day in range(1, 32))
    repeated = "\n".join(f"[{n}] loss {n / 7:.4f} at step {n}" for n in range(100))
    assert is_log(stamped)
    assert is_log(repeated)
    assert not is_log("\n".join(prose(seed, 9) for seed in range(60)))
    assert not is_log("\n".join(f"line {n} of a poem that {WORDS[n]} wrote" for n in range(60)))


def test_files_that_are_cut_off_are_known() -> None:
    program = "def f(x):\n    return {'a': [x, 1]}\n\n\ndef g():\n    return f(2)\n"
    for text, source in [(json.dumps({"a": [1, 2, {"b": 3}]}), "x.json"), (program, "x.py"), ("<html><p>x</p></html>", "x.html")]:
        assert not is_cut_off(text, source)
        assert is_cut_off(text[: len(text) * 2 // 3], source) or source == "x.py"
    assert is_cut_off("values = [1, 2,\n3, (4", "x.py")
    assert is_cut_off('text = """never\nended', "a/b.py#3")
    assert not is_cut_off("print 'an older dialect'\nx = 1\ny = 2\n", "x.py")
    assert not is_cut_off("{ not json", "x.txt")


def test_a_corpus_is_cleaned(tmp_path) -> None:
    text = prose(1)
    for name, content in [("a.txt", text), ("b.txt", edited(text, 1, 1)), ("c.txt", prose(2)), ("d.json", '{"a": [1, 2')]:
        (tmp_path / name).write_text(content)
    plain, clean = open_corpus(tmp_path), open_corpus(tmp_path, clean=CleanConfig())
    assert len(list(plain)) == 4
    assert [document.text for document in clean] == [text, prose(2)]
    assert plain.key != clean.key
    with pytest.raises(ConfigError, match="'near' is 2"):
        CleanConfig(near=2)
