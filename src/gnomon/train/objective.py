"""Next-token cross-entropy as an exact sum over learnt tokens, without ever holding all logits (report §3).

The loss of a step is (sum over all learnt targets of all micro-batches and ranks) / (their count), so masks, accumulation and
the number of ranks do not change it. Read next: `gnomon/kernels/cross_entropy`, `loop.py`.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from gnomon.data.packing import Batch
from gnomon.kernels import cross_entropy
from gnomon.model.multimodal import Multimodal
from gnomon.model.transformer import Transformer

ROWS = 512  # logits of that many positions alive at a time in an evaluation


@torch.no_grad()
def token_losses(model: Transformer, hidden: Float[Tensor, "N D"], targets: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Cross-entropy of each position, in nats."""
    parts = zip(hidden.split(ROWS), targets.split(ROWS), strict=True)
    return torch.cat([functional.cross_entropy(model.head(h).float(), t, reduction="none") for h, t in parts])


class Objective(nn.Module):
    """The model with its loss: one forward from batch to scalar, which is what data parallelism wraps.

    `auxiliary_weight` is that of the balance loss, 0 when balance is a bias. `bf16` runs the products in bfloat16. `eye` is the model
    with tower and projector around `model`, where images are learnt from: text and images have one loss.
    """

    def __init__(self, model: Transformer, auxiliary_weight: float = 0.0, bf16: bool = False, eye: Multimodal | None = None) -> None:
        super().__init__()
        self.model, self.auxiliary_weight, self.bf16, self.eye = model, auxiliary_weight, bf16, eye

    def forward(self, batch: Batch, count: int) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """(what to differentiate, detached sum of the cross-entropy); `count` is the learnt targets of the whole step."""
        with self.precision(batch.tokens.device):
            seen = None if self.eye is None else self.eye.embeddings(batch.tokens, batch.images)
            hidden = self.model.hidden(batch.tokens, embeddings=seen, cu_seqlens=batch.cu_seqlens, token_mask=batch.token_mask)
            return self.of_hidden(hidden, batch, count)

    def precision(self, device: torch.device) -> torch.autocast:
        """The context that the model runs in."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.bf16)

    def of_hidden(self, hidden: Float[Tensor, "B T D"], batch: Batch, count: int) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """The same from what the head sees, inside `precision`: what the last stage of a pipeline does."""
        total = cross_entropy.cross_entropy_sum(*learnt(hidden, batch.targets, batch.loss_mask, self.bf16, self.model.head_weight))
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
