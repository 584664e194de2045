"""Small models with realistic random weights, for the tests of the inference model."""

import torch

from gnomon.kernels import mxfp, situ
from gnomon.model import layers
from gnomon.model.config import ModelConfig
from gnomon.model.experts import RoutedExperts
from gnomon.model.mixers import kda
from gnomon.model.parts import KDAConfig, MLAConfig, MoEConfig
from gnomon.model.transformer import Transformer

KDA = {"num_heads": 3, "head_dim": 16}
MLA = {"num_attention_heads": 2, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
MOE = {"num_experts": 6, "num_experts_per_token": 2, "moe_intermediate_size": 32, "num_shared_experts": 2, "routed_expert_hidden_size": 32}


def config(kda=None, mla=None, moe=None, **changes):
    """A model of five layers; the dictionaries change its parts, `moe="none"` makes every layer dense."""
    fields = {
        "vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 5, "intermediate_size": 72, "attn_res_block_size": 2,
        "layer_pattern": ("kda", "mla"), "final_mixer": None,
    }
    parts = {"kda": KDAConfig(**KDA | (kda or {})), "mla": MLAConfig(**MLA | (mla or {}))}
    experts = None if moe == "none" else MoEConfig(**MOE | (moe or {}))
    return ModelConfig(**fields | {"mixers": parts, "moe": experts} | changes)


def model(configuration=None, seed=0, bias=0.2):
    """A `Transformer` whose weights make every part matter; a large `bias` chooses the experts whatever the scores are."""
    network = Transformer(configuration or config())
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, x in network.state_dict().items():
            mean, spread = 0.0, 0.15
            if name.endswith("norm.weight"):
                mean, spread = 1.0, 0.1
            elif name.endswith("A_log"):
                mean, spread = 0.3, 0.4
            elif name.endswith("dt_bias"):
                mean, spread = -2.0, 1.0
            elif name.endswith("correction_bias"):
                spread = bias
            elif "embed" in name:
                spread = 1.0
            x.copy_(torch.randn(x.shape, generator=draw) * spread + mean)
    return network.eval()


def tokens(count, seed=0, vocabulary=61):
    """Random ids."""
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed))


def relative(ours, exact):
    """Relative error in the Frobenius norm."""
    return float((ours - exact).norm() / exact.norm())


def bf16(x):
    """The values of `x` rounded to bf16."""
    return x.bfloat16().float()


@torch.no_grad()
def round_weights(network, weights):
    """Give a model the values that an inference model with these weights stands for."""
    for name, x in network.state_dict().items():
        if ".experts." in name and weights == "mxfp4":
            x.copy_(mxfp.decode_mxfp4(*mxfp.encode_mxfp4(x), torch.float32))
        elif x.dim() > 1 and not any(part in name for part in ("conv1d", "gate.weight", "res_proj")):
            x.copy_(bf16(x))


def round_activations(network, monkeypatch):
    """Let every product but the router's read inputs that are rounded to bf16, token by token and expert by expert."""

    def dispatch(experts, z, ids, weights):
        y = torch.zeros_like(z)
        for token, (chosen, shares) in enumerate(zip(ids, weights, strict=True)):
            for expert, share in zip(chosen, shares, strict=True):
                inner = situ.situ_glu(experts.w1[expert] @ bf16(z[token]), experts.w3[expert] @ bf16(z[token]), *experts.caps)
                y[token] += share * (experts.w2[expert] @ bf16(inner))
        return y

    monkeypatch.setattr(layers, "together", lambda x, *maps: tuple(bf16(x) @ each.weight.T for each in maps))
    monkeypatch.setattr(kda, "together", layers.together)
    for part in network.modules():
        if isinstance(part, RoutedExperts):
            part.dispatch = dispatch
