"""How calls are written, one way a file, each with a class `Way`. Read `../wire.py` first."""
