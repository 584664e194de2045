"""Gated multi-head latent attention without positions (report §2.1; model of the released `KimiMLAAttention`).

Keys and values are linear in one small latent per token, which is all that is cached. No rotation anywhere: order comes from KDA.
The two latent norms use ε = 1e-6. Read next: `gnomon/kernels/mla/reference.py` (expanded and absorbed forms), `state.py`.
"""

from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gnomon.kernels import mla
from gnomon.model.layers import LATENT_EPS, Linear, RMSNorm
from gnomon.model.parts import MLAConfig
from gnomon.model.state import MLACache


class LatentExchange(Protocol):
    """Where latents come from when the earlier part of a document is elsewhere (context parallelism, report §5.1.2)."""

    def earlier(self, rows: Float[Tensor, "1 T C"]) -> Float[Tensor, "1 E C"] | None:
        """Latents before the first token that is here, of its document; none for None."""
        ...


class LocalLatents:
    """The whole sequence is here."""

    def earlier(self, rows: Tensor) -> Tensor | None:
        """Nothing is elsewhere."""
        return None


class Mixer(nn.Module):
    """The MLA layer; `exchange` is where context parallelism plugs in.

    With `watch_logits` set, `max_logits` [H] keeps the largest logit seen, for the weight clip of Muon.
    """

    Config = MLAConfig

    def __init__(self, config: MLAConfig, hidden_size: int, eps: float):
        super().__init__()
        del eps  # the latent norms have their own
        self.config = config
        heads = config.num_attention_heads
        if config.q_lora_rank is None:
            self.q_proj = Linear(hidden_size, heads * config.qk_head_dim)
        else:
            self.q_a_proj = Linear(hidden_size, config.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_EPS)
            self.q_b_proj = Linear(config.q_lora_rank, heads * config.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(hidden_size, config.kv_lora_rank + config.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_EPS)
        self.kv_b_proj = Linear(config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
        if config.mla_use_output_gate:
            self.g_proj = Linear(hidden_size, heads * config.v_head_dim)
        self.o_proj = Linear(heads * config.v_head_dim, hidden_size)
        self.scale = config.qk_head_dim**-0.5
        self.watch_logits = False
        self.max_logits: Tensor | None = None
        self.exchange: LatentExchange = LocalLatents()

    def new_state(self, sequences: int, capacity: int, dtype: torch.dtype, device: torch.device) -> MLACache:
        """An empty cache with room for `capacity` tokens per sequence."""
        return MLACache.empty(sequences, capacity, self.config.cached_values_per_token(), dtype, device)

    def forward(
        self, x: Float[Tensor, "B T D"], state: MLACache | None = None, cu_seqlens: Int[Tensor, "S1"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """Attend causally, within documents when `cu_seqlens` is given; new latents are appended to `state`."""
        q, rows = self.queries(x), self.latent_rows(x)
        if state is None:
            earlier = self.exchange.earlier(rows)
            o = self.expanded(q, rows, cu_seqlens) if earlier is None else self._continued(q, rows, earlier, cu_seqlens)
        else:
            o = self._cached(q, rows, state, cu_seqlens)
        if self.config.mla_use_output_gate:
            o = o * torch.sigmoid(self.g_proj(x)).view(o.shape)
        return self.o_proj(o.flatten(-2))

    def queries(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H Q"]:
        """Per head, the part that meets the latent's keys and the part that meets the shared key."""
        if self.config.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return q.view(*x.shape[:2], self.config.num_attention_heads, self.config.qk_head_dim)

    def latent_rows(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T C"]:
        """What is cached per token: the normalised latent and the shared key, which is neither normalised nor rotated."""
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        latent = self.kv_a_layernorm(latent).to(shared.dtype)  # under autocast the norm's fp32 weight would widen keys, not queries
        return torch.cat([latent, shared], dim=-1)

    def expanded(self, q: Float[Tensor, "B T H Q"], rows: Float[Tensor, "B T C"], cu_seqlens: Tensor | None) -> Float[Tensor, "B T H V"]:
        """Attention with keys and values of each head written out: prefill and training."""
        k, v = self._keys_values(rows)
        self._watch(q, k, cu_seqlens)
        return mla.attention(q, k, v, self.scale, cu_seqlens)

    def _watch(self, q: Tensor, k: Tensor, cu_seqlens: Tensor | None, offset: int = 0) -> None:
        if self.watch_logits:
            seen = mla.max_logits(q.detach(), k.detach(), self.scale, cu_seqlens, offset)
            self.max_logits = seen if self.max_logits is None else torch.maximum(self.max_logits, seen)

    def _continued(self, q: Tensor, rows: Tensor, earlier: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """The same where the first document has `earlier` latents."""
        here = q.shape[1] if cu_seqlens is None else int(cu_seqlens[1])
        k, v = self._keys_values(torch.cat([earlier, rows[:, :here]], 1))
        self._watch(q[:, :here], k, None, earlier.shape[1])
        first = mla.attention(q[:, :here], k, v, self.scale, None, earlier.shape[1])
        if cu_seqlens is None or len(cu_seqlens) == 2:
            return first
        return torch.cat([first, self.expanded(q[:, here:], rows[:, here:], cu_seqlens[1:] - here)], 1)

    def _keys_values(self, rows: Float[Tensor, "B L C"]) -> tuple[Float[Tensor, "B L H Q"], Float[Tensor, "B L H V"]]:
        """Keys and values of each head, written out."""
        c = self.config
        latent, shared = rows.split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        kv = self.kv_b_proj(latent).view(*rows.shape[:2], c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim)
        nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        return torch.cat([nope, shared.unsqueeze(2).expand(*nope.shape[:3], -1)], dim=-1), v

    def _cached(self, q: Tensor, rows: Tensor, state: MLACache, cu_seqlens: Tensor | None) -> Tensor:
        """Append, then attend: expanded when nothing was cached before, absorbed into the latent otherwise."""
        fresh = int(state.lengths.max()) == 0
        if cu_seqlens is None:
            state.append(rows)
            return self.expanded(q, rows, None) if fresh and q.shape[1] > 1 else self._absorbed(q, state)
        bounds = cu_seqlens.tolist()
        spans = list(zip(bounds, bounds[1:]))
        for sequence, (start, stop) in enumerate(spans):
            state.append_to(sequence, rows[0, start:stop])
        if fresh:
            return self.expanded(q, rows, cu_seqlens)
        parts = []
        for sequence, (start, stop) in enumerate(spans):
            if stop > start:
                own = MLACache(state.rows[sequence : sequence + 1], state.lengths[sequence : sequence + 1])
                parts.append(self._absorbed(q[:, start:stop], own))
        return torch.cat(parts, dim=1)

    def _absorbed(self, q: Float[Tensor, "B T H Q"], state: MLACache) -> Float[Tensor, "B T H V"]:
        c = self.config
        q_nope, q_shared = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        kv_b = self.kv_b_proj.weight.to(q.dtype).view(c.num_attention_heads, -1, c.kv_lora_rank)
        return mla.absorbed(q_nope, q_shared, state.filled(), kv_b, state.lengths, self.scale)
