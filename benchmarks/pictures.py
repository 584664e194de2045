"""Does a small model learn to see from scratch, and what does that cost its text?

The recipe `pictures` is trained, then its twin: the same text model without an eye, by the same optimiser with the same course of its rate,
on as many tokens of the same text, 512 a step (the recipe has about as many a step over the run), and nothing else. Both go on where they
stopped. Shown are the shares of held-out pictures that are answered right to the last letter, by step and at the end, and the loss on
held-out text of both. Targets: lines of twelve letters and scenes at 90 %, text within 2 % of the twin's. A figure shows how reading grew.

`python benchmarks/pictures.py [--out runs/see] [--threads 1]`
`python benchmarks/pictures.py --done runs/pictures runs/pictures-text [--seconds 1300 300]`      # of runs that are there already
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import matplotlib
import torch
from machine import save

from gnomon.train.loop import train
from gnomon.train.recipe import load

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "pictures.toml"
TWIN = ("model.vision=none", "data.sources=[{max_bytes=12000000,pieces=256}]", "batch_tokens=512")
"""What the twin changes: one row a step, until it has seen as much text. It gets the run's tokenizer besides, so that losses compare."""

TARGET, LEVEL = 0.9, 0.02


def trained(folder: Path, changes: tuple[str, ...]) -> float:
    """Train a run; processor seconds of this process."""
    began = time.process_time()
    train(load(RECIPE, (f"run={folder}", *changes)))
    return time.process_time() - began


def text_tokens(folder: Path) -> int:
    """Tokens of text that a finished run of the recipe has seen: its first source is the text, and shares of tokens are exact."""
    stages, seen, before = load(folder / "recipe.toml").stages, 0.0, 0
    for row in rows(folder):
        weights = stages[row["stage"]].weights or (1.0,)
        seen, before = seen + (row["tokens"] - before) * weights[0] / sum(weights), row["tokens"]
    return round(seen)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Metrics of a run, step by step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def result(folder: Path) -> dict[str, Any]:
    """What a finished run says of held-out text and pictures, and its evaluations on the way."""
    steps = rows(folder)
    last = json.loads((folder / "held_out.json").read_text(encoding="utf-8"))[0]
    points = [{"step": row["step"], "held_out_loss": row["held_out_loss"],
               **{name.removeprefix("pictures_"): share for name, share in row.items() if name.startswith("pictures_")}}
              for row in steps if "held_out_loss" in row]
    return {"steps": steps[-1]["step"], "tokens": steps[-1]["tokens"], "text_tokens": text_tokens(folder),
            "held_out_loss": last["loss"], "bits_per_byte": last["bits_per_byte"],
            "pictures": {kind: {"right": share, "asked": asked} for kind, (share, asked) in last["pictures"].items()}, "points": points}


def draw(found: dict[str, Any], path: Path) -> None:
    """Shares of held-out pictures answered right, by step."""
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.4), layout="constrained")
    for kind, end in found["pictures"].items():
        steps = [point["step"] for point in found["points"]] + [found["steps"]]
        shares = [point[kind] for point in found["points"]] + [end["right"]]
        axes.plot(steps, [100 * share for share in shares], marker="o", markersize=3, label=kind)
    axes.axhline(100 * TARGET, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="step", ylabel="% of held-out pictures right", ylim=(-3, 103))
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Train, print, save, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/see"), help="folder of the two runs")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--done", type=Path, nargs=2, metavar=("RUN", "TWIN"), help="read these runs instead of training")
    parser.add_argument("--seconds", type=float, nargs=2, metavar=("RUN", "TWIN"), help="processor seconds that they took, if known")
    parsed = parser.parse_args()
    torch.set_num_threads(parsed.threads)
    folders = parsed.done or (parsed.out / "pictures", parsed.out / "text")
    seconds = parsed.seconds or (None, None)
    if not parsed.done:
        first = trained(folders[0], ())
        twin = (*TWIN, f"data.tokenizer={folders[0] / 'tokenizer'}", f"stages=[{{context=512,tokens={text_tokens(folders[0])}}}]")
        seconds = (first, trained(folders[1], twin))
    found = {name: result(folder) | {"processor_seconds": taken}
             for name, folder, taken in zip(("pictures", "text"), folders, seconds, strict=True)}
    for kind, end in found["pictures"]["pictures"].items():
        print(f"{kind:8} {end['right']:6.1%} of {end['asked']}")
    more = found["pictures"]["held_out_loss"] / found["text"]["held_out_loss"] - 1
    print(f"held-out text: {found['pictures']['held_out_loss']:.4f} nats, the twin {found['text']['held_out_loss']:.4f}: {more:+.1%}")
    met = {kind: found["pictures"]["pictures"][kind]["right"] >= TARGET for kind in ("line", "scene")} | {"text": more <= LEVEL}
    print(f"targets met: {met}")
    save("pictures", found | {"text_loss_above_twin": more, "met": met})
    draw(found["pictures"], ROOT / "docs" / "results" / "pictures.svg")


if __name__ == "__main__":
    main()
