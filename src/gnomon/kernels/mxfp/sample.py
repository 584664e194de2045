"""Small typical inputs of the operators here, for `gnomon kernels` and the contract tests."""

from typing import Any

import torch


def samples(device: str) -> dict[str, tuple[Any, ...]]:
    """Positional arguments of each operator, on a device."""
    torch.manual_seed(0)
    w = torch.randn(4, 48, 64, device=device)
    codes = torch.randint(0, 256, (4, 48, 32), device=device).to(torch.uint8)
    scale = torch.randint(110, 140, (4, 48, 2), device=device).to(torch.uint8)
    return {
        "encode_mxfp4": (w,),
        "decode_mxfp4": (codes, scale, torch.float32),
        "fake_mxfp4": (w,),
        "encode_mxfp8": (w,),
        "decode_mxfp8": (w.to(torch.float8_e4m3fn), scale, torch.float32),
        "fake_mxfp8": (w,),
    }
