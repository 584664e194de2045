"""Attention over depth (AttnRes): a learned softmax lookup over earlier sources instead of one residual sum (report §2.2, eq. 8-10).

`reference.py` is the meaning; `fused.py` is the handwritten backward that keeps two numbers per token and source.
Read next: `gnomon/model/residuals.py`, which decides what the sources are.
"""

from gnomon.kernels.operator import Operator

depth_read = Operator("depth", "depth_read", cpu=("cpu",), any=("fused",))
read_norm = Operator("depth", "read_norm", cpu=("cpu",))
depth_weights = Operator("depth", "depth_weights")
bank_partials = Operator("depth", "bank_partials", cpu=("cpu",))
merge = Operator("depth", "merge", cpu=("cpu",))
