"""gnomon: an open, from-scratch implementation of the system that the Kimi K3 report describes.

Read next: `docs/architecture.md` for the map, `gnomon.model.transformer` for the network, `gnomon.tour` for all of it in miniature.
"""

__version__ = "0.1.0"
