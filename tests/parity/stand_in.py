"""A runner without a model, for tests of what surrounds one: it says the token after the last one, and can be told to fail."""

import time

import torch

from gnomon.model.config import ModelConfig
from gnomon.model.inference import Outputs
from gnomon.model.inference_state import StatePool
from gnomon.model.parts import KDAConfig, MLAConfig


class StandIn:
    """Says the token after the last one; remembers what each step brought."""

    config = ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, intermediate_size=32, layer_pattern=("kda", "mla"),
                         mixers={"kda": KDAConfig(num_heads=1, head_dim=8), "mla": MLAConfig(num_attention_heads=1, kv_lora_rank=8)})

    def __init__(self, seconds=0.0):
        self.steps, self.failure, self.seconds = [], None, seconds

    def new_pool(self, slots, tokens, page_tokens=64, dtype=torch.float32):
        return StatePool(self.config, slots, -(-tokens // page_tokens), page_tokens, dtype)

    def steady(self, wanted):
        return wanted

    def forward(self, rows, pool, *, logits=True):
        rows.check(self.config, pool)
        time.sleep(self.seconds)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        lengths = rows.bounds.diff().tolist()
        self.steps.append(sorted(zip(rows.past.tolist(), lengths, strict=True)))
        scores = torch.zeros(len(rows.wanted), 64)
        scores[torch.arange(len(rows.wanted)), (rows.tokens[rows.wanted] + 1) % 64] = 9.0
        return Outputs(hidden=torch.zeros(len(rows.wanted), 32), logits=scores, record=torch.empty(1, 0, 0))
