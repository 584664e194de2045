"""How fast does text become token shards and batches, beside transformers tokenising the same text with the same vocabulary?

Each engine's ids are compared before anything is timed. The default corpus is used, so figures hold for this machine's text.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import described, repeat, save

from gnomon.data import bpe
from gnomon.data.machine_text import default_corpus
from gnomon.data.mixture import Mixture
from gnomon.data.packing import PackedBatches
from gnomon.data.shards import Shards, write_shards
from gnomon.data.tokenizer import Tokenizer, train_tokenizer

TEXT_BYTES = 10_000_000
VOCAB_SIZE = 8192
BATCHES, ROWS, CONTEXT = 200, 8, 2048


def main() -> None:
    """Measure tokenising by engine, writing shards, a second run that finds them, and packing."""
    corpus = default_corpus(TEXT_BYTES)
    # The peer does not cut long texts as K3 does, so the comparison leaves them out.
    texts = [document.text for document in corpus if len(document.text) <= bpe.PIECE_CHARACTERS]
    size = sum(len(text.encode()) for text in texts)
    tokenizer = train_tokenizer(texts, VOCAB_SIZE)
    expected = tokenizer.encode_batch(texts)
    result: dict[str, Any] = {"text_bytes": size, "tokens": sum(map(len, expected)), "seconds": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, encode in engines(tokenizer, Path(folder)).items():
            if encode(texts) != expected:
                raise SystemExit(f"{name} gives other ids; nothing was measured")
            report(result, f"tokenise, {name}", repeat(lambda encode=encode: encode(texts)), size / 1e6, "MB/s")
        fresh = iter(range(1000))
        written = repeat(lambda: write_shards(corpus, tokenizer, Path(folder) / str(next(fresh))))
        report(result, "write shards", written, size / 1e6, "MB/s")
        found = repeat(lambda: write_shards(corpus, tokenizer, Path(folder) / "0"))
        report(result, "find shards", found, size / 1e6, "MB/s")
        batches = PackedBatches(Mixture([(Shards.open(write_shards(corpus, tokenizer, Path(folder) / "0")), 1.0)]), ROWS, CONTEXT)
        packed = repeat(lambda: [batches.next() for _ in range(BATCHES)])
        report(result, "pack batches", packed, BATCHES * ROWS * CONTEXT / 1e6, "Mtok/s")
    save("text_to_batches", result)


def engines(tokenizer: Tokenizer, folder: Path) -> dict[str, Callable[[list[str]], list[list[int]]]]:
    """Ways to tokenise a list of texts with the same vocabulary."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    slow = Tokenizer(tokenizer.ranks, tokenizer.special_ids, bpe.TokenizersEngine(tokenizer.ranks))
    found: dict[str, Callable[[list[str]], list[list[int]]]] = {
        "gnomon": tokenizer.encode_batch,
        "gnomon without tiktoken": slow.encode_batch,
    }
    try:
        from transformers import AutoTokenizer
    except ImportError:
        print("transformers is not installed: no peer to compare with")
        return found
    tokenizer.save(folder / "tokenizer")
    # The peer turns a marker that a document spells into its id; ours never does, so the peer's parsing is switched off.
    peer = AutoTokenizer.from_pretrained(folder / "tokenizer", split_special_tokens=True)
    found["transformers"] = lambda texts: peer(texts, add_special_tokens=False)["input_ids"]
    return found


def report(result: dict[str, Any], name: str, seconds: dict[str, float], amount: float, unit: str) -> None:
    """Print one line and keep it."""
    result["seconds"][name] = seconds
    rates = [amount / seconds[key] for key in ("median", "max", "min")]
    print(f"{name:34} {rates[0]:9.1f} {unit:6} ({rates[1]:.1f} to {rates[2]:.1f})   {seconds['median']:.2f} s")


if __name__ == "__main__":
    described(__doc__)
    main()
