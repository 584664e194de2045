"""Experts spread over ranks: tokens travel as latents, planned copies of experts too, gradients go back the same ways (report §5.2.1).

Each rank keeps E/R experts and its own tokens. For a micro-batch the ranks exchange how many tokens each has for each expert, plan alike
(`expert_plan.py`), send each routed latent to the rank and row that the plan says, and the weights of few experts to ranks that take over
some of their tokens. The products run over a buffer of the same number of rows on every rank. Outputs return to their tokens, where the
router's weights sum them in the order of choice, as on one rank. Backward is autograd's: each exchange undoes itself, and the gradients of
copies are added at home. Read next: `gnomon/model/experts.py`, whose `dispatch` this replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn

from gnomon.errors import ConfigError
from gnomon.model.experts import RoutedExperts
from gnomon.parallel.exchange import Exchange
from gnomon.parallel.expert_plan import ExpertPlan, plan_experts

Planner = Callable[[np.ndarray], ExpertPlan]


def spread(experts: RoutedExperts, group: dist.ProcessGroup | None = None, planner: Planner = plan_experts) -> Dispatch:
    """Keep this rank's share of the experts and send tokens to where they are; returns what `dispatch` became.

    Raises `ConfigError` where the experts cannot be shared out over the ranks of the group.
    """
    rank, ranks, count = dist.get_rank(group), dist.get_world_size(group), experts.w1.shape[0]
    if count % ranks:
        raise ConfigError(f"{count} experts cannot live on {ranks} ranks in equal numbers; use a divisor of {count}")
    own = slice(rank * count // ranks, (rank + 1) * count // ranks)
    for name in ("w1", "w3", "w2"):
        setattr(experts, name, nn.Parameter(getattr(experts, name).detach()[own].clone()))
    experts.dispatch = Dispatch(count, group, planner)
    return experts.dispatch


class Dispatch:
    """A `dispatch` over ranks. `plan` is that of the last micro-batch, `sent_bytes` what this rank has sent to others since the start."""

    def __init__(self, experts: int, group: dist.ProcessGroup | None, planner: Planner):
        self.experts, self.group, self.planner = experts, group, planner
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.plan: ExpertPlan | None = None
        self.sent_bytes = {"tokens": 0, "weights": 0}

    def __call__(self, experts: RoutedExperts, z: Float[Tensor, "N L"], ids: Int[Tensor, "N k"], weights: Float[Tensor, "N k"]) -> Tensor:
        """The combined latent of this rank's tokens. Every rank of the group must call, also one without tokens."""
        plan = self.plan = self.planner(self._counts(ids))
        routes = Routes.of(plan, self.rank, ids.flatten())
        tokens = routes.order // max(1, ids.shape[1])
        arrived = self._exchange(z[tokens], routes.sends, routes.receives, "tokens")
        stacks = self._stacks(experts, plan, z.dtype)
        one = torch.ones(len(routes.expert), 1, dtype=weights.dtype, device=z.device)  # the router's weights wait at home
        outputs = experts.operator(arrived[routes.place], *stacks, routes.expert[:, None], one, *experts.caps)
        returned = self._exchange(outputs[routes.origin], routes.receives, routes.sends, "tokens")
        by_choice = returned[routes.position].unflatten(0, ids.shape)  # [N, k, L]
        dtype = torch.promote_types(z.dtype, torch.float32)
        return (weights.to(dtype).unsqueeze(-1) * by_choice.to(dtype)).sum(1).to(z.dtype)

    def _counts(self, ids: Tensor) -> np.ndarray:
        """Tokens of every rank for every expert [R, E]. The one thing that a layer reads back: collectives want sizes from the host."""
        places = ids.flatten().clamp(max=self.experts)  # one more place, for what is no expert
        mine = torch.zeros(self.experts + 1, dtype=torch.int64, device=ids.device).scatter_add_(0, places, torch.ones_like(places))
        every = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(every, mine, group=self.group)
        counts = torch.stack(every).cpu().numpy()
        if counts[:, -1].any():
            raise ConfigError(f"'ids' names experts beyond the {self.experts} that there are")
        return np.ascontiguousarray(counts[:, :-1])

    def _stacks(self, experts: RoutedExperts, plan: ExpertPlan, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The weights that this rank works with: its own, then the copies that the plan gives it, in the order of the plan's segments."""
        own = [w.to(dtype) for w in experts.lookup()]
        each, first = self.experts // self.ranks, self.rank * (self.experts // self.ranks)
        wanted = [plan.redundant(rank) for rank in range(self.ranks)]
        homes = [copies // each for copies in wanted]
        if not sum(map(len, wanted)):
            return tuple(own)
        given = [copies[home == self.rank] - first for copies, home in zip(wanted, homes, strict=True)]
        sends = [len(copies) for copies in given]
        receives = np.bincount(homes[self.rank], minlength=self.ranks).tolist()
        chosen = torch.from_numpy(np.concatenate(given)).to(own[0].device)
        flat = torch.cat([w[chosen].flatten(1) for w in own], 1)
        copies = self._exchange(flat, sends, receives, "weights").split([w[0].numel() for w in own], 1)
        return tuple(torch.cat([w, copy.unflatten(1, w.shape[1:])]) for w, copy in zip(own, copies, strict=True))

    def _exchange(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int], kind: str) -> Tensor:
        self.sent_bytes[kind] += (sum(sends) - sends[self.rank]) * rows[:1].numel() * rows.element_size()
        return Exchange.apply(rows, list(sends), list(receives), self.group)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Routes:
    """One rank's side of a plan, as indices.

    `order` [n] sorts its pairs (token, choice) by where they go, `position` [n] is the inverse; `sends` and `receives` [R] count rows.
    What arrives stands source by source; row i of the buffer is `place[i]` of it, and `origin` is the inverse; `expert` [rows] is each
    row's place in the stacks.
    """

    order: Tensor
    position: Tensor
    sends: list[int]
    receives: list[int]
    place: Tensor
    origin: Tensor
    expert: Tensor

    @classmethod
    def of(cls, plan: ExpertPlan, rank: int, expert: Int[Tensor, "n"]) -> Routes:
        """The routes of a rank whose pairs go to these experts, which are not read back: `ExpertPlan.destinations` on their device."""
        device, pairs = expert.device, torch.arange(len(expert), device=expert.device)
        first, last, base, offset = (torch.from_numpy(values).to(device) for values in (
            plan.first, plan.first + plan.assigned, plan.bases() - plan.first, plan.offset[rank]))
        by_expert = torch.argsort(expert, stable=True)
        in_order = expert[by_expert]
        number = torch.empty_like(expert)
        number[by_expert] = pairs - torch.searchsorted(in_order, in_order) + offset[in_order]
        to = ((number >= first[:, expert]) & (number < last[:, expert])).int().argmax(0)
        order = torch.argsort(to * (int(plan.capacity.max()) + 1) + base[to, expert] + number)
        position = torch.empty_like(order)
        position[order] = pairs
        listed, bounds = plan.segments(rank)
        filled = [_slots_from(plan, source, rank, listed, bounds) for source in range(plan.ranks)]
        origin = np.concatenate(filled)
        place = np.empty_like(origin)
        place[origin] = np.arange(len(origin))
        stacked = np.repeat(np.arange(len(listed)), np.diff(bounds))
        tensors = {"place": place, "origin": origin, "expert": stacked}
        return cls(order=order, position=position, sends=plan.sends(rank), receives=[len(rows) for rows in filled],
                   **{name: torch.from_numpy(values.astype(np.int64)).to(device) for name, values in tensors.items()})


def _slots_from(plan: ExpertPlan, source: int, rank: int, listed: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Rows of a rank's buffer that a source fills, ascending, which is the order in which they are sent."""
    start = np.maximum(plan.offset[source, listed], plan.first[rank, listed])
    after = plan.offset[source, listed] + plan.counts[source, listed]
    stop = np.minimum(after, plan.first[rank, listed] + plan.assigned[rank, listed])
    base = bounds[:-1] - plan.first[rank, listed]
    parts = [np.arange(low, high) + shift for low, high, shift in zip(start, stop, base, strict=True) if high > low]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
