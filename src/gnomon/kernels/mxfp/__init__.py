"""Microscaling formats: MXFP4 weights and MXFP8 activations in blocks of 32 with a power-of-two scale (report §4.1.4).

`reference.py` is the meaning and the only implementation: encode, decode, and straight-through rounding for training.
Read next: `gnomon/model/weights.py`, which stores routed experts this way.
"""

from gnomon.kernels.operator import Operator

encode_mxfp4 = Operator("mxfp", "encode_mxfp4")
decode_mxfp4 = Operator("mxfp", "decode_mxfp4")
fake_mxfp4 = Operator("mxfp", "fake_mxfp4")
encode_mxfp8 = Operator("mxfp", "encode_mxfp8")
decode_mxfp8 = Operator("mxfp", "decode_mxfp8")
fake_mxfp8 = Operator("mxfp", "fake_mxfp8")
