"""Newton-Schulz orthogonalisation, the core of Muon (report §2.5).

`reference.py` is the meaning; `cpu.py` works on the small square of each matrix.
Read next: `gnomon/train/muon.py`, which decides what is one matrix (a head, an expert, a projection).
"""

from gnomon.kernels.operator import Operator

newton_schulz = Operator("newton_schulz", "newton_schulz", cpu=("cpu",))
