"""Kimi Delta Attention token by token, in chunks, and in segments that could be on different machines: the same result."""

import torch

from gnomon.kernels import kda


def inputs(time: int, heads: int, width: int) -> tuple[torch.Tensor, ...]:
    """Random q, k, v, log decays and β of one sequence, as a K3 layer makes them."""
    random = torch.Generator().manual_seed(0)
    q, k, v, z = (torch.randn(1, time, heads, width, generator=random) for _ in range(4))
    q, k = kda.prepare(q, k)
    g = kda.decay(z, torch.zeros(heads), lower_bound=-5.0)
    return q, k, v, g, torch.rand(1, time, heads, generator=random)


def main() -> None:
    """Compare the three."""
    q, k, v, g, beta = inputs(time=200, heads=2, width=32)
    slow, last = kda.recurrent(q, k, v, g, beta)
    fast, last_fast = kda.chunk(q, k, v, g, beta, min_log_decay=-5.0)
    print(f"chunks:   outputs differ by {(slow - fast).abs().max():.1e}, the last state by {(last - last_fast).abs().max():.1e}")

    # Each segment is an affine map of the state, (M, S~), found without knowing what came before.
    spans = [slice(0, 70), slice(70, 71), slice(71, 200)]
    maps = [kda.transition(k[:, s], v[:, s], g[:, s], beta[:, s]) for s in spans]
    whole = maps[0]
    for later in maps[1:]:
        whole = kda.compose(later, whole)
    carried, added = whole
    print(f"segments: the last state differs by {(last - added).abs().max():.1e}, from a start of zero")

    start = torch.randn(last.shape, generator=torch.Generator().manual_seed(1))
    _, last_from_start = kda.recurrent(q, k, v, g, beta, start)
    print(f"          and by {(last_from_start - (added + carried @ start)).abs().max():.1e} from any other start")


if __name__ == "__main__":
    main()
