"""Which experts a token visits, with what weights, and the counts that balancing needs (report §2.3.1, §2.3.3).

`reference.py` is the meaning; `cpu.py` does it in one pass over the scores. Read next: `gnomon/model/router.py`.
"""

from gnomon.kernels.operator import Operator

route = Operator("router", "route", cpu=("cpu",))
required_bias_histogram = Operator("router", "required_bias_histogram", cpu=("cpu",))
