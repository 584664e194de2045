"""One network in which teachers sit in turn: checkpoints are read into it, adapters are added to a base that stays in memory.

However many there are, they take the memory of one network, of two where adapters are among them. Read next: `teachers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from gnomon.model import adapter, runs
from gnomon.model.adapter import Adapter
from gnomon.model.config import ModelConfig
from gnomon.model.transformer import Transformer
from gnomon.posttrain.learner import Document, hidden_states, in_pieces, stream
from gnomon.posttrain.teaching import Mode, Said

MICRO_TOKENS = 16_384


class Seat:
    """The network; `reads` counts checkpoints that were read from the disk."""

    def __init__(self, shape: ModelConfig, device: torch.device | str = "cpu") -> None:
        self.shape, self.device, self.reads = shape, device, 0
        self._network: Transformer | None = None
        self._holds: str | None = None
        self._base: tuple[Path, Mapping[str, Tensor]] | None = None

    def hold(self, name: str, checkpoint: Path, added: Adapter | None = None) -> Transformer:
        """The network with the weights of a checkpoint, and an adapter on them; `name` names both."""
        if self._network is None:
            self._network = Transformer(self.shape).to(self.device).eval().requires_grad_(False)
        if self._holds != name:
            self._holds = None  # while the weights are a mixture
            runs.restore_model(self._network, self._tensors(checkpoint, keep=added is not None), checkpoint)
            if added is not None:
                added.apply(self._network)
            self._holds = name
        return self._network

    def _tensors(self, checkpoint: Path, keep: bool) -> Mapping[str, Tensor]:
        if self._base is not None and self._base[0] == checkpoint:
            return self._base[1]
        tensors = runs.load(checkpoint, self.device).tensors["model"]
        self.reads += 1
        if keep:
            self._base = checkpoint, tensors
        return tensors


@dataclass(kw_only=True, slots=True, eq=False)
class Seated:
    """A teacher whose weights are here: a checkpoint, perhaps with an adapter on it."""

    seat: Seat
    checkpoint: Path
    added: Adapter | None = None
    name: str = ""

    def ask(self, documents: Sequence[Document], mode: Mode, k: int, temperature: float) -> list[Said]:
        """What it says about each document."""
        return _ask(self.seat.hold(self.name, self.checkpoint, self.added), documents, mode, k, temperature)


def seated(seat: Seat, checkpoint: Path, folder: Path | None) -> Seated:
    """A teacher of a checkpoint and the folder of an adapter, if any."""
    if folder is None:
        return Seated(seat=seat, checkpoint=checkpoint, name=str(checkpoint))
    return Seated(seat=seat, checkpoint=checkpoint, added=adapter.load(folder), name=f"{checkpoint} + {adapter.digest(folder)}")


@torch.no_grad()
def _ask(network: Transformer, documents: Sequence[Document], mode: Mode, k: int, temperature: float) -> list[Said]:
    found: list[Said] = []
    for part in in_pieces(list(documents), [len(each.token_ids) for each in documents], MICRO_TOKENS):
        piece = stream(part, network.model.embed_tokens.weight.device)
        scores = all_scores(network, hidden_states(network, piece), temperature)
        sizes = piece.lengths.tolist()
        own = scores.gather(1, piece.targets[:, None])[:, 0].split(sizes)
        if mode == "sampled":
            found += [Said(logprobs=o) for o in own]
        elif mode == "full":
            found += [Said(logprobs=o, scores=s) for o, s in zip(own, scores.split(sizes), strict=True)]
        else:
            top, ids = scores.topk(min(k, scores.shape[1]), -1)
            found += [Said(logprobs=o, scores=s, ids=i) for o, s, i in zip(own, top.split(sizes), ids.split(sizes), strict=True)]
    return found


def all_scores(network: Transformer, hidden: Float[Tensor, "n D"], temperature: float) -> Float[Tensor, "n V"]:
    """Log-probabilities of the whole vocabulary, in fp32."""
    logits = network.head(hidden).float()
    return (logits / temperature if temperature else logits).log_softmax(-1)
