"""Text to tokens to batches (report section 3): `tokenizer`, `corpus`, `shards`, `mixture`, `packing`; only packing needs torch."""
