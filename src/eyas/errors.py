"""User errors: what happened, the value, what was expected, then a command that helps.

Everything a user can cause derives from ``EyasError`` and ends the process with exit code 2 and no
traceback. Asserts are for invariants of our own.
"""

from __future__ import annotations


class EyasError(Exception):
    """A mistake or fault the user can act on.

    Args:
        message: What happened, with the value and what was expected.
        hint: A command or an edit that helps.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n\nhint: {self.hint}" if self.hint else self.message


class ConfigError(EyasError):
    """A parameter is unknown, missing, of the wrong type or out of range."""


class TargetError(EyasError):
    """The target cannot be fetched, is not the pinned one, or does not fit its tokenizer."""


class DataError(EyasError):
    """Conversations, tokens or maps are damaged, empty or contradict each other."""


class PlanError(EyasError):
    """The plan cannot be made or does not fit: boundaries, sizes, disk."""


class StoreError(EyasError):
    """A shard, a manifest or the spool is damaged, foreign or incomplete."""


class RemoteError(EyasError):
    """A remote does not answer, lacks an object or holds other bytes under its name: no damage of the samples that were asked for."""


class CaptureError(EyasError):
    """An engine gave states that are short, shifted, not finite, or another sample's."""


class ServerError(EyasError):
    """An inference server cannot be started, is not set up for a capture, or refuses every request."""


class TrainError(EyasError):
    """Training cannot start or go on: no trained row, a foreign checkpoint, a non-finite loss."""


class EvaluateError(EyasError):
    """There is nothing to judge, or speculative decoding is not what plain greedy decoding is."""


class ExportError(EyasError):
    """The export would not load as what was trained."""


class DiskError(EyasError):
    """The volume is full or cannot do what is needed."""
