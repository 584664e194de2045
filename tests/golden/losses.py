"""The golden loss curve: `python tests/golden/losses.py` prints the JSON that `losses.json` keeps.

A small model with every mechanism on learns one fixed sequence by the plain operators. A change that is meant to leave numerics alone
leaves this curve alone; a change that is meant to move it writes the file anew and says why.
"""

import json

import torch
from torch.nn import functional

from gnomon.model.balance import quantile_bias
from gnomon.model.config import ModelConfig, preset
from gnomon.model.transformer import Transformer
from gnomon.train.muon import Muon
from gnomon.train.settings import MuonConfig
from gnomon.train.units import head_rows

SHAPE = ("vocab_size=256", "hidden_size=64", "num_hidden_layers=6", "intermediate_size=96", "moe.routed_expert_hidden_size=32",
         "moe.moe_intermediate_size=32", "moe.num_experts=8", "moe.num_experts_per_token=2", "mixers.kda.head_dim=16")
FAMILIES = {
    "kimi_k3": (),
    "kimi_linear": ("family=kimi_linear", "hidden_act=silu", "attention_residuals=off", "mixers.kda.gate_lower_bound=none",
                    "mixers.kda.use_full_rank_gate=false", "mixers.mla.q_lora_rank=none", "mixers.mla.mla_use_output_gate=false",
                    "moe.routed_expert_hidden_size=none", "moe.routed_scaling_factor=2.446"),
}
STEPS = 8


def curve(config: ModelConfig) -> list[float]:
    """Losses of the first steps on a packed batch of four documents."""
    place = torch.arange(193)
    stream = ((place * place * 7 + 3 * place) % config.vocab_size).unsqueeze(0)
    bounds = torch.tensor([0, 50, 51, 120, 192], dtype=torch.int32)
    model = Transformer(config).initialise(0)
    optimizer = Muon([(n, p) for n, p in model.named_parameters() if p.requires_grad], MuonConfig(), head_rows(config))
    losses = []
    for router in model.routers():
        router.start_observing()
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = model(stream[:, :-1], cu_seqlens=bounds)[0]
        loss = functional.cross_entropy(logits, stream[0, 1:])
        loss.backward()
        optimizer.clip_gradient()
        optimizer.step(3e-3)
        for router in model.routers():
            k = router.config.num_experts_per_token
            router.e_score_correction_bias.copy_(quantile_bias(router.histogram, router.e_score_correction_bias, k))
            router.reset()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(json.dumps({name: curve(preset("tiny", (*SHAPE, *changes))) for name, changes in FAMILIES.items()}, indent=1))
