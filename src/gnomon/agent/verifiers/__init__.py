"""Verifiers, one file for each kind; the file's name is the kind, its class is `Verifier`. The contract is in `gnomon.agent.verifier`."""
