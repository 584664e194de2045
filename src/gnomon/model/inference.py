"""The inference twin of `Transformer`: the same network, its weights packed as they are stored, a whole step in one call to C++.

`Transformer` is the meaning; this is how a server, a sampler or an evaluation runs it on a CPU: rows of any number of sequences at once,
some bringing one token and some thousands, states in pools (`inference_state.py`). A row's result has the same bits whatever else is in
the call and however many threads run it. Read next: `csrc/layer.cpp`, one readable function per layer.
"""

import ctypes
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gnomon.errors import ConfigError, KernelError
from gnomon.kernels import native, operator
from gnomon.kernels.packed.matrix import BF16
from gnomon.model import inference_layout as layout
from gnomon.model.config import ModelConfig
from gnomon.model.huggingface import read_config
from gnomon.model.inference_state import PackedRows, StatePool
from gnomon.model.inference_weights import Buffers, FolderSource, ModelSource, Packer, Source, Weights
from gnomon.model.transformer import Transformer
from gnomon.model.weights import load_pretrained

PAGE = 64
"""Tokens of a page where the caller does not choose."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outputs:
    """Results of the wanted rows: what the head sees, and logits where they were asked for.

    `record` [KDA layers, held rows, width] is what `InferenceModel.advance` needs of the held sequences; `experts` are those that each row
    of the call goes to, in each layer that has any, where they were asked for.
    """

    hidden: Float[Tensor, "W D"]
    logits: Float[Tensor, "W V"] | None
    record: Float[Tensor, "L N R"]
    experts: Int[Tensor, "T M k"] | None = None


class InferenceModel:
    """A model that only runs forward, on the CPU; build it with `load` or `from_transformer`."""

    def __init__(self, config: ModelConfig, source: Source, weights: Weights = "stored"):
        if reason := refuse(config):
            raise KernelError(f"the inference model cannot run: {reason}")
        self.config = config
        packer = Packer(config, source, weights)
        self.structure = packer.model()
        self._memory, self._kept = packer.buffers, packer.kept
        self._address = ctypes.addressof(self.structure)
        self._arena = Arena()
        self._turn = threading.Lock()  # the arena serves one call at a time
        kda = config.mixers.get("kda")
        self._record_width = 0 if kda is None else 4 * kda.width + kda.num_heads

    @classmethod
    def load(cls, folder: str | Path, weights: Weights = "stored") -> Self:
        """Read a released checkpoint; packed experts are never expanded (unless `weights` is "fp32").

        Raises `CheckpointError` for a folder that does not hold the model it describes, `KernelError` where `refuse` has a reason.
        """
        source = FolderSource(folder)
        return cls(source.config, source, weights)

    @classmethod
    def from_transformer(cls, model: Transformer, weights: Weights = "stored") -> Self:
        """Pack a copy of a model's weights; "mxfp4" also encodes its routed experts. Raises `KernelError` for a model on another device."""
        where = model.model.embed_tokens.weight.device
        if where.type != "cpu":
            raise KernelError(f"the inference model packs weights on the CPU and the model is on {where}; move it there first")
        return cls(model.config, ModelSource(model), weights)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights."""
        return self._memory.bytes

    def steady(self, wanted: bool) -> bool:
        """Ask for results that have the same bits however a sequence is cut into calls; returns whether it will be so, here always.

        Attention then keeps to its absorbed form. That costs time only where many tokens of one sequence come at once: a long prompt.
        """
        self.structure.mla.absorbed = int(wanted)
        return True

    def new_pool(self, slots: int, tokens: int, page_tokens: int = PAGE, dtype: torch.dtype = torch.float32) -> StatePool:
        """A pool with this many slots and pages for `tokens` tokens in all; `dtype` is that of the latents."""
        return StatePool(self.config, slots, -(-tokens // page_tokens), page_tokens, dtype)

    def forward(self, rows: PackedRows, pool: StatePool, *, logits: bool = True, experts: bool = False) -> Outputs:
        """Run the rows through all layers; states in the pool move on. Raises `ConfigError` for rows that do not fit."""
        rows.check(self.config, pool)
        wanted = rows.last_rows() if rows.wanted is None else rows.wanted
        total = int(rows.bounds[-1])
        held = total - int(rows.bounds[len(rows.slots) - rows.held])
        hidden = torch.empty(len(wanted), self.config.hidden_size)
        scores = torch.empty(len(wanted), self.config.vocab_size) if logits else None
        record = torch.empty(self.structure.kda_layers, held, self._record_width)
        chosen = torch.empty(total, self.structure.routed_layers, self.structure.experts_per_token, dtype=torch.int32) if experts else None
        call = _call(rows, wanted, record, chosen)
        at = ctypes.addressof(call)
        library = native.library()
        with self._turn:
            size = ctypes.c_int64()
            library.gnomon_model_arena(self._address, at, total, ctypes.addressof(size))
            arena = self._arena.reserve(size.value)
            library.gnomon_model_forward(self._address, pool.address, at, native.address(hidden), native.address(scores), arena,
                                         native.threads())
        return Outputs(hidden=hidden, logits=scores, record=record, experts=chosen)

    def advance(self, rows: PackedRows, outputs: Outputs, accepted: Int[Tensor, "h"], pool: StatePool) -> None:
        """Move the held sequences of an earlier call on by their first `accepted` tokens each; latents are in their pages already.

        Only that call's states are right to advance: nothing else may have changed the slots since. Raises `ConfigError` for rows,
        outputs and counts that do not belong together.
        """
        rows.check(self.config, pool)
        first = len(rows.slots) - rows.held
        bounds = (rows.bounds[first:] - rows.bounds[first]).contiguous()
        if outputs.record.shape[1] != int(bounds[-1]):
            raise ConfigError(f"'outputs' recorded {outputs.record.shape[1]} held rows where 'rows' brings {int(bounds[-1])}; "
                              "both must be of one call")
        prefix = accepted.to(torch.int64).contiguous()
        if len(prefix) != rows.held or bool((prefix < 0).any() | (prefix > bounds.diff()).any()):
            raise ConfigError(f"'accepted' is {accepted.tolist()} for held sequences with {bounds.diff().tolist()} tokens")
        slots = rows.slots[first:].contiguous()
        native.library().gnomon_model_advance(
            self._address, pool.address, native.address(outputs.record), native.address(bounds), native.address(prefix),
            native.address(slots), rows.held, native.threads(),
        )

    def embed(self, tokens: Int[Tensor, "N"]) -> Float[Tensor, "N D"]:
        """Rows of the embedding table, as the forward pass takes them: for callers that put other vectors among them."""
        dtype = torch.bfloat16 if self.structure.embedding_format == BF16 else torch.float32
        rows, width = self.config.vocab_size, self.config.hidden_size
        memory = (ctypes.c_uint8 * (rows * width * dtype.itemsize)).from_address(self.structure.embedding)
        return torch.frombuffer(memory, dtype=dtype).view(rows, width)[tokens].float()

    def head(self, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
        """Logits of hidden vectors."""
        if hidden.shape[1:] != (self.config.hidden_size,):
            raise ConfigError(f"'hidden' has shape {list(hidden.shape)}; rows are {self.config.hidden_size} wide")
        x = hidden.float().contiguous()
        scores = torch.empty(len(x), self.config.vocab_size)
        head = ctypes.addressof(self.structure) + layout.Model.head.offset
        native.library().gnomon_matrix_multiply(head, x.data_ptr(), len(x), x.shape[1], scores.data_ptr(), scores.shape[1], 0,
                                                native.threads())
        return scores

    def continuation(self, capacity: int) -> "Continuation":
        """One sequence of at most `capacity` tokens with a pool of its own."""
        return Continuation(self, capacity)


class Continuation:
    """One sequence: hand it tokens, get the logits that follow them."""

    def __init__(self, model: InferenceModel, capacity: int):
        self.model, self.length = model, 0
        self.pool = model.new_pool(1, max(capacity, 1))
        self.pages = torch.arange(self.pool.pages, dtype=torch.int32)[None]

    def extend(self, tokens: list[int]) -> Float[Tensor, "V"]:
        """Logits after these further tokens. Raises `ConfigError` beyond the capacity or for no tokens."""
        if not tokens:
            raise ConfigError("'tokens' is empty; there is no last token whose logits could be given")
        rows = PackedRows(tokens=torch.tensor(tokens), bounds=torch.tensor([0, len(tokens)]), past=torch.tensor([self.length]),
                          slots=torch.zeros(1, dtype=torch.int64), pages=self.pages)
        logits = self.model.forward(rows, self.pool).logits
        assert logits is not None
        self.length += len(tokens)
        return logits[0]


class Arena:
    """Scratch memory that is kept between calls and grows when a call needs more."""

    def __init__(self) -> None:
        self.size = 0
        self.buffers = Buffers()

    def reserve(self, size: int) -> int:
        """The address of at least `size` bytes."""
        if size > self.size:
            self.buffers, self.size = Buffers(), 0  # the old memory is gone even where there is no new one
            self.address, self.size = self.buffers.place(size), size
        return self.address


def refuse(config: ModelConfig) -> str | None:
    """Why a model cannot run here in one call per step, or `None` if it can."""
    if operator.reference_forced():
        return f"{operator.FORCE}=reference is set"
    foreign = sorted(set(config.layers) - set(layout.MIXERS))
    if foreign:
        return f"the C++ layer knows {' and '.join(layout.MIXERS)}, not the mixer {foreign[0]}"
    return native.unavailable()


def runner(model: Transformer) -> Transformer | InferenceModel:
    """What samples from a model fastest here: its inference twin, or the model itself where `refuse` has a reason."""
    away = model.model.embed_tokens.weight.device.type != "cpu"
    return model if away or refuse(model.config) else InferenceModel.from_transformer(model)


def load_runner(folder: Path) -> Transformer | InferenceModel:
    """The same for a released checkpoint, whose packed experts then stay packed."""
    return load_pretrained(folder) if refuse(read_config(folder / "config.json")) else InferenceModel.load(folder)


def _call(rows: PackedRows, wanted: Tensor, record: Tensor, chosen: Tensor | None) -> layout.Rows:
    sequences = len(rows.slots)
    return layout.Rows(
        sequences=sequences, held=sequences - rows.held, pages_each=rows.pages.shape[1], wanted_count=len(wanted),
        copied=0 if rows.copies is None else len(rows.copies), tokens=native.address(rows.tokens), bounds=rows.bounds.data_ptr(),
        past=rows.past.data_ptr(), slots=rows.slots.data_ptr(), copies=native.address(rows.copies), wanted=wanted.data_ptr(),
        embeddings=native.address(rows.embeddings), pages=rows.pages.data_ptr(), record=record.data_ptr(),
        chosen=native.address(chosen),
    )
