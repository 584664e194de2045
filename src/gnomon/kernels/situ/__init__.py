"""SiTU-GLU, the bounded gated activation of every feed-forward in the model (report §2.3.2).

`reference.py` is the meaning; `fused.py` works tile by tile and recomputes in the backward instead of saving.
Read next: `gnomon/kernels/experts`, which applies it between two grouped products.
"""

from gnomon.kernels.operator import Operator

situ_glu = Operator("situ", "situ_glu", cpu=("cpu",), any=("fused",))
