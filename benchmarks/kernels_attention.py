"""Latent attention over pages at the widths of a small K3-shaped model: decoding a token at long contexts, and reading a prompt.

Peers, in the same run and on the same values: `absorbed` in PyTorch (products by MKL and oneDNN) for decoding, and PyTorch's fused
attention on expanded keys and values for a prompt, the expansion included. Rates count the operations of the form that was chosen;
gigabytes are those of the cached rows. Packing kv_b, which an engine does once, is timed apart and taken off, of the fastest runs.

    OMP_NUM_THREADS=2 python benchmarks/kernels_attention.py
"""

from typing import Any

import torch
from machine import described, repeat, save
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from gnomon.kernels import mla, native

HEADS, NOPE, ROPE, VALUE, LATENT, PAGE = 12, 128, 64, 128, 512, 64
SCALE = (NOPE + ROPE) ** -0.5
DECODE, PROMPTS = (1024, 4096, 16384), ((0, 2048), (4096, 1024))


def draw(past: int, new: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments of the operator for one sequence on shuffled pages."""
    count = -(-(past + new) // PAGE)
    pages = torch.randn(count, PAGE, LATENT + ROPE).to(dtype)
    kv_b = (torch.randn(HEADS, NOPE + VALUE, LATENT) * LATENT**-0.5).to(dtype)
    table = torch.randperm(count)[None].int()
    return torch.randn(new, HEADS, NOPE + ROPE), pages, kv_b, table, torch.tensor([past]), torch.tensor([0, new]), SCALE


def absorbed(q: Tensor, pages: Tensor, kv_b: Tensor, table: Tensor, past: Tensor, _bounds: Tensor, scale: float) -> Tensor:
    """Decoding in PyTorch, in the type of the cache."""
    rows = pages[table[0].long()].flatten(0, 1)[None, : int(past[0]) + len(q)]
    q_n, q_r = q.to(pages.dtype)[None].split([NOPE, ROPE], dim=-1)
    return mla.absorbed(q_n, q_r, rows, kv_b, past + len(q), scale)


def expanded(q: Tensor, pages: Tensor, kv_b: Tensor, table: Tensor, past: Tensor, _bounds: Tensor, scale: float) -> Tensor:
    """A prompt in PyTorch: keys and values written out, then fused attention."""
    length = int(past[0]) + len(q)
    rows = pages[table[0].long()].flatten(0, 1)[:length]
    latent, shared = rows.split([LATENT, ROPE], dim=-1)
    kv = torch.nn.functional.linear(latent, kv_b.flatten(0, 1)).unflatten(1, (HEADS, NOPE + VALUE)).transpose(0, 1)
    k = torch.cat((kv[..., :NOPE], shared.expand(HEADS, -1, -1)), dim=-1)
    v = pad(kv[..., NOPE:], (0, NOPE + ROPE - VALUE))
    mask = None if past[0] == 0 else torch.ones(len(q), length, dtype=torch.bool).tril(int(past[0]))
    query = q.to(pages.dtype).transpose(0, 1)
    out = scaled_dot_product_attention(query[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=scale)
    return out[0, ..., :VALUE].transpose(0, 1)


def compare(past: int, new: int, dtype: torch.dtype) -> dict[str, Any]:
    """Seconds of ours and of the peer's, and the rates of ours."""
    arguments = draw(past, new, dtype)
    peer = absorbed if new == 1 else expanded
    exact, ours = mla.paged.reference(*arguments), mla.paged(*arguments)
    error = float((ours - exact).norm() / exact.norm())
    if error > (1e-5 if dtype == torch.float32 else 1e-2):
        raise SystemExit(f"{past} + {new} tokens in {dtype}: the result is off by {error:.1e}")
    alone = draw(0, 1, dtype)
    empty = repeat(lambda: mla.paged(*alone))
    runs = {"ours": repeat(lambda: mla.paged(*arguments)), "peer": repeat(lambda: peer(*arguments))}
    seconds = runs["ours"]["min"] - empty["min"]
    if seconds <= 0.0:
        raise SystemExit(f"{past} + {new} tokens: the machine is too busy to tell attention from packing")
    pairs = new * past + new * (new + 1) / 2
    per_pair = 2 * LATENT + ROPE if new == 1 else NOPE + ROPE + VALUE
    operations = 2 * HEADS * (pairs * per_pair + (0 if new == 1 else (past + new) * LATENT * (NOPE + VALUE)))
    result = {"past": past, "new": new, "dtype": str(dtype), "seconds": runs, "without_packing": seconds, "relative_error": error,
              "gflops": operations / seconds / 1e9, "read_gb_per_second": (past + new) * (LATENT + ROPE) * dtype.itemsize / seconds / 1e9}
    print(f"{past:6} + {new:4} tokens, {str(dtype)[6:]:8}  {seconds * 1e3:8.2f} ms  {result['gflops']:5.0f} GF  "
          f"{result['read_gb_per_second']:5.1f} GB/s   peer {runs['peer']['median'] * 1e3:8.2f} ms")
    return result


def main() -> None:
    """Measure, print, save."""
    torch.manual_seed(0)
    rows = [compare(*shape, dtype) for dtype in (torch.bfloat16, torch.float32) for shape in (*((p, 1) for p in DECODE), *PROMPTS)]
    save("kernels_attention", {"threads": torch.get_num_threads(), "instructions": native.instruction_set(), "rows": rows})


if __name__ == "__main__":
    described(__doc__)
    main()
