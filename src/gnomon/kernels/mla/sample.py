"""Small typical inputs of the operators here, for `gnomon kernels` and the contract tests."""

from typing import Any

import torch


def samples(device: str) -> dict[str, tuple[Any, ...]]:
    """Positional arguments of each operator, on a device."""
    torch.manual_seed(0)
    batch, time, heads, nope, rope, value, latent = 2, 24, 3, 16, 8, 16, 32
    q, k = (torch.randn(batch, time, heads, nope + rope, device=device) for _ in range(2))
    v = torch.randn(batch, time, heads, value, device=device)
    scale = (nope + rope) ** -0.5
    cache = torch.randn(batch, 40, latent + rope, device=device)
    kv_b = 0.2 * torch.randn(heads, nope + value, latent, device=device)
    lengths = torch.tensor([40, 25], device=device)
    return {
        "attention": (q, k, v, scale),
        "max_logits": (q, k, scale),
        "absorbed": (q[:, :2, :, :nope], q[:, :2, :, nope:], cache, kv_b, lengths, scale),
    }
