"""A checkpoint: the KDA state of all layers after a whole number of hash blocks, kept to be copied by whoever continues from there.

Nobody ever writes to a checkpoint. All layers lie in one slot, so there is no half of one. It carries its own token count and chained
hash, and so does the memory it lies in; both are compared before it is restored, because a wrong state crashes nothing. Read next:
`prefix.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["grid", "turn", "end"]


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    """The state after `length` tokens whose chained hash is `digest`, in `slot`.

    `kind` is "turn" where requests are expected to come back (boundaries of turns, forks) and "end" where a sequence ended. `score` and
    `floor` are what eviction goes by (`worth.py`), `hits` how often it was restored.
    """

    length: int
    digest: bytes
    slot: int
    kind: Kind
    hits: int = 0
    score: float = 0.0
    floor: float = 0.0
