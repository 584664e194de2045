"""Everybody wants the same experts: how many rows does each rank get, sent home and planned, and what do planned copies cost?

    python examples/balanced_experts.py
"""

import numpy as np

from gnomon.parallel.expert_plan import plan_at_home, plan_experts

EXPERTS, RANKS, TOKENS, CHOSEN = 64, 8, 1024, 4


def main() -> None:
    """Plan one micro-batch, more and more uneven."""
    print(f"{EXPERTS} experts on {RANKS} ranks, {TOKENS * CHOSEN} rows each if all were even")
    print("busiest expert   fullest rank: sent home   planned   copies per rank: most   mean   bound")
    for spread in (0.0, 0.5, 1.0, 2.0, 4.0):
        random = np.random.default_rng(0)
        popularity = random.lognormal(0.0, spread, EXPERTS)
        counts = random.multinomial(TOKENS * CHOSEN, popularity / popularity.sum(), size=RANKS)
        home, plan = plan_at_home(counts), plan_experts(counts)
        copies = [len(plan.redundant(rank)) for rank in range(RANKS)]
        load = counts.sum(0)
        print(f"{load.max() / load.mean():10.1f} x {home.assigned.sum(1).max():24d} {plan.assigned.sum(1).max():9d} "
              f"{max(copies):21d} {np.mean(copies):8.1f} {EXPERTS // RANKS:7d}")


if __name__ == "__main__":
    main()
