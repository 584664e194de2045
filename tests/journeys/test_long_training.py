"""Training on long samples from a recipe: they fill the rows of each stage, questions are asked of held-out text, and the run resumes."""

import torch

from gnomon.train import checkpoint
from gnomon.train.loop import train


def test_a_recipe_strews_evidence_and_asks_for_it(recipe, rows):
    source = {"weight": 1.0, "long": {"tasks": 1, "kinds": ["code"], "pieces": [4, 4], "learn": "answers"}}
    plain = recipe()
    sources = [{"paths": list(plain.data.sources[0].paths)}, {"paths": list(plain.data.sources[0].paths), **source}]
    changes = {
        "data": {"sources": sources, "tokenizer": str(plain.data.tokenizer), "held_out": 0.2},
        "stages": [{"context": 1024, "steps": 2}, {"context": 2048, "steps": 2, "weights": [0.2, 0.8]}], "batch_tokens": 4096,
        "evaluate": {"contexts": [64, 1024, 2048], "tokens": 4096}, "checkpoint": {"every_steps": 1, "keep": 4},
    }
    whole = recipe(**changes)
    summary = train(whole, quiet=True)
    assert [result.answers for result in summary.held_out] == [None, 0.0, 0.0]  # 64 tokens hold no evidence; nothing is learnt in 4 steps
    assert "scattered evidence" in (whole.run / "report.html").read_text()
    kept = checkpoint.load(checkpoint.latest(whole.run)).tensors["model"]
    for path in checkpoint.checkpoints(whole.run)[-2:]:  # go back into the middle of the second stage
        for file in sorted(path.rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        path.rmdir()
    assert train(whole, quiet=True).resumed_at == 2
    again = checkpoint.load(checkpoint.latest(whole.run)).tensors["model"]
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    assert len(rows(whole)) == 4
