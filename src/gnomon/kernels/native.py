"""The C++ library of this package: found beside the package, loaded on first use, never at import.

It is built at install time where a C++ compiler exists and speaks plain C (`csrc/gnomon.h`), so it fits every Python and torch.
Without it everything runs on the references; `unavailable` says why it is not there. Read next: `gnomon.kernels.kda.cpu`.
"""

import ctypes
import functools
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

import gnomon
from gnomon.errors import KernelError

ABI = 7  # GNOMON_ABI in csrc/gnomon.h
LIBRARY = "GNOMON_LIBRARY"  # in the environment: a library to load instead of the package's, for instance an instrumented one

_P, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_SIGNATURES = {
    "gnomon_kda_forward": [*[_P] * 5, _I32, *[_P] * 2, *[_I64] * 5, *[_P] * 4, _I32],
    "gnomon_kda_backward": [*[_P] * 4, _I32, *[_P] * 5, *[_I64] * 5, *[_P] * 6, _I32],
    "gnomon_kda_step": [*[_P] * 6, *[_I64] * 3, *[_P] * 2, _I32],
    "gnomon_kda_decode": [*[_P] * 4, _F32, _F32, *[_I64] * 3, _P, _I64, *[_P] * 7, _I32, _P, _I64, *[_P] * 4, _I32],
    "gnomon_kda_commit": [*[_P] * 3, _F32, *[_I64] * 3, _P, _P, _I64, *[_P] * 4, _I32],
    "gnomon_unit_forward": [_P, _I32, _I64, _I64, _F32, _F32, _P, _I32],
    "gnomon_unit_backward": [_P, _P, _I32, _I64, _I64, _F32, _F32, _P, _I32],
    "gnomon_rms_forward": [*[_P] * 3, _I32, _I64, _I64, _F32, _P, _I32],
    "gnomon_rms_backward": [*[_P] * 4, _I32, _I64, _I64, _F32, *[_P] * 3, _I32],
    "gnomon_decay_forward": [*[_P] * 3, _F32, *[_I64] * 3, _P, _I32],
    "gnomon_decay_backward": [*[_P] * 5, _F32, *[_I64] * 3, *[_P] * 3, _I32],
    "gnomon_short_conv_forward": [*[_P] * 3, _I32, _P, *[_I64] * 3, _P, _I32],
    "gnomon_short_conv_backward": [*[_P] * 4, _I32, _P, *[_I64] * 3, *[_P] * 3, _I32],
    "gnomon_situ_forward": [_P, _P, _I64, _I64, _F32, _F32, _P, _I32],
    "gnomon_situ_backward": [*[_P] * 4, _I64, _I64, _F32, _F32, *[_P] * 4, _I32],
    "gnomon_depth_forward": [_P, _P, *[_I64] * 3, _F32, *[_P] * 3, _I32],
    "gnomon_linear_forward": [_P, _I64, _I64, _P, _P, _I64, _P, _I32],
    "gnomon_linear_backward_input": [_P, _I64, _I64, _P, _P, _I64, _P, _I32],
    "gnomon_linear_backward_weights": [_P, _P, _I64, _I64, _P, _I64, _P, _I32],
    "gnomon_cross_entropy": [*[_P] * 3, *[_I64] * 3, *[_P] * 3, _I32],
    "gnomon_route_forward": [_P, _P, *[_I64] * 5, _I32, _F32, *[_P] * 3, _I32],
    "gnomon_route_backward": [*[_P] * 3, *[_I64] * 3, _I32, _F32, _P, _I32],
    "gnomon_required_bias_histogram": [*[_P] * 3, *[_I64] * 3, ctypes.c_double, ctypes.c_double, _P, _I32],
    "gnomon_newton_schulz": [_P, *[_I64] * 4, _P, _P, _I32],
    "gnomon_group": [_P, _I64, _I64, *[_P] * 4],
    "gnomon_grouped_forward": [*[_P] * 8, *[_I64] * 5, _F32, _F32, *[_P] * 3, _I32, _I32],
    "gnomon_grouped_backward": [*[_P] * 11, *[_I64] * 5, _F32, _F32, *[_P] * 5, _I32, _I32],
    "gnomon_depth_backward": [*[_P] * 5, *[_I64] * 3, _P, _P, _I32],
    "gnomon_mxfp_encode": [_P, _I64, _I32, _I32, _P, _P, _I32],
    "gnomon_mxfp_decode": [_P, _P, _I64, _I32, _P, _I32],
    "gnomon_mxfp_round": [_P, _I64, _I32, _I32, _P, _I32],
    "gnomon_buffer_allocate": [_I64, _P],
    "gnomon_buffer_free": [_P, _I64],
    "gnomon_buffer_read": [_P, _I64, _P, _I32],
    "gnomon_matrix_bytes": [_I64, _I64, _I32, _P, _P],
    "gnomon_matrix_pack": [*[_P] * 3, _I32],
    "gnomon_matrix_unpack": [_P, _P, _I32],
    "gnomon_matrix_multiply": [_P, _P, _I64, _I64, _P, _I64, _I32, _I32],
    "gnomon_experts_forward": [*[_P] * 4, _I64, _I64, _I32, _P, _P, _I32],
    "gnomon_depth_read_norm": [*[_P] * 3, *[_I64] * 3, _F32, *[_P] * 2, _I32],
    "gnomon_depth_bank": [*[_P] * 2, *[_I64] * 4, _F32, *[_P] * 3, _I32],
    "gnomon_depth_merge_norm": [*[_P] * 6, *[_I64] * 2, _F32, *[_P] * 2, _I32],
    "gnomon_latent_attention": [_P, _P, _I32, _I64, _P, _I32, _I32, _P, _I64, _P, _P, *[_I64] * 6, _F32, _P, _I32],
    "gnomon_model_sizes": [_P],
    "gnomon_model_arena": [_P, _P, _I64, _P],
    "gnomon_model_forward": [*[_P] * 6, _I32],
    "gnomon_model_advance": [*[_P] * 6, _I64, _I32],
    "gnomon_latent_weights_bytes": [_P, _I32, _P],
    "gnomon_latent_weights_pack": [_P, _P, _P],
}


def library() -> ctypes.CDLL:
    """The loaded library; raises `KernelError` with the reason where there is none."""
    loaded, reason = _load()
    if loaded is None:
        raise KernelError(f"the C++ kernels cannot run: {reason}")
    return loaded


def unavailable() -> str | None:
    """Why the library cannot be used, or `None` if it can."""
    return _load()[1]


def refuse(**tensors: Tensor | None) -> str | None:
    """Why these tensors cannot go to the library, by name; it takes fp32 on the CPU."""
    for name, x in tensors.items():
        if x is not None and (x.dtype != torch.float32 or x.device.type != "cpu"):
            return f"{name} is {x.dtype} on {x.device}; the C++ kernel takes torch.float32 on the CPU"
    return unavailable()


def refuse_rows(**tensors: Tensor | None) -> str | None:
    """As `refuse`, for kernels that read bf16 as it is and compute in fp32."""
    def read(x: Tensor | None) -> Tensor | None:
        return None if x is None or (x.dtype == torch.bfloat16 and x.device.type == "cpu") else x

    return refuse(**{name: read(x) for name, x in tensors.items()})


def bf16_bits(*tensors: Tensor | None) -> int:
    """A bit for each that is bf16."""
    return sum((x is not None and x.dtype == torch.bfloat16) << i for i, x in enumerate(tensors))


def instruction_set() -> str:
    """What the kernels of the loaded library use on this machine, for instance `x86-64-v4 with AVX512-BF16`."""
    return library().gnomon_instruction_set().decode()


def address(x: Tensor | None) -> int | None:
    """The address of a contiguous tensor's first element; `None` becomes a null pointer."""
    return None if x is None else x.data_ptr()


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    """The library or the reason. torch is imported first, so that both share one OpenMP runtime and one pool of threads."""
    name = "libgnomon.dylib" if sys.platform == "darwin" else "libgnomon.so"
    chosen = os.environ.get(LIBRARY)
    found = [path for path in ([Path(chosen)] if chosen else [Path(folder) / name for folder in gnomon.__path__]) if path.is_file()]
    if chosen and not found:
        return None, f"environment variable {LIBRARY}={chosen!r}: there is no such file"
    if not found:
        return None, f"{name} is not in the package: it was installed without a C++ compiler (install one, then reinstall gnomon)"
    try:
        loaded = ctypes.CDLL(str(found[0]))
        loaded.gnomon_abi.restype, loaded.gnomon_instruction_set.restype = _I32, ctypes.c_char_p
        built = loaded.gnomon_abi()
        if built != ABI:
            return None, f"{found[0]} was built from other sources (interface {built}, this package needs {ABI}): reinstall gnomon"
        for function, arguments in _SIGNATURES.items():
            getattr(loaded, function).argtypes = arguments
            getattr(loaded, function).restype = None
    except (OSError, AttributeError) as error:
        return None, f"{found[0]} cannot be loaded ({error}): reinstall gnomon"
    return loaded, None


def threads() -> int:
    """How many threads a kernel may use: as many as torch does."""
    return torch.get_num_threads()
