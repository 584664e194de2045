"""`gnomon train`, `gnomon sample`, `gnomon export`: their arguments, and what they do. Nothing heavy is imported until a verb runs.

Read next: `loop.py`.
"""

import argparse
import json
import sys
from pathlib import Path


def declare_train(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `train` to its parser."""
    parser.add_argument("recipe", type=Path, help="a recipe, or the recipe.toml of a run folder")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="fields to change, e.g. optimizer.learning_rate=1e-3")


def declare_sample(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sample` to its parser."""
    parser.add_argument("run", type=Path, help="run folder, or a checkpoint in a released layout")
    parser.add_argument("--prompt", default="The", help="text to continue (default: The)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to add at most (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")


def declare_export(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `export` to its parser."""
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--adapter-to", type=Path, metavar="RUN", help="write only what the run knows beyond this one: a LoRA adapter")
    parser.add_argument("--rank", type=int, default=16, metavar="N", help="rank of the adapter (default: 16)")
    parser.add_argument("--plain", action="store_true", help="keep every weight as trained instead of rounding to bf16 and MXFP4")


def train(parsed: argparse.Namespace) -> None:
    """Train as the recipe says, from the last checkpoint if there is one."""
    from gnomon.train import loop
    from gnomon.train.recipe import load

    loop.train(load(parsed.recipe, tuple(parsed.overrides)))


def sample(parsed: argparse.Namespace) -> None:
    """Write a prompt and what the model continues it with, as it comes."""
    from gnomon.data.tokenizer import Tokenizer
    from gnomon.model.generate import Sampling, generate
    from gnomon.model.inference import load_runner, runner
    from gnomon.train.checkpoint import load_run

    sampling = Sampling(temperature=parsed.temperature, max_tokens=parsed.tokens, seed=parsed.seed)
    if (parsed.run / "config.json").is_file():
        model, tokenizer = load_runner(parsed.run), Tokenizer.load(parsed.run)
    else:
        trained, tokenizer, _ = load_run(parsed.run)
        model = runner(trained)
    ids, shown = [], ""
    sys.stdout.write(parsed.prompt)
    for token in generate(model, tokenizer.encode(parsed.prompt), sampling, frozenset(tokenizer.stop_ids)):
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # a character may need more tokens than have come
            sys.stdout.write(text[len(shown):])
            sys.stdout.flush()
            shown = text
    sys.stdout.write(tokenizer.decode(ids)[len(shown):] + "\n")


def export(parsed: argparse.Namespace) -> None:
    """Write a run's model in the released layout, or its difference to another as an adapter."""
    if parsed.adapter_to is not None:
        _export_adapter(parsed)
        return
    import torch

    from gnomon.data.images import ImageLimits
    from gnomon.model.multimodal import save_multimodal
    from gnomon.model.runs import load_seeing
    from gnomon.model.weights import save_pretrained
    from gnomon.train.checkpoint import load_run

    model, tokenizer, _ = load_run(parsed.run)
    dtype = None if parsed.plain else torch.bfloat16
    if model.config.vision is None:
        save_pretrained(model, parsed.out, quantize=not parsed.plain, dtype=dtype, tokenizer=tokenizer)
    else:
        save_multimodal(load_seeing(parsed.run)[0], parsed.out, quantize=not parsed.plain, dtype=dtype, tokenizer=tokenizer)
        vision = model.config.vision
        limits = ImageLimits(patch_size=vision.patch_size, merge_size=vision.merge_size)
        (parsed.out / "preprocessor_config.json").write_text(json.dumps(limits.preprocessor_config(), indent=2) + "\n")
    rounded = not parsed.plain and model.config.family == "kimi_k3" and model.config.moe is not None
    sys.stdout.write(f"wrote {parsed.out}" + (": routed experts rounded to MXFP4 (--plain keeps them as trained)\n" if rounded else "\n"))


def _export_adapter(parsed: argparse.Namespace) -> None:
    """Write the adapter, and say what it leaves out."""
    from gnomon.model import adapter
    from gnomon.model.runs import load_model

    base, run = (load_model(folder)[0] for folder in (parsed.adapter_to, parsed.run))
    made, loss = adapter.difference(base, run, parsed.rank)
    made.save(parsed.out, str(parsed.adapter_to))
    worst = max(loss.by_module, key=lambda name: loss.by_module[name], default="")
    sys.stdout.write(f"wrote {parsed.out}: rank {parsed.rank}, {len(made.pairs)} maps, {made.nbytes:,} bytes; it leaves out "
                     f"{loss.error:.1%} of the difference's norm" + (f" ({loss.by_module[worst]:.1%} of {worst})\n" if worst else "\n"))
