"""Small typical inputs of the operators here, for `gnomon kernels` and the contract tests."""

from typing import Any

import torch


def samples(device: str) -> dict[str, tuple[Any, ...]]:
    """Positional arguments of each operator, on a device."""
    torch.manual_seed(0)
    batch, time, heads, width = 2, 80, 2, 32
    raw_q, raw_k, v, z = (torch.randn(batch, time, heads, width, device=device) for _ in range(4))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (raw_q, raw_k))
    g, beta = -5.0 * torch.sigmoid(z), torch.rand(batch, time, heads, device=device)
    state = torch.randn(batch, heads, width, width, device=device)
    borders = torch.tensor([0, 1, 30, 80], device=device)
    pair = (torch.randn(batch, heads, width, width, device=device), state)
    heads_and_width = heads * width
    rows = (torch.randn(9, 3 * heads_and_width, device=device), z[0, :9], torch.randn(9, heads, device=device))
    states = torch.randn(3, 3, 3 * heads_and_width, device=device), torch.randn(3, heads, width, width, device=device)
    weights = (
        torch.randn(3 * heads_and_width, 4, device=device),
        torch.zeros(heads, device=device),
        torch.randn(heads_and_width, device=device),
    )
    sequences = torch.tensor([0, 1, 7, 9], device=device)
    norm = torch.rand(width, device=device)
    return {
        "decode": (*rows, raw_q[0, :9], *states, *weights, norm, -5.0, 1e-5, sequences, torch.tensor([[1, 0], [1, 4]], device=device)),
        "commit": (*rows, *states, *weights, -5.0, sequences, torch.tensor([1, 3, 0], device=device)),
        "prepare": (raw_q, raw_k),
        "decay": (z, torch.randn(heads, device=device), -5.0, weights[2]),
        "recurrent": (q, k, v, g, beta, state),
        "chunk": (q[:1], k[:1], v[:1], g[:1], beta[:1], state[:1].expand(3, -1, -1, -1).contiguous(), borders, -5.0),
        "step": (q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state),
        "transition": (k, v, g, beta),
        "compose": (pair, pair),
    }
