"""The exception tree: whatever a user can cause has a name here, and says which value was wrong and what to do.

::

    GnomonError
    ├── ConfigError            a recipe or an argument does not fit    → exit status 2, path and suggestion
    ├── DataError              a corpus, tokenizer or shard is unusable → which file, which line, the remedy
    ├── KernelError            an operator cannot run here             → which implementation refused and why
    ├── TrainingError          a run cannot go on                      → step, batch and last good checkpoint
    ├── SandboxError           Unsupported · SandboxTimeout · SandboxLost
    ├── PolicyError            who should answer cannot be reached, or answers what is no answer
    ├── VerifierError          judging failed (not: scored low)
    ├── CapacityError          does not fit: what, by how much, which knob would fix it
    └── CheckpointError        missing, foreign, damaged
"""


class GnomonError(Exception):
    """Anything that gnomon raises on purpose; `exit_status` is what the command line returns for it."""

    exit_status = 1


class ConfigError(GnomonError):
    """A recipe, an override or an argument does not fit; the message names the path and the remedy."""

    exit_status = 2


class DataError(GnomonError):
    """A corpus, a tokenizer or a shard cannot be used; the message names the file and the remedy."""


class KernelError(GnomonError):
    """An operator cannot run on these inputs or this machine; the message says who refused and why."""


class TrainingError(GnomonError):
    """A run cannot go on (for instance a non-finite loss); the message names the step and the last good checkpoint."""


class SandboxError(GnomonError):
    """A sandbox failed; see the subclasses."""


class Unsupported(SandboxError):
    """The backend cannot do this at all; the message gives the reason."""


class SandboxTimeout(SandboxError):
    """The command or the sandbox ran past its deadline."""


class SandboxLost(SandboxError):
    """The sandbox is gone; its state cannot be trusted."""


class PolicyError(GnomonError):
    """Who should answer cannot be reached, or its answer is none; the message says which and what it said."""


class VerifierError(GnomonError):
    """Judging failed, which is not the same as a low score."""


class CapacityError(GnomonError):
    """Something does not fit: what, by how much, and which knob would fix it."""


class CheckpointError(GnomonError):
    """A checkpoint is missing, foreign or damaged; nothing half-loaded is returned."""
