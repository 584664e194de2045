"""MoonViT-V2 and its preprocessing against mlx-vlm, which carries the released ones; both files are loaded by path.

mlx-vlm's norms take 2^-7 as epsilon where the released code runs with that of fp32 (docs/numerics.md), so its epsilon is set right first.
"""

import importlib.util
import math
import sys
import types
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gnomon.data.images import prepare
from gnomon.model.parts import VisionConfig
from gnomon.model.vision import EPS, Projector, VisionTower

SMALL = VisionConfig(position_grid=8, vt_hidden_size=64, vt_intermediate_size=96, vt_num_hidden_layers=3, vt_num_attention_heads=4,
                     qkv_hidden_size=96)
RELEASED = VisionConfig(vt_num_hidden_layers=2)
BACKGROUND = {"pattern": "chessboard", "chessboard_square_size": 8, "chessboard_square_on_top_left": True, "chessboard_white_value": 255,
              "chessboard_gray_value": 180}


def folder() -> Path:
    """Where mlx-vlm's K3 files are."""
    package = PathFinder.find_spec("mlx_vlm", [str(Path(sys.prefix) / "peers"), *sys.path])
    if package is None or not package.submodule_search_locations:
        pytest.skip("mlx-vlm is not installed: make test puts it beside the environment's own packages")
    return Path(next(iter(package.submodule_search_locations))) / "models" / "kimi_k3"


def load(name: str, stubs: dict[str, dict[str, Any]]) -> ModuleType:
    """One of its files as a module of a package that is made up of what the file needs from its neighbours."""
    pytest.importorskip("mlx.core", reason="mlx is not installed: pip install mlx-cpu")
    path = folder() / f"{name}.py"
    if not path.is_file():
        pytest.skip(f"{path} is not there; the tests are written for mlx-vlm 0.7.10")
    stubs = {"peer.models.base": {"check_array_shape": lambda weight: False, "install_auto_processor_patch": lambda *names: None}, **stubs}
    for module in ("peer", "peer.models", "peer.models.kimi_k3", *stubs):
        made = sys.modules.setdefault(module, types.ModuleType(module))
        made.__path__ = []  # type: ignore[attr-defined]
        vars(made).update(stubs.get(module, {}))
    spec = importlib.util.spec_from_file_location(f"peer.models.kimi_k3.{name}", path)
    assert spec is not None and spec.loader is not None
    module_found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module_found
    spec.loader.exec_module(module_found)
    return module_found


@pytest.fixture(scope="module")
def vision() -> ModuleType:
    """`vision.py`."""
    return load("vision", {"peer.models.kimi_k3.config": {"VisionConfig": object}})


@pytest.fixture(scope="module")
def processor() -> Any:
    """The image processor, configured as released."""
    pytest.importorskip("transformers")
    module = load("processing_kimi_k3", {"peer.models.kimi_k3.encoding_k3": {"build_chat_segments": None, "is_batched_conversation": None}})
    return module.KimiK3ImageProcessor(transparent_bg_config=BACKGROUND, transparent_bg_fill_stage="after_resize")


def theirs(vision: Any, config: VisionConfig, tower: VisionTower) -> Any:
    """Their tower with our weights and the right epsilon."""
    import mlx.core as mx

    settings = types.SimpleNamespace(
        model_type="moonvit3d", patch_size=config.patch_size, init_pos_emb_height=config.position_grid,
        init_pos_emb_width=config.position_grid, init_pos_emb_time=4, merge_kernel_size=[2, 2], patch_embed_proj_bias=False,
        linear_bias=False, attn_bias=False, **{name: getattr(config, name) for name in (
            "vt_hidden_size", "vt_intermediate_size", "vt_num_hidden_layers", "vt_num_attention_heads", "qkv_hidden_size")})
    model = vision.VisionModel(settings)
    weights = [(name, mx.array(value.numpy())) for name, value in tower.state_dict().items()]
    weights = [(name, value.transpose(0, 2, 3, 1) if value.ndim == 4 else value) for name, value in weights]
    model.load_weights(weights)
    for module in model.modules():
        if type(module).__name__ == "RMSNorm":
            module.eps = EPS
    return model


@pytest.mark.parametrize(("config", "grids"), [
    (SMALL, [(1, 8, 8)]), (SMALL, [(1, 2, 6), (1, 12, 4)]), (SMALL, [(4, 4, 6)]), (SMALL, [(2, 6, 2), (1, 10, 14), (3, 2, 2)]),
    (RELEASED, [(1, 6, 10), (2, 4, 4)]),
], ids=str)
def test_the_tower_agrees(vision: Any, config: VisionConfig, grids: list[tuple[int, int, int]]) -> None:
    import mlx.core as mx

    generator = torch.Generator().manual_seed(0)
    tower = VisionTower(config)
    with torch.no_grad():
        for parameter in tower.parameters():
            scale = 1.0 if parameter.dim() in (1, 3) else math.sqrt(2 / parameter[0].numel())
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1))
    patches = torch.rand(sum(t * h * w for t, h, w in grids), 3, 14, 14, generator=generator) * 2 - 1
    with torch.no_grad():
        ours = torch.cat(tower(patches, grids))
    expected = np.array(theirs(vision, config, tower)(mx.array(patches.numpy().transpose(0, 2, 3, 1)), [list(grid) for grid in grids]))
    difference = np.linalg.norm(ours.numpy() - expected.reshape(ours.shape)) / np.linalg.norm(expected)
    assert difference < 1e-5


def pictures() -> dict[str, Image.Image]:
    """One image of each kind, of awkward sizes."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (61, 97, 4), dtype=np.uint8)
    grey = Image.fromarray(noise[:, :, 0])
    paletted = Image.fromarray(noise[:, :, :3]).quantize(16)
    transparent = paletted.copy()
    transparent.info["transparency"] = 3
    return {
        "rgb": Image.fromarray(noise[:, :, :3]), "rgba": Image.fromarray(noise), "grey": grey, "grey with alpha": grey.convert("LA"),
        "palette": paletted, "palette with transparency": transparent, "cmyk": Image.fromarray(noise[:, :, :3]).convert("CMYK"),
        "black and white": grey.convert("1"), "one pixel": Image.fromarray(noise[:1, :1, :3]), "wide": Image.fromarray(noise[:16, :30, :3]),
        "whole patches": Image.fromarray(noise[:56, :84, :3]), "long": Image.new("RGB", (9000, 20), (200, 30, 60)),
        "large": Image.fromarray(rng.integers(0, 256, (4000, 4600, 3), dtype=np.uint8)),
    }


@pytest.mark.parametrize("name", list(pictures()))
def test_preprocessing_is_equal_to_the_byte(processor: Any, name: str) -> None:
    image = pictures()[name]
    patches, grid = processor._preprocess(image)
    ours = prepare(image)
    assert (1, ours.rows, ours.columns) == grid
    assert ours.patches.tobytes() == np.array(patches).tobytes()


def test_the_projector_agrees(vision: Any) -> None:
    """There is no projector in the file: the formula of the release, in float64."""
    projector = Projector(SMALL, 48)
    with torch.no_grad():
        for parameter in projector.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1 + (parameter.dim() == 1))
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(2))
    w0, w2, norm = (value.double() for value in projector.state_dict().values())
    inner = x.double() @ w0.T
    out = (inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))) @ w2.T
    expected = out / (out.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm
    torch.testing.assert_close(projector(x).double(), expected, rtol=1e-5, atol=1e-5)
