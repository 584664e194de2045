"""Linear maps without bias over one input: what most of a training step is made of.

`reference.py` is the meaning; `cpu.py` runs the maps that share an input together, in C++. Read next: `gnomon/model/layers.py`.
"""

from gnomon.kernels.operator import Operator

linears = Operator("linear", "linears", cpu=("cpu",))
