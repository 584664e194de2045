"""Which choices there are: layouts of a model over so many devices, numbers of devices, and the work that each copy gets.

What a question fixes stays fixed; the rest is tried. Read next: `solve.py`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from gnomon.errors import ConfigError
from gnomon.model.config import ModelConfig
from gnomon.plan.choice import Choice, Work
from gnomon.plan.families import released
from gnomon.plan.hardware import Cluster, Device
from gnomon.plan.laws import sizes
from gnomon.plan.words import Question
from gnomon.plan.workload import RL, Layout, Precision, Serving, Training

MOST_DEVICES = 4096
TRAINING_BYTES = 16
"""Bytes per parameter of weights, gradients, master weights and momentum."""

LONG_CONTEXT = 32768
"""From here on cutting a sequence over ranks is tried in training."""


def cluster_of(device: Device, count: int) -> Cluster:
    """So many devices in as few domains as hold them. Raises `ConfigError` where they do not fill whole domains or have no network."""
    size = device.scale_up_size
    if count <= size:
        return Cluster(device=device, devices_per_domain=count)
    if count % size:
        raise ConfigError(f"{count} x '{device.name}' do not fill whole domains of {size}; use a multiple of {size}")
    return Cluster(device=device, devices_per_domain=size, domains=count // size)


def counts(question: Question) -> list[int]:
    """The numbers of devices to try: the one that was given, else 1, 2, 4 … within a domain and 1, 2, 4 … whole domains, up to a limit."""
    if question.devices is not None:
        return [question.devices]
    most = int(min(MOST_DEVICES, question.limit("devices") or MOST_DEVICES))
    size = question.device.scale_up_size
    domains = MOST_DEVICES if question.device.scale_out_bandwidth else 1
    inside = {2**n for n in range(size.bit_length()) if 2**n <= min(size, most)}
    return sorted(inside | {size * 2**n for n in range(domains.bit_length()) if size * 2**n <= most})


def precision_of(question: Question, model: ModelConfig) -> Precision:
    """The released formats (bf16 while training), except what the question sets; `ConfigError` for an unknown format."""
    base = released(model)
    if question.phase != "serve":
        base = replace(base, experts="bf16", rest="bf16")
    if not question.device.flops.get("bf16") and set(question.device.flops) == {"fp32"} and question.phase == "train":
        base = replace(base, experts="fp32", rest="fp32", activations="fp32")
    return replace(base, **question.precision)


def layouts(model: ModelConfig, count: int, question: Question) -> Iterator[Layout]:
    """The layouts that use all devices and that the model allows.

    Where the question fixes axes and nothing is possible, the reason is raised as `ConfigError`.
    """
    reason: ConfigError | None = None
    found = 0
    for axes in _axes(model, count, question):
        try:
            yield Layout(**axes).check(model, count)
            found += 1
        except ConfigError as error:
            reason = error
    if not found and question.layout:
        if reason is not None:
            raise reason
        Layout(**question.layout).check(model, count)
        said = ", ".join(f"{axis} {size}" for axis, size in question.layout.items())
        raise ConfigError(f"no layout with {said} fills {count} devices; leave an axis out, or change the number of devices")


def _axes(model: ModelConfig, count: int, question: Question) -> Iterator[dict[str, int]]:
    fixed = question.layout
    train = question.phase == "train"
    domain = min(count, question.device.scale_up_size)
    long = train and int(question.work.get("context", 0)) >= LONG_CONTEXT
    for tensor in _tried(fixed, "tensor", [d for d in _divisors(count) if d <= 2 * domain]):
        for context in _tried(fixed, "context", [1, 2, 4, 8] if long else [1]):
            for pipeline in _tried(fixed, "pipeline", _stages(model, count, question)):
                rest = count // (tensor * context * pipeline)
                if tensor * context * pipeline * rest != count or rest < 1:
                    if "data" not in fixed:
                        continue
                    rest = 1
                for data in _tried(fixed, "data", [rest]):
                    for expert in _tried(fixed, "expert", _expert_ranks(model, tensor, tensor * context * data)):
                        for shards, zero in _kept(fixed, tensor, data, train):
                            yield {"tensor": tensor, "context": context, "pipeline": pipeline, "data": data, "expert": expert,
                                   "kv_shards": shards, "zero": zero}


def _stages(model: ModelConfig, count: int, question: Question) -> list[int]:
    """Numbers of pipeline stages to try: none while all that training keeps fits twice over the devices, for stages only add a bubble."""
    if question.phase == "train" and TRAINING_BYTES * sizes(model)[1] < 0.5 * count * question.device.memory_bytes:
        return [1]
    return [d for d in _divisors(count) if d <= min(16, model.num_hidden_layers)]


def _kept(fixed: Mapping[str, int], tensor: int, data: int, train: bool) -> Iterator[tuple[int, int]]:
    """How caches are dealt, and what copies share out."""
    for shards in _tried(fixed, "kv_shards", [1] if train or tensor == 1 else [1, tensor]):
        for zero in _tried(fixed, "zero", [1, 3] if train and data > 1 else [0]):
            yield shards, zero


def _tried(fixed: Mapping[str, int], axis: str, sizes: list[int]) -> list[int]:
    return [fixed[axis]] if axis in fixed else sizes


def _expert_ranks(model: ModelConfig, tensor: int, stage: int) -> list[int]:
    if model.moe is None:
        return [1]
    return sorted({size for size in (tensor, stage) if model.moe.num_experts % size == 0}) or [1]


def _divisors(count: int) -> list[int]:
    return [d for d in range(1, count + 1) if count % d == 0]


def work_of(question: Question, model: ModelConfig, layout: Layout) -> Work:
    """What one copy of the model has to do: requests in flight are dealt over copies, a batch is made to fill them."""
    fields = dict(question.work)
    if question.phase == "serve":
        sessions = fields.pop("sessions", None)
        asked = Serving(**fields, sessions=None if sessions is None else max(fields["concurrency"], sessions))
        return asked.dealt(asked.concurrency, 1, layout.data)
    if question.phase == "rl":
        fields.setdefault("concurrency", max(1, math.ceil(fields["tasks"] * fields["group"] / layout.data)))
        return RL(**fields)
    fields.setdefault("tokens", reference_tokens(model))
    fields.setdefault("context", default_context(model))
    fields.setdefault("global_batch_tokens", default_batch(fields["tokens"], fields["context"]))
    least = fields["context"] * layout.data * fields.get("micro_batch", 1)
    if "global_batch_tokens" not in question.work:
        fields["global_batch_tokens"] = max(fields["global_batch_tokens"], least)
    if "tokens" in question.work and fields["tokens"] < fields["global_batch_tokens"]:
        raise ConfigError(f"'tokens' is {fields['tokens']:,}, less than one batch of {fields['global_batch_tokens']:,}; "
                          f"give more of them, or a smaller batch (batch=…, context=…)")
    return Training(**fields)


def reference_tokens(model: ModelConfig) -> int:
    """Twenty tokens per active parameter, the dense law's optimum: what stands for a training whose length is not given."""
    return 20 * sizes(model)[0]


def default_context(model: ModelConfig) -> int:
    """Tokens per sequence where none are given: 4,096, and 512 for models below 100 million active parameters."""
    return 4096 if sizes(model)[0] >= 1e8 else 512


def default_batch(tokens: float, context: int) -> int:
    """Tokens per optimiser step by 0.58 · tokens^0.571 (Step law, arXiv 2503.04715), as whole sequences."""
    return max(1, round(0.58 * tokens**0.571 / context)) * context


def choices(question: Question, model: ModelConfig, count: int, cluster: Cluster | None = None) -> list[Choice]:
    """Every way of doing the question's work with a model on so many devices. Raises `ConfigError` where the question allows none."""
    cluster = cluster or cluster_of(question.device, count)
    found, reason = [], None
    for layout in layouts(model, count, question):
        try:
            work = work_of(question, model, layout)
            if isinstance(work, Training):
                work.micro_batches(layout)
        except ConfigError as error:
            reason = error
            continue
        found.append(Choice(name=question.name, model=model, cluster=cluster, layout=layout,
                            precision=precision_of(question, model), work=work))
    if not found and reason is not None:
        raise reason
    return found
