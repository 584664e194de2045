"""What the engine runs a model through: rows in, logits of the wanted rows out, states in a pool.

`InferenceModel` is the runner for CPUs. `TorchRunner` gives the same contract over `Transformer`, sequence by sequence, on any device of
torch: slow, but it is the meaning, and it runs where there is no C++ library. Read next: `engine.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from gnomon.errors import ConfigError
from gnomon.model.config import ModelConfig
from gnomon.model.inference import PAGE, InferenceModel, Outputs, refuse
from gnomon.model.inference_state import PackedRows, StatePool
from gnomon.model.router import recorded
from gnomon.model.state import KDAState, LayerState, MLACache
from gnomon.model.transformer import Transformer


class Runner(Protocol):
    """A model that takes the rows of any sequences and keeps their states in a pool."""

    config: ModelConfig

    def new_pool(self, slots: int, tokens: int, page_tokens: int = PAGE, dtype: torch.dtype = torch.float32) -> StatePool:
        """A pool with this many slots and pages for `tokens` tokens in all."""
        ...

    def forward(self, rows: PackedRows, pool: StatePool, *, logits: bool = True, experts: bool = False) -> Outputs:
        """Results of the wanted rows, on the CPU, and the experts of all; states move on. Raises `ConfigError` for rows that do not fit."""
        ...

    def steady(self, wanted: bool) -> bool:
        """Ask for results with the same bits however a sequence is cut into calls; returns whether it will be so."""
        ...

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding table [N, D] fp32 on the CPU, for who puts images among them."""
        ...


class TorchRunner:
    """`Transformer` as a runner; its pool lies on the model's device.

    Only KDA and MLA layers, and no held sequences. Raises `ConfigError` for a model with others.
    """

    def __init__(self, model: Transformer):
        foreign = sorted(set(model.config.layers) - {"kda", "mla"})
        if foreign:
            raise ConfigError(f"'layers' has the mixer '{foreign[0]}', whose states have no place in a pool of KDA states and latents")
        self.model, self.config = model.eval(), model.config
        self.device = model.model.embed_tokens.weight.device
        self.dtype = model.model.embed_tokens.weight.dtype

    def new_pool(self, slots: int, tokens: int, page_tokens: int = PAGE, dtype: torch.dtype = torch.float32) -> StatePool:
        """A pool on the model's device."""
        with torch.device(self.device):
            return StatePool(self.config, slots, -(-tokens // page_tokens), page_tokens, dtype)

    def steady(self, wanted: bool) -> bool:
        """Never: torch's products depend on how many rows they have, in the last bits."""
        del wanted
        return False

    @torch.no_grad()
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding table [N, D] fp32 on the CPU."""
        return self.model.embed(tokens[None].to(self.device))[0].float().cpu()

    @torch.no_grad()
    def forward(self, rows: PackedRows, pool: StatePool, *, logits: bool = True, experts: bool = False) -> Outputs:
        """One sequence after another, each cut where a copy of its state is asked for."""
        if experts:
            with recorded(self.model.routers()) as found:
                outputs = self.forward(rows, pool, logits=logits)
            return replace(outputs, experts=torch.stack([torch.cat(calls) for calls in found], 1).to("cpu", torch.int32))
        rows.check(self.config, pool)
        if rows.held:
            raise ConfigError(f"'held' is {rows.held}; this runner only advances")
        bounds, past, slots = rows.bounds.tolist(), rows.past.tolist(), rows.slots.tolist()
        copies: list[list[int]] = [] if rows.copies is None else rows.copies.tolist()
        hidden = torch.empty(bounds[-1], self.config.hidden_size, dtype=self.dtype, device=self.device)
        for s, slot in enumerate(slots):
            first, last = bounds[s], bounds[s + 1]
            if first == last:
                continue
            targets = [(seen, target) for sequence, seen, target in copies if sequence == s]
            states, start = self._read(pool, slot, rows.pages[s], past[s]), first
            for stop in sorted({first + seen for seen, _ in targets} | {last}):
                hidden[start:stop] = self._run(rows, start, stop, states)
                for target in [target for seen, target in targets if first + seen == stop]:
                    self._write_slot(pool, target, states)
                start = stop
            self._write_slot(pool, slot, states)
            self._write_pages(pool, rows.pages[s], past[s], states)
        wanted = hidden[(rows.last_rows() if rows.wanted is None else rows.wanted).to(self.device)]
        scores = self.model.head(wanted).float().cpu() if logits else None
        return Outputs(hidden=wanted.float().cpu(), logits=scores, record=torch.empty(self.config.layers.count("kda"), 0, 0))

    def _run(self, rows: PackedRows, start: int, stop: int, states: list[LayerState]) -> torch.Tensor:
        if rows.embeddings is not None:
            return self.model.hidden(None, embeddings=rows.embeddings[None, start:stop].to(self.device, self.dtype), states=states)[0]
        assert rows.tokens is not None
        return self.model.hidden(rows.tokens[None, start:stop].to(self.device), states=states)[0]

    def _read(self, pool: StatePool, slot: int, pages: torch.Tensor, past: int) -> list[LayerState]:
        """The states of a sequence, taken out of the pool."""
        if past == 0:
            return self.model.new_states(1)
        table = pages[: -(-past // pool.page_tokens)].to(self.device, torch.int64)
        states: list[LayerState] = []
        for kind, place in self._places():
            if kind == "kda":
                states.append(KDAState(pool.conv[slot, place][None].to(self.dtype, copy=True), pool.matrices[slot, place][None].clone()))
            else:
                latents = pool.latents[table, place].flatten(0, 1)[:past]
                states.append(MLACache(latents[None].to(self.dtype), torch.tensor([past], device=self.device)))
        return states

    def _write_slot(self, pool: StatePool, slot: int, states: list[LayerState]) -> None:
        for (kind, place), state in zip(self._places(), states, strict=True):
            if kind == "kda":
                assert isinstance(state, KDAState)
                pool.conv[slot, place] = state.conv[0].to(pool.conv.dtype)
                pool.matrices[slot, place] = state.matrix[0]

    def _write_pages(self, pool: StatePool, pages: torch.Tensor, past: int, states: list[LayerState]) -> None:
        for (kind, place), state in zip(self._places(), states, strict=True):
            if kind == "mla":
                assert isinstance(state, MLACache)
                length = int(state.lengths[0])
                position = torch.arange(past, length, device=self.device)
                page = pages.to(self.device, torch.int64)[position // pool.page_tokens]
                pool.latents[page, place, position % pool.page_tokens] = state.rows[0, past:length].to(pool.latents.dtype)

    def _places(self) -> list[tuple[str, int]]:
        """The kind of each layer and its number among those of its kind."""
        layers = self.config.layers
        return [(kind, layers[:i].count(kind)) for i, kind in enumerate(layers)]


def runner_for(model: Transformer) -> Runner:
    """The fastest runner for a model here: its inference twin, or the model itself where that refuses or the model is on a GPU."""
    away = model.model.embed_tokens.weight.device.type != "cpu"
    return TorchRunner(model) if away or refuse(model.config) else InferenceModel.from_transformer(model)
