"""Small typical inputs of the packed products, for the survey and the contract test. Read next: `reference.py`."""

from typing import Any

import torch

from gnomon.kernels.mxfp.reference import encode_mxfp4
from gnomon.kernels.packed.matrix import PackedExperts, PackedMatrix


def samples(device: str) -> dict[str, tuple[Any, ...]]:
    """Arguments of each operator of this folder: five rows through MXFP4 weights of an odd height; two of four experts each."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(5, 64, generator=draw).to(device)
    w = torch.randn(23, 64, generator=draw) / 8
    gate, up = (encode_mxfp4(torch.randn(4, 32, 64, generator=draw) / 8) for _ in range(2))
    down = encode_mxfp4(torch.randn(4, 64, 32, generator=draw) / 6)
    ids = torch.rand(5, 4, generator=draw).topk(2, dim=-1).indices.to(device)
    weights = torch.rand(5, 2, generator=draw).to(device)
    return {
        "multiply": (x, PackedMatrix.of_mxfp4(*encode_mxfp4(w))),
        "experts": (x, PackedExperts.of_mxfp4(gate, up, down), ids, weights, 4.0, 25.0),
    }
