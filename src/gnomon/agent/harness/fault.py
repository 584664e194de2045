"""What a policy did wrong, or what did not work, in words for the policy."""

from __future__ import annotations

from gnomon.errors import GnomonError


class Fault(GnomonError):
    """A call that cannot be carried out, or that failed: its text is what the policy gets to read. It never leaves the harness."""
