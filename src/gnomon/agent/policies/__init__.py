"""Policies: one file for each kind, which offers `opened(settings)`. See `gnomon.agent.policy`."""
