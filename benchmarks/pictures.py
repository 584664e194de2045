"""Does a small model learn to see from scratch, and what does that cost its text?

The recipe `pictures` is trained, and its twin on as much text without pictures, one after the other; both go on where they stopped. Shown
are the shares of held-out pictures that are answered right to the last letter, by step and at the end, and the loss on held-out text of
both. Targets: lines of twelve letters and scenes at 90 %, text within 2 % of the twin's. A figure shows how reading grew.

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
TWIN = ("model.vision=none", "data.sources=[{max_bytes=12000000}]", "batch_tokens=512", "stages=[{context=512,tokens=892000}]")
"""What the twin changes: one row a step, until it has seen as much text. It gets the run's tokenizer besides, so that losses compare."""

TARGET, LEVEL = 0.9, 0.02


def trained(folder: Path, changes: tuple[str, ...]) -> float:
    """Train a run; processor seconds of this process."""
    began = time.process_time()
    train(load(RECIPE, (f"run={folder}", *changes)))
    return time.process_time() - began


def result(folder: Path) -> dict[str, Any]:
    """What a finished run says of held-out text and pictures, and its evaluations on the way."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = json.loads((folder / "held_out.json").read_text(encoding="utf-8"))[0]
    points = [{"step": row["step"], "held_out_loss": row["held_out_loss"],
               **{name.removeprefix("pictures_"): share for name, share in row.items() if name.startswith("pictures_")}}
              for row in rows if "held_out_loss" in row]
    return {"steps": rows[-1]["step"], "tokens": rows[-1]["tokens"], "held_out_loss": last["loss"], "bits_per_byte": last["bits_per_byte"],
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
        twin = (*TWIN, f"data.tokenizer={folders[0] / 'tokenizer'}")
        seconds = tuple(trained(folder, changes) for folder, changes in zip(folders, ((), twin), strict=True))
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
