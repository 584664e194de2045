"""The wrong variants of the model that `mutations.py` applies, each with the test that is named for it.

They are what ports of the release got wrong, each as a small change of one function. A variant takes a patcher with `setattr` and
`setenv` and changes gnomon in memory; nothing here is used by gnomon itself. The environment forces the reference operators, so that a
change of the meaning is what runs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from gnomon.kernels import depth, gated_norm, kda, mla, router, short_conv, situ
from gnomon.kernels.depth import reference as depth_reference
from gnomon.kernels.experts import reference as experts_reference
from gnomon.kernels.kda import reference as kda_reference
from gnomon.kernels.router import reference as router_reference
from gnomon.model.experts import LatentMoE
from gnomon.model.layers import RMSNorm
from gnomon.model.mixers.kda import Mixer as KDA
from gnomon.model.mixers.mla import Mixer as MLA
from gnomon.model.residuals import DepthReader, DepthStream, commits_before
from gnomon.model.router import Router
from gnomon.model.transformer import DecoderLayer, Transformer

Patch = Any
"""A patcher as pytest has it: `setattr(object, name, value)`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    """One wrong variant: what it does, how, and the test that must fail."""

    title: str
    named: str
    apply: Callable[[Patch], None]


MUTATIONS: list[Mutation] = []


def wrong(title: str, named: str, owner: object, name: str, value: object) -> None:
    """Add a variant that replaces one attribute."""
    MUTATIONS.append(Mutation(title=title, named=named, apply=lambda patch: patch.setattr(owner, name, value)))


def wrong_after_init(title: str, named: str, cls: type, change: Callable[[Any], None]) -> None:
    """Add a variant that changes each new object of a class."""
    original = cls.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        change(self)

    wrong(title, named, cls, "__init__", init)


def normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


# ---- KDA

L2 = "test_l2_epsilon_is_1e_6_added_to_the_sum"
BOUNDED = "test_bounded_decay_is_a_sigmoid_with_one_rate_per_head"
DELTA = "test_delta_rule_corrects_the_decayed_state_and_reads_the_updated_one"
GATE = "test_norm_comes_before_a_sigmoid_gate"


def l2(eps: float, mean: bool) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`prepare` with another epsilon."""
    def prepare(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        added = eps * q.shape[-1] if mean else eps
        q, k = (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + added) for x in (q, k))
        return q * q.shape[-1] ** -0.5, k
    return prepare


def biased(decay: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`decay` of logits that have their bias."""
    return lambda z, a, bound, bias=None: decay(z if bias is None else z + bias.view(z.shape[-2:]), a, bound)


wrong("l2 eps 1e-5 on the sum", L2, kda, "prepare", l2(1e-5, False))
wrong("l2 eps 1e-6 on the mean", L2, kda, "prepare", l2(1e-6, True))
wrong("l2 norm by max(norm, eps)", L2, kda, "prepare",
      lambda q, k: (functional.normalize(q, dim=-1, eps=1e-6) * q.shape[-1] ** -0.5, functional.normalize(k, dim=-1, eps=1e-6)))
wrong("keys scaled by K^-1/2 too", L2, kda, "prepare", lambda q, k: (kda_reference.prepare(q, k)[0], kda_reference.prepare(k, q)[0]))
wrong("softplus gate", BOUNDED, kda, "decay", biased(lambda z, a, bound: kda_reference.decay(z, a, None)))
wrong("softplus gate, clamped at the bound", BOUNDED, kda, "decay",
      biased(lambda z, a, bound: kda_reference.decay(z, a, None).clamp(min=bound if bound is not None else -torch.inf)))
wrong("A_log outside the sigmoid", BOUNDED, kda, "decay",
      biased(lambda z, a, bound: kda_reference.decay(z, a, None) if bound is None else bound * a.exp()[:, None] * torch.sigmoid(z)))
wrong("A_log indexed by channel", BOUNDED, kda, "decay",
      biased(lambda z, a, bound: kda_reference.decay(z.mT, a.repeat(z.shape[-1])[: z.shape[-1]], bound).mT))
wrong("bounded gate in Kimi-Linear", "test_unbounded_decay_is_a_softplus", kda, "decay",
      biased(lambda z, a, bound: kda_reference.decay(z, a, -5.0)))


def recurrence(step: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[[Patch], None]:
    """Both forms of the recurrence with another step."""
    def chunk(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any = None, cu_seqlens: Any = None, *rest: Any) -> Any:
        state = v.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]) if state is None else state
        rows = []
        for t in range(q.shape[1]):
            row, state = step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state)
            rows.append(row)
        return torch.stack(rows, 1), state

    def apply(patch: Patch) -> None:
        patch.setattr(kda, "step", step)
        patch.setattr(kda, "chunk", chunk)

    return apply


def undecayed_step(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> Any:
    """The error is taken against the state before its decay."""
    error = v - torch.einsum("bhkv,bhk->bhv", state, k)
    state = state * g.exp()[..., None] + (beta[..., None] * k)[..., None] * error[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", state, q), state


def early_step(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> Any:
    """The output is read before the update."""
    _, new = kda_reference.step(q, k, v, g, beta, state)
    return torch.einsum("bhkv,bhk->bhv", state * g.exp()[..., None], q), new


MUTATIONS.append(Mutation(title="delta against the undecayed state", named=DELTA, apply=recurrence(undecayed_step)))
MUTATIONS.append(Mutation(title="output read before the update", named=DELTA, apply=recurrence(early_step)))


def beta(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """KDA with another β."""
    original = KDA.inputs

    def inputs(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        return replace(result, beta=change(result.beta))

    return inputs


def second(function: Callable[..., Any], change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """A function whose second result (what is kept for later) is changed."""
    def changed(*args: Any) -> Any:
        first, kept = function(*args)
        return first, None if kept is None else change(kept)
    return changed


HANDOFF = "test_decoding_continues_the_prefill"
wrong("beta doubled (negative eigenvalues)", "test_beta_stays_fp32_after_the_sigmoid", KDA, "inputs", beta(lambda b: 2 * b))
wrong("beta rounded to bf16", "test_beta_stays_fp32_after_the_sigmoid", KDA, "inputs", beta(lambda b: b.bfloat16().float()))
wrong("prefill hands a transposed state to decoding", HANDOFF, kda, "chunk", second(kda_reference.chunk, lambda s: s.mT.contiguous()))
wrong("convolution history kept after the activation", HANDOFF, short_conv, "short_conv",
      second(short_conv.short_conv.reference, functional.silu))
wrong("convolution reversed", "test_last_tap_multiplies_the_current_token", short_conv, "short_conv",
      lambda u, w, *rest, f=short_conv.short_conv.reference: f(u, w.flip(-1), *rest))
wrong("o_norm after the gate", GATE, gated_norm, "gated_norm",
      lambda o, weight, gate, eps: (normalised(o * torch.sigmoid(gate), eps) * weight).to(gate.dtype))
wrong("SiLU output gate", GATE, gated_norm, "gated_norm",
      lambda o, weight, gate, eps: (normalised(o, eps) * weight * functional.silu(gate)).to(gate.dtype))
wrong_after_init("o_norm eps 1e-6", "test_output_norm_of_kda_uses_the_configured_epsilon", KDA, lambda self: setattr(self, "eps", 1e-6))

# ---- MLA

LATENT = "test_latent_norms_use_1e_6"
ATTENTION = "test_attention_scales_by_the_whole_width_and_gates_with_a_sigmoid"
wrong_after_init("MLA query latent eps 1e-5", LATENT, MLA, lambda self: setattr(getattr(self, "q_a_layernorm", self), "eps", 1e-5))
wrong_after_init("MLA key-value latent eps 1e-5", LATENT, MLA, lambda self: setattr(self.kv_a_layernorm, "eps", 1e-5))
wrong_after_init("MLA scale from the nope width alone", ATTENTION, MLA,
                 lambda self: setattr(self, "scale", self.config.qk_nope_head_dim**-0.5))
wrong_after_init("no MLA gate", ATTENTION, MLA, lambda self: setattr(self, "config", replace(self.config, mla_use_output_gate=False)))


def shared_key(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`latent_rows` with a changed shared key."""
    original = MLA.latent_rows

    def latent_rows(self: Any, x: torch.Tensor) -> torch.Tensor:
        latent, shared = original(self, x).split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], -1)
        return torch.cat([latent, change(shared)], -1)

    return latent_rows


def rotate(shared: torch.Tensor) -> torch.Tensor:
    """Rotary positions on pairs of channels."""
    a, b = shared.unflatten(-1, (-1, 2)).unbind(-1)
    angle = torch.arange(shared.shape[1])[:, None] * 10000.0 ** -torch.linspace(0, 1, a.shape[-1])
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(-2)


SHARED = "test_shared_key_is_neither_normalised_nor_rotated"
wrong("rotary positions on the shared key", SHARED, MLA, "latent_rows", shared_key(rotate))
wrong("shared key dropped", SHARED, MLA, "latent_rows", shared_key(torch.zeros_like))
wrong("shared key normalised", SHARED, MLA, "latent_rows", shared_key(lambda k: normalised(k, 1e-6)))
wrong("MLA without the causal mask", ATTENTION, mla, "attention",
      lambda q, k, v, scale, *rest: torch.einsum("bhtl,blhv->bthv", (torch.einsum("bthq,blhq->bhtl", q, k) * scale).softmax(-1), v))

# ---- depth reads

STREAM = "test_depth_stream_follows_the_algorithm"
MIX = "test_a_depth_read_scores_normalised_keys_and_sums_raw_values"


def depth_read(keys: Callable[[Any, float], Any], values: Callable[[Any, float], Any], scale: Callable[[int], float]) -> Callable[..., Any]:
    """A depth read with other keys, values or scale."""
    def read(sources: Any, query: Any, eps: float) -> Any:
        stacked = torch.stack(list(sources)).float()
        p = (keys(stacked, eps) @ query * scale(len(query))).softmax(0).unsqueeze(-1)
        return (p * values(stacked, eps)).sum(0).to(sources[0].dtype)
    return read


def raw(values: Any, eps: float) -> Any:
    """The values themselves."""
    return values


wrong("sum of normalised values", MIX, depth, "depth_read", depth_read(normalised, normalised, lambda d: 1))
wrong("no key norm", MIX, depth, "depth_read", depth_read(raw, raw, lambda d: 1))
wrong("1/sqrt(d) scale", MIX, depth, "depth_read", depth_read(normalised, raw, lambda d: d**-0.5))
wrong("depth read eps 1e-6", MIX, depth, "depth_read", lambda sources, query, eps: depth_reference.depth_read(sources, query, 1e-6))
wrong("gamma ignored in the depth query", "test_the_depth_query_is_a_product_in_fp32", DepthReader, "query",
      lambda self, name: getattr(self, f"{name}_proj").weight[0].float())
wrong("gamma times w rounded to bf16", "test_the_depth_query_is_a_product_in_fp32", DepthReader, "query",
      lambda self, name: (getattr(self, f"{name}_norm").weight.bfloat16() * getattr(self, f"{name}_proj").weight[0].bfloat16()).float())


def reading(order: Callable[[Any, Any, str, bool], Any]) -> Callable[..., Any]:
    """`DecoderLayer._read` with another order or other contents."""
    def read(self: Any, name: str, sublayer: str, stream: Any, *context: Any) -> Any:
        config = self.config
        return order(self, stream, name, commits_before(config.attention_residuals, config.attn_res_block_size, self.index, sublayer))
    return read


def commit_first(layer: Any, stream: Any, name: str, commit: bool) -> Any:
    """Bank, then read: the finished block is a source twice."""
    if not commit:
        return layer.read(name, stream, 1e-5), stream
    return layer.read(name, DepthStream((*stream.bank, stream.partial), stream.partial), 1e-5), stream.commit()


def bank_mixture(layer: Any, stream: Any, name: str, commit: bool) -> Any:
    """The mixture is banked instead of the running sum."""
    h = layer.read(name, stream, 1e-5)
    return h, DepthStream((*stream.bank, h), None) if commit else stream


def keep_sum(layer: Any, stream: Any, name: str, commit: bool) -> Any:
    """The running sum goes on after it was banked."""
    return layer.read(name, stream, 1e-5), DepthStream((*stream.bank, stream.partial), stream.partial) if commit else stream


def add_to_mixture(layer: Any, stream: Any, name: str, commit: bool) -> Any:
    """The sublayer's output is added to what it read."""
    h = layer.read(name, stream, 1e-5)
    return h, DepthStream((*stream.bank, stream.partial) if commit else stream.bank, h)


def swap_queries(layer: Any, stream: Any, name: str, commit: bool) -> Any:
    """Attention and feed-forward read with each other's query."""
    other = {"mlp_res": "self_attention_res", "self_attention_res": "mlp_res"}[name]
    return layer.read(other, stream, 1e-5), stream.commit() if commit else stream


for title, order in (("commit before the attention read", commit_first), ("bank stores the mixture", bank_mixture),
                     ("running sum not reset", keep_sum), ("residual added to the mixture", add_to_mixture),
                     ("queries swapped", swap_queries)):
    wrong(title, STREAM, DecoderLayer, "_read", reading(order))
wrong("no output read", STREAM, Transformer, "finish", lambda self, stream, *context: self.model.norm(stream.sources[-1]))


def add_in_place(stream: Any, output: Any) -> Any:
    """The buffer of the running sum goes on being used after it was banked."""
    if stream.partial is None:
        return DepthStream(stream.bank, stream.bank[-1].copy_(output))
    return DepthStream(stream.bank, stream.partial.add_(output))


wrong("bank aliased to the live sum", STREAM, DepthStream, "add", add_in_place)

# ---- experts

WEIGHTS = "test_routing_weights_are_renormalised_and_scaled"
BIAS = "test_bias_takes_part_in_the_choice_and_not_in_the_weights"


def unweighted(scores: Any, ids: Any, choice: Any) -> Any:
    """No division by the sum."""
    return scores.gather(-1, ids) * choice.scaling


wrong("no renormalisation of routing weights", WEIGHTS, router_reference, "weigh", unweighted)
wrong("no scaling factor", WEIGHTS, router_reference, "weigh",
      lambda scores, ids, choice, f=router_reference.weigh: f(scores, ids, choice) / choice.scaling)
wrong("softmax over the chosen", BIAS, router_reference, "weigh",
      lambda scores, ids, choice: scores.gather(-1, ids).softmax(-1) * choice.scaling)
wrong("bias used in weights", BIAS, router, "route",
      lambda scores, bias, choice, f=router_reference.route: f(scores + bias, torch.zeros_like(bias), choice))
wrong("bias ignored in selection", BIAS, router_reference, "choose",
      lambda scores, bias, choice, f=router_reference.choose: f(scores - bias, bias, choice))
wrong("router in bf16", "test_the_router_works_in_fp32_in_a_bf16_model", Router, "scores",
      lambda self, x: torch.sigmoid(x.bfloat16() @ self.weight.bfloat16().T).float())
wrong("router reads the latent", "test_the_combined_latent_is_normalised_and_the_shared_expert_reads_the_full_width", LatentMoE, "forward",
      lambda self, x, mask=None, f=LatentMoE.forward: latent_routing(self, x, mask, f))
wrong_after_init("no latent norm", "test_the_combined_latent_is_normalised_and_the_shared_expert_reads_the_full_width", LatentMoE,
                 lambda self: setattr(self, "config", replace(self.config, latent_moe_use_norm=False)))


def latent_routing(moe: Any, x: Any, mask: Any, forward: Callable[..., Any]) -> Any:
    """The router is fed what the experts are fed."""
    if not moe.config.routed_expert_hidden_size:
        return forward(moe, x, mask)
    z = moe.routed_expert_down_proj(x.flatten(0, -2))
    ids, weights = moe.gate(functional.pad(z, (0, x.shape[-1] - z.shape[-1])))
    y = moe._routed(x.flatten(0, -2), ids, weights) + (moe.shared_experts(x.flatten(0, -2)) if moe.config.num_shared_experts else 0)
    return y.view(x.shape)


def activation(title: str, function: Callable[..., Any]) -> None:
    """Add a variant of SiTU in both places where it acts."""
    def apply(patch: Patch) -> None:
        patch.setattr(situ, "situ_glu", function)
        patch.setattr(experts_reference, "situ_glu", function)

    MUTATIONS.append(Mutation(title=title, named="test_situ_caps_both_branches_and_gates_with_the_raw_value", apply=apply))
    MUTATIONS.append(Mutation(title=f"{title}, in routed experts only", named="test_situ_acts_inside_the_experts",
                              apply=lambda patch: patch.setattr(experts_reference, "situ_glu", function)))


activation("SiTU without the up cap", lambda g, u, b1, b2: (b1 or 4) * torch.tanh(g / (b1 or 4)) * torch.sigmoid(g) * u)
activation("SiTU with the sigmoid of the capped gate",
           lambda g, u, b1, b2: functional.silu((b1 or 4) * torch.tanh(g / (b1 or 4))) * (b2 or 25) * torch.tanh(u / (b2 or 25)))
activation("plain SwiGLU", lambda g, u, b1, b2: functional.silu(g) * u)


def bf16_sum(z: Any, w1: Any, w3: Any, w2: Any, ids: Any, weights: Any, *caps: Any) -> Any:
    """The weighted outputs are added in the activation's type."""
    one = torch.ones_like(weights[:, :1])
    single = [experts_reference.experts(z, w1, w3, w2, ids[:, i : i + 1], one, *caps) for i in range(ids.shape[1])]
    parts = [output * weights[:, i : i + 1].to(z.dtype) for i, output in enumerate(single)]
    return sum(parts[1:], parts[0])


def apply_bf16_sum(patch: Patch) -> None:
    """The test calls the operator by name, the model through its package."""
    from gnomon.kernels import experts as package

    patch.setattr(package, "experts", bf16_sum)


MUTATIONS.append(Mutation(title="experts summed in bf16", named="test_experts_are_summed_in_fp32", apply=apply_bf16_sum))

# ---- norms

wrong("norm weight multiplied before rounding", "test_norms_round_before_the_weight_multiplies", gated_norm, "rms_norm",
      lambda x, weight, eps: (normalised(x.float(), eps) * weight.float()).to(x.dtype))
wrong_after_init("config norms with eps 1e-6", "test_other_norms_use_the_configured_epsilon", RMSNorm,
                 lambda self: setattr(self, "eps", 1e-6))
