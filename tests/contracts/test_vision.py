"""The tower and the projector: the released sizes, items apart, images in their places among words, checkpoints both ways."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from gnomon.data.images import Pixels, prepare, prepare_video
from gnomon.errors import CheckpointError, ConfigError
from gnomon.model.config import ModelConfig, preset
from gnomon.model.multimodal import Multimodal, load_multimodal, save_multimodal
from gnomon.model.parts import VisionConfig
from gnomon.model.transformer import Transformer
from gnomon.model.vision import VisionTower, stack
from gnomon.model.weights import load_pretrained, save_pretrained

EYE = VisionConfig(position_grid=8, vt_hidden_size=32, vt_intermediate_size=64, vt_num_hidden_layers=2, vt_num_attention_heads=2,
                   qkv_hidden_size=48)
PAD = 7


def config() -> ModelConfig:
    """The tiny model with an eye."""
    return replace(preset("tiny"), vision=EYE)


def noise(width: int, height: int, seed: int = 0) -> Pixels:
    """An image of noise."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return prepare(Image.fromarray(values))


@pytest.fixture(scope="module")
def model() -> Multimodal:
    return Multimodal(config()).initialise(3).eval()


def test_the_released_sizes() -> None:
    released = preset("k3-2.8t")
    assert released.vision is not None
    with torch.device("meta"):
        tower = VisionTower(released.vision)
    assert sum(p.numel() for p in tower.parameters()) == 401_214_464
    projector = [t for t in released.vision.tensors(released.hidden_size) if t.name.startswith("mm_projector")]
    assert sum(t.elements for t in projector) == 46_144_512
    named = {f"vision_tower.{name}": tuple(p.shape) for name, p in tower.named_parameters()}
    assert named == {t.name: t.shape for t in released.vision.tensors(released.hidden_size) if t.name.startswith("vision_tower")}


def test_flops_are_those_of_the_products() -> None:
    seeing = Multimodal(config())
    for item in (noise(56, 84), prepare_video([Image.new("RGB", (56, 56))] * 3)[0]):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            seeing.features([item])
        counted = counter.get_total_flops()
        ours = EYE.flops(len(item.patches), seeing.config.hidden_size, item.frames)
        attention = 4 * EYE.vt_num_hidden_layers * len(item.patches) ** 2 * EYE.qkv_hidden_size
        assert counted in (ours, ours - attention)  # torch does not count its fused attention on every machine


def test_items_do_not_see_each_other(model: Multimodal) -> None:
    items = [noise(56, 28, 1), noise(30, 90, 2), *prepare_video([Image.effect_noise((56, 56), 60).convert("RGB") for _ in range(3)])]
    with torch.no_grad():
        together, alone = model.features(items), [model.features([item])[0] for item in items]
    assert [len(x) for x in together] == [item.tokens for item in items]
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_frames_have_their_order_and_a_still_clip_is_no_image(model: Multimodal) -> None:
    frames = [Image.effect_noise((56, 56), 60).convert("RGB") for _ in range(2)]
    with torch.no_grad():
        forward, backward, still, image = (model.features(prepare_video(part))[0]
                                           for part in (frames, frames[::-1], [frames[0]] * 2, frames[:1]))
    assert not torch.allclose(forward, backward, atol=1e-3)
    assert not torch.allclose(still, image, atol=1e-3)  # a single frame has no embedding of time, the frames of a clip do


def test_images_take_their_places(model: Multimodal) -> None:
    tokens = torch.tensor([1, 2, PAD, 3, PAD, 4])
    items = [noise(56, 28, 1), noise(28, 28, 2)]
    with torch.no_grad():
        features = model.features(items)
        merged = model.merge(tokens, features, PAD)
        logits = model(tokens, items, PAD)
    assert merged.tokens.tolist() == [1, 2, PAD, PAD, 3, PAD, 4] and merged.seen.tolist() == [False, False, True, True, False, True, False]
    assert torch.equal(merged.embeddings[2:4], features[0]) and torch.equal(merged.embeddings[5:6], features[1])
    assert torch.equal(merged.embeddings[0], model.language_model.embed(tokens[None])[0, 0])
    assert logits.shape == (7, model.config.vocab_size)
    plain = torch.tensor([1, 2, 3])
    with torch.no_grad():
        torch.testing.assert_close(model(plain, [], PAD), model.language_model(plain[None])[0])
    with pytest.raises(ConfigError, match="2 places for images and 1 images"):
        model.merge(tokens, features[:1], PAD)


def test_everything_learns(model: Multimodal) -> None:
    learner = Multimodal(config()).initialise(1)
    learner(torch.tensor([1, PAD, 2]), [noise(56, 56)], PAD).square().mean().backward()
    own = {name: p.grad for name, p in learner.named_parameters() if not name.startswith("language_model")}
    silent = [name for name, gradient in own.items() if gradient is None or not gradient.any()]
    assert not silent


def test_starting_values_keep_the_scale(model: Multimodal) -> None:
    with torch.no_grad():
        features = model.features([noise(112, 112)])[0]
    assert 0.8 < features.square().mean().sqrt() < 1.25  # a norm ends the projector
    again = Multimodal(config()).initialise(3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_checkpoints_keep_every_tensor(model: Multimodal, tmp_path: Path) -> None:
    save_multimodal(model, tmp_path / "whole", quantize=False)
    back = load_multimodal(tmp_path / "whole")
    for (name, a), (_, b) in zip(model.state_dict().items(), back.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    text = load_pretrained(tmp_path / "whole")  # a text model reads it too and carries the eye along
    assert set(text.untouched) == {name for name in model.state_dict() if not name.startswith("language_model.")}
    assert not model.language_model.untouched
    save_multimodal(back, tmp_path / "bf16", dtype=torch.bfloat16)
    assert load_multimodal(tmp_path / "bf16").vision_tower.patch_embed.proj.weight.dtype == torch.bfloat16


def test_what_does_not_fit_is_refused(model: Multimodal, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'vision' is missing"):
        Multimodal(preset("tiny"))
    patches, grids = stack([noise(56, 28)])
    with pytest.raises(ConfigError, match="8 patches where the grids have 16"):
        model.vision_tower(patches, grids * 2)
    with pytest.raises(ConfigError, match="divisible by 2"):
        model.vision_tower(patches, [(1, 1, 8)])
    with pytest.raises(ConfigError, match="1 to 4 frames"):
        model.vision_tower(patches, [(8, 1, 1)])
    with pytest.raises(ConfigError, match="qkv_hidden_size"):
        replace(EYE, qkv_hidden_size=50)
    save_pretrained(Transformer(preset("tiny")).initialise(0), tmp_path, quantize=False)
    with pytest.raises(CheckpointError, match="no vision tower"):
        load_multimodal(tmp_path)
