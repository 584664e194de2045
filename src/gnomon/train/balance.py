"""The load balance of a run: one update of every router per optimiser step, through one reduction (report §2.3.3).

Routers count while micro-batches run; here the counts of all layers and ranks become one integer sum, and each router its next
bias. It runs after the last micro-batch and before the next forward, so no batch is routed with a bias derived from itself.
Read next: `gnomon/model/balance.py` for the rules.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from gnomon.model import balance
from gnomon.model.router import Router
from gnomon.train.settings import BalanceConfig


def start(routers: Sequence[Router], config: BalanceConfig) -> None:
    """Have the routers count, and compute the loss term where it is the method."""
    for router in routers:
        router.start_observing()
        router.auxiliary = config.method == "auxiliary"


@torch.no_grad()
def update_balance(routers: Sequence[Router], config: BalanceConfig, reduce_sum: Callable[[Tensor], None]) -> Int[Tensor, "L E"]:
    """Set each router's next bias from the step's counts, zero the counts, and return the loads of all ranks by layer.

    `reduce_sum` adds an integer tensor over ranks in place; it is called once, with the counts of all layers.
    """
    if not routers:
        return torch.zeros(0, 0, dtype=torch.int64)
    loads = [router.load for router in routers]
    histograms = [router.histogram.flatten() for router in routers] if config.method == "quantile" else []
    counts = torch.cat([*loads, *histograms])
    reduce_sum(counts)
    parts = counts.split([len(part) for part in [*loads, *histograms]])
    for layer, router in enumerate(routers):
        bias, load = router.e_score_correction_bias, parts[layer]
        if config.method == "quantile":
            histogram = parts[len(routers) + layer].view_as(router.histogram)
            bias.copy_(balance.quantile_bias(histogram, bias, router.config.num_experts_per_token))
        elif config.method == "sign":
            bias.copy_(balance.sign_rule(bias, load, config.sign_step))
        router.reset()
    return torch.stack(parts[: len(routers)])
