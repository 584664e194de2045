"""The eye: MoonViT-V2 over patches of images and short clips, and the projector to the width of the text model (report §2.4).

Each item (an image, or up to four frames) attends to itself alone, over all its frames and patches. Places are given twice: a learned
table, resized to the item's grid, and a rotation of queries and keys by column and row. Frames are averaged, and each square of 2 x 2
patches becomes one token. The report tells of separate passes over space and time; the released code attends jointly, and so does this.
Read next: `multimodal.py`, which puts the tokens among words.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from gnomon.errors import ConfigError
from gnomon.model.layers import Linear
from gnomon.model.parts import VisionConfig

EPS = torch.finfo(torch.float32).eps
"""Epsilon of the tower's norms: what `nn.RMSNorm` takes where none is given, whatever the type of its input."""

PROJECTOR_EPS = 1e-5
ROTATION_BASE = 10_000.0
CLIP_FRAMES = 4
"""Frames that have an embedding of their own."""

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches of one item."""


class Item(Protocol):
    """An image or clip cut into patches [frames·rows·columns, 3, P, P], as `gnomon.data.images` makes them."""

    @property
    def patches(self) -> np.ndarray:
        """Values in [-1, 1], row by row."""
        ...

    @property
    def frames(self) -> int:
        """Frames that become one."""
        ...

    @property
    def rows(self) -> int:
        """Rows of patches."""
        ...

    @property
    def columns(self) -> int:
        """Columns of patches."""
        ...


class VisionTower(nn.Module):
    """Patches to features, before the projector."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.encoder = Encoder(config)

    def forward(self, patches: Float[Tensor, "N 3 P P"], grids: Sequence[Grid]) -> list[Float[Tensor, "_ W"]]:
        """For each item its merged features [tokens, merge² · width]; a square's patches stand side by side, row by row.

        `patches` holds the items' patches end to end, frames outermost. Raises `ConfigError` for grids that do not fit.
        """
        self._check(patches, grids)
        hidden = self.encoder(self.patch_embed(patches, grids), grids)
        return [self._merge(item, grid) for item, grid in zip(hidden.split([t * h * w for t, h, w in grids]), grids, strict=True)]

    def _check(self, patches: Tensor, grids: Sequence[Grid]) -> None:
        merge = self.config.merge_size
        for t, h, w in grids:
            if not 1 <= t <= CLIP_FRAMES or h < 1 or w < 1 or h % merge or w % merge:
                raise ConfigError(f"an item of {t} frames and {h} x {w} patches; it takes 1 to {CLIP_FRAMES} frames, and rows and columns "
                                  f"divisible by {merge}")
        expected = sum(t * h * w for t, h, w in grids)
        if len(patches) != expected:
            raise ConfigError(f"'patches' holds {len(patches)} patches where the grids have {expected}")

    def _merge(self, item: Tensor, grid: Grid) -> Tensor:
        t, h, w = grid
        merge = self.config.merge_size
        pooled = item.view(t, h // merge, merge, w // merge, merge, -1).mean(0)
        return pooled.transpose(1, 2).reshape(h * w // merge**2, -1)


class PatchEmbed(nn.Module):
    """A linear map of each patch, plus where it stands."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.proj = nn.Conv2d(3, config.vt_hidden_size, config.patch_size, config.patch_size, bias=False)
        self.pos_emb = Places(config)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Features [N, W] of patches [N, 3, P, P]."""
        x = patches.to(self.proj.weight.dtype).flatten(1) @ self.proj.weight.flatten(1).T
        places = {grid: self.pos_emb(grid) for grid in dict.fromkeys(grids)}
        return x + torch.cat([places[grid] for grid in grids]).to(x.dtype)


class Places(nn.Module):
    """The learned table of places, bilinearly resized to an item's grid; the frames of a clip get a sine and cosine besides."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.position_grid, config.position_grid, config.vt_hidden_size))

    def forward(self, grid: Grid) -> Float[Tensor, "N W"]:
        """What is added to the patches of an item."""
        t, h, w = grid
        places = self.weight.flatten(0, 1)
        if (h, w) != tuple(self.weight.shape[:2]):
            picture = self.weight.permute(2, 0, 1)[None]
            places = functional.interpolate(picture, size=(h, w), mode="bilinear", align_corners=False)[0].flatten(1).T
        if t == 1:
            return places
        return (places + _frames(t, self.weight.shape[-1], self.weight.device)[:, None]).flatten(0, 1)


class Encoder(nn.Module):
    """The blocks and the final norm."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.vt_num_hidden_layers))
        self.final_layernorm = nn.RMSNorm(config.vt_hidden_size, EPS)

    def forward(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Features of all items, end to end."""
        turns = {grid: rotations(self.config.head_dim, grid, x.device) for grid in dict.fromkeys(grids)}
        rotation = torch.cat([turns[grid] for grid in grids])
        lengths = [t * h * w for t, h, w in grids]
        for block in self.blocks:
            x = block(x, rotation, lengths)
        return self.final_layernorm(x)


class Block(nn.Module):
    """Attention within each item, then a feed-forward, each behind a norm."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.heads = config.vt_num_attention_heads
        self.norm0 = nn.RMSNorm(config.vt_hidden_size, EPS)
        self.norm1 = nn.RMSNorm(config.vt_hidden_size, EPS)
        self.wqkv = Linear(config.vt_hidden_size, 3 * config.qkv_hidden_size)
        self.wo = Linear(config.qkv_hidden_size, config.vt_hidden_size)
        self.mlp = FeedForward(config.vt_hidden_size, config.vt_intermediate_size)

    def forward(self, x: Tensor, rotation: Tensor, lengths: list[int]) -> Tensor:
        """Features [N, W]; `rotation` [N, head/2] holds complex numbers of length one, `lengths` the patches of each item."""
        q, k, v = self.wqkv(self.norm0(x)).view(len(x), 3, self.heads, -1).unbind(1)
        q, k = (_rotated(each, rotation) for each in (q, k))
        parts = [_attention(run, length) for run, length in _runs((q, k, v), lengths)]
        x = x + self.wo(torch.cat(parts).flatten(1))
        return x + self.mlp(self.norm1(x))


class FeedForward(nn.Module):
    """Two maps with GELU, by its tanh form, between them."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc0 = Linear(width, inner)
        self.fc1 = Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to each patch."""
        return self.fc1(functional.gelu(self.fc0(x), approximate="tanh"))


class Projector(nn.Module):
    """Merged features to vectors that stand where embeddings of words would: two maps, exact GELU between them, a norm after."""

    def __init__(self, config: VisionConfig, hidden_size: int):
        super().__init__()
        merged = config.vt_hidden_size * config.merge_size**2
        self.proj = nn.Sequential(Linear(merged, merged), nn.GELU(), Linear(merged, hidden_size))
        self.post_norm = nn.RMSNorm(hidden_size, PROJECTOR_EPS)

    def forward(self, merged: Float[Tensor, "M W"]) -> Float[Tensor, "M D"]:
        """Vectors of the text model's width."""
        return self.post_norm(self.proj(merged))


def stack(items: Sequence[Item], device: torch.device | None = None) -> tuple[Float[Tensor, "N 3 P P"], list[Grid]]:
    """The patches of several items end to end, and their grids."""
    patches = torch.cat([torch.from_numpy(item.patches) for item in items]).to(device)
    return patches, [(item.frames, item.rows, item.columns) for item in items]


def rotations(head_dim: int, grid: Grid, device: torch.device | None = None) -> Tensor:
    """Complex numbers [t·h·w, head_dim/2] by which pairs of channels turn: even pairs by column, odd ones by row; frames alike."""
    t, h, w = grid
    rates = ROTATION_BASE ** (-torch.arange(0, head_dim, 4, device=device, dtype=torch.float32) / head_dim)
    rows, columns = torch.meshgrid(torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij")
    angles = torch.stack([place.flatten()[:, None].float() * rates for place in (columns, rows)], -1).flatten(1)
    return torch.polar(torch.ones_like(angles), angles).repeat(t, 1)


def _rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn adjacent channels [N, H, head] as complex numbers, in fp32."""
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * rotation[:, None]
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def _runs(heads: tuple[Tensor, ...], lengths: list[int]) -> Iterator[tuple[list[Tensor], int]]:
    """Neighbouring items of one length together: queries, keys and values [N, H, head] of each run, and that length."""
    runs = [(length, length * len(list(items))) for length, items in groupby(lengths)]
    cut = [each.split([size for _, size in runs]) for each in heads]
    yield from (([each[place] for each in cut], length) for place, (length, _) in enumerate(runs))


def _attention(heads: list[Tensor], length: int) -> Tensor:
    """Full attention [N, H, head] within each item of `length` patches, of queries, keys and values."""
    q, k, v = (each.unflatten(0, (-1, length)).transpose(1, 2) for each in heads)
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)


def _frames(count: int, width: int, device: torch.device) -> Float[Tensor, "t W"]:
    rates = ROTATION_BASE ** (-torch.arange(width // 2, device=device, dtype=torch.float32) / (width // 2))
    angles = torch.arange(count, device=device)[:, None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], -1)
