"""QK-Clip: after a step, shrink the query and key maps of heads whose attention logits grew too large (report §2.5; Kimi K2).

Muon lets logits grow without bound. For a head whose largest logit S exceeds tau, gamma = tau/S shrinks its logits to tau: the
latent's query and key parts by sqrt(gamma) each, the query part that meets the shared key by gamma, the shared key not at all,
since it belongs to every head. KDA needs none: its queries and keys have length one. Read next: `loop.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gnomon.model.parts import MLAConfig
from gnomon.parallel.weights import rows_here

Reduce = Callable[[Tensor], None]
"""Combines a tensor over ranks, in place."""


def watch(layers: Mapping[int, Any]) -> None:
    """Have the latent-attention mixers keep the largest logit of each head."""
    for mixer in layers.values():
        mixer.watch_logits = True
        mixer.max_logits = None


@torch.no_grad()
def clip_logits(layers: Mapping[int, Any], threshold: float, reduce_max: Reduce) -> Float[Tensor, "L"]:
    """Apply the clip once per optimiser step, forget the logits that were seen, and return each layer's largest.

    `layers` is `Transformer.mla_layers()`. Ranks agree through one maximum over all layers. A layer that saw no
    token returns minus infinity and is left alone.
    """
    mixers = list(layers.values())
    if not mixers:
        return torch.zeros(0)
    heads = [mixer.config.num_attention_heads for mixer in mixers]
    seen = torch.cat([_seen(mixer) for mixer in mixers])
    reduce_max(seen)
    for mixer, largest in zip(mixers, seen.split(heads), strict=True):
        mixer.max_logits = None
        if bool((largest > threshold).any()):
            scale_heads(mixer, (threshold / largest.clamp(min=threshold)).to(mixer.kv_b_proj.weight.dtype))
    return torch.stack([largest.max() for largest in seen.split(heads)])


def _seen(mixer: Any) -> Tensor:
    if mixer.max_logits is not None:
        return mixer.max_logits.float()
    return torch.full((mixer.config.num_attention_heads,), float("-inf"), device=mixer.kv_b_proj.weight.device)


def scale_heads(mixer: Any, gamma: Float[Tensor, "H"]) -> None:
    """Multiply each head's logits by its gamma, through the weights; of a weight that is cut over ranks, the rows that are here."""
    config: MLAConfig = mixer.config
    query = (mixer.q_proj if config.q_lora_rank is None else mixer.q_b_proj).weight
    root, nope = gamma.sqrt()[:, None], config.qk_nope_head_dim
    queries = torch.cat([root.expand(-1, nope), gamma[:, None].expand(-1, config.qk_head_dim - nope)], 1)  # [H, nope + shared]
    keys = torch.cat([root.expand(-1, nope), torch.ones_like(root).expand(-1, config.v_head_dim)], 1)  # [H, nope + value]
    for weight, factors in ((query, queries), (mixer.kv_b_proj.weight, keys)):
        rows, start = rows_here(weight)
        rows.mul_(factors.flatten()[start : start + len(rows), None])
