"""The reserved block at the end of the vocabulary, in the manner of K3.

K3 keeps its last 256 ids for tokens that text can never produce: the structural markers of the chat format, image
markers, padding. A slot without a name is called ``<|reserved_token_ID|>``. A small vocabulary takes a compact block of
32 slots with the same names in the same order. Read next: ``tokenizer.py``, which places this block above the ranks.
"""

from __future__ import annotations

from gnomon.errors import ConfigError

FULL_BLOCK = 256
COMPACT_BLOCK = 32
FULL_BLOCK_FROM = 32_768  # a vocabulary of at least this size can afford the released block

END_OF_DOCUMENT = "[EOS]"
END_OF_MESSAGE = "<|end_of_msg|>"
BEGINNING = "[BOS]"
UNKNOWN = "[UNK]"
PADDING = "[PAD]"

# Offsets inside the released block of 256 (id - 163,584 in K3).
K3_SLOTS = {
    0: BEGINNING,
    1: END_OF_DOCUMENT,
    2: END_OF_MESSAGE,
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: UNKNOWN,
    255: PADDING,
}
_LAST_TWO = (UNKNOWN, PADDING)


def block_size(vocab_size: int) -> int:
    """Number of reserved slots that a vocabulary of `vocab_size` ids gets: the released 256, or 32 if it is small."""
    return FULL_BLOCK if vocab_size >= FULL_BLOCK_FROM else COMPACT_BLOCK


def block(first_id: int, slots: int) -> dict[str, int]:
    """Names and ids of a reserved block of `slots` ids that starts at `first_id`, in the order of the ids.

    256 slots: exactly K3's places. Fewer: K3's names packed at the front in K3's order, `[UNK]` and `[PAD]` last.
    Raises ConfigError when the names do not fit.
    """
    if slots < len(K3_SLOTS):
        raise ConfigError(f"special_slots = {slots}: the {len(K3_SLOTS)} named tokens of K3 need at least as many slots")
    if slots >= FULL_BLOCK:
        named = dict(K3_SLOTS)
    else:
        front = [name for name in K3_SLOTS.values() if name not in _LAST_TWO]
        named = dict(enumerate(front)) | {slots - 2: UNKNOWN, slots - 1: PADDING}
    return fill(named, first_id, slots)


def fill(named: dict[int, str], first_id: int, slots: int) -> dict[str, int]:
    """Complete a partly named block: each offset without a name becomes ``<|reserved_token_ID|>``."""
    return {named.get(i, f"<|reserved_token_{first_id + i}|>"): first_id + i for i in range(slots)}
