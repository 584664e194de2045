"""Laws that hold for any input: symmetries of attention, routing and the depth read, and of the MX formats."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.kernels import depth, experts, mla, mxfp

SEEDS = st.integers(0, 2**31)
few = settings(max_examples=25, deadline=None)


def draw(seed: int) -> torch.Generator:
    """A random state of its own for one example."""
    return torch.Generator().manual_seed(seed)


@few
@given(seed=SEEDS, size=st.integers(-100, 100), shift=st.integers(-20, 20))
def test_mxfp4_commutes_with_powers_of_two(seed: int, size: int, shift: int) -> None:
    w = torch.randn(3, 64, generator=draw(seed)) * 2.0**size
    packed, scale = mxfp.encode_mxfp4(w)
    shifted_packed, shifted_scale = mxfp.encode_mxfp4(w * 2.0**shift)
    assert torch.equal(packed, shifted_packed)
    assert torch.equal(scale.int() + shift, shifted_scale.int())


@few
@given(seed=SEEDS, size=st.integers(-140, 120), rules=st.tuples(*[st.sampled_from(["even", "ceil"])] * 2))
def test_encoding_decoded_values_changes_nothing(seed: int, size: int, rules: tuple[str, str]) -> None:
    w = torch.randn(2, 96, generator=draw(seed)) * 2.0**size
    for encode, decode in ((mxfp.encode_mxfp4, mxfp.decode_mxfp4), (mxfp.encode_mxfp8, mxfp.decode_mxfp8)):
        once = decode(*encode(w, rules[0]), torch.float32)
        assert torch.equal(decode(*encode(once, rules[1]), torch.float32), once)


@few
@given(seed=SEEDS, lengths=st.lists(st.integers(0, 90), min_size=1, max_size=6).filter(any))
def test_packed_attention_is_attention_of_each_document(seed: int, lengths: list[int]) -> None:
    state = draw(seed)
    q, k, v = (torch.randn(1, sum(lengths), 2, width, generator=state, dtype=torch.float64) for width in (6, 6, 4))
    borders = torch.tensor([0, *lengths]).cumsum(0)
    packed = mla.attention(q, k, v, 0.4, borders)
    alone = [mla.attention(q[:, a:b], k[:, a:b], v[:, a:b], 0.4) for a, b in zip(borders[:-1], borders[1:], strict=True) if b > a]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-12, atol=1e-12)


@few
@given(seed=SEEDS)
def test_attention_has_no_positions(seed: int) -> None:
    """The last query sees a set: shuffling the past with its values does not matter (NoPE)."""
    state = draw(seed)
    q, k, v = (torch.randn(1, 9, 2, 5, generator=state, dtype=torch.float64) for _ in range(3))
    order = torch.randperm(9, generator=state)
    ordinary, shuffled = mla.attention(q, k, v, 0.4)[:, -1], mla.attention(q, k[:, order], v[:, order], 0.4)[:, -1]
    torch.testing.assert_close(ordinary, shuffled, rtol=1e-12, atol=1e-12)


@few
@given(seed=SEEDS, tokens=st.integers(1, 20), chosen=st.integers(1, 4))
def test_experts_follow_their_tokens_and_their_names(seed: int, tokens: int, chosen: int) -> None:
    """Reordering tokens reorders the result; renaming experts, or the slots of a token, changes nothing."""
    state = draw(seed)
    z = torch.randn(tokens, 5, generator=state, dtype=torch.float64)
    stacks = [torch.randn(4, *shape, generator=state, dtype=torch.float64) for shape in ((3, 5), (3, 5), (5, 3))]
    ids = torch.rand(tokens, 4, generator=state).topk(chosen, dim=-1).indices
    weights = torch.rand(tokens, chosen, generator=state, dtype=torch.float64)
    u = experts.experts(z, *stacks, ids, weights, 4.0, 25.0)
    order, names, slots = (torch.randperm(n, generator=state) for n in (tokens, 4, chosen))
    renamed = [stack[names.argsort()] for stack in stacks]
    moved = experts.experts(z[order], *renamed, names[ids[order]][:, slots], weights[order][:, slots], 4.0, 25.0)
    torch.testing.assert_close(moved, u[order], rtol=1e-11, atol=1e-11)


@few
@given(seed=SEEDS, count=st.integers(1, 9), size=st.floats(-3.0, 3.0))
def test_the_depth_read_lies_between_its_sources_and_ignores_their_order(seed: int, count: int, size: float) -> None:
    state = draw(seed)
    sources = [torch.randn(2, 3, 8, generator=state, dtype=torch.float64) * 10.0**size for _ in range(count)]
    query = torch.randn(8, generator=state, dtype=torch.float64)
    read = depth.depth_read(sources, query, 1e-5)
    stacked = torch.stack(sources)
    slack = 1e-12 * 10.0**size
    assert ((read >= stacked.amin(dim=0) - slack) & (read <= stacked.amax(dim=0) + slack)).all()
    torch.testing.assert_close(depth.depth_read(sources[::-1], query, 1e-5), read, rtol=1e-11, atol=1e-12)
