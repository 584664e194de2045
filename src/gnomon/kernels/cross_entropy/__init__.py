"""The loss of a language model: summed cross-entropy of a head's logits, which are never all in memory (report §3).

`reference.py` is the meaning; `chunked.py` makes the gradients chunk by chunk in the forward pass; `cpu.py` does so in C++.
Read next: `gnomon/train/objective.py`.
"""

from gnomon.kernels.operator import Operator

cross_entropy_sum = Operator("cross_entropy", "cross_entropy_sum", cpu=("cpu",), any=("chunked",))
