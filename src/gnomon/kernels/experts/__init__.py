"""Routed experts: many small feed-forwards, of which each token visits k (report §2.3).

`reference.py` is the meaning; `grouped.py` is one C++ call in fp32, `grouped_mm.py` PyTorch's grouped product on GPUs; `fused.py` is the
handwritten backward that needs no expert output for the router's gradient, around any activation.
Read next: `gnomon/model/experts.py` and `gnomon/model/router.py`.
"""

from gnomon.kernels.operator import Operator

experts = Operator("experts", "experts", cpu=("grouped", "cpu"), cuda=("grouped_mm",), any=("fused",))
experts_mxfp8 = Operator("experts", "experts_mxfp8", cpu=("grouped",))
