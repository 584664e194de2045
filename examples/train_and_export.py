"""Text in, a model other engines can read out, from Python: train a recipe's run, sample from it, export it, read it back."""

import tempfile
from pathlib import Path

import torch

from gnomon.model.generate import Sampling, generate
from gnomon.model.weights import load_pretrained, save_pretrained
from gnomon.train.checkpoint import load_run
from gnomon.train.loop import train
from gnomon.train.recipe import TrainRecipe, load

RECIPE = """
batch_tokens = 1024
[model]
extends = "tiny"
vocab_size = 512
hidden_size = 64
num_hidden_layers = 4
[[data.sources]]
max_bytes = 300_000
[[stages]]
context = 128
steps = 6
[evaluate]
tokens = 2048
"""


def main(folder: Path) -> None:
    """A run of six steps: enough to see each part work, not enough to learn a language."""
    (folder / "recipe.toml").write_text(RECIPE)
    recipe: TrainRecipe = load(folder / "recipe.toml", (f"run={folder / 'run'}",))
    summary = train(recipe, quiet=True)
    print(f"{summary.steps} steps, {summary.tokens:,} tokens, last loss {summary.loss:.2f}")
    model, tokenizer, _ = load_run(recipe.run)
    tokens = generate(model, tokenizer.encode("def "), Sampling(max_tokens=8), frozenset(tokenizer.stop_ids))
    print("sample:", repr(tokenizer.decode(list(tokens))))
    save_pretrained(model, folder / "export", tokenizer=tokenizer)
    again = load_pretrained(folder / "export", dtype=torch.float32)
    print("export:", ", ".join(sorted(path.name for path in (folder / "export").iterdir())))
    print(f"read back: {sum(p.numel() for p in again.parameters()):,} parameters")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
