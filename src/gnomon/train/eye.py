"""The part of a run that sees: tower and projector beside the text model, trained by the same loss from the first step (report §2.4, §3.3).

In checkpoints they are a group of their own, so whatever reads the text model alone reads it as before; `runs.load_seeing` reads both.
Read next: `gnomon/model/multimodal.py`.
"""

from pathlib import Path

from torch import Tensor

from gnomon.model.multimodal import TEXT, Multimodal
from gnomon.model.runs import EYE, Saved, eye_tensors, restore_eye
from gnomon.model.transformer import Transformer
from gnomon.train.evaluate import frozen, share_read
from gnomon.train.material import Material, picture_questions

__all__ = ["EYE", "around", "open_eye", "parameters", "read_pictures", "restore", "tensors"]


def open_eye(model: Transformer, seed: int) -> Multimodal | None:
    """Tower and projector around a text model, with starting weights; none where the configuration has no `vision`."""
    if model.config.vision is None:
        return None
    return Multimodal(model.config, model).initialise_eye(seed).to(next(model.parameters()).device)


def parameters(model: Transformer, eye: Multimodal | None) -> list[tuple[str, Tensor]]:
    """What is trained, by name: the text model's parameters under their own names, then those of tower and projector."""
    seen = [] if eye is None else [(name, p) for name, p in eye.named_parameters() if not name.startswith(TEXT)]
    return [(name, p) for name, p in [*model.named_parameters(), *seen] if p.requires_grad]


def tensors(eye: Multimodal | None) -> dict[str, dict[str, Tensor]]:
    """The group of a checkpoint that holds tower and projector; nothing for a text model."""
    return {} if eye is None else {EYE: eye_tensors(eye)}


def restore(eye: Multimodal | None, saved: Saved, where: Path) -> None:
    """Take tower and projector over from a checkpoint. Raises `CheckpointError` where it has none or others."""
    if eye is not None:
        restore_eye(eye, saved.tensors.get(EYE, {}), where)


def around(eye: Multimodal, model: Transformer) -> Multimodal:
    """The same tower and projector around another text model: a whole copy of one that is spread over ranks."""
    if eye.language_model is model:
        return eye
    other = Multimodal(model.config, model)
    other.vision_tower, other.mm_projector = eye.vision_tower, eye.mm_projector
    return other


def read_pictures(eye: Multimodal, material: Material, samples: int) -> dict[str, tuple[float, int]]:
    """Share of held-out pictures that are answered right, and how many were asked, by kind."""
    with frozen(eye.language_model):
        return {kind: (share_read(eye, source, samples), samples) for kind, source in picture_questions(material).items()}
