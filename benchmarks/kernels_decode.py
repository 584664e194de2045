"""How close does the inference model come to the machine: to its memory when it decodes, to its arithmetic when it reads a prompt?

A K3-shaped model of 1.22 billion parameters (378 million active) with random weights in the released types: bf16 and MXFP4 experts.
Decoding is held against the time in which the bytes of one token (active weights as stored, and the cached latents) can be read, at the
rate of a plain reader on the same threads in the same run. A prompt of 2,048 tokens is held against torch's bf16 product, by the
operations of the weights.

    OMP_NUM_THREADS=2 python benchmarks/kernels_decode.py
    OMP_NUM_THREADS=2 python benchmarks/kernels_decode.py 0 16384 --only decode
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from machine import save
from torch import Tensor

from gnomon.kernels import native
from gnomon.kernels.packed.matrix import WeightBuffer
from gnomon.model.config import ModelConfig
from gnomon.model.inference import InferenceModel
from gnomon.model.inference_state import PackedRows, StatePool
from gnomon.model.parts import KDAConfig, MLAConfig, MoEConfig

PROMPT = 2048
CONTEXTS = (0, 2048)
STEPS = 64


def medium() -> ModelConfig:
    """The shape: 15 KDA and 5 MLA layers, 64 experts of which a token visits 8."""
    return ModelConfig(
        vocab_size=8192, hidden_size=1024, num_hidden_layers=20, intermediate_size=4096, attn_res_block_size=4,
        mixers={
            "kda": KDAConfig(num_heads=12, head_dim=128),
            "mla": MLAConfig(num_attention_heads=12, q_lora_rank=384, kv_lora_rank=512),
        },
        moe=MoEConfig(num_experts=64, num_experts_per_token=8, moe_intermediate_size=512, num_shared_experts=2,
                      routed_expert_hidden_size=512),
    )  # fmt: skip


class RandomWeights:
    """Weights in the released types, drawn when they are asked for."""

    def __init__(self, config: ModelConfig):
        self.config, self.draw = config, torch.Generator().manual_seed(0)
        self.specs = {spec.name: spec for spec in config.tensors()}

    def tensor(self, name: str) -> Tensor:
        """One tensor: norms near one, matrices that keep the size of what they multiply."""
        spec = self.specs.get(name)
        if spec is None:  # the selection bias is not among the parameters
            return torch.zeros(self.config.moe.num_experts)
        values = torch.randn(spec.shape, generator=self.draw)
        values = values * spec.shape[-1] ** -0.5 if len(spec.shape) > 1 else 1.0 + 0.1 * values
        return values.to(torch.bfloat16 if spec.storage == "bf16" else torch.float32)

    def expert(self, name: str, index: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of one expert's matrix."""
        moe = self.config.moe
        assert moe is not None
        width, inner = moe.expert_width(self.config.hidden_size), moe.moe_intermediate_size
        out, inputs = (width, inner) if name.endswith("w2") else (inner, width)
        codes = torch.randint(256, (out, inputs // 2), dtype=torch.uint8, generator=self.draw)
        return codes, torch.full((out, inputs // 32), 121, dtype=torch.uint8)


def reader(size: int = 1 << 28) -> Callable[[], float]:
    """A function that reads a buffer once and returns bytes per second."""
    buffer, parity = WeightBuffer(size), ctypes.c_uint64()
    ctypes.memset(buffer.address, 1, size)

    def read() -> float:
        start = time.perf_counter()
        native.library().gnomon_buffer_read(buffer.address, size, ctypes.addressof(parity), native.threads())
        return size / (time.perf_counter() - start)

    return read


def product_rate(n: int = 2048) -> float:
    """Operations per second of torch's bf16 product."""
    a, b = (torch.randn(n, n).bfloat16() for _ in range(2))
    start = time.perf_counter()
    a @ b
    return 2 * n**3 / (time.perf_counter() - start)


def bytes_per_token(config: ModelConfig, context: int) -> float:
    """What one token must read: its active weights as stored, and the latents of its context."""
    table = "model.embed_tokens.weight"
    moe = config.moe
    share = 1.0 if moe is None else moe.num_experts_per_token / moe.num_experts
    weights = sum(t.stored_bytes * (share if ".experts." in t.name else 1.0) for t in config.tensors() if t.name != table)
    return weights + config.kv_bytes_per_token() * context


def step(model: InferenceModel, pool: StatePool, ids: Tensor, past: int) -> None:
    """One call for one sequence."""
    pages = torch.arange(pool.pages, dtype=torch.int32)[None]
    model.forward(PackedRows(tokens=ids, bounds=torch.tensor([0, len(ids)]), past=torch.tensor([past]),
                             slots=torch.zeros(1, dtype=torch.int64), pages=pages), pool)


def timed(run: Callable[[], None]) -> float:
    """Seconds."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def decode(model: InferenceModel, context: int, read: Callable[[], float]) -> dict[str, float]:
    """Seconds per token after `context` tokens, against the plain reader before, between and after."""
    ids = torch.randint(model.config.vocab_size, (context + STEPS + 2,), generator=torch.Generator().manual_seed(1))
    pool = model.new_pool(1, context + STEPS + 2, dtype=torch.bfloat16)
    step(model, pool, ids[: context + 1], 0)
    rates, seconds = [read()], []
    for index in range(STEPS):
        past = context + 1 + index
        seconds.append(timed(partial(step, model, pool, ids[past : past + 1], past)))
        if index % 16 == 15:
            rates.append(read())
    middle, rate = statistics.median(seconds), statistics.median(rates)
    ideal = bytes_per_token(model.config, context + STEPS // 2) / rate
    print(f"decode after {context:6}: {1 / middle:6.1f} tok/s, memory {rate / 1e9:5.1f} GB/s, {ideal / middle:.0%} of the roofline",
          flush=True)
    return {"tokens_per_second": 1 / middle, "fastest": 1 / min(seconds), "slowest": 1 / max(seconds), "memory": rate,
            "share_of_roofline": ideal / middle, "steps": STEPS}


def prefill(model: InferenceModel, runs: int = 5) -> dict[str, float]:
    """Tokens per second of a prompt, and the share of torch's bf16 product rate that this is."""
    ids = torch.randint(model.config.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(2))
    pool = model.new_pool(1, PROMPT, dtype=torch.bfloat16)
    step(model, pool, ids[:64], 0)
    product_rate()
    seconds, rates = [], []
    for _ in range(runs):
        rates.append(product_rate())
        seconds.append(timed(lambda: step(model, pool, ids, 0)))
    middle, rate = statistics.median(seconds), statistics.median(rates)
    reached = model.config.flops_per_token(0) * PROMPT / middle
    print(f"prefill {PROMPT:6}: {PROMPT / middle:6.0f} tok/s, {reached / 1e9:5.0f} Gflop/s, torch's bf16 product {rate / 1e9:5.0f}, "
          f"{reached / rate:.0%}", flush=True)
    return {"tokens_per_second": PROMPT / middle, "operations_per_second": reached, "torch_bf16_product": rate,
            "share": reached / rate, "runs": runs}


def overhead(model: InferenceModel) -> dict[str, float]:
    """Seconds that one step spends outside C: the same Python over a model of no layers."""
    bare = ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, intermediate_size=32, layer_pattern=("kda",), final_mixer=None,
                       mixers={"kda": KDAConfig(num_heads=1, head_dim=8)})
    tiny = InferenceModel(bare, RandomWeights(bare))
    pool = tiny.new_pool(1, 512)
    seconds = [timed(lambda: step(tiny, pool, torch.tensor([1]), 1)) for _ in range(200)]
    middle = statistics.median(seconds)
    print(f"a step of a model of almost nothing: {middle * 1e6:.0f} us, two calls into C", flush=True)
    return {"seconds": middle, "calls_per_step": 2, "layers": model.config.num_hidden_layers}


def main() -> None:
    """Print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contexts", type=int, nargs="*", default=CONTEXTS, help="tokens before decoding (default: 0 2048)")
    parser.add_argument("--only", choices=("decode", "prefill", "python"), nargs="+", default=("decode", "prefill", "python"),
                        help="these parts alone; the others' figures stay")
    asked = parser.parse_args()
    model, read = InferenceModel(medium(), RandomWeights(medium())), reader()
    read()
    results = {f"decode_{context}": decode(model, context, read) for context in asked.contexts if "decode" in asked.only}
    results |= {"prefill": prefill(model)} if "prefill" in asked.only else {}
    results |= {"python": overhead(model)} if "python" in asked.only else {}
    save("kernels_decode", {"threads": torch.get_num_threads(), "instructions": native.instruction_set(),
                            "weight_bytes": model.weight_bytes, "bytes_per_token": bytes_per_token(model.config, 0), **results}, keep=True)


if __name__ == "__main__":
    main()
