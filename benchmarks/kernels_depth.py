"""What do depth reads cost? Their share of a training step and of decoding, and the two forms of inference side by side.

Training: whole steps of one small model with depth reads and with plain residuals, in turns; the difference is the cost of AttnRes
(the paper reports at most 4 %). Decoding: the reads of one token through 20 layers of width 1,024 with the norms that follow, which
have to happen without depth reads too, against the time in which the token's 580 MB of weights can be read at 30 GB/s (the paper: 2 %).

    OMP_NUM_THREADS=2 python benchmarks/kernels_depth.py
"""

import ctypes
import dataclasses
import statistics
import time
from typing import Any

import torch
from machine import described, repeat, save
from torch.nn.functional import cross_entropy

from gnomon.kernels import depth, native
from gnomon.model.config import ModelConfig
from gnomon.model.parts import KDAConfig, MLAConfig, MoEConfig
from gnomon.model.transformer import Transformer

WIDTH, LAYERS, BLOCK = 1024, 20, 4
TOKEN_SECONDS = 580e6 / 30e9


def small() -> ModelConfig:
    """A model of the family with 12 layers in blocks of three."""
    return ModelConfig(
        vocab_size=4096, hidden_size=384, num_hidden_layers=12, intermediate_size=1024, attn_res_block_size=3,
        mixers={"kda": KDAConfig(num_heads=6, head_dim=64),
                "mla": MLAConfig(num_attention_heads=6, q_lora_rank=192, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32,
                                 v_head_dim=64)},
        moe=MoEConfig(num_experts=16, num_experts_per_token=4, moe_intermediate_size=256, num_shared_experts=1,
                      routed_expert_hidden_size=192),
    )  # fmt: skip


def training(runs: int = 7) -> dict[str, Any]:
    """Seconds of a forward and backward pass over 1,024 tokens, with and without depth reads."""
    models = {}
    for mode in ("block", "off"):
        models[mode] = Transformer(dataclasses.replace(small(), attention_residuals=mode)).initialise()
    tokens = torch.randint(0, 4096, (2, 513))
    seconds: dict[str, list[float]] = {mode: [] for mode in models}
    for turn in range(runs + 1):
        for mode, model in models.items():
            start = time.perf_counter()
            logits = model(tokens[:, :-1])
            cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            model.zero_grad()
            if turn:  # the first is a warm-up
                seconds[mode].append(time.perf_counter() - start)
    medians = {mode: statistics.median(times) for mode, times in seconds.items()}
    return {"seconds": medians, "share": 1.0 - medians["off"] / medians["block"], "runs": runs}


def sources_of_reads() -> list[int]:
    """How many sources each read of one pass has; the first has one and is no read."""
    counts, bank = [], 0
    for layer in range(LAYERS):
        counts.append(bank + 1)
        bank += layer % BLOCK == 0
        counts.append(bank + 1)
    return [*counts, bank + 1]


def decoding(rows: int = 1) -> dict[str, Any]:
    """Seconds of all reads of a token, norms included; and of the norms alone."""
    library, counts = native.library(), sources_of_reads()
    values, query, norm = torch.randn(max(counts), rows, WIDTH), torch.randn(WIDTH), torch.rand(WIDTH)
    out = torch.empty(rows, WIDTH)
    arrays = {n: (ctypes.c_void_p * n)(*[values[j].data_ptr() for j in range(n)]) for n in {1, *counts}}

    def reads(sizes: list[int]) -> None:
        for n in sizes:
            library.gnomon_depth_read_norm(arrays[n], query.data_ptr(), norm.data_ptr(), n, rows, WIDTH, 1e-5, None, out.data_ptr(), 1)

    whole, norms = repeat(lambda: reads(counts * 50), runs=9), repeat(lambda: reads([1] * len(counts) * 50), runs=9)
    extra = (whole["median"] - norms["median"]) / 50
    return {"rows": rows, "reads": len(counts), "seconds": whole["median"] / 50, "norms_alone": norms["median"] / 50,
            "share": extra / TOKEN_SECONDS}


def two_phases(rows: int) -> dict[str, float]:
    """Eight queries over a bank of four sources: directly, and in two phases."""
    bank = [torch.randn(1, rows, WIDTH) for _ in range(4)]
    live, queries = torch.randn(1, rows, WIDTH), torch.randn(8, WIDTH)

    def direct() -> None:
        for query in queries:
            depth.depth_read([*bank, live], query, 1e-5)

    def phases() -> None:
        largest, denominator, numerator = depth.bank_partials(bank, queries, 1e-5)
        for r, query in enumerate(queries):
            depth.merge((largest[r], denominator[r], numerator[r]), live, query, 1e-5)

    with torch.no_grad():
        return {"direct": repeat(direct)["median"], "two_phases": repeat(phases)["median"]}


def main() -> None:
    """Measure, print, save."""
    torch.manual_seed(0)
    step, token = training(), decoding()
    print(f"training step: {step['seconds']['block'] * 1e3:.0f} ms with depth reads, {step['seconds']['off'] * 1e3:.0f} ms without: "
          f"{step['share']:.1%}")
    print(f"decoding: {token['seconds'] * 1e6:.0f} us per token, {token['norms_alone'] * 1e6:.0f} us for the norms alone: "
          f"{token['share']:.2%}")
    forms = {rows: two_phases(rows) for rows in (1, 64, 2048)}
    for rows, seconds in forms.items():
        print(f"8 reads of {rows} rows: direct {seconds['direct'] * 1e3:.3f} ms, in two phases {seconds['two_phases'] * 1e3:.3f} ms")
    save("kernels_depth", {"threads": torch.get_num_threads(), "instructions": native.instruction_set(), "training": step,
                           "decoding": token, "forms": {str(rows): seconds for rows, seconds in forms.items()}})


if __name__ == "__main__":
    described(__doc__)
    main()
