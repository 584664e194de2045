"""Which experts a token visits: sigmoid scores, a selection bias, weights from the raw scores (report §2.3.1, §2.3.3).

The bias takes part in the choice and never in the weights, so it never touches a gradient. In training the router counts what
Quantile Balancing needs; the optimiser step then updates the bias (`gnomon/train/balance.py`). Frozen at inference.
What was chosen can be written down (`recorded`) and chosen again under other weights (`replayed`).
Read next: `gnomon/kernels/router/reference.py` for the choice, `balance.py` for the estimator, `experts.py` for what happens to the chosen.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from gnomon.errors import ConfigError
from gnomon.kernels import router as kernels
from gnomon.kernels.router.reference import Choice, weigh
from gnomon.model import balance
from gnomon.model.parts import MoEConfig

_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)


@contextmanager
def recomputing() -> Iterator[None]:
    """Inside, routers do not count: activation checkpointing runs a layer twice, its tokens are seen once."""
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


@contextmanager
def recorded(routers: Sequence["Router"]) -> Iterator[list[list[Tensor]]]:
    """Inside, each router writes down the ids [N, k] of every call; gives a list for each router."""
    for router in routers:
        router.chosen = []
    try:
        yield [router.chosen for router in routers if router.chosen is not None]
    finally:
        for router in routers:
            router.chosen = None


@contextmanager
def replayed(routers: Sequence["Router"], ids: Sequence[Tensor]) -> Iterator[None]:
    """Inside, each router chooses these ids [N, k] whatever its scores are; weights come from the scores and carry their gradient. It must
    last until the backward pass is over. No ids: routers choose by themselves."""
    for router, its in zip(routers, ids, strict=bool(ids)):
        router.forced = its
    try:
        yield
    finally:
        for router in routers:
            router.forced = None


class Router(nn.Module):
    """Scores, choice and weights of one layer.

    While `observing`, each forward adds to `histogram` [E, bins] (required biases) and `load` [E] (routed tokens); while `auxiliary`,
    it leaves the balance loss in `auxiliary_loss`. Counters are not part of a checkpoint of the model.
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: MoEConfig, hidden_size: int):
        super().__init__()
        self.config = config
        self.choice = Choice(config.num_experts_per_token, config.num_expert_group, config.topk_group, config.moe_renormalize,
                             config.routed_scaling_factor)
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts, dtype=torch.float32))
        self.observing = False
        self.auxiliary = False
        self.auxiliary_loss: Tensor | None = None
        self.histogram = balance.new_histogram(0)
        self.load = torch.zeros(0, dtype=torch.int64)
        self.chosen: list[Tensor] | None = None
        self.forced: Tensor | None = None

    def start_observing(self) -> None:
        """Begin to count, from zero; until then the counters are empty."""
        self.observing = True
        self.reset()

    def reset(self) -> None:
        """Zero the counters: after each update of the bias."""
        self.histogram = balance.new_histogram(self.config.num_experts, self.weight.device)
        self.load = torch.zeros(self.config.num_experts, dtype=torch.int64, device=self.weight.device)

    def forward(
        self, x: Float[Tensor, "N D"], mask: Bool[Tensor, "N"] | None = None
    ) -> tuple[Int[Tensor, "N k"], Float[Tensor, "N k"]]:
        """`(expert ids, weights)` of each token; `mask` is false where a token is padding and must not be counted."""
        scores = self.scores(x)
        if self.forced is not None:
            if len(self.forced) != len(scores):
                raise ConfigError(f"experts of {len(self.forced)} tokens are to be chosen again, and {len(scores)} came; replay the same")
            return self.forced, weigh(scores, self.forced.long(), self.choice)
        ids, weights, cutoff = kernels.route(scores, self.e_score_correction_bias, self.choice)
        if self.chosen is not None:
            self.chosen.append(ids.detach())
        if self.observing and not _recomputing.get():
            self._observe(scores.detach(), ids, cutoff, mask)
        if self.auxiliary:  # computed again when recomputing, which must repeat every operation, but kept once
            loss = balance.auxiliary_loss(scores, ids, mask)
            self.auxiliary_loss = self.auxiliary_loss if _recomputing.get() else loss
        return ids, weights

    def scores(self, x: Float[Tensor, "N D"]) -> Float[Tensor, "N E"]:
        """Sigmoid affinities of the full-width input, in fp32 whatever the model's type."""
        with torch.autocast(x.device.type, enabled=False):
            exact = torch.promote_types(x.dtype, torch.float32)
            return torch.sigmoid(functional.linear(x.to(exact), self.weight.to(exact)))

    @torch.no_grad()
    def _observe(self, scores: Tensor, ids: Tensor, cutoff: Tensor, mask: Tensor | None) -> None:
        balance.accumulate(self.histogram, scores.float(), cutoff.float(), self.e_score_correction_bias, mask)
        counted = ids if mask is None else ids[mask]
        self.load += torch.bincount(counted.flatten(), minlength=self.config.num_experts)
