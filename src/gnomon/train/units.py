"""What Muon orthogonalises: named units, each one matrix of one map (report §2.5, Per-Head Muon).

A projection that feeds several heads stacks one map per head along its rows. Orthogonalised whole, the heads with the
largest gradients take the update; so queries, keys and values are split into their heads first. A stack of experts is one
matrix per expert. What is no matrix, and the two tables whose rows are tokens, goes to AdamW.

Read next: `muon.py`, which acts on the units.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxtyping import Float
from torch import Tensor

from gnomon.errors import ConfigError
from gnomon.model.config import ModelConfig
from gnomon.model.parts import KDAConfig, MLAConfig

TABLES = ("embed_tokens.weight", "lm_head.weight", "pos_emb.weight")
"""Rows of these are tokens or places, not directions of one map: AdamW, with weight decay."""

PATCHES = "patch_embed.proj.weight"
"""One map, from all values of a patch, stored as filters [W, 3, P, P]."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One matrix that is orthogonalised alone: the `index`-th block of part `part` of a parameter."""

    parameter: str
    part: int
    index: int

    def __str__(self) -> str:
        return f"{self.parameter}[{self.part}:{self.index}]"


def head_rows(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Row heights of one head, by parameter name; the pattern repeats over the rows, and each height is a unit.

    KDA: q, k, v by `head_dim`. MLA: queries by the whole query of a head; `kv_b_proj` by a head's key rows and value rows
    apart, since they are two maps; `kv_a_proj_with_mqa` into the latent and the key that all heads share. Output and gate
    projections are one matrix, as in the report. The tower's queries, keys and values by head. A mixer of your own says it by a method
    `head_rows()` of its config.
    """
    names: dict[str, tuple[int, ...]] = {}
    if config.vision is not None:
        blocks = range(config.vision.vt_num_hidden_layers)
        names |= {f"vision_tower.encoder.blocks.{block}.wqkv.weight": (config.vision.head_dim,) for block in blocks}
    for layer, kind in enumerate(config.layers):
        for name, rows in _mixer_rows(config.mixers[kind]).items():
            names[f"model.layers.{layer}.self_attn.{name}.weight"] = rows
    return names


def _mixer_rows(mixer: object) -> dict[str, tuple[int, ...]]:
    if isinstance(mixer, KDAConfig):
        return dict.fromkeys(("q_proj", "k_proj", "v_proj"), (mixer.head_dim,))
    if isinstance(mixer, MLAConfig):
        query = "q_proj" if mixer.q_lora_rank is None else "q_b_proj"
        shared = (mixer.kv_lora_rank, mixer.qk_rope_head_dim) if mixer.qk_rope_head_dim else (mixer.kv_lora_rank,)
        return {query: (mixer.qk_head_dim,), "kv_b_proj": (mixer.qk_nope_head_dim, mixer.v_head_dim),
                "kv_a_proj_with_mqa": shared}
    own = getattr(mixer, "head_rows", None)
    return own() if own is not None else {}


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon takes a parameter of this shape: a matrix or a stack of matrices that is no token table and no convolution.

    One row is a vector (the query of a depth read): orthogonalising it would only fix its length.
    """
    return len(shape) >= 2 and min(shape[-2:]) > 1 and not name.endswith(TABLES) and "conv1d" not in name


def split(name: str, tensor: Float[Tensor, "*S A B"], rows: tuple[int, ...] | None) -> list[Float[Tensor, "H _ _"]]:
    """Views of a parameter (or of anything shaped like it), one stack `[H, rows, B]` of units per part.

    Raises `ConfigError` when the head pattern does not divide the rows.
    """
    if name.endswith(PATCHES):
        return [tensor.flatten(1)[None]]
    if rows is None:
        return [tensor.reshape(-1, *tensor.shape[-2:])]
    if tensor.shape[0] % sum(rows):
        raise ConfigError(f"'{name}' has {tensor.shape[0]} rows, which heads of {'+'.join(map(str, rows))} rows do not divide")
    heads = tensor.unflatten(0, (-1, sum(rows)))  # [H, rows, B]
    return list(heads.split(rows, dim=1))


def row_spans(shape: Sequence[int], rows: tuple[int, ...] | None) -> list[tuple[int, int]]:
    """First and past the last row of each unit of a matrix, or of each matrix of a stack."""
    if rows is None:
        return [(0, shape[0])] if len(shape) == 2 else [(index, index + 1) for index in range(shape[0])]
    bounds = [0]
    for _ in range(shape[0] // sum(rows)):
        for height in rows:
            bounds.append(bounds[-1] + height)
    return list(pairwise(bounds))


def units(name: str, tensor: Tensor, rows: tuple[int, ...] | None) -> Iterator[Unit]:
    """The names of a parameter's units, in the order of `split`."""
    for part, stack in enumerate(split(name, tensor, rows)):
        yield from (Unit(name, part, index) for index in range(stack.shape[0]))


def all_units(parameters: Mapping[str, Tensor], rows: Mapping[str, tuple[int, ...]]) -> list[Unit]:
    """Every unit of a model, to be assigned to ranks or counted."""
    return [unit for name, tensor in parameters.items() if is_matrix(name, tensor.shape)
            for unit in units(name, tensor, rows.get(name))]
