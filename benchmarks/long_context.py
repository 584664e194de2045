"""How fast are long samples built on one core, and do their guarantees hold?

Text of this machine fills windows of several lengths; the rate counts the bytes of text that the tokens stand for, in processor seconds.
Then samples are drawn and each guarantee is checked: first to last evidence at least half a window apart, evidence in every quarter, the
answer at the end, and the same sample again from its number.

`python benchmarks/long_context.py [--samples 100000]`
"""

import argparse
import time
from statistics import median

import numpy as np
from machine import save

from gnomon.data.long_context import LongConfig, LongContext
from gnomon.data.machine_text import default_corpus
from gnomon.data.tokenizer import Tokenizer, train_tokenizer

WINDOWS = (4_096, 16_384, 131_072, 1_048_576)
TOKENS = 4_000_000   # of each measurement


def material(size: int = 6_000_000) -> tuple[Tokenizer, list[np.ndarray], float]:
    """A tokenizer, documents, and bytes per token."""
    texts = [document.text for document in default_corpus(size)]
    tokenizer = train_tokenizer(texts, 8_192)
    documents = [np.array([*ids, tokenizer.document_end_id]) for ids in tokenizer.encode_batch(texts)]
    return tokenizer, documents, sum(len(text.encode()) for text in texts) / sum(map(len, documents))


def seconds(source: LongContext, count: int) -> float:
    """Processor seconds of `count` samples."""
    began = time.process_time()
    for index in range(count):
        source.sample(index)
    return time.process_time() - began


def main() -> None:
    """Measure, check, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000, help="samples whose guarantees are checked")
    samples = parser.parse_args().samples
    tokenizer, documents, width = material()
    rates = {}
    for window in WINDOWS:
        source = LongContext(documents, tokenizer, LongConfig(window=window))
        count = max(3, TOKENS // window)
        runs = [count * window * width / seconds(source, count) / 1e6 for _ in range(5)]
        rates[window] = {"median": median(runs), "min": min(runs), "max": max(runs)}
        print(f"window {window:>9,}: {median(runs):6.0f} MB/s of text ({min(runs):.0f} to {max(runs):.0f})")
    broken = {"span": 0, "quarters": 0, "answer": 0, "again": 0}
    source, window = LongContext(documents, tokenizer, LongConfig(window=4_096)), 4_096
    for index in range(samples):
        sample = source.sample(index)
        for placed in sample.tasks:
            broken["span"] += placed.span < window / 2
            broken["quarters"] += {4 * start // window for start, _ in placed.evidence} != {0, 1, 2, 3}
            broken["answer"] += placed.answer[0] <= max(start + length for start, length in placed.evidence)
        if index % 100 == 0:
            broken["again"] += not np.array_equal(sample.item.tokens, source.sample(index).item.tokens)
    print(f"{samples:,} samples: guarantees broken {broken}")
    save("long_context", {"megabytes_per_second": rates, "samples": samples, "broken": broken})


if __name__ == "__main__":
    main()
