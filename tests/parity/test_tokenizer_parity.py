"""The saved files in other engines: transformers and mlx-lm load them and give our ids."""

import json
from pathlib import Path

import pytest

from gnomon.data.tokenizer import Tokenizer, train_tokenizer

TEXTS = [path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))]
SAMPLES = ["Hello world", "你好世界 Ünïcode 🙂", "it's  we'LL\r\n\n x\t12345", "    def f(self):\n        return None\n", *TEXTS]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Path]:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = train_tokenizer(TEXTS, 1024)
    tokenizer.save(folder)
    return tokenizer, folder


def _compare(tokenizer: Tokenizer, other) -> None:
    for text in SAMPLES:
        ids = other.encode(text, add_special_tokens=False)
        assert list(ids) == tokenizer.encode(text)
        assert other.decode(ids) == text
    assert other.eos_token_id == tokenizer.eos_id
    assert other.bos_token_id == tokenizer.bos_id
    assert other.convert_tokens_to_ids("<|sep|>") == tokenizer.special_ids["<|sep|>"]


def test_transformers_reads_the_files(saved: tuple[Tokenizer, Path]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizer, folder = saved
    other = transformers.AutoTokenizer.from_pretrained(folder)
    _compare(tokenizer, other)
    assert len(other) == tokenizer.vocab_size
    assert other.pad_token_id == tokenizer.pad_id


def test_transformers_writes_files_that_read_back(saved: tuple[Tokenizer, Path], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizer, folder = saved
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    assert Tokenizer.load(tmp_path).fingerprint == tokenizer.fingerprint


def test_transformers_converts_the_rank_file_to_the_same_merges(saved: tuple[Tokenizer, Path]) -> None:
    convert = pytest.importorskip("transformers.convert_slow_tokenizer", reason="transformers is not installed")
    tokenizer, folder = saved
    vocabulary, merges = convert.TikTokenConverter(vocab_file=str(folder / "tiktoken.model")).extract_vocab_merges_from_model(
        str(folder / "tiktoken.model")
    )
    graph = json.loads((folder / "tokenizer.json").read_text())
    assert vocabulary == graph["model"]["vocab"]
    assert [tuple(merge) for merge in merges] == [tuple(merge) for merge in graph["model"]["merges"]]
    assert tokenizer.vocab_size == len(vocabulary) + 32


def test_mlx_lm_reads_the_files(saved: tuple[Tokenizer, Path]) -> None:
    utils = pytest.importorskip("mlx_lm.tokenizer_utils", reason="mlx-lm is not installed")
    tokenizer, folder = saved
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_linear"}))
    other = utils.load(folder)
    _compare(tokenizer, other)
    detokenizer = other.detokenizer
    detokenizer.reset()
    for index in tokenizer.encode(SAMPLES[1]):
        detokenizer.add_token(index)
    detokenizer.finalize()
    assert detokenizer.text == SAMPLES[1]
