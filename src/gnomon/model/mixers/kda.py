"""Kimi Delta Attention: short convolutions, a decay per channel, a delta-rule state, a gated norm (report §2.1, eq. 1–7).

Per head the state S ∈ R^{K×V} follows S ← (I − β k kᵀ) Diag(α) S + β k vᵀ and is read by o = Sᵀ q. Everything after the projections
is per head. Read next: `gnomon/kernels/kda/reference.py` for the recurrence, `state.py` for what is kept between calls.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gnomon.kernels import gated_norm, kda, short_conv
from gnomon.model.layers import Linear, together
from gnomon.model.parts import KDAConfig
from gnomon.model.state import KDAState


@dataclass(frozen=True, kw_only=True, slots=True)
class KDAInputs:
    """What the recurrence consumes: q (scaled) and k normalised, log decays and β in fp32; the new history of the convolution if kept."""

    q: Float[Tensor, "B T H K"]
    k: Float[Tensor, "B T H K"]
    v: Float[Tensor, "B T H V"]
    g: Float[Tensor, "B T H K"]
    beta: Float[Tensor, "B T H"]
    history: Float[Tensor, "S W C"] | None


class SegmentExchange(Protocol):
    """Where a sequence comes from when its earlier part is elsewhere (context parallelism, report §5.1.2)."""

    def history(self, projected: Float[Tensor, "B T C"], history: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
        """The projected inputs just before each document's first local token."""
        ...

    def initial_state(self, inputs: KDAInputs, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
        """The state before each document's first local token; `kda.transition` gives what must travel."""
        ...


class LocalSegments:
    """The whole sequence is here: the caller's state and history are right as they are."""

    def history(self, projected: Float[Tensor, "B T C"], history: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
        """The caller's history."""
        return history

    def initial_state(self, inputs: KDAInputs, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
        """The caller's state."""
        return state


class ShortConv(nn.Module):
    """The taps of one depthwise causal convolution, `[C, 1, W]`; the last tap multiplies the current token."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))

    def forward(self, x: Tensor, history: Tensor | None, cu_seqlens: Tensor | None, keep: bool = True) -> tuple[Tensor, Tensor | None]:
        """`(SiLU of the convolution, new history or None unless keep)`."""
        return short_conv.short_conv(x, self.weight[:, 0], history, cu_seqlens, keep)


class Mixer(nn.Module):
    """The KDA layer; `exchange` is where context parallelism plugs in."""

    Config = KDAConfig

    def __init__(self, config: KDAConfig, hidden_size: int, eps: float):
        super().__init__()
        self.config, self.eps = config, eps
        width = config.width
        self.q_proj, self.k_proj, self.v_proj = (Linear(hidden_size, width) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConv(width, config.short_conv_kernel_size) for _ in range(3))
        self.f_a_proj = Linear(hidden_size, config.head_dim)
        self.f_b_proj = Linear(config.head_dim, width)
        self.b_proj = Linear(hidden_size, config.num_heads)
        if config.use_full_rank_gate:
            self.g_proj = Linear(hidden_size, width)
        else:
            self.g_a_proj = Linear(hidden_size, config.head_dim)
            self.g_b_proj = Linear(config.head_dim, width)
        self.A_log = nn.Parameter(torch.empty(config.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(width))
        self.o_norm = nn.Module()
        self.o_norm.weight = nn.Parameter(torch.empty(config.head_dim))
        self.o_proj = Linear(width, hidden_size)
        self.exchange: SegmentExchange = LocalSegments()

    def new_state(self, sequences: int, capacity: int, dtype: torch.dtype, device: torch.device) -> KDAState:
        """The state before the first token; its size does not depend on `capacity`."""
        c = self.config
        return KDAState.zeros(sequences, c.short_conv_kernel_size - 1, c.num_heads, c.head_dim, dtype, device)

    def forward(
        self, x: Float[Tensor, "B T D"], state: KDAState | None = None, cu_seqlens: Int[Tensor, "S1"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """Mix along time; `state` is read and replaced. With `cu_seqlens` every document starts afresh or from its own state."""
        inputs = self.inputs(x, None if state is None else state.conv, cu_seqlens, keep=state is not None)
        initial = self.exchange.initial_state(inputs, None if state is None else state.matrix, cu_seqlens)
        if x.shape[1] == 1 and cu_seqlens is None and initial is not None:
            first = (t[:, 0] for t in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))
            o, final = kda.step(*first, initial)
            o = o.unsqueeze(1)
        else:
            o, final = kda.chunk(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, initial, cu_seqlens, self.min_log_decay)
        if state is not None and inputs.history is not None:
            state.conv, state.matrix = inputs.history.to(state.conv.dtype), final
        return self.output(x, o)

    @property
    def min_log_decay(self) -> float:
        """The a-priori bound on the log decay of one step."""
        bound = self.config.gate_lower_bound
        return float("-inf") if bound is None else bound

    def inputs(self, x: Float[Tensor, "B T D"], history: Tensor | None, cu_seqlens: Tensor | None, keep: bool = True) -> KDAInputs:
        """Project, convolve, normalise, and compute decay and β in fp32."""
        heads = (*x.shape[:2], self.config.num_heads, self.config.head_dim)
        before = (None, None, None) if history is None else history.chunk(3, dim=-1)
        mixed, kept = [], []
        *streams, decay, beta = together(x, self.q_proj, self.k_proj, self.v_proj, self.f_a_proj, self.b_proj)
        for name, projected, past in zip("qkv", streams, before, strict=True):
            past = self.exchange.history(projected, past, cu_seqlens)
            y, new = getattr(self, f"{name}_conv1d")(projected, past, cu_seqlens, keep)
            mixed.append(y.view(heads))
            kept.append(new)
        q, k = kda.prepare(mixed[0], mixed[1])
        g = kda.decay(self.f_b_proj(decay).float().view(heads), self.A_log, self.config.gate_lower_bound, self.dt_bias)
        beta = torch.sigmoid(beta.float())
        return KDAInputs(q=q, k=k, v=mixed[2], g=g, beta=beta, history=torch.cat(kept, dim=-1) if keep else None)

    def output(self, x: Float[Tensor, "B T D"], o: Float[Tensor, "B T H V"]) -> Float[Tensor, "B T D"]:
        """Normalise each head, gate with a sigmoid, project back."""
        gate = self.g_proj(x) if self.config.use_full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        gated = gated_norm.gated_norm(o, self.o_norm.weight, gate.view(o.shape), self.eps)
        return self.o_proj(gated.flatten(-2))
