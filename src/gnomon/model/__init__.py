"""The network: one file per idea of report §2.

Read next: `transformer.py` (the whole forward pass), then `mixers/`, `residuals.py`, `router.py`,
`experts.py`; shapes and costs are in `config.py`.
"""
