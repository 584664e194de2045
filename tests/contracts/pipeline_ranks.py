"""A program for several ranks: a model cut into stages gives the loss and gradients of one rank, and sends what is counted.

Run by test_pipeline.py.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from ranks import Case, compare_all

from gnomon.data.packing import Batch
from gnomon.model.config import ModelConfig, preset
from gnomon.model.transformer import Transformer
from gnomon.parallel.pipeline import Work, cut

TOKENS, PARTS, WIDTH = 12, 6, 32


def small(layers: int, mode: str, block: int) -> ModelConfig:
    """Dense layers with both mixers, so that no rounding can flip a choice of experts."""
    made = preset("tiny", (f"num_hidden_layers={layers}", "vocab_size=64", f"hidden_size={WIDTH}", "intermediate_size=48",
                           "tie_word_embeddings=false", f"attn_res_block_size={block}", f"attention_residuals={mode}"))
    return replace(made, moe=None)


def built(config: ModelConfig) -> Transformer:
    """The same weights wherever it is called; depth reads are no plain averages."""
    model = Transformer(config).initialise(5).double()
    random = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "res_proj" in name and parameter.requires_grad:
            parameter.data.normal_(generator=random)
    return model


def pieces() -> list[Batch]:
    """Micro-batches of two documents each, cut in different places."""
    random, found = torch.Generator().manual_seed(1), []
    for number in range(PARTS):
        tokens = torch.randint(64, (1, TOKENS), generator=random)
        ones = torch.ones(1, TOKENS, dtype=torch.bool)
        found.append(Batch(tokens=tokens, targets=tokens, loss_mask=ones, token_mask=ones,
                           cu_seqlens=torch.tensor([0, 3 + number, TOKENS], dtype=torch.int32)))
    return found


def compare(config: ModelConfig, virtual: int, recompute: bool) -> dict[str, float]:
    """Relative differences of losses and of this rank's gradients; what was sent, and what is counted."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wanted = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    whole, part = built(config), built(config)
    expected = []
    for piece in pieces():
        loss = (whole.hidden(piece.tokens, cu_seqlens=piece.cu_seqlens)[0] * wanted).sum() + whole.head_weight.sum()
        loss.backward()
        expected.append(loss.item())
    part.activation_checkpointing = recompute
    pipeline = cut(part, ranks, virtual, rank, None, torch.device("cpu"))

    def of(hidden: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        loss = (hidden[0] * wanted).sum() + part.head_weight.sum()
        return loss, loss.detach()

    found = pipeline.run(Work(pieces=pieces(), own=lambda piece: piece, loss=of, precision=nullcontext))
    theirs = dict(whole.named_parameters())
    worst = 0.0
    for name, ours in part.named_parameters():
        other = theirs[name].grad
        assert (other is None) == (ours.grad is None), name
        if other is not None and other.norm() > 1e-9:
            worst = max(worst, float((ours.grad - other).norm() / other.norm()))
    losses = max(abs(float(a) - b) / abs(b) for a, b in zip(found, expected, strict=True)) if rank == ranks - 1 else 0.0
    return {"losses": losses, "gradients": worst, "held": sum(p.numel() for p in part.parameters()), "sent": pipeline.sent,
            "counted": pipeline.cuts.payload() * WIDTH * TOKENS * PARTS * 8, "whole": sum(p.numel() for p in whole.parameters())}


def every_pipeline(ranks: int) -> Iterator[Case]:
    """Depth reads of all forms, one and several stages of a rank, with and without recomputation."""
    torch.set_default_dtype(torch.float64)
    for mode, block, virtual, recompute in (("block", 2, 1, False), ("block", 1, 2, True), ("block", 2, 3, False), ("full", 1, 2, False),
                                            ("off", 1, 2, False)):
        yield (f"{mode} {block}, virtual {virtual}, recompute {recompute}",
               partial(compare, small(6 if virtual == 3 else 5, mode, block), virtual, recompute))


if __name__ == "__main__":
    compare_all(every_pipeline)
