"""How long do a plan and a full solve take, knobs included? Questions like those of docs/planner.md, without start-up, caches emptied."""

import functools
import gc
import subprocess
import sys

from machine import described, repeat, save

from gnomon.plan.answer import ask, coster
from gnomon.plan.calibration import best_record
from gnomon.plan.hardware import Cluster
from gnomon.plan.solve import solve
from gnomon.plan.words import Question, question

QUESTIONS = {
    "plan, layout given": ("serve concurrency=16 tp=8 ep=8 pp=1 dp=1 dcp=1", "b300:8", "k3-2.8t"),
    "plan, layout searched": ("serve concurrency=16", "b300:8", "k3-2.8t"),
    "solve: four Macs, K3": ("serve", "m3-ultra:4", "k3-2.8t"),
    "solve: 1B in a week": ("train time=7d", "h200:8", "1B"),
    "solve: tonight, any size": ("train time=10h", "xeon-2core:1", None),
    "solve: any size, any number": ("train budget=$500", "h200", None),
    "solve: any number of devices": ("serve concurrency=16 speed=40", "h200", "k3-2.8t"),
}


def asked(text: str, hardware: str, model: str | None) -> Question:
    """The question of a command line."""
    cluster = Cluster.parse(hardware)
    return question(text.split(), (cluster.device, cluster.count if ":" in hardware else None), model)


def forget() -> None:
    """Empty every cache of the planner, so that each run counts and weighs anew."""
    for found in gc.get_objects():
        if isinstance(found, functools._lru_cache_wrapper) and str(found.__module__).startswith("gnomon."):
            found.cache_clear()


def main() -> None:
    """Measure each question; `plan` leaves the knobs out."""
    seconds = {}
    for name, words in QUESTIONS.items():
        def run(words: tuple[str, str, str | None] = words, name: str = name) -> None:
            forget()
            wanted = asked(*words)
            if name.startswith("plan"):
                solve(wanted, coster(best_record(wanted.device)))
            else:
                ask(wanted)
        seconds[name] = repeat(run, runs=5)
        median, low, high = (seconds[name][key] for key in ("median", "min", "max"))
        print(f"{name:30} {median:6.2f} s   ({low:.2f} to {high:.2f})")
    command = [sys.executable, "-m", "gnomon", "plan", "--hardware", "b300:8", "--model", "k3-2.8t", "--json"]
    seconds["the whole command"] = repeat(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL), runs=5)
    print(f"{'the whole command':30} {seconds['the whole command']['median']:6.2f} s")
    program = "import sys, gnomon.plan.answer, gnomon.plan.page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    save("planner_speed", {"seconds": seconds})


if __name__ == "__main__":
    described(__doc__)
    main()
