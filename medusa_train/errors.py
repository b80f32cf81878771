"""Errors that speak to the person who can fix them: what was found, expected, and what to change.

The command line prints the message of a `MedusaError` without a traceback and leaves with its
`exit_status`. Anything else is a fault of this package and keeps its traceback.
"""


class MedusaError(Exception):
    """Base of all errors that a user can do something about."""

    exit_status = 1


class ConfigError(MedusaError):
    """A setting is unknown, of the wrong type, or does not go with another one."""

    exit_status = 2


class ModelError(MedusaError):
    """A model, tokenizer or set of heads is missing or does not fit."""


class DataError(MedusaError):
    """Prompts or rows are missing, empty or malformed."""


class CheckpointError(MedusaError):
    """A stage folder or checkpoint is damaged, or belongs to another run."""


class TrainingError(MedusaError):
    """Training went wrong in a way that more steps would not repair, such as a loss of NaN."""


class Interrupted(MedusaError):  # noqa: N818
    """A signal asked to stop; the work so far is saved and the same command goes on with it."""

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.exit_status = 128 + signal_number
