"""Pre-training: one loop, Per-Head Muon, Quantile Balancing, exact checkpoints, a report (report §2.5, §3). Start at `loop.py`."""
