"""The whole network, read this first: embed, run the layers over a depth stream, mix once more, normalise, project (report Fig. 2).

A layer is two sublayers. Each reads the depth stream, normalises, works, and adds its output to the running sum; a mixer works along
time, a feed-forward (dense or experts) on each token. No positions are encoded anywhere.
Read next: `residuals.py`, `mixers/kda.py`, `mixers/mla.py`, `experts.py`, `state.py`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gnomon.errors import ConfigError
from gnomon.extend import find
from gnomon.model.config import MIXERS, ModelConfig
from gnomon.model.experts import LatentMoE
from gnomon.model.layers import GatedMLP, Linear, RMSNorm, initialise
from gnomon.model.residuals import DepthReader, DepthStream, commits_before
from gnomon.model.router import Router, recomputing
from gnomon.model.state import LayerState


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """What a forward pass carries besides the stream.

    `cu_seqlens` [S+1] bounds the packed documents of a `[1, T]` stream; `states` has one state per layer; `token_mask` is false on
    padding; `taps` collects the depth read that follows a finished block, for each block number that it has as a key; `record` is
    told the probabilities [B, T, n] of every read that had more than one source.
    """

    cu_seqlens: Tensor | None = None
    states: Sequence[LayerState] | None = None
    token_mask: Tensor | None = None
    taps: dict[int, Tensor | None] = field(default_factory=dict)
    record: Callable[[str, Tensor], None] | None = None


class DecoderLayer(DepthReader):
    """One mixer and one feed-forward, each behind a depth read and a norm."""

    self_attn: Any  # a mixer: forward(x, state, cu_seqlens) and new_state(…)

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.config, self.index = config, index
        kind, eps = config.layers[index], config.rms_norm_eps
        caps = (config.activation_situ_beta, config.activation_situ_linear_beta) if config.hidden_act == "situ" else (None, None)
        self.input_layernorm = RMSNorm(config.hidden_size, eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps)
        self.self_attn = find(MIXERS, kind, "Mixer")(config.mixers[kind], config.hidden_size, eps)
        if config.attention_residuals != "off":
            self.add_read("self_attention_res", config.hidden_size)
            self.add_read("mlp_res", config.hidden_size)
        self.has_experts = config.is_moe_layer(index)
        if config.moe is not None and self.has_experts:
            self.block_sparse_moe = LatentMoE(config.moe, config.hidden_size, caps, eps)
        else:
            self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, caps)

    def forward(self, stream: DepthStream, context: Pass) -> DepthStream:
        """Run both sublayers."""
        state = None if context.states is None else context.states[self.index]
        h, stream = self._read("self_attention_res", "attention", stream, context)
        if (block := self._finished_block()) in context.taps:
            context.taps[block] = h
        stream = stream.add(self.self_attn(self.input_layernorm(h), state, context.cu_seqlens))
        h, stream = self._read("mlp_res", "mlp", stream, context)
        x = self.post_attention_layernorm(h)
        return stream.add(self.block_sparse_moe(x, context.token_mask) if self.has_experts else self.mlp(x))

    def _read(self, name: str, sublayer: str, stream: DepthStream, context: Pass) -> tuple[Tensor, DepthStream]:
        if context.record is not None and len(stream.sources) > 1:
            context.record(f"layer {self.index} {sublayer}", self.read_weights(name, stream, self.config.rms_norm_eps))
        h = self.read(name, stream, self.config.rms_norm_eps)
        commit = commits_before(self.config.attention_residuals, self.config.attn_res_block_size, self.index, sublayer)
        return h, stream.commit() if commit else stream

    def _finished_block(self) -> int | None:
        """The 1-based number of the block that ended just before this layer."""
        whole, rest = divmod(self.index, self.config.attn_res_block_size)
        return whole if rest == 0 and whole > 0 else None


class TextModel(DepthReader):
    """Embedding, layers, the output's depth read, and the final norm: `model.` in checkpoints."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers: list[DecoderLayer] = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))  # type: ignore[assignment]
        if config.attention_residuals != "off":
            self.add_read("output_attn_res", config.hidden_size)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Transformer(nn.Module):
    """A language model of the K3 or Kimi-Linear family. Parameters carry the released names, routed experts stacked per layer.

    Build it under `torch.device("meta")` to get shapes only; `initialise(seed)` gives starting weights.
    With `activation_checkpointing` set, each layer keeps only its stream for the backward pass.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        self.model = TextModel(config)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.untouched: dict[str, Tensor] = {}  # tensors of a checkpoint that are kept for writing back
        self.untouched_config: dict[str, Any] = {}
        if config.attention_residuals != "off":
            # the first read has one source, so these exist in checkpoints and never matter
            self.model.layers[0].freeze_read("self_attention_res")

    def initialise(self, seed: int = 0) -> "Transformer":
        """Starting weights for training from scratch; the same seed gives the same weights on any machine."""
        initialise(self, seed, self.config.initializer_range)
        for router in self.routers():
            router.e_score_correction_bias.zero_()
        return self

    def forward(
        self,
        tokens: Int[Tensor, "B T"] | None,
        *,
        embeddings: Float[Tensor, "B T D"] | None = None,
        cu_seqlens: Int[Tensor, "S1"] | None = None,
        states: Sequence[LayerState] | None = None,
        token_mask: Bool[Tensor, "B T"] | None = None,
        last_only: bool = False,
    ) -> Float[Tensor, "B T2 V"]:
        """Logits of every position, or of the last one of each row with `last_only`.

        `embeddings` replaces the look-up (images, soft prompts). `cu_seqlens` bounds documents over the flattened `B·T` stream; each
        starts afresh. `states` (from `new_states`) makes the pass a continuation and is updated in place.
        """
        hidden = self.hidden(tokens, embeddings=embeddings, cu_seqlens=cu_seqlens, states=states, token_mask=token_mask)
        return self.head(hidden[:, -1:] if last_only else hidden)

    def hidden(
        self,
        tokens: Int[Tensor, "B T"] | None,
        *,
        embeddings: Float[Tensor, "B T D"] | None = None,
        cu_seqlens: Int[Tensor, "S1"] | None = None,
        states: Sequence[LayerState] | None = None,
        token_mask: Bool[Tensor, "B T"] | None = None,
        taps: dict[int, Tensor | None] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """What the head sees. `taps={1: None, 4: None}` is filled with the depth reads that follow blocks 1 and 4.

        The read that follows the last block is the output's. Raises `ConfigError` for a block that the model does not have.
        """
        unknown = [block for block in taps or () if not 1 <= block <= self.num_blocks]
        if unknown:
            raise ConfigError(f"'taps' names blocks {unknown}, but the model has blocks 1 to {self.num_blocks}")
        x = self.embed(tokens) if embeddings is None else embeddings
        shape = x.shape
        if cu_seqlens is not None:
            x = x.reshape(1, -1, shape[-1])
            token_mask = None if token_mask is None else token_mask.reshape(1, -1)
        context = Pass(cu_seqlens=cu_seqlens, states=states, token_mask=token_mask, taps={} if taps is None else taps)
        stream = self.run_layers(DepthStream(partial=x), 0, self.config.num_hidden_layers, context)
        return self.finish(stream, context).view(shape)

    def embed(self, tokens: Int[Tensor, "B T"] | None) -> Float[Tensor, "B T D"]:
        """Rows of the embedding table."""
        if tokens is None:
            raise ConfigError("neither 'tokens' nor 'embeddings' was given; pass one of them")
        return self.model.embed_tokens(tokens)

    def run_layers(self, stream: DepthStream, start: int, stop: int, context: Pass) -> DepthStream:
        """Layers `start:stop` over an explicit stream: what a pipeline stage runs."""
        for layer in self.model.layers[start:stop]:
            # a state moves on in the forward pass, so a layer that has one cannot be run again
            if self.activation_checkpointing and torch.is_grad_enabled() and context.states is None:
                stream = checkpoint(layer, stream, context, use_reentrant=False, context_fn=_count_once)
            else:
                stream = layer(stream, context)
        return stream

    def finish(self, stream: DepthStream, context: Pass | None = None) -> Float[Tensor, "B T D"]:
        """The output's depth read and the final norm."""
        if context is not None and context.record is not None and len(stream.sources) > 1:
            context.record("output", self.model.read_weights("output_attn_res", stream, self.config.rms_norm_eps))
        h = self.model.read("output_attn_res", stream, self.config.rms_norm_eps)
        if context is not None and self.num_blocks in context.taps:
            context.taps[self.num_blocks] = h
        return self.model.norm(h)

    @property
    def num_blocks(self) -> int:
        """Depth blocks of `attn_res_block_size` layers; the last one may be shorter."""
        return -(-self.config.num_hidden_layers // self.config.attn_res_block_size)

    def head(self, hidden: Float[Tensor, "*N D"]) -> Float[Tensor, "*N V"]:
        """Logits."""
        return functional.linear(hidden, self.head_weight.to(hidden.dtype))

    @property
    def head_weight(self) -> Float[Tensor, "V D"]:
        """The table that gives logits: its own, or the embedding where they are tied."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def new_states(self, sequences: int = 1, capacity: int = 256, dtype: torch.dtype | None = None) -> list[LayerState]:
        """One fresh state per layer; `dtype` is that of histories and caches (default: the weights'), matrices are fp32."""
        weight = self.model.embed_tokens.weight
        return [layer.self_attn.new_state(sequences, capacity, dtype or weight.dtype, weight.device) for layer in self.model.layers]

    def routers(self) -> list[Router]:
        """The routers, in layer order."""
        return [m for m in self.modules() if isinstance(m, Router)]

    def mla_layers(self) -> dict[int, nn.Module]:
        """Attention mixers by layer number: the ones whose logits can grow."""
        return {i: layer.self_attn for i, layer in enumerate(self.model.layers)
                if self.config.layers[i] == "mla" and isinstance(layer, DecoderLayer)}

    @torch.no_grad()
    def depth_read_weights(self, tokens: Int[Tensor, "B T"]) -> list[tuple[str, Float[Tensor, "n"]]]:
        """Mean probabilities of each depth read over these tokens: what each sublayer looks at."""
        if self.config.attention_residuals == "off":
            return []
        rows: list[tuple[str, Tensor]] = []
        context = Pass(record=lambda name, weights: rows.append((name, weights.float().mean((0, 1)))))
        stream = self.run_layers(DepthStream(partial=self.embed(tokens)), 0, self.config.num_hidden_layers, context)
        self.finish(stream, context)
        return rows


def _count_once() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), recomputing()
