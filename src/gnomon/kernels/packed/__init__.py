"""Weight matrices packed once for inference: products with fp32, bf16 and MXFP4 weights as stored, and routed experts on them.

`matrix.py` owns the memory; `reference.py` is the meaning; `cpu.py` is csrc/matrix.cpp. No gradients: training uses plain tensors.
Read next: `matrix.py`; csrc/matrix.h for the layout and the order of sums.
"""

from gnomon.kernels.operator import Operator

multiply = Operator("packed", "multiply", cpu=("cpu",))
experts = Operator("packed", "experts", cpu=("cpu",))
