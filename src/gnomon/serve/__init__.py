"""Serving a model: requests in, tokens out; start with `request.py`, then `engine.py`."""
