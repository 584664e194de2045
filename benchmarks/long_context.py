"""How fast are long samples built on one core, do their guarantees hold, and what does a small model learn from them?

Text of this machine fills windows of several lengths; the rate counts the bytes of text that the tokens stand for, in processor seconds.
Then samples are drawn and each guarantee is checked: first to last evidence at least half a window apart, evidence in every quarter, the
answer at the end, and the same sample again from its number.

With `--twins` the recipe `long-small` is trained, and with the same budget three twins: without synthesis, of KDA layers alone, of latent
attention alone. All are asked about held-out windows up to four times as long as they were trained on; one picture shows them together.

`python benchmarks/long_context.py [--samples 100000]`
`python benchmarks/long_context.py --twins [--out runs/long] [key=value …]`
"""

import argparse
import time
from pathlib import Path
from statistics import median

import matplotlib
import numpy as np
from machine import RESULTS, save

from gnomon.data.long_context import LongConfig, LongContext
from gnomon.data.machine_text import default_corpus
from gnomon.data.tokenizer import Tokenizer, train_tokenizer
from gnomon.train.evaluate import HeldOut
from gnomon.train.loop import train
from gnomon.train.recipe import load

WINDOWS = (4_096, 16_384, 131_072, 1_048_576)
TOKENS = 4_000_000   # of each measurement

RECIPE = Path(__file__).parents[1] / "recipes" / "long-small.toml"
TWINS = {
    "hybrid": (),
    "hybrid, without synthesis": ("stages=[{context=512,steps=250,weights=[1,0]},{context=1024,steps=30,weights=[1,0]},"
                                  "{context=4096,steps=40,weights=[1,0]}]",),
    "KDA alone": ('model.layer_pattern=["kda"]',),
    "latent attention alone": ('model.layer_pattern=["mla"]',),
}
"""What each twin changes in the recipe; the one without synthesis has its source at weight 0, so that it is asked the same."""


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


def twins(out: Path, overrides: list[str]) -> None:
    """Train all twins, print and save what they answer, draw it."""
    found: dict[str, dict[str, object]] = {}
    for name, changes in TWINS.items():
        folder = out / name.replace(" ", "-").replace(",", "")
        began = time.process_time()
        summary = train(load(RECIPE, (f"run={folder}", f"data.cache={out / 'data'}", *changes, *overrides)))
        seconds = time.process_time() - began
        found[name] = {"processor_seconds": seconds, "steps": summary.steps, "tokens": summary.tokens,
                       "by_context": [result.row() for result in summary.held_out]}
        for result in summary.held_out:
            print(f"{name:26} {result.context:>7,} {shown(result)}  ({seconds:.0f} s)")
    save("long_context_twins", {"trained": 4_096, "twins": found})
    draw_twins(found, RESULTS / "long_context_twins.svg")


def shown(result: HeldOut) -> str:
    """Whole answers and single pieces, as shares."""
    pieces = sum(count for *_, count in result.distances)
    right = sum(share * count for *_, share, count in result.distances)
    return f"answers {result.answers or 0:6.1%}  pieces {right / pieces if pieces else 0:6.1%}  loss {result.loss:.3f}"


def draw_twins(found: dict[str, dict[str, object]], path: Path) -> None:
    """Whole answers right, by length of window."""
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name, each in found.items():
        rows = [row for row in each["by_context"] if row["answers"] is not None]  # type: ignore[attr-defined]
        axes.plot([row["context"] for row in rows], [100 * row["answers"] for row in rows], marker="o", label=name)
    axes.axvline(4_096, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="tokens of the window (dotted: the longest trained on)", ylabel="% of answers right", ylim=(-3, 103))
    axes.set_xscale("log", base=2)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, check, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000, help="samples whose guarantees are checked")
    parser.add_argument("--twins", action="store_true", help="train the recipe and its twins instead")
    parser.add_argument("--out", type=Path, default=Path("runs/long"), help="folder of the twins' runs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields of the recipe to change in all twins")
    parsed = parser.parse_args()
    if parsed.twins:
        twins(parsed.out, parsed.overrides)
        return
    samples = parsed.samples
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
