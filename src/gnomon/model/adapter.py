"""Low-rank adapters in the layout of PEFT: what one model knows beyond another, in a small part of its size (LoRA, arXiv 2106.09685).

An adapter adds `scale B A` to linear maps of a base, `scale` = `lora_alpha` / `r`. Its folder has `adapter_config.json` and
`adapter_model.safetensors`, whose names are those of the released layout, routed experts one by one. What no product of two thin matrices
can say (vectors, convolutions) stands beside them in `adapter_rest.safetensors`, as plain differences; other readers leave it out.
`difference` makes an adapter of two models. Read next: `weights.py`, whose slots it fills.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gnomon.errors import CheckpointError, ConfigError
from gnomon.model.transformer import Transformer
from gnomon.model.weights import PREFIX, Slot, slots

CONFIG, WEIGHTS, REST = "adapter_config.json", "adapter_model.safetensors", "adapter_rest.safetensors"
OUTER = "base_model.model."
LINEAR = (".lora_A.weight", ".lora_B.weight")
EMBEDDING = (".lora_embedding_A", ".lora_embedding_B")
"""Ends of names: A reads, B writes. An embedding's are transposed: its rows are looked up, not multiplied."""
WITHOUT = {"bias": ("none",), "fan_in_fan_out": (False,), "use_dora": (False,), "lora_bias": (False,), "modules_to_save": (None, [])}
"""Fields of a configuration, and the values of them that can be read."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pair:
    """`scale * b @ a` is added to a map [out, in]; `looked_up`: its transpose to an embedding [in, out]."""

    a: Float[Tensor, "r in"]
    b: Float[Tensor, "out r"]
    scale: float = 1.0
    looked_up: bool = False

    @property
    def delta(self) -> Tensor:
        """What is added, in fp32."""
        product = self.scale * (self.b.float() @ self.a.float())
        return product.T if self.looked_up else product


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adapter:
    """`pairs` by module, `rest` by tensor, both named as in the released layout without its family's prefix."""

    pairs: Mapping[str, Pair]
    rest: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """What is held."""
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.pairs.values()) + sum(t.nbytes for t in self.rest.values())

    @torch.no_grad()
    def apply(self, model: Transformer) -> None:
        """Add it to a model that has the base's weights. Raises `CheckpointError` for a module that the model lacks, before it adds any."""
        places = {name: (slot, tensor) for name, slot, tensor in _places(model)}
        plan: list[tuple[Tensor, Pair | Tensor]] = []
        parts: list[tuple[str, Pair | Tensor]] = [(f"{module}.weight", pair) for module, pair in self.pairs.items()]
        for name, part in [*parts, *self.rest.items()]:
            if name not in places:
                raise CheckpointError(f"the adapter changes {name}, which the model does not have; it belongs to another model")
            tensor = places[name][1]
            shape = _shape(part)
            if tensor.shape != shape:
                raise CheckpointError(f"the adapter's {name} is {shape}, the model's {tuple(tensor.shape)}; it belongs to another one")
            plan.append((tensor, part))
        for tensor, part in plan:
            tensor += (part.delta if isinstance(part, Pair) else part).to(tensor)

    def save(self, folder: Path, base: str = "") -> None:
        """Write the folder; `base` is the name of what it belongs to."""
        folder.mkdir(parents=True, exist_ok=True)
        ranks = {pair.a.shape[0] for pair in self.pairs.values()} or {1}
        tensors: dict[str, Tensor] = {}
        for module, pair in self.pairs.items():
            for end, part in zip(EMBEDDING if pair.looked_up else LINEAR, (pair.a, pair.b), strict=True):
                tensors[f"{OUTER}{module}{end}"] = part.contiguous()
        scales = {module: pair.scale * pair.a.shape[0] for module, pair in self.pairs.items()}
        table = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True, "r": max(ranks),
            "lora_alpha": _plain(max(scales.values(), default=1.0)), "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
            "target_modules": sorted({module.rpartition(".")[2] for module in self.pairs}), "modules_to_save": None, "use_dora": False,
            "use_rslora": False, "rank_pattern": {m: p.a.shape[0] for m, p in self.pairs.items() if p.a.shape[0] != max(ranks)},
            "alpha_pattern": {m: _plain(s) for m, s in scales.items() if s != max(scales.values())},
        }
        (folder / CONFIG).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, folder / WEIGHTS)
        (folder / REST).unlink(missing_ok=True)
        if self.rest:
            save_file({name: tensor.contiguous() for name, tensor in self.rest.items()}, folder / REST)


def load(folder: Path) -> Adapter:
    """Read a folder. Raises `CheckpointError` for files that are missing or damaged, or a kind of adapter that is not read here."""
    try:
        table = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
        rest = load_file(folder / REST) if (folder / REST).exists() else {}
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"adapter {folder} cannot be read: {error}; it has {CONFIG} and {WEIGHTS}") from None
    if not isinstance(table, dict) or table.get("peft_type") != "LORA":
        raise CheckpointError(f"adapter {folder}: 'peft_type' must be LORA")
    for name, values in WITHOUT.items():
        if table.get(name, values[0]) not in values:
            raise CheckpointError(f"adapter {folder}: '{name}' is {table[name]!r}; only {values[0]!r} is read here")
    return Adapter(pairs=_pairs(folder, table, tensors), rest={_bare(name): tensor for name, tensor in rest.items()})


def digest(folder: Path) -> str:
    """A name for what a folder's adapter is: the same for the same bits."""
    found = hashlib.sha256()
    for name in (CONFIG, WEIGHTS, REST):
        if (folder / name).exists():
            found.update(f"{name}\n".encode() + (folder / name).read_bytes())
    return found.hexdigest()[:16]


def _pairs(folder: Path, table: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Pair]:
    pairs: dict[str, Pair] = {}
    left = dict(tensors)
    for name in tensors:
        for (reads, writes), looked_up in ((LINEAR, False), (EMBEDDING, True)):
            if not name.endswith(reads):
                continue
            module = name.removesuffix(reads)
            if module + writes not in tensors:
                raise CheckpointError(f"adapter {folder}: {name} has no counterpart {module}{writes}")
            a, b = left.pop(name), left.pop(module + writes)
            if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
                raise CheckpointError(f"adapter {folder}: {module} has A {tuple(a.shape)} and B {tuple(b.shape)}; ranks must agree")
            bare = _bare(module.removeprefix(OUTER))
            pairs[bare] = Pair(a=a, b=b, scale=_scale(table, bare, a.shape[0]), looked_up=looked_up)
    if left:
        raise CheckpointError(f"adapter {folder}: unknown tensors {sorted(left)[:5]}")
    return pairs


def _scale(table: Mapping[str, Any], module: str, rank: int) -> float:
    """A pattern counts for modules that its key ends, dot before it."""
    patterns = table.get("alpha_pattern") or {}
    alpha = next((value for key, value in patterns.items() if module == key or module.endswith(f".{key}")), table.get("lora_alpha", 1))
    return float(alpha) / (math.sqrt(rank) if table.get("use_rslora") else rank)


def _plain(value: float) -> float:
    return int(value) if value == int(value) else value


def _bare(name: str) -> str:
    """A name without its family's prefix."""
    return name.removeprefix(PREFIX["kimi_k3"])


def _shape(part: Pair | Tensor) -> tuple[int, ...]:
    if not isinstance(part, Pair):
        return tuple(part.shape)
    shape = part.b.shape[0], part.a.shape[1]
    return shape[::-1] if part.looked_up else shape


def _places(model: Transformer) -> Iterator[tuple[str, Slot, Tensor]]:
    """Every tensor of the released layout by its bare name, as a view of the model's."""
    tensors = model.state_dict()
    for slot in slots(model):
        whole = tensors[slot.target]
        yield _bare(slot.name), slot, whole if slot.expert is None else whole[slot.expert]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What an adapter leaves out of a difference: `error` is the norm of that over the norm of the whole, by map, and over all of them."""

    by_module: Mapping[str, float]
    error: float


@torch.no_grad()
def difference(base: Transformer, expert: Transformer, rank: int) -> tuple[Adapter, Loss]:
    """The adapter of a rank that comes nearest to what `expert` knows beyond `base` (singular values, map by map), and what it loses.

    Raises `ConfigError` for models of other shapes, or a rank below 1.
    """
    if rank < 1 or base.config != expert.config:
        raise ConfigError(f"'rank' is {rank}, and must be at least 1" if rank < 1 else
                          "base and expert have other shapes; an adapter belongs to a base of the expert's shape")
    pairs: dict[str, Pair] = {}
    rest: dict[str, Tensor] = {}
    lost: dict[str, float] = {}
    whole = left = 0.0
    for (name, _, ours), (_, _, theirs) in zip(_places(base), _places(expert), strict=True):
        gap = theirs.double() - ours.double()
        if not gap.any():
            continue
        if gap.ndim != 2 or not name.endswith(".weight"):
            rest[name] = gap.to(ours.dtype).clone()
            continue
        module, looked_up = name.removesuffix(".weight"), name.endswith("embed_tokens.weight")
        pairs[module], squares = _thin(gap.T if looked_up else gap, rank, looked_up)
        whole, left = whole + gap.square().sum().item(), left + squares
        lost[module] = math.sqrt(squares) / gap.norm().item()
    return Adapter(pairs=pairs, rest=rest), Loss(by_module=lost, error=math.sqrt(left / whole) if whole else 0.0)


def _thin(gap: Tensor, rank: int, looked_up: bool) -> tuple[Pair, float]:
    """Two matrices of `rank`, and the sum of squares that they leave. Smaller maps have zeros where the rank is more than they can use."""
    u, values, v = torch.linalg.svd(gap, full_matrices=False)
    root = values[:rank].sqrt()
    a, b = gap.new_zeros(rank, gap.shape[1]), gap.new_zeros(gap.shape[0], rank)
    a[: len(root)], b[:, : len(root)] = root[:, None] * v[:rank], u[:, :rank] * root
    return Pair(a=a.float(), b=b.float(), looked_up=looked_up), values[rank:].square().sum().item()
