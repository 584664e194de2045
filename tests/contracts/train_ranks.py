"""A program for several ranks: they train the recipes that follow their number, one after another. Run by tests/journeys/test_meshes.py."""

import sys
from pathlib import Path

from ranks import start

from gnomon.train.loop import train
from gnomon.train.recipe import load


def work() -> None:
    """All recipes that were named."""
    for path in sys.argv[2:]:
        train(load(Path(path)), quiet=True)


if __name__ == "__main__":
    start(work, int(sys.argv[1]))
