"""Microscaling formats: MXFP4 weights and MXFP8 activations in blocks of 32 with a power-of-two scale (report §4.1.4).

`reference.py` is the meaning: encode, decode, and straight-through rounding for training; `cpu.py` is the same to the last bit in C++.
Read next: `gnomon/model/weights.py`, which stores routed experts this way.
"""

from gnomon.kernels.operator import Operator

encode_mxfp4 = Operator("mxfp", "encode_mxfp4", cpu=("cpu",))
decode_mxfp4 = Operator("mxfp", "decode_mxfp4", cpu=("cpu",))
fake_mxfp4 = Operator("mxfp", "fake_mxfp4", cpu=("cpu",))
encode_mxfp8 = Operator("mxfp", "encode_mxfp8", cpu=("cpu",))
decode_mxfp8 = Operator("mxfp", "decode_mxfp8", cpu=("cpu",))
fake_mxfp8 = Operator("mxfp", "fake_mxfp8", cpu=("cpu",))
