"""Root-mean-square norms: the plain one, and the one that a sigmoid gates at the end of a KDA layer (report section 2.1.1).

Read next: `reference.gated_norm`.
"""

from gnomon.kernels.operator import Operator

gated_norm = Operator("gated_norm", "gated_norm", cpu=("cpu",))
rms_norm = Operator("gated_norm", "rms_norm", cpu=("cpu",))
