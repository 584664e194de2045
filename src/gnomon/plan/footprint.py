"""What a model takes of each rank's memory, exactly: weights, cached latents, recurrent states; and what fits beside them.

Sums over `inventory.py` under a `Layout` and a `Precision`. Figures are of the stage that holds most unless a stage is named, and of the
rank that holds most within it; `whole` is the model once. Read next: `traffic.py` for what a step moves, `learning.py` for training.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from gnomon.errors import CapacityError, ConfigError
from gnomon.model.config import ModelConfig
from gnomon.plan.hardware import Device
from gnomon.plan.inventory import ByValue, Piece, inventory, stages
from gnomon.plan.quantity import Estimate, exact
from gnomon.plan.workload import BITS, Layout, Precision
from gnomon.units import format_bytes

ONE_RANK = Layout()
"""Everything on one device."""

HASH_BLOCK = 512
"""Tokens whose cache is addressed as one by a prefix cache (report §5.4.1)."""

UTILISATION = 0.92
"""Share of a device's memory that engines plan with unless told; 0.95 has been run (16 RTX PRO 6000, K3)."""

RESERVE_BYTES = 3.5e9
"""Memory per device that neither weights nor caches get: runtime, graphs, buffers (aiconfigurator's figure for all its systems)."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes by part: `parts` on the rank that holds most, `whole` in one copy of the model; `stage` is where that rank stands."""

    parts: Mapping[str, float]
    whole: Mapping[str, float]
    stage: int = 0

    @property
    def bytes(self) -> float:
        """Bytes on the rank."""
        return sum(self.parts.values())

    @property
    def whole_bytes(self) -> float:
        """Bytes of one copy of everything."""
        return sum(self.whole.values())

    @property
    def estimate(self) -> Estimate:
        """The rank's bytes as an exact figure."""
        return exact(self.bytes, "B", "; ".join(f"{part} {format_bytes(size)}" for part, size in self.parts.items() if size))

    def without(self, *parts: str) -> "Footprint":
        """The same with some parts left out, e.g. `without("vision")`."""
        return replace(self, parts={p: b for p, b in self.parts.items() if p not in parts},
                       whole={p: b for p, b in self.whole.items() if p not in parts})


def parameters(config: ModelConfig, layout: Layout = ONE_RANK, stage: int | None = None) -> Footprint:
    """Parameters (a count, not bytes) by part."""
    return _picked(_weighed(ByValue(config), None, replace(layout, zero=0)), stage)


def weights(config: ModelConfig, precision: Precision, layout: Layout = ONE_RANK, stage: int | None = None) -> Footprint:
    """Weight bytes by part, scales and padding included; with ZeRO-3 each data-parallel copy keeps its share."""
    return _picked(_weighed(ByValue(config), precision, layout), stage)


@lru_cache(maxsize=4096)
def _weighed(key: ByValue, precision: Precision | None, layout: Layout) -> tuple[Footprint, ...]:
    def size(piece: Piece) -> float:
        return float(piece.spec.elements) if precision is None else piece.stored_bytes(precision)

    listed, whole, found = inventory(key.config), dict[str, float](), []
    for piece, count in listed.counted():
        whole[piece.part] = whole.get(piece.part, 0.0) + size(piece) * count
    for index, layers in enumerate(stages(key.config, layout)):
        parts: dict[str, float] = {}
        for piece, count in listed.stage(layers):
            shards = piece.shards(layout) * (copies(piece, layout) if layout.zero == 3 else 1)
            parts[piece.part] = parts.get(piece.part, 0.0) + size(piece) * count / shards
        found.append(Footprint(parts, whole, index))
    return tuple(found)


def _picked(found: tuple[Footprint, ...], stage: int | None) -> Footprint:
    if stage is None:
        return max(found, key=lambda footprint: footprint.bytes)
    if not 0 <= stage < len(found):
        raise ConfigError(f"there is no stage {stage}; the layout has {len(found)}, counted from 0")
    return found[stage]


def copies(piece: Piece, layout: Layout) -> int:
    """Ranks of a stage that hold the same shard of a piece, and may share out what is kept for it (ZeRO)."""
    return layout.tensor * layout.context * layout.data // piece.shards(layout) if piece.cut == "expert" else layout.context * layout.data


def kv_bytes_per_token(config: ModelConfig, precision: Precision, layout: Layout = ONE_RANK, stage: int | None = None) -> float:
    """Bytes that one more token of context takes on a rank: the latents of the layers that keep any.

    Every tensor rank holds all latents unless they are dealt (`kv_shards`); a context-parallel rank holds its part of the sequence.
    """
    per_layer = {kind: config.mixers[kind].cached_values_per_token() for kind in config.mixers}
    return _heaviest(config, layout, stage, per_layer) * BITS[precision.kv] / 8 / (layout.kv_shards * layout.context)


def kv_bytes(config: ModelConfig, precision: Precision, layout: Layout, tokens: float, stage: int | None = None) -> float:
    """Bytes of the latents of `tokens` tokens (of all sequences of one copy together) on a rank."""
    return tokens * kv_bytes_per_token(config, precision, layout, stage)


def state_bytes(config: ModelConfig, precision: Precision, layout: Layout = ONE_RANK, sequences: float = 1, draft_tokens: int = 0,
                stage: int | None = None) -> float:
    """Bytes of recurrent matrices and convolution histories of `sequences` sequences on a rank; they are cut by heads.

    Checking `draft_tokens` drafts at once keeps that many more taps of the convolution, so that a rejected one can be undone.
    """
    return sequences * _heaviest(config, layout, stage, _state_of(config, precision, draft_tokens)) / layout.tensor


def _state_of(config: ModelConfig, precision: Precision, draft_tokens: int) -> dict[str, float]:
    found = {}
    for kind in config.mixers:
        mixer = config.mixers[kind]
        taps = mixer.conv_state_values()
        if taps and draft_tokens:
            history = getattr(mixer, "short_conv_kernel_size", 1) - 1 or getattr(mixer, "window", 1)
            taps += draft_tokens * taps // history
        found[kind] = mixer.state_bytes() / 4 * BITS[precision.state] / 8 + taps * BITS[_history(precision)] / 8
    return found


def _history(precision: Precision) -> str:
    """Convolution histories are kept as activations are, bf16 at the narrowest."""
    return precision.activations if precision.activations in ("fp32", "bf16") else "bf16"


def _heaviest(config: ModelConfig, layout: Layout, stage: int | None, per_layer: Mapping[str, float]) -> float:
    layers = config.layers
    sums = [sum(per_layer[layers[layer]] for layer in span) for span in stages(config, layout)]
    return max(sums) if stage is None else sums[stage]


def page_tokens(config: ModelConfig, precision: Precision, layout: Layout = ONE_RANK) -> int:
    """Tokens of one attention page when pages of states and of latents must be equally large: a multiple of the hash block.

    One layer's state (fp32 matrix, convolution taps) on one rank, over the bytes of one layer's latent of a token, rounded up.
    """
    latent = max(config.mixers[kind].cached_values_per_token() for kind in config.mixers) * BITS[precision.kv] / 8
    state = max(_state_of(config, precision, 0).values()) / layout.tensor
    return HASH_BLOCK if not latent or not state else HASH_BLOCK * math.ceil(state / latent / HASH_BLOCK)


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What one rank of each stage has: usable bytes, weights, bytes left, and what a token and a sequence take of them."""

    usable: float
    weights: tuple[float, ...]
    per_token: tuple[float, ...]
    per_sequence: tuple[float, ...]

    @property
    def left(self) -> tuple[float, ...]:
        """Bytes that weights leave, by stage; negative where they do not fit."""
        return tuple(self.usable - held for held in self.weights)

    @property
    def fits(self) -> bool:
        """Whether the weights fit."""
        return min(self.left) >= 0

    def tokens(self, sequences: float = 0) -> float:
        """Tokens of context, over all sequences of one copy, that fit beside the states of `sequences` sequences."""
        found = [(left - sequences * state) / token if token else math.inf if left >= sequences * state else 0.0
                 for left, token, state in zip(self.left, self.per_token, self.per_sequence)]
        return max(0.0, min(found))

    def sequences(self, context: float) -> float:
        """Sequences of `context` tokens that fit at once on one copy."""
        sizes = [context * token + state for token, state in zip(self.per_token, self.per_sequence)]
        return max(0.0, min(left / size if size else math.inf for left, size in zip(self.left, sizes)))


def capacity(config: ModelConfig, precision: Precision, layout: Layout, device: Device, *, utilisation: float = UTILISATION,
             reserve_bytes: float | None = None, draft_tokens: int = 0) -> Room:
    """What fits on devices of a kind under a layout.

    `utilisation` is the share of memory that the engine may plan with; of that, `reserve_bytes` go to neither weights nor caches (none:
    3.5 GB, and at most a tenth of a small device).
    """
    if not 0 < utilisation <= 1:
        raise ConfigError(f"'utilisation' is {utilisation}; it is a share of the memory, above 0 and at most 1")
    layout.check(config)
    reserve = min(RESERVE_BYTES, 0.1 * device.memory_bytes) if reserve_bytes is None else reserve_bytes
    each = range(layout.pipeline)
    return Room(
        usable=device.memory_bytes * utilisation - reserve,
        weights=tuple(weights(config, precision, layout, stage).bytes for stage in each),
        per_token=tuple(kv_bytes_per_token(config, precision, layout, stage) for stage in each),
        per_sequence=tuple(state_bytes(config, precision, layout, 1, draft_tokens, stage) for stage in each),
    )


def fewest_devices(config: ModelConfig, precision: Precision, device: Device, *, context: int = 0, utilisation: float = UTILISATION,
                   reserve_bytes: float | None = None, most: int = 4096) -> tuple[int, Layout]:
    """The fewest devices that hold the weights and `context` tokens: matrices cut (TP), layers too (PP) where heads run out.

    Raises `CapacityError` with what is missing where not even `most` devices do.
    """
    sizes = _sizes(most)
    cut = [Layout(tensor=size) for size in sizes]
    cut += [Layout(tensor=tensor, pipeline=count // tensor) for count in sizes for tensor in reversed(sizes) if tensor < count]
    last: Room | None = None
    for layout in cut:
        if _allowed(config, layout):
            last = capacity(config, precision, layout, device, utilisation=utilisation, reserve_bytes=reserve_bytes)
            if last.fits and last.sequences(context) >= 1:
                return layout.ranks, layout
    lacking = "no layout is possible" if last is None else f"a rank still lacks {format_bytes(-min(last.left))} with {most} devices"
    raise CapacityError(f"the model does not fit on {device.title}: {lacking}; use narrower formats or a device with more memory")


def _sizes(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length()) if 2**n <= most]


def _allowed(config: ModelConfig, layout: Layout) -> bool:
    try:
        layout.check(config)
    except ConfigError:
        return False
    return True
