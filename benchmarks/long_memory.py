"""How much memory does long context take: a sample of a million tokens, made and packed, and one pass of the tiny model over 256K tokens?

Each is done in a process of its own, whose peak of resident memory is read at the end. The sample must stay below 2 GB in all, of text
alone and with evidence in pictures. The pass reads a random text piece by piece as the engine does; what it takes beyond what was resident
before is compared with what was computed beforehand: weights, latents and states by the formulas of `ModelConfig`, scratch by the
library's answer for a piece. All that is said must be finite.

`python benchmarks/long_memory.py [--sample 1048576] [--forward 262144] [--preset tiny]`
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import time
from pathlib import Path

from machine import save

MOST = 2e9
"""Bytes that generating and packing a sample of a million tokens may take."""

PIECE = 4_096
"""Tokens that the model reads at a time."""


def status(key: str) -> int:
    """A line of this process's memory status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def sample(tokens: int, pictures: float) -> dict[str, float]:
    """Make one sample of so many tokens and pack it into a row; peak bytes of the whole process, seconds, images in it."""
    import numpy as np

    from gnomon.data.images import RELEASED
    from gnomon.data.long_context import LongConfig, LongContext
    from gnomon.data.machine_text import default_corpus
    from gnomon.data.mixture import Mixture
    from gnomon.data.packing import PackedBatches
    from gnomon.data.tokenizer import train_tokenizer

    texts = [document.text for document in default_corpus(4_000_000)]
    tokenizer = train_tokenizer(texts, 4_096)
    documents = [np.array([*ids, tokenizer.document_end_id]) for ids in tokenizer.encode_batch(texts)]
    began = time.perf_counter()
    source = LongContext(documents, tokenizer, LongConfig(tasks=8, pieces=(4, 32), pictures=pictures), RELEASED)
    batch = PackedBatches(Mixture([(source, 1.0)]), 1, tokens, pad_id=tokenizer.pad_id).next()
    taken = time.perf_counter() - began
    assert batch.tokens.shape == (1, tokens) and bool(batch.token_mask.all()), "the row is not full"
    return {"peak_bytes": status("VmHWM"), "seconds": taken, "images": len(batch.images)}


def forward(tokens: int, preset: str) -> dict[str, float]:
    """One pass of a model of a preset with random weights; predicted and peak bytes beyond what was resident before, and seconds."""
    import torch

    from gnomon.kernels import native
    from gnomon.model.config import preset as named
    from gnomon.model.inference import InferenceModel, _call
    from gnomon.model.inference_state import PackedRows
    from gnomon.model.transformer import Transformer

    config = named(preset)
    text = torch.randint(config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0))
    transformer = Transformer(config).initialise(0)
    pages = torch.arange(-(-tokens // 64), dtype=torch.int32)[None]

    def rows(first: int, count: int = PIECE) -> PackedRows:
        piece = text[first : first + count]
        return PackedRows(tokens=piece, bounds=torch.tensor([0, len(piece)]), past=torch.tensor([first]),
                          slots=torch.zeros(1, dtype=torch.int64), pages=pages)

    warm = InferenceModel.from_transformer(transformer, "fp32")  # threads, code and the like are there before anything is counted
    warm.forward(rows(0, 1), warm.new_pool(1, 64))
    del warm
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    model = InferenceModel.from_transformer(transformer, "fp32")
    last, size = rows((tokens - 1) // PIECE * PIECE), ctypes.c_int64()
    call = _call(last, last.last_rows(), torch.empty(model.structure.kda_layers, 0, model._record_width), None)
    native.library().gnomon_model_arena(model._address, ctypes.addressof(call), len(last.tokens), ctypes.addressof(size))
    predicted = config.num_parameters() * 4 + config.kv_bytes_per_token(4) * tokens + config.state_bytes() + size.value
    predicted += PIECE * config.hidden_size * 4  # the hidden states that a piece returns
    pool = model.new_pool(1, tokens)
    began = time.perf_counter()
    for first in range(0, tokens, PIECE):
        out = model.forward(rows(first), pool)
        assert out.logits is not None and bool((out.logits.sum() + out.hidden.sum()).isfinite()), f"not finite at token {first}"
        del out
    return {"predicted_bytes": predicted, "peak_bytes": status("VmHWM") - before, "seconds": time.perf_counter() - began}


def apart(what: str, *arguments: object) -> dict[str, float]:
    """The figures of a function of this file, called in a process of its own."""
    command = [sys.executable, __file__, "--apart", json.dumps([what, *arguments])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=1 << 20, help="tokens of the sample")
    parser.add_argument("--forward", type=int, default=1 << 18, help="tokens of the pass; 0 leaves it out")
    parser.add_argument("--preset", default="tiny", help="the model that makes the pass")
    parser.add_argument("--apart", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.apart:
        what, *arguments = json.loads(parsed.apart)
        print(json.dumps({"sample": sample, "forward": forward}[what](*arguments)))
        return
    found: dict[str, object] = {"sample_tokens": parsed.sample, "forward_tokens": parsed.forward, "preset": parsed.preset}
    for name, pictures in (("text", 0.0), ("with pictures", 0.25)):
        figures = found[name] = apart("sample", parsed.sample, pictures)
        print(f"{parsed.sample:,} tokens, {name}: {figures['peak_bytes'] / 1e9:.2f} GB at most ({figures['images']:,} images, "
              f"{figures['seconds']:.1f} s), {'within' if figures['peak_bytes'] <= MOST else 'BEYOND'} {MOST / 1e9:g} GB")
    if parsed.forward:
        figures = found["forward"] = apart("forward", parsed.forward, parsed.preset)
        print(f"a pass over {parsed.forward:,} tokens: {figures['peak_bytes'] / 1e6:,.0f} MB beyond what was resident, "
              f"{figures['predicted_bytes'] / 1e6:,.0f} MB predicted; finite; {figures['seconds']:.0f} s")
    save("long_memory", found)


if __name__ == "__main__":
    main()
