"""The structures of `csrc/layer.h`, field by field: how a model, its states and one call's rows are handed to C++.

Filled once when a model is loaded; after that a step passes three addresses. Read next: `inference_weights.py`, which fills them.
"""

import ctypes

from gnomon.kernels.packed.matrix import ExpertsView, MatrixView

_P, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float

MIXERS = {"kda": 0, "mla": 1}
"""Mixer kinds that the C++ layer knows."""

BEFORE_MIXER, BEFORE_FEED_FORWARD = 1, 2
"""When the running sum is banked (bits of `Layer.commits`)."""


class LatentWeights(ctypes.Structure):
    """kv_b as latent attention reads it."""

    _fields_ = (("packed", _P), ("format", _I32))


class LatentShape(ctypes.Structure):
    """Widths of latent attention."""

    _fields_ = (*((name, _I64) for name in ("heads", "nope", "rope", "value", "latent")), ("scale", _F32), ("absorbed", _I32))


class KDALayer(ctypes.Structure):
    """Weights of a KDA mixer."""

    _fields_ = (
        *((name, MatrixView) for name in ("qkv", "decay_a", "decay_b", "beta", "gate_a", "gate", "out")),
        *((name, _P) for name in ("conv", "a_log", "dt_bias", "norm")),
    )


class MLALayer(ctypes.Structure):
    """Weights of an MLA mixer."""

    _fields_ = (
        *((name, MatrixView) for name in ("query_a", "query", "latent", "gate", "out")),
        ("keys_values", LatentWeights), ("query_norm", _P), ("latent_norm", _P),
    )


class FeedForward(ctypes.Structure):
    """Weights of a feed-forward, dense or with experts."""

    _fields_ = (
        *((name, MatrixView) for name in ("gate", "up", "down", "router", "to_latent", "from_latent")),
        ("bias", _P), ("norm", _P), ("routed", ExpertsView),
    )


class Layer(ctypes.Structure):
    """One layer."""

    _fields_ = (
        ("mixer", _I32), ("commits", _I32), ("place", _I32), ("routed", _I32),
        *((name, _P) for name in ("mixer_query", "feed_query", "mixer_norm", "feed_norm")),
        ("kda", KDALayer), ("mla", MLALayer), ("feed", FeedForward),
    )


class Model(ctypes.Structure):
    """The whole model."""

    _fields_ = (
        *((name, _I64) for name in ("layers", "hidden", "vocabulary", "sources")),
        *((name, _P) for name in ("layer", "embedding", "output_query", "norm")),
        ("head", MatrixView), ("embedding_format", _I32), ("eps", _F32), ("beta1", _F32), ("beta2", _F32),
        *((name, _I64) for name in ("kda_layers", "kda_heads", "kda_width", "taps", "mla_layers")), ("mla", LatentShape),
        *((name, _I64) for name in ("experts_per_token", "groups", "kept_groups", "renormalise", "routed_layers")),
        ("routed_scale", _F32), ("lower_bound", _F32), ("latent_eps", _F32), ("mxfp8", _I32),
    )


class Pools(ctypes.Structure):
    """Where states lie."""

    _fields_ = (("matrices", _P), ("conv", _P), ("latents", _P), ("latent_format", _I32), ("page_tokens", _I64))


class Rows(ctypes.Structure):
    """The rows of one call."""

    _fields_ = (
        *((name, _I64) for name in ("sequences", "held", "pages_each", "copied", "wanted_count")),
        *((name, _P) for name in ("tokens", "bounds", "past", "slots", "copies", "wanted", "embeddings", "pages", "record", "chosen")),
    )
