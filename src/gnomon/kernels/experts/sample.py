"""Small typical inputs of the routed experts, for the survey and the contract test. Read next: `reference.py`."""

from typing import Any

import torch


def samples(device: str) -> dict[str, tuple[Any, ...]]:
    """Arguments of the operator: 30 tokens, 3 of 6 experts each, one expert left without any token."""
    draw = torch.Generator().manual_seed(0)
    tokens, experts, chosen, hidden, latent = 30, 6, 3, 12, 20
    z = torch.randn(tokens, latent, generator=draw)
    w_gate, w_up = (torch.randn(experts, hidden, latent, generator=draw) * latent**-0.5 for _ in range(2))
    w_down = torch.randn(experts, latent, hidden, generator=draw) * hidden**-0.5
    ids = torch.rand(tokens, experts - 1, generator=draw).topk(chosen, dim=-1).indices
    weights = torch.rand(tokens, chosen, generator=draw)
    plain = (*(t.to(device) for t in (z, w_gate, w_up, w_down, ids, weights)), 4.0, 25.0)
    latent, hidden = 64, 32  # whole blocks of 32
    z = torch.randn(tokens, latent, generator=draw)
    w_gate, w_up = (torch.randn(experts, hidden, latent, generator=draw) * latent**-0.5 for _ in range(2))
    w_down = torch.randn(experts, latent, hidden, generator=draw) * hidden**-0.5
    return {"experts": plain, "experts_mxfp8": (*(t.to(device) for t in (z, w_gate, w_up, w_down, ids, weights)), 4.0, 25.0)}
