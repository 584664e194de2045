"""Weights of an inference model: read from a released checkpoint or taken from a `Transformer`, packed, placed in one run of memory.

Packed experts stay packed, bf16 stays bf16; vectors, convolutions and the router are fp32, as in the model. Matrices over the same input
that act together are stacked. Everything lies in anonymous huge-page buffers in the order in which a token needs it.
Read next: `inference_layout.py` for the structures that point into them, `inference.py` for the model.
"""

import ctypes
import weakref
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from gnomon.errors import ConfigError
from gnomon.kernels import mxfp, native
from gnomon.kernels.packed.matrix import BF16, F32, MXFP4, ExpertsView, MatrixView
from gnomon.model import inference_layout as layout
from gnomon.model import weights as checkpoints
from gnomon.model.config import ModelConfig
from gnomon.model.layers import LATENT_EPS
from gnomon.model.residuals import commits_before
from gnomon.model.transformer import Transformer

Weights = Literal["stored", "fp32", "bf16", "mxfp4"]
"""How matrices are held: as the source has them; all fp32; bf16 (packed experts stay); bf16 with experts encoded as MXFP4."""

CHUNK = 64 << 20
"""Bytes of one buffer; what is not used of it takes no memory."""

ALIGNMENT = 64
"""Of every matrix and vector, in bytes: a cache line, and the widest vector."""

Packed = tuple[Tensor, Tensor]


class Source(Protocol):
    """Where weights come from; names are those of `Transformer.state_dict()`, experts one row of a stack."""

    def tensor(self, name: str) -> Tensor:
        """A tensor in the type in which it is stored."""
        ...

    def expert(self, name: str, index: int) -> Tensor | Packed:
        """One expert's matrix, or its MXFP4 codes and scales."""
        ...


class ModelSource:
    """The weights of a `Transformer` on the CPU."""

    def __init__(self, model: Transformer):
        self.tensors = model.state_dict()

    def tensor(self, name: str) -> Tensor:
        """A parameter or buffer."""
        return self.tensors[name]

    def expert(self, name: str, index: int) -> Tensor | Packed:
        """A row of a stack of experts."""
        return self.tensors[name][index]


class FolderSource:
    """The tensors of a released checkpoint, each read when it is asked for."""

    def __init__(self, folder: str | Path):
        self.config, plan = checkpoints.stored_layout(folder)
        self.parts = {(slot.target, slot.expert): (slot, parts) for slot, parts in plan}

    def tensor(self, name: str) -> Tensor:
        """A stored tensor, in the model's shape."""
        slot, parts = self.parts[name, None]
        out = torch.empty(slot.shape, dtype=checkpoints.tensorfile.DTYPES[parts[0].tag])
        checkpoints.read(slot, parts, out)
        return out

    def expert(self, name: str, index: int) -> Tensor | Packed:
        """One expert's matrix, or its codes and scales as they are stored."""
        slot, parts = self.parts[name, index]
        if len(parts) == 2:
            return checkpoints.read_codes(slot.name, parts)
        return parts[0].read()


class Buffers:
    """Memory of packed weights: pieces of large buffers, given back when this object goes."""

    def __init__(self) -> None:
        self.free, self.left, self.bytes = 0, 0, 0
        self._owned: list[tuple[int, int]] = []
        weakref.finalize(self, _release, self._owned)

    def place(self, size: int) -> int:
        """The address of `size` bytes. Raises `ConfigError` when the system has no memory for them."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        if size > self.left:
            whole = max(size, CHUNK)
            address = ctypes.c_void_p()
            native.library().gnomon_buffer_allocate(whole, ctypes.byref(address))
            if not address.value:
                raise ConfigError(f"no memory for {whole >> 20} MiB of weights; choose a smaller model or free memory")
            self._owned.append((address.value, whole))
            self.free, self.left = address.value, whole
        at = self.free
        self.free, self.left, self.bytes = at + size, self.left - size, self.bytes + size
        return at

    def vector(self, values: Tensor) -> int:
        """A copy of these values in fp32; their address."""
        return self.copy(values.detach().float().contiguous())

    def copy(self, values: Tensor) -> int:
        """A copy of a contiguous tensor's bytes; their address."""
        at = self.place(values.nbytes)
        ctypes.memmove(at, values.data_ptr(), values.nbytes)
        return at


def _release(owned: list[tuple[int, int]]) -> None:
    for address, size in owned:
        native.library().gnomon_buffer_free(address, size)


class Packer:
    """Fills the structures of one model from a source."""

    def __init__(self, config: ModelConfig, source: Source, weights: Weights):
        self.config, self.source, self.weights = config, source, weights
        self.buffers = Buffers()
        self.kept: list[object] = []  # arrays of structures that other structures point to

    def model(self) -> layout.Model:
        """The whole model; `buffers` and `kept` must live as long as it is used."""
        c, kda, mla = self.config, self.config.mixers.get("kda"), self.config.mixers.get("mla")
        layers = (layout.Layer * c.num_hidden_layers)()
        self.kept.append(layers)
        table = self.source.tensor("model.embed_tokens.weight").detach().contiguous()
        held = table if self._format(table) == BF16 and table.dtype == torch.bfloat16 else table.to(self._dtype(table))
        m = layout.Model(layers=c.num_hidden_layers, hidden=c.hidden_size, vocabulary=c.vocab_size, sources=max([1, *c.depth_sources()]),
                         layer=ctypes.addressof(layers), eps=c.rms_norm_eps, latent_eps=LATENT_EPS)
        m.beta1, m.beta2 = _caps(c)
        m.embedding, m.embedding_format = self.buffers.copy(held), self._format(table)
        if kda is not None:
            m.kda_layers, m.kda_heads, m.kda_width = c.layers.count("kda"), kda.num_heads, kda.head_dim
            m.taps, m.lower_bound = kda.short_conv_kernel_size, kda.gate_lower_bound or 0.0
        if mla is not None:
            m.mla_layers = c.layers.count("mla")
            m.mla = layout.LatentShape(mla.num_attention_heads, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim,
                                       mla.kv_lora_rank, mla.qk_head_dim**-0.5)
        if c.moe is not None:
            m.experts_per_token, m.groups, m.kept_groups = c.moe.num_experts_per_token, c.moe.num_expert_group, c.moe.topk_group
            m.renormalise, m.routed_scale = c.moe.moe_renormalize, c.moe.routed_scaling_factor
            m.mxfp8, m.routed_layers = c.moe.expert_inputs == "mxfp8", c.routed_layers(c.num_hidden_layers)
        for index in range(c.num_hidden_layers):
            self._layer(layers[index], index, m)
        m.output_query = self._query("model.output_attn_res")
        m.norm = self._vector("model.norm.weight")
        m.head = self._matrix(table if c.tie_word_embeddings else self.source.tensor("lm_head.weight"))
        return m

    def _layer(self, layer: layout.Layer, index: int, model: layout.Model) -> None:
        c, at = self.config, f"model.layers.{index}."
        kind = c.layers[index]
        layer.mixer, layer.place, layer.routed = layout.MIXERS[kind], c.layers[:index].count(kind), c.routed_layers(index)
        for bit, sublayer in ((layout.BEFORE_MIXER, "attention"), (layout.BEFORE_FEED_FORWARD, "mlp")):
            layer.commits |= bit * commits_before(c.attention_residuals, c.attn_res_block_size, index, sublayer)
        layer.mixer_query, layer.feed_query = self._query(f"{at}self_attention_res"), self._query(f"{at}mlp_res")
        layer.mixer_norm = self._vector(f"{at}input_layernorm.weight")
        layer.feed_norm = self._vector(f"{at}post_attention_layernorm.weight")
        if kind == "kda":
            self._kda(layer.kda, f"{at}self_attn.")
        else:
            self._mla(layer.mla, f"{at}self_attn.", model.mla)
        if c.is_moe_layer(index):
            self._experts(layer.feed, f"{at}block_sparse_moe.")
        else:
            self._gated(layer.feed, f"{at}mlp.")

    def _kda(self, kda: layout.KDALayer, at: str) -> None:
        kda.qkv = self._stack(*(f"{at}{name}_proj.weight" for name in "qkv"))
        kda.decay_a, kda.decay_b, kda.beta = (self._stack(f"{at}{name}_proj.weight") for name in ("f_a", "f_b", "b"))
        if self.config.mixers["kda"].use_full_rank_gate:
            kda.gate = self._stack(f"{at}g_proj.weight")
        else:
            kda.gate_a, kda.gate = self._stack(f"{at}g_a_proj.weight"), self._stack(f"{at}g_b_proj.weight")
        taps = torch.cat([self.source.tensor(f"{at}{name}_conv1d.weight")[:, 0].float() for name in "qkv"])
        kda.conv = self.buffers.vector(taps.T)
        kda.a_log, kda.dt_bias, kda.norm = (self._vector(at + name) for name in ("A_log", "dt_bias", "o_norm.weight"))
        kda.out = self._stack(f"{at}o_proj.weight")

    def _mla(self, mla: layout.MLALayer, at: str, shape: layout.LatentShape) -> None:
        c = self.config.mixers["mla"]
        if c.q_lora_rank is None:
            mla.query = self._stack(f"{at}q_proj.weight")
        else:
            mla.query_a, mla.query = self._stack(f"{at}q_a_proj.weight"), self._stack(f"{at}q_b_proj.weight")
            mla.query_norm = self._vector(f"{at}q_a_layernorm.weight")
        mla.latent = self._stack(f"{at}kv_a_proj_with_mqa.weight")
        mla.latent_norm = self._vector(f"{at}kv_a_layernorm.weight")
        if c.mla_use_output_gate:
            mla.gate = self._stack(f"{at}g_proj.weight")
        mla.keys_values = self._keys_values(f"{at}kv_b_proj.weight", shape)
        mla.out = self._stack(f"{at}o_proj.weight")

    def _gated(self, feed: layout.FeedForward, at: str) -> None:
        feed.gate, feed.up, feed.down = (self._stack(f"{at}{name}_proj.weight") for name in ("gate", "up", "down"))

    def _experts(self, feed: layout.FeedForward, at: str) -> None:
        c = self.config.moe
        assert c is not None
        feed.router = self._pack(self.source.tensor(f"{at}gate.weight"), F32)
        feed.bias = self._vector(f"{at}gate.e_score_correction_bias")
        if c.routed_expert_hidden_size:
            feed.to_latent, feed.from_latent = (self._stack(f"{at}routed_expert_{name}_proj.weight") for name in ("down", "up"))
            if c.latent_moe_use_norm:
                feed.norm = self._vector(f"{at}routed_expert_norm.weight")
        if c.num_shared_experts:
            self._gated(feed, f"{at}shared_experts.")
        gate, up, down = ((MatrixView * c.num_experts)() for _ in range(3))
        self.kept += [gate, up, down]
        for expert in range(c.num_experts):
            for name, row in (("w1", gate), ("w3", up), ("w2", down)):
                row[expert] = self._expert(self.source.expert(f"{at}experts.{name}", expert))
        feed.routed = ExpertsView(*map(ctypes.addressof, (gate, up, down)), c.num_experts, *_caps(self.config))

    def _query(self, name: str) -> int | None:
        if self.config.attention_residuals == "off":
            return None
        norm, query = self.source.tensor(f"{name}_norm.weight"), self.source.tensor(f"{name}_proj.weight")
        return self.buffers.vector(norm.float() * query[0].float())

    def _vector(self, name: str) -> int:
        return self.buffers.vector(self.source.tensor(name))

    def _stack(self, *names: str) -> MatrixView:
        parts = [self.source.tensor(name).detach() for name in names]
        return self._matrix(parts[0] if len(parts) == 1 else torch.cat(parts))

    def _matrix(self, weight: Tensor) -> MatrixView:
        return self._pack(weight, self._format(weight))

    def _format(self, weight: Tensor) -> int:
        stored = BF16 if weight.dtype == torch.bfloat16 else F32
        return {"stored": stored, "fp32": F32, "bf16": BF16, "mxfp4": BF16}[self.weights]

    def _dtype(self, weight: Tensor) -> torch.dtype:
        return torch.bfloat16 if self._format(weight) == BF16 else torch.float32

    def _expert(self, weight: Tensor | Packed) -> MatrixView:
        moe = self.config.moe
        assert moe is not None
        trained = moe.expert_weights == "mxfp4"
        if isinstance(weight, Tensor) and (self.weights == "mxfp4" or (trained and moe.expert_inputs == "mxfp8")):
            weight = checkpoints.encode(weight, moe.expert_scales)  # MXFP8 inputs are exact in bf16, so packed products are the trainer's
        elif isinstance(weight, Tensor) and trained:
            weight = mxfp.fake_mxfp4(weight.detach(), moe.expert_scales)
        if isinstance(weight, Tensor):
            return self._matrix(weight)
        if self.weights == "fp32":
            return self._pack(mxfp.decode_mxfp4(*weight, torch.float32), F32)
        codes, scales = weight
        return self._packed(codes, scales, codes.shape[0], 2 * codes.shape[1], MXFP4)

    def _pack(self, weight: Tensor, form: int) -> MatrixView:
        values = weight.detach().to(torch.bfloat16 if form == BF16 else torch.float32).contiguous()
        return self._packed(values, None, values.shape[0], values.shape[1], form)

    def _packed(self, values: Tensor, scales: Tensor | None, out: int, inputs: int, form: int) -> MatrixView:
        library = native.library()
        sizes = (ctypes.c_int64 * 2)()
        first = ctypes.addressof(sizes)
        library.gnomon_matrix_bytes(out, inputs, form, first, first + 8)
        matrix = MatrixView(self.buffers.place(sizes[0]), self.buffers.place(sizes[1]) if sizes[1] else None, out, inputs, form)
        library.gnomon_matrix_pack(values.data_ptr(), native.address(scales), ctypes.addressof(matrix), native.threads())
        return matrix

    def _keys_values(self, name: str, shape: layout.LatentShape) -> layout.LatentWeights:
        weight = self.source.tensor(name).detach()
        form = self._format(weight)
        values = weight.to(self._dtype(weight)).contiguous()
        library, size = native.library(), ctypes.c_int64()
        library.gnomon_latent_weights_bytes(ctypes.addressof(shape), form, ctypes.addressof(size))
        packed = layout.LatentWeights(self.buffers.place(size.value), form)
        library.gnomon_latent_weights_pack(ctypes.addressof(shape), values.data_ptr(), ctypes.addressof(packed))
        return packed


def _caps(config: ModelConfig) -> tuple[float, float]:
    """The two caps of SiTU, 0 for none."""
    return (config.activation_situ_beta, config.activation_situ_linear_beta or 0.0) if config.hidden_act == "situ" else (0.0, 0.0)
