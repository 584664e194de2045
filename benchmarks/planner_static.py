"""Which published figures does the planner's arithmetic give: sizes, caches, pages, smallest deployments? No clock, no machine.

    python benchmarks/planner_static.py

Prints every row with its deviation and the knobs of K3 one turn at a time, then families side by side at equal cost per token.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from machine import described, save

from gnomon.plan.families import all_mla, at_equal_active, compare, families, layered_sparse
from gnomon.plan.published import static, table
from gnomon.plan.variants import variants


def main() -> None:
    """Print the three tables and keep the first as JSON."""
    start = time.perf_counter()
    rows = static()
    print(table(rows))
    k3 = families()["k3"].config
    print(f"\n{'K3, one knob turned':<28} {'total':>8} {'active':>9} {'weights GB':>11} {'KV KiB/token':>13} {'state MB':>9}")
    for variant in variants(k3):
        row = variant.row
        print(f"{variant.name:<28} {row.total / 1e12:>7.2f}T {row.active / 1e9:>8.1f}B {row.weight_bytes / 1e9:>11.0f} "
              f"{row.kv_bytes_per_token / 1024:>13.1f} {row.state_bytes / 1e6:>9.0f}")
    active = k3.activated_parameters()
    ours = {"k3": k3, "k3 all-MLA": all_mla(k3), "k3 layered sparse": layered_sparse(k3)}
    models = {**{name: at_equal_active(config, active) for name, config in ours.items()},
              **{name: item.config for name, item in families().items() if name != "k3"}}
    print(f"\n{'one sequence, a token':<20} {'context':>9} {'active':>8} {'KV GiB':>8} {'state MB':>9} {'cache GB':>9} {'GFLOP':>7}")
    for row in compare(models):
        print(f"{row.name:<20} {row.context:>9} {row.active / 1e9:>7.1f}B {row.kv_bytes / 2**30:>8.2f} {row.state_bytes / 1e6:>9.0f} "
              f"{row.cache_traffic / 1e9:>9.2f} {row.flops / 1e9:>7.0f}")
    seconds = time.perf_counter() - start
    agreeing = sum(row.agrees for row in rows)
    print(f"\n{agreeing} of {len(rows)} figures agree; {seconds:.2f} s")
    save("planner_static", {"agreeing": agreeing, "seconds": seconds, "rows": [
        {"id": row.id, "what": row.what, "published": row.value, "ours": row.ours, "unit": row.unit, "deviation": row.deviation,
         "agrees": row.agrees, "miss": row.miss, "source": row.source} for row in rows]})


if __name__ == "__main__":
    described(__doc__)
    main()
