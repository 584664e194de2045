"""Kimi Delta Attention: a matrix state per head that decays per channel and is corrected by the delta rule (report section 2.1.1).

Per token, with k̂ and q̂ normalised, α = exp(g) per key channel and β in (0, 1)::

    S ← Diag(α) S;   e = v − Sᵀ k̂;   S ← S + β k̂ eᵀ;   o = Sᵀ q̂

Read next: `reference.recurrent` (the meaning), then `reference.chunk` (the same in matrix products).
"""

from gnomon.kernels.operator import Operator

prepare = Operator("kda", "prepare", cpu=("cpu",))
decay = Operator("kda", "decay", cpu=("cpu",))
recurrent = Operator("kda", "recurrent")
chunk = Operator("kda", "chunk", cpu=("cpu",), cuda=("fla",), any=("fused",))
step = Operator("kda", "step", cpu=("cpu",))
decode = Operator("kda", "decode", cpu=("cpu",))
commit = Operator("kda", "commit", cpu=("cpu",))
transition = Operator("kda", "transition", cpu=("cpu",), any=("fused",))
compose = Operator("kda", "compose")
