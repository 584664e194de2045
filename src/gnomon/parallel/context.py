"""One stream of tokens over several ranks, each with a stretch of it: what of the past must travel (report §5.1.2, eq. 17).

A KDA layer needs the state before a stretch. Every rank works out what its last document does to a state, S ↦ S̃ + M S, all ranks exchange
these maps, whose size does not depend on the length, and each composes those of its past. The short convolution needs the few inputs just
before the stretch, which go to the rank that lacks them and to no other. Latent attention needs the latents of the document so far, which
is all that it would have cached. Documents begin and end anywhere, stretches may differ in length. Gradients go back through the same
exchanges. Read next: `exchange.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from gnomon.data.packing import Batch
from gnomon.errors import ConfigError
from gnomon.kernels import kda
from gnomon.model.mixers import kda as kda_layer
from gnomon.model.mixers import mla as mla_layer
from gnomon.model.transformer import Transformer
from gnomon.parallel.exchange import Exchange, Gather


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a stream of documents is cut into stretches: `lengths` of the ranks' stretches, `borders` of documents over the whole stream.

    Raises `ConfigError` for stretches that do not make up the documents, or that are empty.
    """

    lengths: tuple[int, ...]
    borders: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(length < 1 for length in self.lengths):
            raise ConfigError(f"'lengths' is {list(self.lengths)}; every rank needs at least one token of the stream")
        if self.borders[0] != 0 or self.borders[-1] != sum(self.lengths) or any(a >= b for a, b in pairwise(self.borders)):
            raise ConfigError(f"'borders' {list(self.borders)} must rise from 0 to the {sum(self.lengths)} tokens of all stretches")

    def span(self, rank: int) -> tuple[int, int]:
        """First token and past the last of a rank's stretch."""
        start = sum(self.lengths[:rank])
        return start, start + self.lengths[rank]

    def local_borders(self, rank: int) -> tuple[int, ...]:
        """Borders of documents within a stretch, from 0 to its length."""
        start, stop = self.span(rank)
        return (0, *(border - start for border in self.borders if start < border < stop), stop - start)

    def continues(self, rank: int) -> bool:
        """Whether a stretch begins in the middle of a document."""
        return self.span(rank)[0] not in self.borders

    def past(self, rank: int) -> list[int]:
        """The ranks that hold earlier parts of a stretch's first document, in order."""
        found: list[int] = []
        at = rank
        while self.continues(at):
            at -= 1
            found.insert(0, at)
            if len(self.local_borders(at)) > 2:
                break
        return found

    def recent(self, rank: int, kept: int) -> dict[int, int]:
        """How many of the `kept` tokens before a stretch, of its first document, stand on which other ranks, in order."""
        found: dict[int, int] = {}
        for other in reversed(self.past(rank)):
            if count := min(kept - sum(found.values()), self.lengths[other] - self.last(other)):
                found = {other: count} | found
        return found

    def last(self, rank: int) -> int:
        """Where in a stretch its last document begins."""
        return self.local_borders(rank)[-2]


class Context:
    """The exchanges of one rank; give the same object to all layers, and `cut` before each micro-batch."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self._cut: Cut | None = None
        self.sent_bytes = {"states": 0, "history": 0, "latents": 0}

    @property
    def cut(self) -> Cut:
        """How the present micro-batch is cut."""
        if self._cut is None:
            raise ConfigError("the stream has not been cut: set 'cut' before the forward pass")
        return self._cut

    @cut.setter
    def cut(self, cut: Cut) -> None:
        if len(cut.lengths) != self.ranks:
            raise ConfigError(f"'lengths' has {len(cut.lengths)} stretches for {self.ranks} ranks")
        self._cut = cut

    def stretch(self, piece: Batch) -> Batch:
        """This rank's part of a micro-batch whose rows all ranks of the group have, laid end to end; `cut` is set to it."""
        self.cut = Cut(lengths=stretches(piece.tokens.numel(), self.ranks), borders=tuple(piece.cu_seqlens.tolist()))
        own = slice(*self.cut.span(self.rank))
        tokens, targets, loss_mask, token_mask = (
            t.reshape(1, -1)[:, own] for t in (piece.tokens, piece.targets, piece.loss_mask, piece.token_mask))
        images = tuple(part for image in piece.images if (part := image.within(own.start, own.stop)) is not None)
        return Batch(tokens=tokens, targets=targets, loss_mask=loss_mask, token_mask=token_mask, cu_seqlens=self.borders(tokens.device),
                     images=images)

    def borders(self, device: torch.device | None = None) -> Tensor:
        """`cu_seqlens` of this rank's stretch, for the forward pass."""
        return torch.tensor(self.cut.local_borders(self.rank), dtype=torch.int32, device=device)

    def gather(self, own: Tensor, kind: str) -> Tensor:
        """Every rank's tensor of one shape [R, …]."""
        self.sent_bytes[kind] += own.nbytes * (self.ranks - 1)
        return Gather.apply(own, self.group)

    def exchange(self, rows: Tensor, sends: list[int], receives: list[int], kind: str) -> Tensor:
        """Rows to the ranks that want them, and from those that have them [Σ receives, …]; most pairs of ranks send nothing."""
        self.sent_bytes[kind] += rows.nbytes
        return Exchange.apply(rows, sends, receives, self.group)


class Stretches:
    """The `SegmentExchange` of a KDA layer whose sequence is spread over ranks."""

    def __init__(self, context: Context, taps: int):
        self.context, self.taps = context, taps

    def history(self, projected: Float[Tensor, "1 T C"], history: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
        """The last inputs of the first document that other ranks hold, zeros for documents that begin here."""
        _no_state(history)
        context, cut, kept = self.context, self.context.cut, self.taps - 1
        others, wanted = range(context.ranks), cut.recent(context.rank, kept)
        sends, receives = [cut.recent(other, kept).get(context.rank, 0) for other in others], [wanted.get(other, 0) for other in others]
        own = torch.cat([projected[0, projected.shape[1] - count :] for count in sends])
        arrived = context.exchange(own, sends, receives, "history")
        recent = torch.cat([own.new_zeros(kept - len(arrived), own.shape[1]), arrived])
        fresh = own.new_zeros(len(cut.local_borders(context.rank)) - 2, *recent.shape)
        return _touched(torch.cat([recent[None], fresh]), arrived)

    def initial_state(self, inputs: kda_layer.KDAInputs, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
        """The state before each document: composed of the maps of earlier ranks for the first, zero for the others."""
        _no_state(state)
        context, cut = self.context, self.context.cut
        last = slice(cut.last(context.rank), None)
        carried, added = kda.transition(*(x[:, last] for x in (inputs.k, inputs.v, inputs.g, inputs.beta)))
        every = context.gather(torch.cat([carried[0], added[0]], -1), "states")
        width = carried.shape[-1]
        reached = torch.zeros_like(added[0])
        for rank in cut.past(context.rank):
            reached = every[rank, ..., width:] + every[rank, ..., :width] @ reached
        others = reached.new_zeros(len(cut.local_borders(context.rank)) - 2, *reached.shape)
        return _touched(torch.cat([reached[None], others]), every)


class Latents:
    """The exchange of a latent-attention layer: the latents of the first document that other ranks hold."""

    def __init__(self, context: Context):
        self.context = context

    def earlier(self, rows: Float[Tensor, "1 T C"]) -> Tensor | None:
        """Latents before this stretch, of its first document [1, E, C]; None where it begins here."""
        context, cut = self.context, self.context.cut
        longest = max(cut.lengths)
        every = context.gather(torch.cat([rows[0], rows.new_zeros(longest - rows.shape[1], rows.shape[2])]), "latents")
        past = cut.past(context.rank)
        parts = [every[rank, cut.last(rank) : cut.lengths[rank]] for rank in past]
        return _touched(torch.cat([every[0, :0], *parts])[None], every)


def spread(model: Transformer, group: dist.ProcessGroup | None = None) -> Context:
    """Let a model's layers look for their past on other ranks; returns what must be told how each stream is cut.

    Raises `ConfigError` for a mixer that knows no exchange.
    """
    context = Context(group)
    for index, layer in enumerate(model.model.layers):
        mixer = getattr(layer, "self_attn", None)
        if mixer is None:  # a pipeline has it elsewhere
            continue
        if isinstance(mixer, kda_layer.Mixer):
            mixer.exchange = Stretches(context, mixer.config.short_conv_kernel_size)
        elif isinstance(mixer, mla_layer.Mixer):
            mixer.exchange = Latents(context)
        else:
            raise ConfigError(f"layer {index}: the mixer '{model.config.layers[index]}' cannot be spread over ranks")
    return context


def stretches(tokens: int, ranks: int) -> tuple[int, ...]:
    """Stretches of nearly equal length."""
    whole, rest = divmod(tokens, ranks)
    return tuple(whole + (rank < rest) for rank in range(ranks))


def _touched(result: Tensor, every: Tensor) -> Tensor:
    """The same values, made to depend on the exchange, so that every rank takes part in its backward pass."""
    return result + every.flatten()[:0].sum() if every.requires_grad else result


def _no_state(state: Tensor | None) -> None:
    if state is not None:
        raise ConfigError("a stream that is spread over ranks begins afresh: it takes no states")
