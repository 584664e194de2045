"""What a model costs, from its shape alone: no torch, no weights. Change a knob and see what moves."""

from gnomon.model.config import ModelConfig, preset
from gnomon.units import format_bytes, format_count, format_flops

CONTEXT = 131_072
KNOBS = {
    "Kimi K3 as released": (),
    "half as many experts per token": ("moe.num_experts_per_token=8",),
    "experts at full width, no latent": ("moe.routed_expert_hidden_size=none",),
    "one global layer in eight": ('layer_pattern=["kda","kda","kda","kda","kda","kda","kda","mla"]',),
    "global layers only": ('layer_pattern=["mla"]',),
}


def line(name: str, config: ModelConfig) -> str:
    """One row of the table."""
    sequence = config.kv_bytes_per_token() * CONTEXT + config.state_bytes() + config.conv_state_bytes()
    size, active, work = config.num_parameters(), config.activated_parameters(), config.flops_per_token(CONTEXT)
    return (f"{name:34} {format_count(size):>8} {format_count(active):>8} {format_flops(work):>12} "
            f"{format_bytes(sequence):>12} {format_bytes(config.checkpoint_bytes()):>10}")


def main() -> None:
    """Print the released model and four variations."""
    print(f"{'at a context of 128K tokens':34} {'params':>8} {'active':>8} {'per token':>12} {'a sequence':>12} {'on disk':>10}")
    for name, overrides in KNOBS.items():
        print(line(name, preset("k3-2.8t", overrides)))


if __name__ == "__main__":
    main()
