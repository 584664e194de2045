"""Latent attention without positions (gated MLA, report §2.1): causal softmax attention and its decode on the compressed cache.

`reference.py` is the meaning, with explicit scores; `sdpa.py` runs documents of similar length together in PyTorch's flash kernel;
`flex.py` takes on a GPU what that kernel's mask cannot say; `cpu.py` reads the pages of many sequences in C++.
Read next: `gnomon/model/mixers/mla.py`, which makes queries, keys and the latent.
"""

from gnomon.kernels.operator import Operator

attention = Operator("mla", "attention", any=("sdpa", "flex"))
max_logits = Operator("mla", "max_logits")
absorbed = Operator("mla", "absorbed")
paged = Operator("mla", "paged", cpu=("cpu",))
