"""One model turned by one knob at a time: what each turn does to parameters, weights, cache and state, exactly.

The rows that a plan's tornado rests on: pool and choice of experts, depth, the mix of attention, the format of each part, more ranks.
Read next: `knobs.py`, which turns them inside a plan.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from gnomon.errors import ConfigError
from gnomon.model.config import ModelConfig
from gnomon.plan.families import all_mla
from gnomon.plan.footprint import kv_bytes_per_token, weights
from gnomon.plan.workload import BITS, Layout, Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A model, its formats and its layout, with a name."""

    name: str
    config: ModelConfig
    precision: Precision
    layout: Layout

    @property
    def row(self) -> "Static":
        """The figures that do not depend on time."""
        matrices = sum(self.config.mixers[kind].state_bytes() for kind in self.config.layers) * BITS[self.precision.state] / 32
        return Static(total=self.config.num_parameters(), active=self.config.activated_parameters(),
                      weight_bytes=weights(self.config, self.precision).without("vision").whole_bytes,
                      kv_bytes_per_token=kv_bytes_per_token(self.config, self.precision), state_bytes=matrices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Static:
    """Parameters in all and per token; bytes of the text model's weights, of one token's latents, of one sequence's matrices."""

    total: int
    active: int
    weight_bytes: float
    kv_bytes_per_token: float
    state_bytes: float


Turn = Callable[[Variant], Variant]


def experts(pool: float = 1.0, chosen: float = 1.0) -> Turn:
    """Routed experts, and how many a token visits, times a factor."""
    def turn(now: Variant) -> Variant:
        moe = now.config.moe
        if moe is None:
            raise ConfigError("the model has no experts to change; give it a table 'moe'")
        changed = replace(moe, num_experts=round(moe.num_experts * pool), num_experts_per_token=round(moe.num_experts_per_token * chosen))
        return replace(now, config=replace(now.config, moe=changed))
    return turn


def depth(factor: float) -> Turn:
    """Layers times a factor, the pattern of mixers going on."""
    return lambda now: replace(now, config=replace(now.config, num_hidden_layers=round(now.config.num_hidden_layers * factor)))


def latent_only(now: Variant) -> Variant:
    """Latent attention in every layer."""
    return replace(now, config=all_mla(now.config))


def mix(kda: int) -> Turn:
    """`kda` KDA layers before each MLA layer; the last layer stays what it is."""
    return lambda now: replace(now, config=replace(now.config, layer_pattern=(*("kda",) * kda, "mla")))


def formats(**parts: str) -> Turn:
    """Other formats, e.g. `formats(kv="fp8")`."""
    return lambda now: replace(now, precision=replace(now.precision, **parts))


def ranks(tensor: int) -> Turn:
    """Matrices cut over so many ranks."""
    return lambda now: replace(now, layout=replace(now.layout, tensor=tensor, kv_shards=tensor))


TURNS: dict[str, Turn] = {
    "as it is": lambda now: now,
    "experts x2, same top-k": experts(pool=2),
    "top-k x2, same pool": experts(chosen=2),
    "top-k /2": experts(chosen=0.5),
    "depth +10 %": depth(1.1),
    "all-MLA (no KDA)": latent_only,
    "MLA 1:7 instead of 1:3": mix(7),
    "fp8 KV": formats(kv="fp8"),
    "fp8 non-expert weights": formats(rest="fp8"),
    "experts at bf16": formats(experts="bf16"),
    "twice the ranks": lambda now: ranks(2 * now.layout.tensor)(now),
}
"""Knobs by name, each one turn from the model as it is."""


def variants(config: ModelConfig, precision: Precision | None = None, layout: Layout | None = None) -> list[Variant]:
    """The model and every turn of it that applies; a model without experts, say, has no rows about them."""
    start = Variant(name="as it is", config=config, precision=precision or Precision.released(config), layout=layout or Layout())
    found = []
    for name, turn in TURNS.items():
        try:
            found.append(replace(turn(start), name=name))
        except ConfigError:
            continue
    return found
