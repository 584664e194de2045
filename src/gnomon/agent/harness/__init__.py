"""Harnesses: what stands between a task and a policy. Begin with `harness.py`."""
