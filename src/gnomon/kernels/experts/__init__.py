"""Routed experts: many small feed-forwards, of which each token visits k (report §2.3).

`reference.py` is the meaning; `fused.py` is the handwritten backward that needs no expert output for the router's gradient.
Read next: `gnomon/model/experts.py` and `gnomon/model/router.py`.
"""

from gnomon.kernels.operator import Operator

experts = Operator("experts", "experts", cpu=("cpu",), any=("fused",))
