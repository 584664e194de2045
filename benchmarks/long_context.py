"""How fast are long samples built on one core, do their guarantees hold, and what does a small model learn from them?

Text of this machine fills windows of several lengths; the rate counts the bytes of text that the tokens stand for, in processor seconds, no
sample twice. Then samples are drawn and each guarantee is checked: first to last evidence at least half a window apart, evidence in every
quarter, the answer at the end, and the same sample again from its number.

With `--twins` the recipe `long-small` is trained, and with the same budget three twins: without synthesis, of KDA layers alone, of latent
attention alone. All are asked about held-out windows up to four times as long as they were trained on; one picture shows them together.

`python benchmarks/long_context.py [--samples 100000]`
`python benchmarks/long_context.py --twins [--out runs/long] [--only hybrid] [key=value …]`
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
import numpy as np
from machine import save

from gnomon.data.long_context import LongConfig, LongContext
from gnomon.data.machine_text import default_corpus
from gnomon.data.tokenizer import Tokenizer, train_tokenizer
from gnomon.train.loop import train
from gnomon.train.recipe import TrainRecipe, load

WINDOWS = (4_096, 16_384, 131_072, 1_048_576)
TOKENS = 4_000_000   # of each measurement

TRAINED = 4_096      # tokens of the longest window that the twins are trained on
RESULT = "result.json"  # in a twin's folder when it is done

RECIPE = Path(__file__).parents[1] / "recipes" / "long-small.toml"
PLAIN = "hybrid, without synthesis"
TWINS = {
    "hybrid": (),
    PLAIN: (),
    "KDA alone": ('model.layer_pattern=["kda"]',),
    "latent attention alone": ('model.layer_pattern=["mla"]',),
}
"""What each twin changes in the recipe; in every stage of `PLAIN` the text alone has weight, and it is asked the same."""


def material(size: int = 3_000_000) -> tuple[Tokenizer, list[np.ndarray], float]:
    """A tokenizer, documents, and bytes per token."""
    texts = [document.text for document in default_corpus(size)]
    tokenizer = train_tokenizer(texts, 8_192)
    documents = [np.array([*ids, tokenizer.document_end_id]) for ids in tokenizer.encode_batch(texts)]
    return tokenizer, documents, sum(len(text.encode()) for text in texts) / sum(map(len, documents))


def seconds(source: LongContext, first: int, count: int) -> float:
    """Processor seconds of `count` samples from number `first` on."""
    began = time.process_time()
    for index in range(first, first + count):
        source.sample(index)
    return time.process_time() - began


def twins(out: Path, names: list[str], overrides: list[str]) -> None:
    """Train the named twins that are not trained yet, print and save what all that are there answer, draw it."""
    found: dict[str, dict[str, Any]] = {}
    for name, changes in TWINS.items():
        folder = out / name.replace(" ", "-").replace(",", "")
        if name in names and not (folder / RESULT).is_file():
            began = time.process_time()
            recipe = load(RECIPE, (f"run={folder}", f"data.cache={out / 'data'}", *changes, *overrides))
            summary = train(without_synthesis(recipe) if name == PLAIN else recipe)
            result = {"processor_seconds": time.process_time() - began, "resumed_at": summary.resumed_at, "steps": summary.steps,
                      "tokens": summary.tokens, "by_context": [each.row() for each in summary.held_out]}
            (folder / RESULT).write_text(json.dumps(result), encoding="utf-8")
        if (folder / RESULT).is_file():
            found[name] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
            for row in found[name]["by_context"]:
                print(f"{name:26} {row['context']:>7,} {shown(row)}  ({found[name]['processor_seconds']:.0f} s)")
    save("long_context_twins", {"trained": TRAINED, "twins": found})
    draw_twins(found, Path(__file__).parents[1] / "docs" / "results" / "long_context_twins.svg")


def without_synthesis(recipe: TrainRecipe) -> TrainRecipe:
    """The same budget for the recipe's first source, which is plain text."""
    weights = (1.0, *[0.0] * (len(recipe.data.sources) - 1))
    return replace(recipe, stages=tuple(replace(stage, weights=weights) for stage in recipe.stages))


def shown(row: dict[str, Any]) -> str:
    """Whole answers and single pieces, as shares."""
    pieces = sum(count for *_, count in row["distances"])
    right = sum(share * count for *_, share, count in row["distances"])
    return f"answers {row['answers'] or 0:6.1%}  pieces {right / pieces if pieces else 0:6.1%}  loss {row['loss']:.3f}"


def draw_twins(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Whole answers right, by length of window."""
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    for size, (name, each) in zip((11, 11, 5, 5), found.items(), strict=False):  # what lies beneath another stays visible
        rows = [row for row in each["by_context"] if row["answers"] is not None]
        axes.plot([row["context"] for row in rows], [100 * row["answers"] for row in rows], marker="o", markersize=size, label=name)
    axes.axvline(TRAINED, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="tokens of the window (dotted: the longest trained on)", ylabel="% of answers right", ylim=(-3, 103))
    axes.set_xscale("log", base=2)
    axes.legend(fontsize=8, loc="center left")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, check, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000, help="samples whose guarantees are checked")
    parser.add_argument("--twins", action="store_true", help="train the recipe and its twins instead")
    parser.add_argument("--out", type=Path, default=Path("runs/long"), help="folder of the twins' runs")
    parser.add_argument("--only", action="append", choices=list(TWINS), help="train this twin only; may be given several times")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields of the recipe to change in all twins")
    parsed = parser.parse_args()
    if parsed.twins:
        twins(parsed.out, parsed.only or list(TWINS), parsed.overrides)
        return
    samples = parsed.samples
    tokenizer, documents, width = material()
    rates = {}
    for window in WINDOWS:
        source = LongContext(documents, tokenizer, LongConfig(window=window))
        count = max(3, TOKENS // window)
        runs = [count * window * width / seconds(source, run * count, count) / 1e6 for run in range(6)][1:]  # the first one learns words
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
