"""Small typical inputs of the MX formats, for the survey and the contract test. Read next: `reference.py`."""

from typing import Any

import torch

from gnomon.kernels.mxfp.reference import encode_mxfp4, encode_mxfp8


def samples(device: str) -> dict[str, tuple[Any, ...]]:
    """Arguments of each operator of this folder: three rows of two blocks."""
    w = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(device)
    return {
        "encode_mxfp4": (w,),
        "decode_mxfp4": (*encode_mxfp4(w), torch.float32),
        "fake_mxfp4": (w,),
        "encode_mxfp8": (w,),
        "decode_mxfp8": (*encode_mxfp8(w), torch.float32),
        "fake_mxfp8": (w,),
    }
