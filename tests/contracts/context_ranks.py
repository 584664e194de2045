"""A program for several ranks: a stream of documents spread over them gives the outputs and gradients of one rank.

Run by test_context_parallel.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from ranks import Case, compare_all

from gnomon.model.config import ModelConfig, preset
from gnomon.model.transformer import Transformer
from gnomon.parallel.context import Cut, spread, stretches

LONG = 60


def small() -> ModelConfig:
    """Four layers with both mixers; dense, so that no rounding can flip a choice of experts."""
    return replace(preset("tiny", ("num_hidden_layers=4", "vocab_size=256", "hidden_size=64", "intermediate_size=96")), moe=None)


def cases(ranks: int) -> dict[str, Cut]:
    """Streams cut in every awkward way."""
    even = stretches(LONG, ranks)
    uneven = stretches(LONG - 2 * ranks, ranks)
    uneven = (uneven[0] + 2 * ranks - (ranks - 1), *(length + 1 for length in uneven[1:]))
    return {
        "one document": Cut(lengths=even, borders=(0, LONG)),
        "unequal stretches": Cut(lengths=uneven, borders=(0, LONG)),
        "documents that cross": Cut(lengths=even, borders=(0, 10, LONG // ranks + 1, LONG - 5, LONG)),
        "borders at cuts": Cut(lengths=even, borders=(0, LONG // ranks, LONG - 2, LONG)),
        "a stretch shorter than the convolution": Cut(lengths=(LONG - 2 * (ranks - 1), *[2] * (ranks - 1)), borders=(0, LONG)),
        "a document of one token at a cut": Cut(lengths=even, borders=(0, LONG // ranks - 1, LONG // ranks, LONG)),
    }


def compare(cut: Cut, dtype: torch.dtype) -> dict[str, float]:
    """Relative differences of outputs and of the sum of all ranks' gradients."""
    rank = dist.get_rank()
    tokens = torch.randint(256, (1, LONG), generator=torch.Generator().manual_seed(1))
    wanted = torch.randn(1, LONG, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    whole, part = (Transformer(small()).initialise(5).to(dtype) for _ in range(2))
    for model in (whole, part):
        for layer in model.model.layers:
            layer.self_attention_res_proj.weight.data.normal_(generator=torch.Generator().manual_seed(3))  # no plain average
    expected = whole.hidden(tokens, cu_seqlens=torch.tensor(cut.borders, dtype=torch.int32))
    (expected * wanted).sum().backward()
    context = spread(part)
    context.cut = cut
    span = slice(*cut.span(rank))
    found = part.hidden(tokens[:, span], cu_seqlens=context.borders())
    (found * wanted[:, span]).sum().backward()
    worst = float((found - expected[:, span]).detach().norm() / expected[:, span].detach().norm())
    gradients = 0.0
    for (name, ours), (_, theirs) in zip(part.named_parameters(), whole.named_parameters(), strict=True):
        if theirs.grad is None:
            continue
        total = torch.zeros_like(theirs) if ours.grad is None else ours.grad.clone()
        dist.all_reduce(total)
        if theirs.grad.norm() > 1e-6:
            gradients = max(gradients, float((total - theirs.grad).norm() / theirs.grad.norm()))
        assert torch.isfinite(total).all(), name
    return {"outputs": worst, "gradients": gradients, **context.sent_bytes}


def every_cut(ranks: int) -> Iterator[Case]:
    """All cuts in fp64; two of them in fp32 as well."""
    for name, cut in cases(ranks).items():
        for dtype in (torch.float64, torch.float32) if name in ("one document", "documents that cross") else (torch.float64,):
            yield f"{name}, {dtype}", partial(compare, cut, dtype)


if __name__ == "__main__":
    compare_all(every_cut)
