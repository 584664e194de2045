"""A tensor that is some rows of a larger one, as torch's distributed checkpoints understand it: who holds what, and nothing else.

Every layout of a run is of this form: a shard of FSDP, a share of the experts, the pieces of an optimiser's state that a rank owns, or a
whole tensor. So a checkpoint written under one mesh is read under another without anybody holding a whole model.
Read next: `weights.py`, `shard.py`; `gnomon/train/checkpoint_rows.py`, which writes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Rows(Tensor):
    """Rows `start` and following of a tensor of `count` rows; shares the memory of `local`. A whole tensor may have no rows at all."""

    start: int
    count: int

    @staticmethod
    def of(local: Tensor, start: int = 0, count: int | None = None) -> Rows:
        """`local` [n, …] as rows of a tensor [count, …]; without `count` it is all of it, of any shape."""
        rows = local.detach().as_subclass(Rows)
        rows.start, rows.count = start, count if count is not None else (local.shape[0] if local.ndim else 0)
        return rows

    @property
    def local(self) -> Tensor:
        """The rows themselves."""
        return self.as_subclass(Tensor)

    def size(self, dim: int | None = None) -> Any:
        """That of the whole tensor, which is what a checkpoint compares."""
        local = self.local.shape
        whole = torch.Size([self.count, *local[1:]]) if local else local
        return whole if dim is None else whole[dim]

    def _chunk(self) -> ChunkStorageMetadata:
        local = self.local.shape
        return ChunkStorageMetadata(offsets=torch.Size([self.start, *[0] * (len(local) - 1)][: len(local)]), sizes=local)

    def __create_write_items__(self, name: str, value: object) -> list[WriteItem]:
        """What a rank has to write: one item, or none for no rows."""
        local = self.local
        if local.ndim and not local.shape[0]:
            return []
        chunk = self._chunk()
        data = TensorWriteData(chunk=chunk, properties=TensorProperties.create_from_tensor(local), size=self.size())
        return [WriteItem(index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What a rank wants to read."""
        return [self._chunk()] if not self.local.ndim or self.local.shape[0] else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The memory that is written or read."""
        return self.local
