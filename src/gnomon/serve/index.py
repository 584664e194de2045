"""Which prefixes are known: a tree of hash blocks, found by chained hashes.

A *hash block* is a fixed number of tokens, the unit in which prefixes are compared; where its latents lie (pages) and whether the
recurrent state after it was kept (a checkpoint) are separate questions. A block's hash covers its tokens and the hash before it, from a
root that stands for the model and the salt, so equal hashes mean equal prefixes; the tokens are compared as well. A look-up costs one
dictionary step per block. Read next: `prefix.py`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from gnomon.errors import ConfigError
from gnomon.serve.checkpoints import Checkpoint

ID_BYTES = 4
DIGEST_BYTES = 16
REMEMBERED = 1 << 16
"""How many hashes of evicted blocks are remembered, so that a miss can be explained."""


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as the bytes that are hashed and compared. Raises `ConfigError` for what is no id."""
    try:
        return array("i", tokens).tobytes()
    except (OverflowError, TypeError) as error:
        raise ConfigError(f"'tokens' must be ids from 0 to 2^31 - 1: {error}") from None


def unpacked(data: bytes) -> list[int]:
    """The ids again."""
    return array("i", data).tolist()


class Node:
    """One hash block after the blocks of its parents: `depth` blocks from the root, `pages` that hold its latents.

    `pins` counts running sequences and reads whose last block this is; a pinned node and those above it stay.
    """

    __slots__ = ("checkpoint", "children", "depth", "digest", "pages", "parent", "pins", "tokens")

    def __init__(self, parent: Node | None, digest: bytes, tokens: bytes, pages: tuple[int, ...]):
        self.parent, self.digest, self.tokens, self.pages = parent, digest, tokens, pages
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[bytes, Node] = {}
        self.checkpoint: Checkpoint | None = None
        self.pins = 0


class Index:
    """The tree. `fingerprint` says whose states these are; `block` is the number of tokens of a hash block."""

    def __init__(self, fingerprint: str, block: int):
        self.fingerprint, self.block = fingerprint, block
        self._roots: dict[bytes, Node] = {}
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self.count = 0

    @property
    def width(self) -> int:
        """Bytes of a block's tokens."""
        return self.block * ID_BYTES

    def root(self, salt: str) -> Node:
        """Where prefixes under a salt begin."""
        digest = blake2b(repr((self.fingerprint, salt, self.block)).encode(), digest_size=DIGEST_BYTES).digest()
        return self._roots.setdefault(digest, Node(None, digest, b"", ()))

    def chain(self, root: Node, data: bytes | bytearray, digests: list[bytes], depth: int) -> None:
        """Extend `digests` (of the blocks of `data` in order) to so many blocks, as far as `data` goes."""
        width = self.width
        view = memoryview(data)
        before = digests[-1] if digests else root.digest
        for i in range(len(digests), min(depth, len(data) // width)):
            before = chained(before, view[i * width:(i + 1) * width])
            digests.append(before)

    def match(self, root: Node, data: bytes | bytearray, digests: list[bytes], limit: int) -> list[Node]:
        """The known blocks at the beginning of `data`, at most `limit`; `digests` grows to the first that is unknown."""
        path, node, width = [], root, self.width
        before = root.digest
        for i in range(limit):  # this loop is what a look-up costs
            tokens = data[i * width:(i + 1) * width]
            if i == len(digests):
                digests.append(chained(before, tokens))
            before = digests[i]
            child = node.children.get(before)
            if child is None or child.tokens != tokens:
                break
            path.append(child)
            node = child
        return path

    def add(self, parent: Node, digest: bytes, tokens: bytes, pages: tuple[int, ...]) -> Node:
        """A new block after `parent`."""
        node = parent.children[digest] = Node(parent, digest, tokens, pages)
        self._gone.pop(digest, None)
        self.count += 1
        return node

    def remove(self, node: Node) -> None:
        """Forget a block that has no children."""
        assert not node.children and not node.pins and node.checkpoint is None, "a block that is in use cannot be forgotten"
        if node.parent is None:
            self._roots.pop(node.digest, None)
            return
        del node.parent.children[node.digest]
        self.count -= 1
        self.mourn(node.digest)

    def mourn(self, digest: bytes) -> None:
        """Remember that this block, or the state after it, was here."""
        self._gone[digest] = None
        self._gone.move_to_end(digest)
        if len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)

    def was_here(self, digest: bytes) -> bool:
        """Whether the block, or the state after it, was evicted not long ago."""
        return digest in self._gone

    def nodes(self) -> list[Node]:
        """Every block, parents first."""
        found = list(self._roots.values())
        for node in found:
            found.extend(node.children.values())
        return [node for node in found if node.parent is not None]

    def roots(self) -> list[Node]:
        """Where the salts in use begin."""
        return list(self._roots.values())


def chained(before: bytes, block: bytes | bytearray | memoryview) -> bytes:
    """The hash of a block after the block with hash `before`."""
    return blake2b(block, key=before, digest_size=DIGEST_BYTES).digest()
