"""How long does drawing a token from 163,840 logits take: sorted whole, as the plain loop does it, and in the engine?

    python benchmarks/draws.py [--short]

One thread, temperature 0.8, top-p 0.95. Logits are normal numbers times a scale: flat ones, where most ids are kept, and steep ones, as
a trained model gives. The plain loop and the whole sort draw the same ids; the engine draws by numbers of its own.
"""

import argparse

import torch
from machine import repeat, save
from torch import Tensor

from gnomon.model.generate import Sampling, draw
from gnomon.serve import request, sampler

VOCABULARY, TEMPERATURE, TOP_P = 163_840, 0.8, 0.95


def by_sorting(logits: Tensor, random: torch.Generator) -> int:
    """The draw by its definition."""
    probabilities, order = torch.softmax(logits / TEMPERATURE, -1).sort(descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities
    return int(order[torch.multinomial(torch.where(before < TOP_P, probabilities, 0.0), 1, generator=random)])


def main() -> None:
    """Measure the three in turn, for each steepness."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few repetitions; nothing is saved")
    short = parser.parse_args().short
    torch.set_num_threads(1)
    plain, served = Sampling(temperature=TEMPERATURE, top_p=TOP_P), request.Sampling(temperature=TEMPERATURE, top_p=TOP_P)
    found = {}
    for scale in (1, 2, 4, 8):
        logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0)) * scale
        randoms, row = [torch.Generator().manual_seed(0) for _ in range(2)], logits.numpy()[None]
        ways = {
            "sorted": lambda: by_sorting(logits, randoms[0]),  # noqa: B023
            "plain loop": lambda: draw(logits, plain, randoms[1]),  # noqa: B023
            "engine": lambda: sampler.sample(row, [sampler.Draw(row=0, step=0, sampling=served)]),  # noqa: B023
        }
        seconds = {name: repeat(way, runs=5 if short else 31, warm_up=2) for name, way in ways.items()}
        ratio = seconds["sorted"]["median"] / seconds["plain loop"]["median"]
        found[f"scale {scale}"] = {"seconds": seconds, "times_as_fast": ratio}
        taken = ", ".join(f"{name} {1000 * each['median']:.1f} ms" for name, each in seconds.items())
        print(f"scale {scale}: {taken}; the plain loop is {ratio:.1f} times as fast as the sort")
    if not short:
        save("draws", found)


if __name__ == "__main__":
    main()
