"""API dialects: what a client's JSON asks for, and the JSON that answers; start with `asked.py`."""
