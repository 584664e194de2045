"""Layers over ranks, micro-batch after micro-batch, through torch's schedules; each depth block travels to a rank once (report §5.2.2).

What passes between stages is a depth stream: the banked blocks and the running sum. With several stages per rank, stage s stands on rank
s mod P, and a rank has seen most of the bank already when its next stage begins. It keeps those blocks for the micro-batch, so a stage is
sent only what its rank has not seen. In the backward pass a stage that read a kept block *deposits* its gradient with it; the stage that
put the block there adds the deposit to its own before it sends gradients on. Schedules are torch's: 1F1B, and interleaved 1F1B.
Read next: `gnomon/model/residuals.py` for the stream, `axes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from gnomon.data.packing import Batch
from gnomon.errors import ConfigError
from gnomon.model.config import ModelConfig
from gnomon.model.residuals import DepthStream
from gnomon.model.transformer import Pass, Transformer


class Elsewhere(nn.Module):
    """Stands in the place of a part that another rank holds, so that names stay what they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a step does with its micro-batches.

    `own(piece)` is this rank's part of one; `loss(hidden, batch)` gives what is differentiated and what is reported; `precision()` is the
    context of the forward pass.
    """

    pieces: Sequence[Batch]
    own: Callable[[Batch], Batch]
    loss: Callable[[Tensor, Batch], tuple[Tensor, Tensor]]
    precision: Callable[[], AbstractContextManager[Any]]


def spans(layers: int, stages: int) -> list[range]:
    """The layers of each stage: consecutive, equal up to one, the first stages longer. Raises `ConfigError` for more stages than layers."""
    if stages > layers:
        raise ConfigError(f"'mesh.pipeline' x 'mesh.virtual' is {stages} stages, but the model has {layers} layers; use {layers} or fewer")
    whole, rest = divmod(layers, stages)
    bounds = [0]
    for stage in range(stages):
        bounds.append(bounds[-1] + whole + (stage < rest))
    return [range(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]


def banked(config: ModelConfig, layer: int) -> int:
    """Sources in the bank when a layer starts."""
    if config.attention_residuals == "off":
        return 0
    return 2 * layer if config.attention_residuals == "full" else -(-layer // config.attn_res_block_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """Where a model is cut into `ranks` x `virtual` stages, and what each stage is sent."""

    config: ModelConfig
    ranks: int
    virtual: int = 1

    @property
    def layers(self) -> list[range]:
        """The layers of each stage."""
        return spans(self.config.num_hidden_layers, self.ranks * self.virtual)

    def before(self, stage: int) -> int:
        """Blocks in the bank when a stage starts; after the last one for the number of stages."""
        layers = self.layers
        return banked(self.config, layers[stage].start if stage < len(layers) else layers[-1].stop)

    def known(self, stage: int) -> int:
        """Of those, how many its rank has seen in its stage before: they are not sent."""
        return self.before(stage - self.ranks + 1) if stage >= self.ranks else 0

    def payload(self) -> int:
        """Rows of the hidden width that one token sends over all hops, forward: running sums and new blocks."""
        return sum(1 + self.before(stage) - self.known(stage) for stage in range(1, self.ranks * self.virtual))


class _Handoff(torch.autograd.Function):
    """A block that this rank keeps for its next stage; backward adds what was deposited there."""

    @staticmethod
    def forward(ctx: Any, block: Tensor, kept: list[Tensor]) -> Tensor:
        """The block; a leaf with its values goes into `kept`."""
        ctx.leaf = block.detach().requires_grad_()
        kept.append(ctx.leaf)
        return block.view_as(block)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient with the deposit of later stages."""
        deposit, ctx.leaf.grad = ctx.leaf.grad, None
        return gradients[0] if deposit is None else gradients[0] + deposit, None


class _Stage(nn.Module):
    """One stage as torch's schedules want it: tensors in, tensors out."""

    pipeline: Pipeline

    def __init__(self, pipeline: Pipeline, number: int):
        super().__init__()
        self.number = number
        object.__setattr__(self, "pipeline", pipeline)  # a plain attribute: the model's parameters belong to the model

    def forward(self, *received: Tensor, number: Tensor) -> tuple[Tensor, ...] | Tensor:
        """`received` is empty on the first stage, else new blocks and the running sum; `number` [1] is the micro-batch's."""
        return self.pipeline.forward(self.number, int(number), received)


@dataclass(slots=True, kw_only=True)
class Pipeline:
    """One rank's stages. `totals` are the reported losses of the last step's micro-batches, on the rank with the last stage."""

    model: Transformer
    cuts: Cuts
    rank: int
    group: dist.ProcessGroup | None
    device: torch.device
    totals: dict[int, Tensor] = field(default_factory=dict)
    sent: int = 0
    _work: Work | None = None
    _kept: dict[int, list[Tensor]] = field(default_factory=dict)
    _schedules: dict[tuple[int, int], Any] = field(default_factory=dict)

    @property
    def stages(self) -> list[int]:
        """The numbers of this rank's stages."""
        return list(range(self.rank, self.cuts.ranks * self.cuts.virtual, self.cuts.ranks))

    def run(self, work: Work) -> list[Tensor]:
        """Forward and backward of all micro-batches; returns their reported losses, zero on ranks without the last stage."""
        first = work.own(work.pieces[0])
        self._work = work
        schedule = self._schedule(len(work.pieces), first.tokens.numel())
        numbers = torch.arange(len(work.pieces), device=self.device)
        last = self.stages[-1] == self.cuts.ranks * self.cuts.virtual - 1
        schedule.step(number=numbers, **({"target": numbers, "losses": []} if last else {}), return_outputs=False)
        losses = [self.totals.get(number, torch.zeros((), device=self.device)) for number in range(len(work.pieces))]
        self._kept.clear()
        self.totals.clear()
        self._work = None
        return losses

    def forward(self, stage: int, number: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...] | Tensor:
        """The layers of a stage over one micro-batch."""
        work, cuts, kept = self._work, self.cuts, self._kept.setdefault(number, [])
        assert work is not None  # only run() calls schedules
        batch, layers, continued = work.own(work.pieces[number]), cuts.layers[stage], stage + cuts.ranks < len(cuts.layers)
        with work.precision():
            if stage == 0:
                stream = DepthStream(partial=self.model.embed(batch.tokens).flatten(0, 1)[None])
            else:
                known, fresh = tuple(kept), received[:-1]
                stream = DepthStream((*known, *(_Handoff.apply(b, kept) if continued else b for b in fresh)), received[-1])
            context = Pass(cu_seqlens=batch.cu_seqlens, token_mask=batch.token_mask.reshape(1, -1))
            stream = self.model.run_layers(stream, layers.start, layers.stop, context)
            if stage + 1 == len(cuts.layers):
                loss, self.totals[number] = work.loss(self.model.finish(stream, context), batch)
                return loss
        made = [_Handoff.apply(block, kept) if continued else block for block in stream.bank[cuts.before(stage) :]]
        assert stream.partial is not None  # a layer ends with an addition
        sent = (*stream.bank[cuts.known(stage + 1) : cuts.before(stage)], *made, stream.partial)
        self.sent += sum(tensor.nbytes for tensor in sent)
        return sent

    def _schedule(self, parts: int, tokens: int) -> Any:
        """Torch's schedule for so many micro-batches of so many tokens."""
        if (parts, tokens) not in self._schedules:
            stages, made = self.cuts.ranks * self.cuts.virtual, []
            dtype = next(self.model.parameters()).dtype
            row = torch.empty(1, tokens, self.model.config.hidden_size, dtype=dtype, device="meta", requires_grad=True)
            for number in self.stages:
                given, out = ((1 + self.cuts.before(s) - self.cuts.known(s)) for s in (number, number + 1))
                outputs = torch.empty((), device="meta", requires_grad=True) if number + 1 == stages else (row,) * out
                made.append(PipelineStage(_Stage(self, number), number, stages, self.device, group=self.group,
                                          input_args=(row,) * given if number else (), output_args=outputs))
            kind = ScheduleInterleaved1F1B if self.cuts.virtual > 1 else Schedule1F1B
            chosen: Any = made if self.cuts.virtual > 1 else made[0]
            self._schedules = {(parts, tokens): kind(chosen, parts, loss_fn=_as_it_is, scale_grads=False)}
        return self._schedules[parts, tokens]


def _as_it_is(loss: Tensor, target: Tensor) -> Tensor:
    """The last stage's output is the loss already."""
    return loss


def cut(model: Transformer, ranks: int, virtual: int, rank: int, group: dist.ProcessGroup | None, device: torch.device) -> Pipeline:
    """Keep this rank's stages of a model and put `Elsewhere` in the place of all else.

    Raises `ConfigError` for more stages than layers, and for tied embeddings, which two stages would need.
    """
    if model.config.tie_word_embeddings:
        raise ConfigError("'mesh.pipeline' cuts the embedding from the head, which 'model.tie_word_embeddings' makes one; set it to false")
    pipeline = Pipeline(model=model, cuts=Cuts(config=model.config, ranks=ranks, virtual=virtual), rank=rank, group=group, device=device)
    held = {layer for stage in pipeline.stages for layer in pipeline.cuts.layers[stage]}
    for layer in range(model.config.num_hidden_layers):
        if layer not in held:
            model.model.layers[layer] = Elsewhere()  # type: ignore[call-overload]
    if rank != 0:
        model.model.embed_tokens = Elsewhere()  # type: ignore[assignment]
    if rank != ranks - 1:
        model.lm_head = Elsewhere()  # type: ignore[assignment]
        model.model.norm = Elsewhere()  # type: ignore[assignment]
        for part in ("output_attn_res_norm", "output_attn_res_proj"):
            if hasattr(model.model, part):
                setattr(model.model, part, Elsewhere())
    return pipeline
