"""What is done about a history that grows, one way a file, each with a class `Way`. Read `../context.py` first."""
