"""Small typical inputs of the MLA operators, for the survey and the contract test. Read next: `reference.py`."""

from typing import Any

import torch


def samples(device: str) -> dict[str, tuple[Any, ...]]:
    """Arguments of each operator of this folder: packed documents of 5, 0, 70, 1 and 9 tokens; a cache with two sequences."""
    draw = torch.Generator().manual_seed(0)
    borders = torch.tensor([0, 5, 5, 75, 76, 85], dtype=torch.int32)
    q, k = (torch.randn(1, 85, 2, 12, generator=draw).to(device) for _ in range(2))
    v = torch.randn(1, 85, 2, 8, generator=draw).to(device)
    q_n, q_r = (torch.randn(2, 3, 2, width, generator=draw).to(device) for width in (8, 4))
    cache = torch.randn(2, 11, 10, generator=draw).to(device)  # latent 6, shared key 4
    kv_b = torch.randn(2, 14, 6, generator=draw).to(device)  # key part 8, value part 6
    lengths = torch.tensor([11, 5], device=device)
    scale = 12**-0.5
    pages = torch.randn(9, 4, 10, generator=draw).to(device)
    table = torch.tensor([[8, 2, 5], [0, 0, 0], [1, 7, 3]], dtype=torch.int32, device=device)
    past, news = torch.tensor([9, 0, 4], device=device), torch.tensor([0, 1, 1, 6], device=device)
    return {
        "attention": (q, k, v, scale, borders.to(device)),
        "max_logits": (q, k, scale, borders.to(device)),
        "absorbed": (q_n, q_r, cache, kv_b, lengths, scale),
        "paged": (q[0, :6], pages, kv_b, table, past, news, scale),
    }
