"""The same training on four machines: what it takes, what it costs, and which wall stops each. No torch, a second or two."""

from gnomon.errors import ConfigError
from gnomon.plan.answer import ask
from gnomon.plan.hardware import Cluster
from gnomon.plan.quantity import written
from gnomon.plan.words import question

WORDS = ["train", "tokens=2B", "context=2048", "batch=262144"]

for name in ("m3-ultra:1", "rtx-4090:1", "h100:8", "gb300:64"):
    cluster = Cluster.parse(name)
    try:
        answer = ask(question(WORDS, (cluster.device, cluster.count), "100M"))
    except ConfigError as error:
        print(f"{name:12} {error}")
        continue
    best = answer.best
    if best is None:
        print(f"{name:12} no, because {answer.plan.refusal.because}")
        continue
    time, step = best.metrics["time"], best.steps["training"]
    money = written(best.metrics["budget"].value, "$") if "budget" in best.metrics else "owned"
    print(f"{name:12} {written(time.value, 's'):>14} (80 %: {written(time.low, 's')} to {written(time.high, 's')}), {money:>8}, "
          f"{best.choice.layout}, wall: {step.wall}")
