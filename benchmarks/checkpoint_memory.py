"""How much memory does loading a checkpoint take beyond the model itself?

    python benchmarks/checkpoint_memory.py [--runs 5] [--gigabytes 1.0]

Writes a checkpoint of each family of at least one gigabyte in one shard, then loads it in fresh processes and takes the peak of the
resident memory during the load over what was resident before, divided by the bytes of the loaded tensors. Target: at most 1.15.
Beside it, in the same run, transformers on the Kimi-Linear folder. The kernel's peak counts mapped file pages too.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).parent)]

import machine  # noqa: E402

TARGET = 1.15
SHAPES = {
    "kimi_k3": ("small", ("hidden_size=1024", "vocab_size=65536", "mixers.kda.head_dim=128", "intermediate_size=4096",
                          "moe.num_experts=112", "moe.moe_intermediate_size=512", "moe.routed_expert_hidden_size=512")),
    "kimi_linear": ("kimi-linear-48b", ("hidden_size=1024", "vocab_size=65536", "num_hidden_layers=12", "intermediate_size=4096",
                                        "mixers.kda.num_heads=8", "mixers.mla.num_attention_heads=8", "moe.num_experts=12",
                                        "bos_token_id=1", "eos_token_id=2", "pad_token_id=0")),
}


def status(key: str) -> int:
    """A line of this process's memory status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def write(family: str, folder: Path, gigabytes: float) -> int:
    """Write a random checkpoint, with as many experts as its size needs; returns its bytes on disk."""
    import torch

    from gnomon.model.config import preset
    from gnomon.model.transformer import Transformer
    from gnomon.model.weights import save_pretrained

    name, overrides = SHAPES[family]
    config = preset(name, overrides)
    while config.checkpoint_bytes() < gigabytes * 1e9:
        overrides = (*overrides, f"moe.num_experts={config.moe.num_experts + 8}")
        config = preset(name, overrides)
    with torch.device("meta"):
        model = Transformer(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu").requires_grad_(False)
    noise = torch.randn(1 << 20) * 0.02
    for tensor in model.state_dict().values():
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), noise.numel()):
            flat[start : start + noise.numel()] = noise[: flat.numel() - start]
    save_pretrained(model, folder)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def measure(reader: str, folder: Path) -> dict[str, float]:
    """Load in this process and compare the peak with what was resident before."""
    import torch

    if reader == "gnomon":
        from gnomon.model.weights import load_pretrained as load
    else:
        import transformers

        transformers.logging.set_verbosity_error()
        load = transformers.AutoModelForCausalLM.from_pretrained
    torch.zeros(1).add_(1)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    start = time.perf_counter()
    model = load(folder) if reader == "gnomon" else load(folder, dtype=torch.bfloat16)
    seconds = time.perf_counter() - start
    loaded = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    increase = status("VmHWM") - before
    return {"loaded_bytes": loaded, "peak_increase": increase, "ratio": increase / loaded, "seconds": seconds}


def repeat(reader: str, folder: Path, runs: int) -> dict[str, object]:
    """Fresh processes, one after the other."""
    rows = []
    for _ in range(runs):
        program = [sys.executable, __file__, "--measure", reader, "--folder", str(folder)]
        rows.append(json.loads(subprocess.run(program, check=True, capture_output=True, text=True).stdout.splitlines()[-1]))
    return {"loaded_bytes": rows[0]["loaded_bytes"], "ratio": machine.spread([row["ratio"] for row in rows]),
            "seconds": statistics.median(row["seconds"] for row in rows)}


def main() -> int:
    """Write, load, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.folder)))
        return 0
    results = {}
    for family in SHAPES:
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / family
            size = write(family, folder, options.gigabytes)
            readers = ["gnomon", *(["transformers"] if family == "kimi_linear" and find_spec("transformers") else [])]
            for reader in readers:
                row = repeat(reader, folder, options.runs)
                results[f"{family}, {reader}"] = {"checkpoint_bytes": size, **row}
                ratio = row["ratio"]
                sizes = f"{size / 1e9:.2f} GB on disk, {row['loaded_bytes'] / 1e9:.2f} GB loaded"
                print(f"{family:<12} {reader:<13} {sizes}: peak increase {ratio['median']:.3f} x the model "
                      f"(min {ratio['min']:.3f}, max {ratio['max']:.3f}, {row['seconds']:.1f} s)", flush=True)
    worst = max(row["ratio"]["max"] for name, row in results.items() if name.endswith("gnomon"))
    print(f"worst {worst:.3f}, target {TARGET}: {'met' if worst <= TARGET else 'MISSED'}")
    if not options.no_save:
        machine.save("checkpoint_memory", {"target": TARGET, "results": results})
    return 0 if worst <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
