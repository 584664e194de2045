"""Next-token cross-entropy as an exact sum over learnt tokens, without ever holding all logits (report §3).

The loss of a step is (sum over all learnt targets of all micro-batches and ranks) / (their count), so masks, accumulation and
the number of ranks do not change it. Read next: `loop.py`.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from gnomon.data.packing import Batch
from gnomon.model.transformer import Transformer

LOGIT_ELEMENTS = 1 << 20  # logits alive at a time
LEAST_ROWS = 128  # with a large vocabulary, so that the products stay efficient


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of -log softmax(h Wᵀ)[target]; gradients are made chunk by chunk in the forward pass, since the sum is linear."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if wanted else None
        exact, product = torch.promote_types(weight.dtype, torch.float32), weight.to(hidden.dtype)
        grad_weight = torch.zeros_like(weight, dtype=exact) if wanted else None
        total = hidden.new_zeros((), dtype=torch.float64)
        for start in range(0, hidden.shape[0], rows):
            part, target = hidden[start : start + rows], targets[start : start + rows]
            log_p = functional.log_softmax(functional.linear(part, product).to(exact), dim=-1)  # [n, V]
            total -= log_p.gather(-1, target[:, None]).double().sum()
            if wanted:
                slope = log_p.exp_()
                slope[torch.arange(len(target), device=target.device), target] -= 1.0
                slope = slope.to(part.dtype)
                grad_hidden[start : start + rows] = slope @ product  # type: ignore[index]
                grad_weight += slope.mT @ part  # type: ignore[operator]
        if wanted:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))  # type: ignore[union-attr]
        return total.to(torch.promote_types(hidden.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None, None  # a scalar keeps its precision and their types


def cross_entropy_sum(hidden: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], targets: Int[Tensor, "N"]) -> Float[Tensor, ""]:
    """Summed cross-entropy of the head's logits against `targets`, in nats; at most `LOGIT_ELEMENTS` logits exist at a time."""
    rows = max(LEAST_ROWS, LOGIT_ELEMENTS // weight.shape[0])
    return _ChunkedCrossEntropy.apply(hidden, weight, targets, rows)


@torch.no_grad()
def token_losses(model: Transformer, hidden: Float[Tensor, "N D"], targets: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Cross-entropy of each position, in nats."""
    rows = max(LEAST_ROWS, LOGIT_ELEMENTS // model.config.vocab_size)
    parts = zip(hidden.split(rows), targets.split(rows), strict=True)
    return torch.cat([functional.cross_entropy(model.head(h).float(), t, reduction="none") for h, t in parts])


class Objective(nn.Module):
    """The model with its loss: one forward from batch to scalar, which is what data parallelism wraps.

    `auxiliary_weight` is that of the balance loss, 0 when balance is a bias. `bf16` runs the products in bfloat16.
    """

    def __init__(self, model: Transformer, auxiliary_weight: float = 0.0, bf16: bool = False) -> None:
        super().__init__()
        self.model, self.auxiliary_weight, self.bf16 = model, auxiliary_weight, bf16

    def forward(self, batch: Batch, count: int) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """(what to differentiate, detached sum of the cross-entropy); `count` is the learnt targets of the whole step."""
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self.bf16):
            hidden = self.model.hidden(batch.tokens, cu_seqlens=batch.cu_seqlens, token_mask=batch.token_mask)
            total = cross_entropy_sum(*learnt(hidden, batch.targets, batch.loss_mask, self.bf16, self.model.head_weight))
        loss = total / count
        if self.auxiliary_weight:
            terms = [router.auxiliary_loss for router in self.model.routers() if router.auxiliary_loss is not None]
            share = batch.loss_mask.sum() / count  # so that micro-batches and ranks average rather than add
            loss = loss + self.auxiliary_weight * share * torch.stack(terms).mean()
        return loss, total.detach()


def learnt(
    hidden: Float[Tensor, "B T D"], targets: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"], bf16: bool, weight: Float[Tensor, "V D"]
) -> tuple[Float[Tensor, "N D"], Float[Tensor, "V D"], Int[Tensor, "N"]]:
    """The rows of the head's product: hidden states and targets where the loss counts, in the type of the products."""
    flat = hidden.flatten(0, 1)[mask.flatten()]
    return flat.bfloat16() if bf16 else flat, weight, targets[mask]
