"""A language model that sees: the text model, the tower and the projector, and how images take their places among words (report §2.4).

In a prompt an image is `<|media_begin|>image WxH<|media_content|><|media_pad|><|media_end|>`; its one pad token becomes as many
positions as the image has tokens, each with a projected feature instead of an embedding. Checkpoints have the released layout: text under
`language_model.`, beside it `vision_tower.` and `mm_projector.`. Read next: `vision.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gnomon.errors import CheckpointError, ConfigError
from gnomon.model.config import ModelConfig
from gnomon.model.layers import initialise
from gnomon.model.transformer import Transformer
from gnomon.model.vision import Item, Projector, VisionTower, stack
from gnomon.model.weights import load_pretrained, save_pretrained, stored_tensors

TEXT = "language_model."
"""What names of the text model's tensors begin with."""

PAD = "<|media_pad|>"
"""The token that stands for an image."""

PLACEHOLDER = "<|kimi_image_placeholder|>"
"""What stands for an image in a released prompt before it is made of tokens."""


class Placed(Protocol):
    """An image among tokens: its vectors `skip` … `skip + count - 1` stand from position `start` on."""

    @property
    def pixels(self) -> Item:
        """Its patches."""
        ...

    @property
    def start(self) -> int:
        """The first position."""
        ...

    @property
    def count(self) -> int:
        """Positions."""
        ...

    @property
    def skip(self) -> int:
        """Vectors before the first that stands here."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Merged:
    """A prompt with its images in place: vectors, the ids they stand for (the pad's id at image positions), and where images are."""

    embeddings: Float[Tensor, "T D"]
    tokens: Int[Tensor, "T"]
    seen: Bool[Tensor, "T"]


class Eye(nn.Module):
    """Tower and projector: images to vectors of the text model's width. Raises `ConfigError` for a configuration without `vision`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.vision is None:
            raise ConfigError("'vision' is missing: the model has no tower; add a [vision] table or use `Transformer`")
        self.config = config
        self.vision_tower = VisionTower(config.vision)
        self.mm_projector = Projector(config.vision, config.hidden_size)

    @torch.no_grad()
    def initialise_eye(self, seed: int = 0) -> Self:
        """Starting weights of tower and projector alone; filters of patches begin without a mean."""
        for part, prefix in ((self.vision_tower, 1), (self.mm_projector, 2)):
            initialise(part, seed + prefix, 1.0)
            for parameter in part.parameters():
                if parameter.dim() in (2, 4):
                    parameter.data *= math.sqrt(1 / parameter[0].numel())
        filters = self.vision_tower.patch_embed.proj.weight
        filters -= filters.mean((1, 2, 3), keepdim=True)  # plain paper says nothing at first; what stands out on it does
        return self

    def features(self, images: Sequence[Item]) -> list[Float[Tensor, "_ D"]]:
        """For each image the vectors that take its place."""
        if not images:
            return []
        patches, grids = stack(images, self.mm_projector.post_norm.weight.device)
        merged = self.vision_tower(patches, grids)
        return list(self.mm_projector(torch.cat(merged)).split([len(item) for item in merged]))


class Multimodal(Eye):
    """Text model, tower and projector. Raises `ConfigError` for a configuration without `vision`."""

    def __init__(self, config: ModelConfig, text: Transformer | None = None):
        super().__init__(config)
        self.language_model = Transformer(config) if text is None else text

    def initialise(self, seed: int = 0) -> Self:
        """Starting weights for training from scratch: the text model's own; the tower's maps by their inputs, its places N(0, 1)."""
        self.language_model.initialise(seed)
        return self.initialise_eye(seed)

    def eye(self) -> Eye:
        """Tower and projector alone, the same tensors."""
        with torch.device("meta"):
            alone = Eye(self.config)
        alone.vision_tower, alone.mm_projector = self.vision_tower, self.mm_projector
        return alone

    def embeddings(self, tokens: Int[Tensor, "B T"], images: Sequence[Placed]) -> Float[Tensor, "B T D"]:
        """Embeddings of tokens with images over their pads, which are as many as the images have vectors there; positions count over
        the flattened rows. Images of one size are seen together. Raises `ConfigError` for one that stands outside the tokens."""
        words = self.language_model.embed(tokens)
        if not images:
            return words
        ordered = sorted(images, key=lambda image: (image.pixels.rows, image.pixels.columns, image.pixels.frames))
        if min(image.start for image in images) < 0 or max(image.start + image.count for image in images) > tokens.numel():
            raise ConfigError(f"an image stands outside the {tokens.numel()} tokens")
        features = self.features([image.pixels for image in ordered])
        vectors = torch.cat([each[image.skip : image.skip + image.count] for each, image in zip(features, ordered, strict=True)])
        places = torch.cat([torch.arange(image.start, image.start + image.count) for image in ordered]).to(tokens.device)
        return words.flatten(0, 1).index_copy(0, places, vectors.to(words.dtype)).view_as(words)

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


def load_eye(folder: str | Path, config: ModelConfig, dtype: torch.dtype | None = None) -> Eye:
    """Tower and projector of a checkpoint in the released layout; the text model is not read. Raises `CheckpointError` for one that lacks
    any of their tensors."""
    stored = stored_tensors(Path(folder))
    with torch.device("meta"):
        eye = Eye(config)
    for name, shape in [(name, parameter.shape) for name, parameter in eye.named_parameters()]:
        if name not in stored or stored[name].shape != tuple(shape):
            found = f"of shape {list(stored[name].shape)}" if name in stored else "missing"
            raise CheckpointError(f"{folder}: the tensor {name} is {found}; the vision tower needs {list(shape)}")
        values = stored[name].read()
        owner, _, leaf = name.rpartition(".")
        setattr(eye.get_submodule(owner), leaf, nn.Parameter(values if dtype is None else values.to(dtype), requires_grad=False))
    return eye


def load_multimodal(folder: str | Path, dtype: torch.dtype | None = None) -> Multimodal:
    """Read a checkpoint in the released layout. Raises `CheckpointError` for one without the tower's tensors."""
    text = load_pretrained(folder, dtype=dtype)
    if text.config.vision is None or not text.untouched:
        raise CheckpointError(f"{folder} holds no vision tower; load it as a text model")
    model = Multimodal(text.config, text)
    held, text.untouched = text.untouched, {}
    for name in list(dict(model.named_parameters())):
        if not name.startswith(TEXT):
            values = held[name].to(dtype or held[name].dtype)
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(values))
    return model


def save_multimodal(model: Multimodal, folder: str | Path, *, dtype: torch.dtype | None = None, **how: Any) -> None:
    """Write a checkpoint in the released layout; arguments as those of `save_pretrained`. With a `tokenizer` it says which id stands for
    images."""
    text, tokenizer = model.language_model, how.get("tokenizer")
    before, fields = text.untouched, text.untouched_config
    text.untouched = {name: value.detach().to(dtype or value.dtype) for name, value in model.state_dict().items()
                      if not name.startswith(TEXT)}
    if tokenizer is not None:
        text.untouched_config = {"image_placeholder": PLACEHOLDER, "media_placeholder_token_id": tokenizer.special_ids[PAD]} | fields
    try:
        save_pretrained(text, folder, dtype=dtype, **how)
    finally:
        text.untouched, text.untouched_config = before, fields
