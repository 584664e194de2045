"""Operators: one folder each, with `reference.py` (the meaning) and faster implementations beside it.

Read next: `gnomon.kernels.operator` (how an implementation is chosen), then any `reference.py`.
"""
