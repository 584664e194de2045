"""This machine: what short measured runs say of it, as a hardware file and a calibration record of its own.

`calibrate` starts the measuring program in a process of its own, fits a record to what it prints, and writes both files. Predictions for
shapes that were not measured then go through the same formulas as those for a cluster. Read next: `calibration.py`.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Any

from gnomon.config import setting, to_toml
from gnomon.errors import ConfigError
from gnomon.model.config import ModelConfig, preset
from gnomon.plan.calibration import DEFAULT, FirstToken, Range, Record, TrainingStep, band, fit, fit_logarithms, record, wider
from gnomon.plan.cost import Deployment, decode, decode_demand
from gnomon.plan.hardware import HERE, Cluster, Device, HardwareFile, read_device, user_folder
from gnomon.plan.quantity import Estimate, exact
from gnomon.plan.step import Coefficients, Demand, as_table, seconds
from gnomon.plan.training import TrainingDemand, train, training_demand, whole_step
from gnomon.plan.workload import Layout, Precision, Training

DRAWN = (2048, 4096, 8192, 32768)
"""Vocabularies for which drawing a token is timed."""

SAMPLED = 48
"""Tokens over which sampling is timed."""

USUAL_SPREAD = 0.15
"""Band that a record of few shapes leans on: three shapes on two machines."""

EXPECTED_HERE = Coefficients(layer_seconds=1e-5, expert_layer_seconds=1e-5, sequence_seconds=5e-5, collective_seconds=1e-6,
                             link_efficiency=1.0, read_efficiency=0.7, cache_efficiency=0.5, compute_efficiency=0.2)
"""What one would expect of sampling on a CPU: a step is one call, and bytes decide."""

LIMIT_SECONDS = 120.0
"""After this long the measuring program is given up."""

FULL = Precision(experts="fp32", rest="fp32", kv="fp32", activations="fp32")
"""How models train and are sampled on a CPU unless a recipe says otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A small model and how it is run; `calibrates` tells those that records are fitted to from those that check them."""

    config: ModelConfig = setting(doc="the model")
    context: int = setting(512, "tokens per document, and of the prompt when sampling")
    batch_tokens: int = setting(2048, "tokens per optimiser step")
    calibrates: bool = setting(True, "whether a record is fitted to it")

    @property
    def work(self) -> Training:
        """The training that is timed."""
        return Training(tokens=self.batch_tokens, global_batch_tokens=self.batch_tokens, context=self.context,
                        micro_batch=self.batch_tokens // self.context, recompute="none")


def shapes() -> dict[str, Shape]:
    """Models of a few million parameters that differ in width, depth, experts, vocabulary and context."""
    def tiny(**changes: Any) -> ModelConfig:
        return preset("tiny", tuple(f"{key.replace('__', '.')}={value}" for key, value in changes.items()))

    small = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384, "moe__routed_expert_hidden_size": 64}
    wide = {"vocab_size": 2048, "hidden_size": 320, "intermediate_size": 896, "moe__routed_expert_hidden_size": 160,
            "moe__moe_intermediate_size": 128, "mixers__kda__num_heads": 6}
    return {
        "shallow": Shape(config=tiny(num_hidden_layers=4, **small), batch_tokens=1024, context=256),
        "deep": Shape(config=tiny(num_hidden_layers=12, **small), batch_tokens=1024, context=512),
        "wide": Shape(config=tiny(num_hidden_layers=4, **wide)),
        "long": Shape(config=tiny(num_hidden_layers=4, vocab_size=4096), context=2048),
        "many experts": Shape(config=tiny(num_hidden_layers=4, moe__num_experts=48, vocab_size=8192), context=256, batch_tokens=1024),
        "tiny": Shape(config=tiny(), calibrates=False, context=512, batch_tokens=2048),
        "middle": Shape(config=tiny(num_hidden_layers=6, vocab_size=4096, hidden_size=256, intermediate_size=768, moe__num_experts=24,
                                    moe__routed_expert_hidden_size=128), calibrates=False, context=1024, batch_tokens=2048),
        "stout": Shape(config=tiny(num_hidden_layers=5, vocab_size=3072, hidden_size=384, intermediate_size=1024,
                                   moe__moe_intermediate_size=96, moe__routed_expert_hidden_size=192, mixers__kda__num_heads=8),
                       calibrates=False, context=512, batch_tokens=1024),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibrated:
    """What a calibration came to: the two files, what is in them, and how long it took."""

    hardware: Path
    record: Path
    device: Device
    made: Record
    seconds: float


def calibrate(folder: Path | None = None) -> Calibrated:
    """Measure this machine and write `hardware/here.toml` and `records/here.toml` into a folder, by default the user's own.

    Raises `ConfigError` where the measuring program cannot run or the folder cannot be written.
    """
    found = measured([])
    place = folder or user_folder()
    hardware, records = place / "hardware" / f"{HERE}.toml", place / "records" / f"{HERE}.toml"
    for path in (hardware, records):
        path.parent.mkdir(parents=True, exist_ok=True)
    hardware.write_text(to_toml(hardware_file(found)), encoding="utf-8")
    device = read_device(hardware)
    chosen = [shape for shape in shapes().values() if shape.calibrates]
    made = fitted(device, chosen, found)
    records.write_text(to_toml(made), encoding="utf-8")
    return Calibrated(hardware=hardware, record=records, device=device, made=made, seconds=found["seconds"])


def measured(names: Sequence[str]) -> dict[str, Any]:
    """What the measuring program prints for shapes by name, or for all that calibrate."""
    environment = {"GOMP_SPINCOUNT": "3000", "THP_MEM_ALLOC_ENABLE": "1", **os.environ}  # as the command line sets them
    try:
        done = subprocess.run([sys.executable, "-m", "gnomon.measure", *names], capture_output=True, text=True, check=False,
                              timeout=LIMIT_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the measurement took longer than {LIMIT_SECONDS:.0f} s; is the machine busy? "
                          "Try again when it is not") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"the measuring program stopped: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def hardware_file(found: Mapping[str, Any]) -> HardwareFile:
    """The measured machine as a hardware file."""
    machine = found["machine"]
    return HardwareFile(
        title=f"this machine: {machine['processor']}, {machine['cores']} cores", date=date.today().isoformat(),
        source=f"measured by gnomon plan --calibrate: {fingerprint(machine)}",
        compute={name: f"{rate / 1e9:.1f} GFLOP/s" for name, rate in found["flops"].items()},
        memory=f"{machine['memory_bytes'] / 2**30:.2f} GiB", bandwidth=f"{found['read_bytes_per_second'] / 1e9:.2f} GB/s",
        notes=f"a small operator takes {found['operator_seconds'] * 1e6:.2g} us")


def fingerprint(machine: Mapping[str, Any]) -> str:
    """What measurements hold for, in one line."""
    return (f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, {machine['system']}, "
            f"torch {machine['torch']}, {'C++' if machine['library'] else 'no C++'} kernels")


def fitted(device: Device, chosen: Sequence[Shape], found: Mapping[str, Any]) -> Record:
    """The record of measured shapes; its bands are the misses on each shape of a fit to the others, leaning on what is usual."""
    start = replace(record(DEFAULT), drawing={size: float(f"{taken:.4g}") for size, taken in found["drawing"].items()}, drift=0.0)
    plans = [_plan(device, shape, start) for shape in chosen]
    steps = [_sampled(plan, shape) for plan, shape in zip(plans, chosen, strict=True)]
    left = [max(0.2 * taken, taken - start.draw_seconds(shape.config.vocab_size))
            for taken, shape in zip(found["sampling"], chosen, strict=True)]
    trained = [training_demand(plan, shape.work) for plan, shape in zip(plans, chosen, strict=True)]
    sampling, training = _fit_sampling(steps, left), _fit_training(trained, found["training"])
    others = [[j for j in range(len(chosen)) if j != i] for i in range(len(chosen))]
    missed = [math.log(float(seconds(steps[i], as_table(_fit_sampling([steps[j] for j in rest], [left[j] for j in rest])))) / left[i])
              for i, rest in enumerate(others)]
    again = [_fit_training([trained[j] for j in rest], [found["training"][j] for j in rest]) for rest in others]
    learnt = [math.log(sum(whole_step(trained[i], as_table(again[i])).values()) / found["training"][i]) for i in range(len(chosen))]
    spread, training_spread = band(missed, USUAL_SPREAD, strength=5.0), band(learnt, USUAL_SPREAD, strength=5.0)
    return replace(
        start, title="this machine", stack="gnomon", fabric="any", devices=(HERE,), date=date.today().isoformat(), rows=2 * len(chosen),
        source=f"gnomon plan --calibrate: {len(chosen)} small models, trained and sampled", machine=fingerprint(found["machine"]),
        spread=round(spread, 3), spread_beyond=round(max(1.0, wider(spread)), 3), training_spread=round(training_spread, 3),
        range=Range(ranks=1, sequences=1, context=8192), coefficients=sampling, training_step=training,
        first_token=FirstToken(base_seconds=1e-3, wait_steps=0.0, compute_efficiency=min(1.0, training.product_efficiency),
                               link_efficiency=1.0, spread=1.0))


def _plan(device: Device, shape: Shape, found: Record) -> Deployment:
    alone = Cluster(device=device, devices_per_domain=1)
    return Deployment(config=shape.config, cluster=alone, layout=Layout(), precision=FULL, record=found)


def _sampled(plan: Deployment, shape: Shape) -> Demand:
    """A step of sampling halfway through what is timed."""
    return decode_demand(plan, 1.0, shape.context + SAMPLED / 2)


def _fit_sampling(steps: Sequence[Demand], taken: Sequence[float]) -> Coefficients:
    joined = Demand(**{field.name: _array([getattr(step, field.name) for step in steps]) for field in fields(Demand)})
    return _rounded(fit(joined, taken, prior=EXPECTED_HERE, looseness=0.7, weight=0.05))


def _fit_training(steps: Sequence[TrainingDemand], taken: Sequence[float]) -> TrainingStep:
    joined = TrainingDemand(**{field.name: _array([getattr(step, field.name) for step in steps]) for field in fields(TrainingDemand)})
    expected = as_table(TrainingStep())
    found = fit_logarithms(lambda values: sum(whole_step(joined, dict(zip(expected, values, strict=True))).values()), taken,
                           list(expected.values()), [1.0, 0.3, 0.3, 0.7, 0.5], most=[math.inf, 1.2, 1.2, 1.2, 1.2], weight=0.05)
    return TrainingStep(**{name: float(f"{value:.4g}") for name, value in zip(expected, found, strict=True)})


def _array(values: Sequence[float]) -> Any:
    import numpy as np

    return np.array(values, float)


def _rounded(found: Coefficients) -> Coefficients:
    return Coefficients(**{name: float(f"{value:.4g}") for name, value in as_table(found).items()})


def predicted(device: Device, made: Record, shape: Shape) -> tuple[Estimate, Estimate]:
    """Tokens per second that a shape trains at, and that one sequence of it is sampled at."""
    plan = _plan(device, shape, made)
    pace = decode(plan, 1.0, shape.context + SAMPLED / 2).total
    return train(plan, shape.work).tokens_per_second, replace(exact(1.0, "token") / pace, unit="token/s")
