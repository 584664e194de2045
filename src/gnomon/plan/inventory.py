"""What a model is made of, part by part, and how each tensor is cut over ranks: the lists that every figure of the planner is a sum over.

Tensors come from `ModelConfig`, which lists them once for the modules, the checkpoint and this. Layers that are alike are listed once.
Matrices are cut over the tensor ranks, routed experts over the expert ranks, and what has no head to be cut along (norms, the inner half
of low-rank gates, router biases) stands on every rank. Read next: `footprint.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Literal

from gnomon.model.config import ModelConfig
from gnomon.model.parts import STORED_BITS, TensorSpec, linear
from gnomon.plan.workload import BITS, Layout, Precision

PARTS = ("embedding", "head", "mla", "kda", "router", "latent", "routed", "shared", "dense", "norms", "depth", "vision")
"""The parts of a model; a mixer of your own is a part by its kind's name."""

REPLICATED = ("f_a_proj.weight", "g_a_proj.weight", "o_norm.weight", "e_score_correction_bias")
"""Ends of names that stand on every tensor rank: one head's width, or one value per expert."""

ROW_CUT = ("o_proj.weight", "down_proj.weight", "w2.weight")
"""Ends of names of matrices that are cut along their inputs; their outputs are summed over ranks."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor (or `spec.count` alike): its part, and whether it is cut over `tensor` ranks, `expert` ranks, or `none`."""

    part: str
    spec: TensorSpec
    cut: Literal["tensor", "expert", "none"]

    @property
    def is_matrix(self) -> bool:
        """Whether a product with it is taken: convolutions, norms and tables of positions are not."""
        return len(self.spec.shape) == 2 and min(self.spec.shape) > 1

    def shards(self, layout: Layout) -> int:
        """Ranks that share one copy of it."""
        return {"tensor": layout.tensor, "expert": layout.expert_shards, "none": 1}[self.cut]

    def stored_bytes(self, precision: Precision) -> float:
        """Bytes of all of it: vectors and fp32 tensors as released, the rest in the format that is asked for."""
        if self.part == "routed":
            bits = BITS[precision.experts]
        elif self.spec.storage == "bf16" and len(self.spec.shape) > 1:
            bits = BITS[precision.rest]
        else:
            bits = STORED_BITS[self.spec.storage]
        return (self.spec.elements + self.spec.padding) * bits / 8


@dataclass(frozen=True, slots=True)
class Kind:
    """What makes two layers alike: their mixer and whether they have experts."""

    mixer: str
    experts: bool


@dataclass(frozen=True, slots=True)
class Inventory:
    """The pieces of a model: one layer of each kind, the kinds in order, and what stands before and after the layers."""

    layers: dict[Kind, tuple[Piece, ...]]
    order: tuple[Kind, ...]
    first: tuple[Piece, ...]
    last: tuple[Piece, ...]
    tied: bool = False

    def counted(self) -> Iterator[tuple[Piece, int]]:
        """Every tensor of the model with the number of layers that have one like it."""
        for piece in (*self.first, *self.last):
            yield piece, 1
        for kind, listed in self.layers.items():
            for piece in listed:
                yield piece, self.order.count(kind)

    def stage(self, layers: range) -> Iterator[tuple[Piece, int]]:
        """The tensors of a stretch of layers, with what stands before the first and after the last; a tied table stands on both ends."""
        order, begins, ends = self.order[layers.start: layers.stop], layers.start == 0, layers.stop == len(self.order)
        table = self.first[:1] if self.tied and ends and not begins else ()
        for piece in (*(self.first if begins else ()), *(self.last if ends else ()), *table):
            yield piece, 1
        for kind, listed in self.layers.items():
            if count := order.count(kind):
                for piece in listed:
                    yield piece, count


class ByValue:
    """A configuration as a key for caches: its mixers are a dictionary, which has no hash of its own."""

    __slots__ = ("config", "value")

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.value = tuple(tuple(item.items()) if isinstance(item, dict) else item
                           for item in (getattr(config, field.name) for field in fields(config)))

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByValue) and self.value == other.value


def inventory(config: ModelConfig) -> Inventory:
    """The pieces of a model, listed once per configuration."""
    return _listed(ByValue(config))


@lru_cache(maxsize=512)
def _listed(key: ByValue) -> Inventory:
    config = key.config
    order = tuple(Kind(mixer, config.is_moe_layer(layer)) for layer, mixer in enumerate(config.layers))
    alike: dict[Kind, tuple[Piece, ...]] = {}
    for layer, kind in enumerate(order):
        if kind not in alike:
            alike[kind] = tuple(_piece(kind.mixer, spec) for spec in config.layer_tensors(layer))
    return Inventory(alike, order, _before(config), _after(config), config.tie_word_embeddings)


def _before(config: ModelConfig) -> tuple[Piece, ...]:
    table = Piece("embedding", linear("model.embed_tokens", config.vocab_size, config.hidden_size), "tensor")
    vision = () if config.vision is None else config.vision.tensors(config.hidden_size)
    alike: dict[tuple[tuple[int, ...], str], TensorSpec] = {}
    for spec in vision:
        seen = alike.get((spec.shape, spec.storage))
        alike[spec.shape, spec.storage] = spec if seen is None else replace(seen, count=seen.count + spec.count)
    return (table, *(Piece("vision", spec, "tensor" if len(spec.shape) > 1 else "none") for spec in alike.values()))


def _after(config: ModelConfig) -> tuple[Piece, ...]:
    width = config.hidden_size
    found = [Piece("norms", TensorSpec("model.norm.weight", (width,)), "none")]
    if config.attention_residuals != "off":
        found += [Piece("depth", TensorSpec(f"model.output_attn_res_{name}.weight", shape), "none")
                  for name, shape in (("norm", (width,)), ("proj", (1, width)))]
    if not config.tie_word_embeddings:
        found.append(Piece("head", linear("lm_head", config.vocab_size, width), "tensor"))
    return tuple(found)


@lru_cache(maxsize=2048)
def _stages(key: ByValue, layout: Layout) -> tuple[range, ...]:
    listed = _listed(key)
    alike = {kind: _held(found, layout) for kind, found in listed.layers.items()}
    sizes = [alike[kind] for kind in listed.order]
    sizes[0] += _held(listed.first, layout)
    sizes[-1] += _held(listed.last, layout)
    low, high = max(sizes), sum(sizes)
    while high - low > max(1.0, 1e-6 * high):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(sizes, middle, layout.pipeline)) <= layout.pipeline else (middle, high)
    bounds = [0, *_filled(sizes, high, layout.pipeline)]
    return tuple(range(a, b) for a, b in zip(bounds, bounds[1:]))


def stages(config: ModelConfig, layout: Layout) -> tuple[range, ...]:
    """The layers of each pipeline stage: consecutive, at least one each, the largest as small as can be."""
    return _stages(ByValue(config), layout)


def _filled(sizes: list[float], limit: float, count: int) -> list[int]:
    """Ends of stages filled up to a limit, the last ones cut short so that none of `count` is empty."""
    ends: list[int] = []
    total = 0.0
    for layer, size in enumerate(sizes):
        left = len(sizes) - layer
        if layer and (total + size > limit or left <= count - len(ends) - 1):
            ends.append(layer)
            total = 0.0
        total += size
    return [*ends, len(sizes)]


def _held(listed: tuple[Piece, ...], layout: Layout) -> float:
    return sum(piece.spec.elements / piece.shards(layout) for piece in listed)


def _piece(mixer: str, spec: TensorSpec) -> Piece:
    part = _part(mixer, spec.name)
    if part == "routed":
        return Piece(part, spec, "expert")
    whole = part in ("norms", "depth") or spec.name.endswith(REPLICATED) or spec.name.endswith(("layernorm.weight", "_norm.weight"))
    return Piece(part, spec, "none" if whole else "tensor")


def _part(mixer: str, name: str) -> str:
    if name.startswith("self_attn."):
        return mixer
    for mark, part in ((".experts.", "routed"), ("shared_experts.", "shared"), ("routed_expert_", "latent"), (".gate.", "router"),
                       ("_res_", "depth"), ("mlp.", "dense")):
        if mark in name:
            return part
    return "norms"
