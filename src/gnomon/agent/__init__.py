"""Agents: tasks as data, the Harbor task directory, trajectories that keep every token, verifiers of the final state (report §4.2)."""
