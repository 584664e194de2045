"""The short causal convolution before q, k and v: depth-wise, four taps, no bias, then SiLU (report section 2.1.1).

Read next: `reference.short_conv`.
"""

from gnomon.kernels.operator import Operator

short_conv = Operator("short_conv", "short_conv", cpu=("cpu",))
