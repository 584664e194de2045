"""Several processes that act as one: ranks and collectives (`mesh.py`)."""
