"""Images in training: the packed loss is that of each prompt alone, gradients reach the eye, the optimiser knows its tensors."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from gnomon import config as toml
from gnomon.data.images import ImageAt, Pixels, prepare
from gnomon.data.mixture import Item, Mixture
from gnomon.data.packing import PackedBatches
from gnomon.errors import CheckpointError, ConfigError
from gnomon.model.config import ModelConfig, preset
from gnomon.model.multimodal import Multimodal
from gnomon.model.parts import VisionConfig
from gnomon.model.runs import eye_tensors, restore_eye
from gnomon.train.eye import parameters
from gnomon.train.muon import Muon
from gnomon.train.objective import Objective
from gnomon.train.recipe import TrainRecipe
from gnomon.train.settings import MuonConfig
from gnomon.train.units import all_units, head_rows

EYE = VisionConfig(position_grid=8, vt_hidden_size=32, vt_intermediate_size=64, vt_num_hidden_layers=2, vt_num_attention_heads=2,
                   qkv_hidden_size=48)
PAD = 7


def config() -> ModelConfig:
    return replace(preset("tiny"), num_hidden_layers=4, vision=EYE)


def noise(width: int, height: int, seed: int) -> Pixels:
    return prepare(Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)))


def prompts() -> list[tuple[list[int], list[Pixels]]]:
    """Tokens with one pad for each image, and the images."""
    return [([11, PAD, 12, 13, PAD, 14, 15], [noise(56, 28, 1), noise(60, 90, 2)]), ([21, 22, 23], []),
            ([31, PAD, 32, 33], [noise(56, 28, 3)]), ([41, 42, PAD, 43], [noise(140, 28, 4)])]


class Prompts:
    """The prompts in turn, laid out as items."""

    def __init__(self) -> None:
        self.turn = 0

    def next_item(self) -> Item:
        tokens, pixels = prompts()[self.turn % 4]
        self.turn += 1
        laid: list[int] = []
        images: list[ImageAt] = []
        for token in tokens:
            if token == PAD:
                images.append(ImageAt(pixels=pixels[len(images)], start=len(laid), count=pixels[len(images)].tokens))
            laid += [PAD] * images[-1].count if token == PAD else [token]
        whole = np.array(laid)
        return Item(tokens=whole, loss_mask=whole != PAD, images=tuple(images))

    def state(self):
        return {"turn": self.turn}

    def restore(self, state) -> None:
        self.turn = state["turn"]


@pytest.fixture(scope="module")
def model() -> Multimodal:
    torch.set_num_threads(1)
    return Multimodal(config()).initialise(3)


def alone(model: Multimodal) -> tuple[float, int]:
    """Summed loss of the four prompts and their learnt targets, prompt by prompt, through `merge` and all logits."""
    total, count = 0.0, 0
    with torch.no_grad():
        for tokens, pixels in prompts():
            merged = model.merge(torch.tensor(tokens), model.features(pixels), PAD)
            logits = model.language_model(None, embeddings=merged.embeddings[None])[0]
            learnt = merged.tokens[1:] != PAD
            total += functional.cross_entropy(logits[:-1][learnt].double(), merged.tokens[1:][learnt], reduction="sum").item()
            count += int(learnt.sum())
    return total, count


def test_packed_with_text_the_loss_is_that_of_each_prompt_alone(model: Multimodal) -> None:
    size = sum(len(Prompts.next_item(source).tokens) - 1 for source in [Prompts()] for _ in range(4))
    batch = PackedBatches(Mixture([(Prompts(), 1.0)]), 1, size, pad_id=0).next()
    assert len(batch.images) == 4
    wanted, count = alone(model)
    assert int(batch.loss_mask.sum()) == count
    loss, total = Objective(model.language_model, eye=model)(batch, count)
    assert total.item() == pytest.approx(wanted, rel=1e-5)
    assert loss.item() == pytest.approx(wanted / count, rel=1e-5)
    loss.backward()
    silent = [name for name, p in eye_named(model) if p.grad is None or not p.grad.any()]
    assert not silent
    pads = model.language_model.model.embed_tokens.weight.grad[PAD]
    assert not pads.any()  # images take the place of the pad's own row
    model.zero_grad()


def eye_named(model: Multimodal):
    return [(name, p) for name, p in model.named_parameters() if not name.startswith("language_model.")]


def test_a_part_of_an_image_has_its_own_vectors(model: Multimodal) -> None:
    pixels = noise(140, 28, 4)
    tokens = torch.tensor([[1, PAD, PAD, 2]])
    with torch.no_grad():
        found = model.embeddings(tokens, [ImageAt(pixels=pixels, start=1, count=2, skip=3)])[0]
        torch.testing.assert_close(found[1:3], model.features([pixels])[0][3:5])
        torch.testing.assert_close(found[[0, 3]], model.language_model.embed(tokens)[0, [0, 3]])
        assert torch.equal(model.embeddings(tokens, []), model.language_model.embed(tokens))
    with pytest.raises(ConfigError, match="outside the 4 tokens"):
        model.embeddings(tokens, [ImageAt(pixels=pixels, start=2, count=5)])


def test_without_images_the_loss_is_that_of_the_text_model(model: Multimodal) -> None:
    batch = PackedBatches(Mixture([(Prompts(), 1.0)]), 1, 30, pad_id=0).next()
    blank = replace(batch, images=())
    with_eye, _ = Objective(model.language_model, eye=model)(blank, 10)
    text, _ = Objective(model.language_model)(blank, 10)
    assert with_eye.item() == text.item()
    with_eye.backward()
    assert all(p.grad is None for _, p in eye_named(model))
    model.zero_grad()


def test_the_optimiser_knows_the_eye(model: Multimodal) -> None:
    named, rows = dict(parameters(model.language_model, model)), head_rows(model.config)
    assert len(named) == len({id(p) for p in named.values()}) == sum(1 for _ in model.parameters() if _.requires_grad)
    units = [unit for unit in all_units(named, rows) if unit.parameter.startswith(("vision_tower.", "mm_projector."))]
    by_name = {name: sum(unit.parameter == name for unit in units) for name in {unit.parameter for unit in units}}
    assert by_name["vision_tower.patch_embed.proj.weight"] == 1  # one map of all values of a patch
    assert by_name["vision_tower.encoder.blocks.0.wqkv.weight"] == 3 * EYE.vt_num_attention_heads
    assert by_name["vision_tower.encoder.blocks.0.wo.weight"] == by_name["mm_projector.proj.2.weight"] == 1
    assert "vision_tower.patch_embed.pos_emb.weight" not in by_name
    before = named["vision_tower.patch_embed.proj.weight"].detach().clone()
    optimizer = Muon([("vision_tower.patch_embed.proj.weight", named["vision_tower.patch_embed.proj.weight"])],
                     MuonConfig(weight_decay=0.0), rows)
    weight = named["vision_tower.patch_embed.proj.weight"]
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    optimizer.step(1e-2)
    update = (weight.detach() - before).flatten(1) / 1e-2
    values = torch.linalg.svdvals(update) / (0.2 * math.sqrt(max(update.shape)))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3  # an orthogonal update of the flat map
    with torch.no_grad():
        weight.copy_(before)
    weight.grad = None


def test_the_eye_of_another_shape_is_refused(model: Multimodal, tmp_path) -> None:
    tensors = dict(eye_tensors(model))
    gone = next(iter(tensors))
    with pytest.raises(CheckpointError, match="missing"):
        restore_eye(model, {name: value for name, value in tensors.items() if name != gone}, tmp_path)


def test_recipes_name_what_does_not_fit() -> None:
    blind = {"model": {"extends": "tiny"}, "stages": [{"context": 128, "steps": 1}]}
    model = toml.to_dict(preset("tiny"))
    with pytest.raises(ConfigError, match=r"no eye; add a \[model.vision\] table"):
        toml.from_dict(TrainRecipe, blind | {"model": model, "data": {"sources": [{}, {"pictures": {}}]}})
    with pytest.raises(ConfigError, match="holds no text to train a tokenizer on"):
        toml.from_dict(TrainRecipe, blind | {"model": model | {"vision": {}}, "data": {"sources": [{"pictures": {}}]}})
    with pytest.raises(ConfigError, match="makes its own words"):
        toml.from_dict(TrainRecipe, blind | {"model": model | {"vision": {}}, "data": {"sources": [{"pictures": {}, "max_bytes": 5}]}})
