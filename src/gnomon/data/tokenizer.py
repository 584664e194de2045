"""Text to token ids and back: byte-level BPE with the vocabulary layout of K3.

Ids 0 … n-1 are byte strings in merge order (`bpe.py`), the block above them is reserved (`special_tokens.py`), as in the
released vocabulary of 163,584 + 256. Text never yields a reserved id: ``<|open|>`` in a document is ordinary characters,
and only code that means a marker writes its id. No BOS is added. Read next: `corpus.py` for where text comes from.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from gnomon.data import bpe, special_tokens
from gnomon.errors import ConfigError, DataError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
RANK_FILE = "tiktoken.model"
AGAIN_CHARACTERS = 1 << 21
"""How much text that may come again is kept with its ids."""


class Tokenizer:
    """A vocabulary and the engine that applies it.

    `ranks` are the byte strings of ids 0 … n-1, `special_ids` the names of ids n … vocab_size-1, `engine` what merges
    (by default the fastest that is installed). Build one with `train_tokenizer` or `Tokenizer.load`.
    """

    def __init__(self, ranks: Sequence[bytes], special_ids: Mapping[str, int], engine: bpe.Engine | None = None) -> None:
        self.ranks = list(ranks)
        self.special_ids = dict(special_ids)
        _require_layout(self.ranks, self.special_ids)
        self._engine = bpe.engine_for(self.ranks) if engine is None else engine
        self._bytes = self.ranks + [name.encode() for name in self.special_ids]
        self._again: dict[str, tuple[int, ...]] = {}
        self._again_characters = 0

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a folder that holds ``tokenizer.json``, or K3's ``tiktoken.model`` beside ``tokenizer_config.json``.

        `path` may also name one of these files. Raises DataError naming what is missing or damaged.
        """
        path = Path(path)
        folder = path.parent if path.is_file() else path
        if (folder / TOKENIZER_FILE).is_file() and path.name != RANK_FILE:
            return _load_graph(folder)
        if (folder / RANK_FILE).is_file():
            return _load_rank_file(folder)
        raise DataError(f"no tokenizer in {folder}: expected {TOKENIZER_FILE}, or {RANK_FILE} with {CONFIG_FILE}")

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``tiktoken.model``: what other engines read.

        The files list the reserved block as special tokens, so other programs may parse them from text; this class does not.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        graph = json.loads(bpe.graph_of(self.ranks).to_str())
        graph["added_tokens"] = [{"id": index, **_added_token(name)} for name, index in self.special_ids.items()]
        _write_json(folder / TOKENIZER_FILE, graph)
        _write_json(folder / CONFIG_FILE, self._config())
        lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(self.ranks))
        (folder / RANK_FILE).write_bytes(b"".join(lines))

    def _config(self) -> dict[str, Any]:
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": {str(index): _added_token(name) for name, index in self.special_ids.items()},
            "bos_token": special_tokens.BEGINNING,
            "eos_token": special_tokens.END_OF_MESSAGE,
            "unk_token": special_tokens.UNKNOWN,
            "pad_token": special_tokens.PADDING,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1_048_576,
        }

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; never a reserved id. Raises DataError for text that is not Unicode (a lone surrogate)."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, computed on all cores; equal to `encode` of each."""
        counts, flat = [], []
        for text in texts:
            parts = list(bpe.pieces(_require_unicode(text)))
            counts.append(len(parts))
            flat += parts
        encoded = iter(self._engine.encode_batch(flat))
        return [_joined(encoded, count) for count in counts]

    def encode_again(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of each text, as `encode` gives them, for texts that are likely to come again, as those of a conversation do with each turn:
        what was encoded is kept, up to AGAIN_CHARACTERS in all."""
        known = self._again
        found = list(map(known.get, texts))
        missing = [at for at, ids in enumerate(found) if ids is None] if None in found else []
        if not missing:
            return cast(list[tuple[int, ...]], found)
        new = list(dict.fromkeys(texts[at] for at in missing))
        fresh = dict(zip(new, map(tuple, self.encode_batch(new)), strict=True))
        for at in missing:
            found[at] = fresh[texts[at]]
        self._again_characters += sum(map(len, fresh))
        if self._again_characters > AGAIN_CHARACTERS:  # begin anew; whoever still reads the old table keeps it
            self._again, self._again_characters = {}, 0
        else:
            known.update(fresh)
        return cast(list[tuple[int, ...]], found)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that `ids` stand for; a reserved id yields its name. Raises DataError for an id outside the vocabulary."""
        try:
            return b"".join([self._bytes[index] for index in _non_negative(ids)])
        except IndexError:
            raise DataError(f"token ids must be below vocab_size = {self.vocab_size}") from None

    def decode(self, ids: Iterable[int]) -> str:
        """The text that `ids` stand for; bytes that are not UTF-8 (a cut character) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @property
    def vocab_size(self) -> int:
        """Number of ids: ranks and reserved block."""
        return len(self._bytes)

    @property
    def bos_id(self) -> int:
        """Id of ``[BOS]``."""
        return self.special_ids[special_tokens.BEGINNING]

    @property
    def eos_id(self) -> int:
        """Id of ``<|end_of_msg|>``, where an assistant stops (``<|im_end|>`` in Kimi-Linear: the same slot)."""
        return len(self.ranks) + 2

    @property
    def document_end_id(self) -> int:
        """Id of ``[EOS]``, which closes a document in pre-training."""
        return self.special_ids[special_tokens.END_OF_DOCUMENT]

    @property
    def stop_ids(self) -> tuple[int, int]:
        """The ids at which generation stops: end of document and end of message."""
        return self.document_end_id, self.eos_id

    @property
    def pad_id(self) -> int:
        """Id of ``[PAD]``."""
        return self.special_ids[special_tokens.PADDING]

    @cached_property
    def fingerprint(self) -> str:
        """Digest of everything that decides ids: equal fingerprints give equal ids for every text. Computed once: positions hold it."""
        digest = hashlib.sha256(bpe.PATTERN.encode())
        for token in self.ranks:
            digest.update(len(token).to_bytes(4, "little") + token)
        digest.update(json.dumps(self.special_ids).encode())
        return digest.hexdigest()


def train_tokenizer(texts: Iterable[str], vocab_size: int, special_slots: int | None = None) -> Tokenizer:
    """Train a byte-level BPE vocabulary of exactly `vocab_size` ids, K3's reserved block included.

    `special_slots` sets the size of that block; by default 256 from 32,768 ids on and 32 below. The same texts in the
    same order give the same tokenizer. Raises ConfigError for a vocabulary too small to hold bytes and block, DataError
    for text too small to fill it.
    """
    slots = special_tokens.block_size(vocab_size) if special_slots is None else special_slots
    count = vocab_size - slots
    if count < 256:
        raise ConfigError(f"vocab_size = {vocab_size}: 256 byte tokens and {slots} reserved tokens need at least {256 + slots}")
    ranks = bpe.train_ranks((_require_unicode(text) for text in texts), count)
    return Tokenizer(ranks, special_tokens.block(count, slots))


def _require_unicode(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"text holds the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, which is not Unicode "
            "text; decode the source with errors='replace' or drop the character"
        ) from None
    return text


def _require_layout(ranks: list[bytes], special_ids: dict[str, int]) -> None:
    missing = 256 - len({token for token in ranks if len(token) == 1})
    if missing:
        raise DataError(f"the vocabulary lacks {missing} of the 256 single bytes, so some text has no encoding")
    if len(set(ranks)) != len(ranks):
        raise DataError("the vocabulary holds the same byte string twice")
    expected = list(range(len(ranks), len(ranks) + len(special_ids)))
    if list(special_ids.values()) != expected:
        raise DataError(f"special tokens must take the ids above the {len(ranks)} ranks without a gap, in order")
    absent = {
        special_tokens.BEGINNING,
        special_tokens.END_OF_DOCUMENT,
        special_tokens.PADDING,
    } - special_ids.keys()
    if absent:
        raise DataError(f"special tokens {', '.join(sorted(absent))} are missing from the reserved block")


def _joined(encoded: Iterator[list[int]], count: int) -> list[int]:
    parts = [next(encoded) for _ in range(count)]
    return parts[0] if count == 1 else [index for part in parts for index in part]


def _non_negative(ids: Iterable[int]) -> Iterator[int]:
    for index in ids:
        if index < 0:
            raise DataError(f"token id {index} is negative")
        yield index


def _added_token(name: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": name, **flags}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not valid JSON: {error}") from None


def _load_graph(folder: Path) -> Tokenizer:
    path = folder / TOKENIZER_FILE
    graph = _read_json(path)
    try:
        model, added = graph["model"], sorted(graph["added_tokens"], key=lambda token: token["id"])
        special_ids = {token["content"]: token["id"] for token in added}
        vocabulary, kind = model["vocab"], model["type"]
        letters = sorted(vocabulary.keys() - special_ids.keys(), key=vocabulary.__getitem__)
        merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
        pattern = graph["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a byte-level BPE tokenizer of this family: {error!r} not found") from None
    if kind != "BPE" or pattern != bpe.PATTERN:
        raise DataError(f"{path} is a {kind} tokenizer with another pre-tokenisation pattern than K3's; its ids would differ")
    ranks = [bpe.from_letters(token) for token in letters]
    if merges != bpe.merges_of(ranks):
        raise DataError(f"the merges of {path} are not those that its vocabulary implies: the file was edited or damaged")
    return Tokenizer(ranks, special_ids)


def _load_rank_file(folder: Path) -> Tokenizer:
    ranks = _read_ranks(folder / RANK_FILE)
    config = _read_json(folder / CONFIG_FILE)
    named: dict[int, str] = {}
    for index, token in config.get("added_tokens_decoder", {}).items():
        named[int(index) - len(ranks)] = token["content"]
    if named and min(named) < 0:
        raise DataError(f"{folder / CONFIG_FILE} names id {min(named) + len(ranks)}, which is one of the {len(ranks)} ranks")
    slots = max([special_tokens.COMPACT_BLOCK - 1, *named]) + 1
    slots = special_tokens.FULL_BLOCK if special_tokens.COMPACT_BLOCK < slots <= special_tokens.FULL_BLOCK else slots
    return Tokenizer(ranks, special_tokens.fill(named, len(ranks), slots))


def _read_ranks(path: Path) -> list[bytes]:
    ranks: list[bytes] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks.append(base64.b64decode(token, validate=True))
            in_order = int(rank) == len(ranks) - 1
        except (ValueError, binascii.Error):
            raise DataError(f"{path}, line {number}: expected 'BASE64 RANK', got {line[:60]!r}") from None
        if not in_order:
            raise DataError(f"{path}, line {number}: rank {rank.decode()} where {len(ranks) - 1} was expected")
    return ranks
