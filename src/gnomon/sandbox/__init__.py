"""Isolated machines for agents: create, run, pause, snapshot, fork; start with `sandbox.py`, the contract of every backend."""
