"""Measured serving times of ten public models, as demands that the planner's step formula prices.

The rows are `silicon_sample.csv` inside the package `aiconfigurator-core` 0.12.0 (Apache-2.0): dated measurements with time to first
token and time per output token. Shapes are those of the models' published configurations. What a row does not say is taken as follows:

* requests in flight are the `silicon_concurrency` of its source; the column `batch_size` is that divided by a wrong number of groups;
* equal `moe_tp_size` and `moe_ep_size` above 1 are one axis written twice: TP8 EP8 on 8 devices, not on 64;
* rows with more than 8 devices of one axis are sums over separate prefill and decode servers, and rows with 0 groups are several servers:
  neither can be priced, both are left out;
* the date is that of the measurement, where one is given;
* caches are bf16, and fp8 under TensorRT-LLM for quantised models; NVFP4 and INT4 mixtures keep other weights in bf16, as their published
  exclusion lists do.
"""

import csv
import io
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from gnomon.errors import ConfigError
from gnomon.plan.hardware import Device, device
from gnomon.plan.step import Demand

MEMBER = "aiconfigurator_core/systems/silicon_sample.csv"
SYSTEMS = {"b200_sxm": "b200", "h200_sxm": "h200", "h100_sxm": "h100", "gb200": "gb200", "b300_sxm": "b300", "gb300": "gb300"}
BYTES = {"": 2.0, "bf16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 4.5 / 8, "int4_wo": 4.5 / 8, "mxfp4": 4.25 / 8}
ARITHMETIC = {"": "bf16", "bf16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4", "int4_wo": "bf16", "mxfp4": "bf16"}
USABLE_MEMORY = 0.9


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Routed experts of a family, and parameters of its shared ones."""

    layers: int
    inner: int
    pool: int
    chosen: int
    shared: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a published configuration says, in parameters, values and FLOPs."""

    layers: int
    hidden: int
    vocabulary: int
    attention: float          # parameters of all mixers
    cached: float             # values per token in the cache that grows
    pair: float               # FLOPs per decoded token and cached token
    prefill_pair: float       # the same for prompt tokens
    dense: float = 0.0        # parameters of dense feed-forwards
    experts: Experts | None = None
    state_bytes: float = 0.0
    kv_heads: int | None = None   # none: one latent, which every tensor rank holds


def _mla(hidden: int, heads: int, query: int, nope: int, value: int) -> float:
    return hidden * query + query * heads * (nope + 64) + hidden * 576 + 512 * heads * (nope + value) + heads * value * hidden


def _gqa(hidden: int, heads: int, kv_heads: int, width: int, gates: int = 0) -> float:
    return hidden * heads * width * (2 + gates) + 2 * hidden * kv_heads * width


def _grouped(layers: int, hidden: int, vocabulary: int, shape: tuple[int, int, int], **rest: Any) -> Family:
    """A family with grouped-query attention of shape (heads, kv heads, width) in `attending` of its layers."""
    heads, kv_heads, width = shape
    attending = rest.pop("attending", layers)
    pair = float(attending * 4 * heads * width)
    return Family(layers=layers, hidden=hidden, vocabulary=vocabulary, attention=rest.pop("attention", layers * _gqa(hidden, *shape)),
                  cached=attending * 2 * kv_heads * width, pair=pair, prefill_pair=pair, kv_heads=kv_heads, **rest)


def _gated_delta(hidden: int) -> float:
    return hidden * (2 * 16 * 128 + 2 * 64 * 128 + 2 * 64) + 64 * 128 * hidden


FAMILIES = {
    "deepseek-v3": Family(layers=61, hidden=7168, vocabulary=129280, attention=61 * _mla(7168, 128, 1536, 128, 128), cached=61 * 576,
                          pair=61 * 2 * 128 * 1088, prefill_pair=61 * 2 * 128 * 320, dense=3 * 3 * 7168 * 18432,
                          experts=Experts(layers=58, inner=2048, pool=256, chosen=8, shared=58 * 3 * 7168 * 2048)),
    "kimi-k2.5": Family(layers=61, hidden=7168, vocabulary=163840, attention=61 * _mla(7168, 64, 1536, 128, 128), cached=61 * 576,
                        pair=61 * 2 * 64 * 1088, prefill_pair=61 * 2 * 64 * 320, dense=3 * 7168 * 18432,
                        experts=Experts(layers=60, inner=2048, pool=384, chosen=8, shared=60 * 3 * 7168 * 2048)),
    # Sparse attention: every cached token is scored by 32 index heads of width 128; few are attended to.
    "glm-5": Family(layers=78, hidden=6144, vocabulary=154880, attention=78 * (_mla(6144, 64, 2048, 192, 256) + 6144 * 128 + 2048 * 4096),
                    cached=78 * (576 + 128), pair=78 * 2 * 32 * 128, prefill_pair=78 * 2 * 64 * 512, dense=3 * 3 * 6144 * 12288,
                    experts=Experts(layers=75, inner=2048, pool=256, chosen=8, shared=75 * 3 * 6144 * 2048)),
    "minimax-m2.5": _grouped(62, 3072, 200064, (48, 8, 128), experts=Experts(layers=62, inner=1536, pool=256, chosen=8)),
    # Every other layer sees 128 tokens only.
    "gpt-oss-120b": _grouped(36, 2880, 201088, (64, 8, 64), attending=18, experts=Experts(layers=36, inner=2880, pool=128, chosen=4)),
    "llama-3.1-70b": _grouped(80, 8192, 128256, (64, 8, 128), dense=80 * 3 * 8192 * 28672),
    "llama-3.1-8b": _grouped(32, 4096, 128256, (32, 8, 128), dense=32 * 3 * 4096 * 14336),
    "qwen3-32b": _grouped(64, 5120, 151936, (64, 8, 128), dense=64 * 3 * 5120 * 25600),
    "qwen3-235b": _grouped(94, 4096, 151936, (64, 4, 128), experts=Experts(layers=94, inner=1536, pool=128, chosen=8)),
    "qwen3.5-397b": _grouped(60, 4096, 248320, (32, 2, 256), attending=15, state_bytes=45 * 64 * 128 * 128 * 4,
                             attention=15 * _gqa(4096, 32, 2, 256, gates=1) + 45 * _gated_delta(4096),
                             experts=Experts(layers=60, inner=1024, pool=512, chosen=10, shared=60 * 3 * 4096 * 1024)),
}
MODELS = {"DeepSeek": "deepseek-v3", "Kimi-K2.5": "kimi-k2.5", "GLM-5": "glm-5", "MiniMax-M2.5": "minimax-m2.5",
          "gpt-oss": "gpt-oss-120b", "3.1-70B": "llama-3.1-70b", "3.1-8B": "llama-3.1-8b", "Qwen3-32B": "qwen3-32b",
          "Qwen3-235B": "qwen3-235b", "Qwen3.5-397B": "qwen3.5-397b"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement: a server's layout, its load, and what it took."""

    model: str
    device: Device
    backend: str
    version: str
    formats: tuple[str, str]      # of the experts (or of all, without experts), of the rest
    devices: int
    tensor: int                   # devices that share one attention group
    concurrency: int
    prompt: int
    output: int
    seconds_per_token: float
    seconds_to_first: float
    date: str                     # YYYY-MM, empty where the source has none

    @property
    def configuration(self) -> tuple[Any, ...]:
        """What makes two measurements repetitions of each other."""
        return (self.model, self.device.name, self.backend, self.formats, self.devices, self.tensor, self.concurrency, self.prompt,
                self.output)

    @property
    def group(self) -> tuple[str, str, str]:
        """Model, system and backend: what one calibration is for."""
        return self.model, self.device.name, self.backend


def read(package: Path | None = None) -> list[Row]:
    """The usable rows with both times, from an installed package or a downloaded wheel."""
    table = csv.DictReader(io.StringIO(_text(package)))
    return [row for raw in table if raw["mode"] == "agg" for row in _row(raw)]


def _text(package: Path | None) -> str:
    if package is not None:
        with zipfile.ZipFile(package) as wheel:
            return wheel.read(MEMBER).decode()
    spec = find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("the measurements are in the package aiconfigurator-core; `pip download --no-deps aiconfigurator-core==0.12.0` "
                          "and pass the wheel with --package")
    return (Path(spec.submodule_search_locations[0]) / "systems" / "silicon_sample.csv").read_text(encoding="utf-8")


def _row(raw: dict[str, str]) -> Iterator[Row]:
    tensor, groups = int(raw["tp_size"]), int(raw["attention_dp_size"] or 1)
    cut, spread = int(raw["moe_tp_size"] or 1), int(raw["moe_ep_size"] or 1)
    in_flight = re.search(r"concurrency=(\d+)", raw["silicon_data_source"])
    if in_flight is None or not groups or not cut or (tensor > 8 and tensor != cut * spread) or (tensor > 8 and cut != spread):
        return
    if cut == spread > 1 and tensor * groups >= cut * spread:
        devices, tensor = cut, cut if groups == 1 else 1
    elif groups > 1 and tensor == groups and spread == tensor * groups:
        devices, tensor = tensor, 1
    else:
        devices = max(tensor * groups, cut * max(spread, 1))
    model = next(name for part, name in MODELS.items() if part in raw["model_path"])
    experts, rest = raw["moe_quant_mode"], raw["gemm_quant_mode"]
    measured = re.search(r"measured=(\d{4}-\d\d)", raw["silicon_data_source"])
    if model == "gpt-oss-120b":
        experts, rest = "mxfp4" if experts == "nvfp4" else experts, "bf16"
    elif FAMILIES[model].experts is not None and rest in ("nvfp4", "int4_wo"):
        rest = "bf16"
    yield Row(model=model, device=device(SYSTEMS[raw["system"]]), backend=raw["backend"], version=raw["backend_version"],
              formats=(experts, rest), devices=devices, tensor=tensor, concurrency=int(in_flight[1]), prompt=int(raw["isl"]),
              output=int(raw["osl"]), seconds_per_token=float(raw["silicon_tpot_ms"]) / 1e3,
              seconds_to_first=float(raw["silicon_ttft_ms"]) / 1e3, date=measured[1] if measured else "")


def demand(row: Row) -> Demand:
    """What one decode step asks for in a steady state: each sequence that ends is followed by another's prompt."""
    family, groups = FAMILIES[row.model], row.devices // row.tensor
    experts, rest_bytes = family.experts, BYTES[row.formats[1]]
    machine, context = row.device, row.prompt + row.output / 2
    cache_bytes = 1.0 if row.backend == "trtllm" and row.formats[0] not in ("", "bf16") else 2.0
    per_token = family.cached * cache_bytes / (min(row.tensor, family.kv_heads) if family.kv_heads else 1)
    shared = experts.shared if experts else 0.0
    head = family.vocabulary * family.hidden / row.tensor
    rest = (family.attention + family.dense + shared) / row.tensor
    expert_values = 3 * family.hidden * experts.inner * experts.layers if experts else 0.0     # of one expert in every layer
    pool_bytes = expert_values * experts.pool * BYTES[row.formats[0]] / row.devices if experts else 0.0
    free = USABLE_MEMORY * machine.memory_bytes - rest * rest_bytes - 4 * head - pool_bytes
    fits = max(1.0, free / (per_token * context))
    sequences = min(row.concurrency / groups, fits)
    prompt_tokens = sequences * row.prompt / row.output
    touched = 1 - (1 - experts.chosen / experts.pool) ** row.concurrency if experts else 0.0
    expert_flops = 2 * expert_values * experts.chosen * groups / row.devices if experts else 0.0
    products = 2 * rest / machine.peak(ARITHMETIC[row.formats[1]]) + expert_flops / machine.peak(ARITHMETIC[row.formats[0]])
    bf16, ranks, collectives = machine.peak("bf16"), row.devices, 2 * family.layers
    moved = collectives * (sequences + prompt_tokens) * family.hidden * 2 * 2 * (ranks - 1) / ranks
    return Demand(
        layers=family.layers, expert_layers=family.layers if experts else 0, sequences=sequences,
        hops=collectives * float(np.log2(ranks)), link=moved / machine.scale_up_bandwidth,
        weights=(rest * rest_bytes + 2 * head + pool_bytes * touched) / machine.bandwidth,
        cache=sequences * (context * per_token + 2 * family.state_bytes / row.tensor) / machine.bandwidth,
        products=sequences * (products + 2 * head / bf16), attention=sequences * context * family.pair / row.tensor / bf16,
        prefill=prompt_tokens * (products + row.prompt / 2 * family.prefill_pair / row.tensor / bf16))


def prompt_demand(row: Row) -> Demand:
    """What reading one prompt asks for, by itself."""
    family, groups = FAMILIES[row.model], row.devices // row.tensor
    alone = demand(Row(**{**vars(row), "concurrency": groups, "output": row.prompt}))     # one sequence, one prompt token per token
    return Demand(layers=alone.layers, expert_layers=alone.expert_layers, hops=alone.hops, link=alone.link / 2 * row.prompt,
                  weights=_held_bytes(family, row) / row.device.bandwidth, products=alone.prefill * row.prompt)


def _held_bytes(family: Family, row: Row) -> float:
    """Weights on a device: a prompt touches every expert."""
    experts = family.experts
    rest = (family.attention + family.dense + (experts.shared if experts else 0.0)) / row.tensor * BYTES[row.formats[1]]
    pool = 3 * family.hidden * experts.inner * experts.layers * experts.pool * BYTES[row.formats[0]] / row.devices if experts else 0.0
    return rest + pool


def columns(demands: list[Demand]) -> Any:
    """Many demands as one with arrays for fields, which the step formula takes as it takes numbers."""
    return Demand(**{field.name: np.array([getattr(item, field.name) for item in demands], float) for field in fields(Demand)})
