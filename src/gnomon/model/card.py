"""What a model costs, as rows to print: `gnomon show PRESET`, and the tour's table of the toy beside K3. Free of torch."""

from rich.table import Table

from gnomon.model.config import ModelConfig
from gnomon.units import format_bytes, format_count, format_flops

CONTEXTS = (8192, 1048576)
"""The first and the last context of the report's curriculum (§3.4)."""


def card(config: ModelConfig) -> list[tuple[str, str]]:
    """Label and value of each figure; exact counts beside rounded ones."""
    kinds = {kind: config.layers.count(kind) for kind in dict.fromkeys(config.layers)}
    rows = [
        ("layers", f"{config.num_hidden_layers} ({', '.join(f'{n} {kind}' for kind, n in kinds.items())})"),
        ("parameters", _exact(config.num_parameters())),
        ("activated per token", _exact(config.activated_parameters())),
    ]
    if config.moe is not None:
        rows.append(("experts per token", f"{config.moe.num_experts_per_token} of {config.moe.num_experts}"))
    if config.vision is not None:
        rows.append(("vision parameters", _exact(config.vision_parameters())))
    rows += [(f"forward FLOPs per token at {context:,}", format_flops(config.flops_per_token(context))) for context in CONTEXTS]
    rows += [
        ("cache per token (bf16)", f"{config.kv_bytes_per_token():,} B"),
        ("state per sequence (fp32)", f"{config.state_bytes():,} B ({format_bytes(config.state_bytes())})"),
        ("checkpoint", f"{config.checkpoint_bytes():,} B ({format_bytes(config.checkpoint_bytes())})"),
    ]
    return rows


def table(name: str, config: ModelConfig) -> Table:
    """The card of one model."""
    result = Table("", name, box=None)
    for label, value in card(config):
        result.add_row(label, value)
    return result


def _exact(count: int) -> str:
    return f"{count:,} ({format_count(count)})"
