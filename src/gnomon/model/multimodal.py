"""A language model that sees: the text model, the tower and the projector, and how images take their places among words (report §2.4).

In a prompt an image is `<|media_begin|>image WxH<|media_content|><|media_pad|><|media_end|>`; its one pad token becomes as many
positions as the image has tokens, each with a projected feature instead of an embedding. Checkpoints have the released layout: text under
`language_model.`, beside it `vision_tower.` and `mm_projector.`. Read next: `vision.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gnomon.errors import CheckpointError, ConfigError
from gnomon.model.config import ModelConfig
from gnomon.model.layers import initialise
from gnomon.model.transformer import Transformer
from gnomon.model.vision import Item, Projector, VisionTower, stack
from gnomon.model.weights import load_pretrained, save_pretrained


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Merged:
    """A prompt with its images in place: vectors, the ids they stand for (the pad's id at image positions), and where images are."""

    embeddings: Float[Tensor, "T D"]
    tokens: Int[Tensor, "T"]
    seen: Bool[Tensor, "T"]


class Multimodal(nn.Module):
    """Text model, tower and projector. Raises `ConfigError` for a configuration without `vision`."""

    def __init__(self, config: ModelConfig, text: Transformer | None = None):
        super().__init__()
        if config.vision is None:
            raise ConfigError("'vision' is missing: the model has no tower; add a [vision] table or use `Transformer`")
        self.config = config
        self.language_model = Transformer(config) if text is None else text
        self.vision_tower = VisionTower(config.vision)
        self.mm_projector = Projector(config.vision, config.hidden_size)

    def initialise(self, seed: int = 0) -> "Multimodal":
        """Starting weights for training from scratch: the text model's own; the tower's maps by their inputs, its places N(0, 1)."""
        self.language_model.initialise(seed)
        for part, prefix in ((self.vision_tower, 1), (self.mm_projector, 2)):
            initialise(part, seed + prefix, 1.0)
            for parameter in part.parameters():
                if parameter.dim() in (2, 4):
                    parameter.data *= math.sqrt(1 / parameter[0].numel())
        return self

    def features(self, images: Sequence[Item]) -> list[Float[Tensor, "_ D"]]:
        """For each image the vectors that take its place."""
        if not images:
            return []
        patches, grids = stack(images, self.mm_projector.post_norm.weight.device)
        merged = self.vision_tower(patches, grids)
        return list(self.mm_projector(torch.cat(merged)).split([len(item) for item in merged]))

    def merge(self, tokens: Int[Tensor, "S"], features: Sequence[Float[Tensor, "_ D"]], pad: int) -> Merged:
        """Replace each pad token by an image's vectors, in order. Raises `ConfigError` where pads and images differ in number."""
        places = (tokens == pad).nonzero().flatten().tolist()
        if len(places) != len(features):
            raise ConfigError(f"the prompt has {len(places)} places for images and {len(features)} images are given")
        words = self.language_model.embed(tokens[None])[0]
        vectors: list[Tensor] = []
        ids: list[Tensor] = []
        start = 0
        for place, image in zip(places, features, strict=True):
            vectors += [words[start:place], image.to(words.dtype)]
            ids += [tokens[start:place], tokens.new_full((len(image),), pad)]
            start = place + 1
        whole = torch.cat([*ids, tokens[start:]])
        return Merged(embeddings=torch.cat([*vectors, words[start:]]), tokens=whole, seen=whole == pad)

    def forward(self, tokens: Int[Tensor, "S"], images: Sequence[Item], pad: int, **rest: Any) -> Float[Tensor, "T V"]:
        """Logits of every position of one prompt with its images in place; `rest` goes to `Transformer.forward`."""
        merged = self.merge(tokens, self.features(images), pad)
        return self.language_model(None, embeddings=merged.embeddings[None], **rest)[0]


def load_multimodal(folder: str | Path, dtype: torch.dtype | None = None) -> Multimodal:
    """Read a checkpoint in the released layout. Raises `CheckpointError` for one without the tower's tensors."""
    text = load_pretrained(folder, dtype=dtype)
    if text.config.vision is None or not text.untouched:
        raise CheckpointError(f"{folder} holds no vision tower; load it as a text model")
    model = Multimodal(text.config, text)
    held, text.untouched = text.untouched, {}
    for name in list(dict(model.named_parameters())):
        if not name.startswith("language_model."):
            values = held[name].to(dtype or held[name].dtype)
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(values))
    return model


def save_multimodal(model: Multimodal, folder: str | Path, *, dtype: torch.dtype | None = None, **how: Any) -> None:
    """Write a checkpoint in the released layout; arguments as those of `save_pretrained`."""
    text = model.language_model
    before = text.untouched
    text.untouched = {name: value.detach().to(dtype or value.dtype) for name, value in model.state_dict().items()
                      if not name.startswith("language_model.")}
    try:
        save_pretrained(text, folder, dtype=dtype, **how)
    finally:
        text.untouched = before
