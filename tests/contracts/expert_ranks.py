"""A program for several ranks: experts spread over them give the outputs and gradients of one rank. Run by test_expert_parallel.py."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ranks import Case, compare_all

from gnomon.model.config import preset
from gnomon.model.experts import RoutedExperts
from gnomon.parallel.expert import spread
from gnomon.parallel.expert_plan import plan_at_home, plan_experts

LATENT, CHOSEN = 32, 3


def routing(kind: str, tokens: int, experts: int, random: torch.Generator) -> torch.Tensor:
    """Chosen experts [tokens, CHOSEN], different for each token."""
    if kind == "even":
        scores = torch.rand(tokens, experts, generator=random)
    elif kind == "skewed":
        scores = torch.rand(tokens, experts, generator=random) ** torch.linspace(0.05, 6, experts)
    else:  # all tokens want the same few
        scores = torch.arange(experts, 0, -1).float().expand(tokens, -1)
    return scores.topk(CHOSEN, -1).indices


@contextmanager
def counted(reads: list[str]) -> Iterator[None]:
    """Inside, every time that the package's exchanges look at a tensor's values from the host is written down."""
    names, before = ("cpu", "numpy", "item", "tolist", "__bool__", "__int__"), {}
    for name in names:
        before[name] = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *arguments: Any, _name: str = name, **named: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"].startswith("gnomon.parallel"):
                reads.append(_name)
            return before[_name](tensor, *arguments, **named)

        setattr(torch.Tensor, name, read)
    yield
    for name in names:
        setattr(torch.Tensor, name, before[name])


def case(kind: str, lengths: list[int], experts: int, planner) -> dict[str, Any]:
    """Compare one layer; returns what the ranks found."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(7)
    config = replace(preset("tiny").moe, num_experts=experts, num_experts_per_token=CHOSEN, routed_expert_hidden_size=LATENT)
    whole, mine = (RoutedExperts(config, 64, (4.0, 25.0)) for _ in range(2))
    for name in ("w1", "w3", "w2"):
        values = torch.randn(getattr(whole, name).shape, generator=random) * 0.2
        for each in (whole, mine):
            getattr(each, name).data.copy_(values)
    tokens = sum(lengths)
    z, ids = torch.randn(tokens, LATENT, generator=random), routing(kind, tokens, experts, random)
    weights, wanted = torch.rand(tokens, CHOSEN, generator=random), torch.randn(tokens, LATENT, generator=random)
    part = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    dispatch = spread(mine, planner=planner)
    results, reads = [], list[str]()
    for experts_here, rows in ((whole, slice(None)), (mine, part)):
        x, w = z[rows].clone().requires_grad_(), weights[rows].clone().requires_grad_()
        with counted(reads):
            y = experts_here(x, ids[rows], w)
            (y * wanted[rows]).sum().backward()
        results.append((y.detach(), x.grad, w.grad))
    own = slice(rank * experts // ranks, (rank + 1) * experts // ranks)
    pairs = [(a[part], b) for a, b in zip(*results, strict=True)]
    pairs += [(getattr(whole, name).grad[own], getattr(mine, name).grad) for name in ("w1", "w3", "w2")]
    worst = max((float((a - b).norm() / max(float(a.norm()), 1e-12)) for a, b in pairs if a.numel()), default=0.0)
    plan = dispatch.plan
    assert plan is not None
    pair_bytes, moved = LATENT * 4, sum(CHOSEN * n for n in lengths)
    to, _ = plan.destinations(rank, ids[part].flatten().numpy())
    return {"worst": worst, "reads": reads, "rows": int(plan.assigned[rank].sum()), "copies": len(plan.redundant(rank)), "moved": moved,
            "bytes": dispatch.sent_bytes["tokens"],
            "expected_bytes": int((to != rank).sum() + plan.assigned[rank].sum() - np.sum(to == rank)) * pair_bytes,
            "weights": dispatch.sent_bytes["weights"]}


def every_routing(ranks: int) -> Iterator[Case]:
    """All routings under both planners, with ranks that have equally many tokens, none, and different numbers."""
    for kind in ("even", "skewed", "same"):
        for name, planner in (("planned", plan_experts), ("at home", plan_at_home)):
            for lengths in ([40] * ranks, [40] * (ranks - 1) + [0], list(range(1, ranks + 1))):
                yield f"{kind}, {name}, {lengths}", partial(case, kind, lengths, 4 * ranks, planner)


if __name__ == "__main__":
    compare_all(every_routing)
