"""What an agent can do, one kind a file, each with a class `Kind`. Read `../tool.py` first."""
