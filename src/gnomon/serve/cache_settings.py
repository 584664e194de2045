"""All that can be set about the prefix cache and the memory under it. No torch. Read next: `prefix.py`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from gnomon.config import setting
from gnomon.errors import ConfigError

Form = Literal["fp32", "bf16", "int8"]
FORMS: tuple[Form, ...] = get_args(Form)
SHARE = 4
"""One part in so many of the machine's memory is the budget where none is given."""
CONTROL_GROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSettings:
    """The cache: its grid, its budget, what it does when memory runs out, and its disk."""

    hash_block: int = setting(64, "tokens of a hash block, the grid on which prefixes are shared; best a multiple of 64")
    page_tokens: int = setting(64, "tokens of a page, the unit of memory for latents")
    memory_bytes: int | None = setting(None, "for running states, checkpoints and pages together; none: a quarter of the machine's memory")
    latents: Literal["fp32", "bf16"] = setting("fp32", "type of the latents in memory; with bf16 weights, bf16 changes no result")
    resting: Form = setting("fp32", "what checkpoints become before any has to go, and on the disk: bf16 and int8 are smaller, fp32 exact")
    folder: Path | None = setting(None, "where prefixes outlive the process; none: nowhere")
    disk_bytes: int = setting(16 << 30, "for the folder")
    disk_queue_bytes: int = setting(256 << 20, "that may wait to be written; more is dropped")

    def __post_init__(self) -> None:
        for name, choices in (("resting", FORMS), ("latents", ("fp32", "bf16"))):
            if getattr(self, name) not in choices:
                raise ConfigError(f"'{name}' is '{getattr(self, name)}'; choose one of: {', '.join(choices)}")
        for name in ("hash_block", "page_tokens", "disk_bytes", "disk_queue_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"'{name}' is {getattr(self, name)}; use a positive number")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ConfigError(f"'memory_bytes' is {self.memory_bytes}; use a positive number, or leave it out")

    @property
    def budget_bytes(self) -> int:
        """The budget in memory."""
        return machine_bytes() // SHARE if self.memory_bytes is None else self.memory_bytes


def machine_bytes() -> int:
    """Memory of this machine, or of the control group that this process is in, if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = CONTROL_GROUP.read_text(encoding="utf-8").strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical
