"""Tiny models with realistic random weights, written by gnomon, for other engines to read."""

import numpy as np
import released
import torch

from gnomon.model.huggingface import to_model_config
from gnomon.model.transformer import Transformer
from gnomon.model.weights import load_pretrained, save_pretrained, slots

PROMPT = 40
CONTINUATION = 64


def build(arch, seed=0, **changes):
    """A model in fp32 whose weights are those of `released.tensors`."""
    config = released.config(arch, **changes)
    values = released.tensors(config, seed)
    model = Transformer(to_model_config(released.full_config(config, False) if arch == "kimi_k3" else config))
    state = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for slot in slots(model):
            place = state[slot.target] if slot.expert is None else state[slot.target][slot.expert]
            place.copy_(torch.from_numpy(values[slot.name.removeprefix("language_model.")]))
    return model


def export(folder, arch, seed=0, quantize=True, **changes):
    """Write a model; returns what gnomon reads back, so that packed experts have exactly their decoded values."""
    save_pretrained(build(arch, seed, **changes), folder, quantize=quantize)
    return load_pretrained(folder, dtype=torch.float32)


def prompt(seed=0, vocabulary=300):
    return np.random.default_rng(seed).integers(0, vocabulary, PROMPT).tolist()


@torch.no_grad()
def greedy(model, tokens):
    """(logits of the prompt [T, V], the greedy continuation, the smallest gap between first and second choice)."""
    states = model.new_states()
    logits = model(torch.tensor([tokens]), states=states)[0]
    row, continuation, gap = logits[-1], [], np.inf
    for _ in range(CONTINUATION):
        best = row.topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        continuation.append(int(best.indices[0]))
        row = model(torch.tensor([[continuation[-1]]]), states=states)[0, -1]
    return logits.numpy(), continuation, gap


def relative(ours, theirs):
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
