"""Findings about the parts of a run, and the category of each error that a run can raise before its first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatrain.base.errors import ConfigError, ModelFolderError, UnsupportedModelError
from megatrain.checkpoint.resume import ConfigChangedError, LostCheckpointsError
from megatrain.checkpoint.state import CheckpointError
from megatrain.converters.adapters import AdapterError
from megatrain.data.rows_report import DataError
from megatrain.models.checkpoint_names import ConversionError
from megatrain.models.export import ExportError
from megatrain.models.graph import FreezeError
from megatrain.models.initialize import InitializationError
from megatrain.models.internals import TransformersVersionError
from megatrain.optim.lr import ScheduleError
from megatrain.optim.plugins import OptimizerError
from megatrain.plan.shortfall import DoesNotFitError
from tiered.errors import TieredError, UnusableDirectoryError

__all__ = ["EXPECTED_ERRORS", "CheckResult"]

#: Category of a problem: the config or the model, memory and drives, the data, or a storage failure.
Kind = Literal["config", "fit", "data", "failed"]
_ERROR_KINDS: tuple[tuple[tuple[type[Exception], ...], Kind], ...] = (
    ((DoesNotFitError,), "fit"),
    ((LostCheckpointsError,), "failed"),
    ((DataError,), "data"),
    (
        (
            ConfigError, ModelFolderError, UnsupportedModelError, FreezeError, ConversionError, InitializationError,
            OptimizerError, ScheduleError, AdapterError, ExportError, CheckpointError, ConfigChangedError,
            UnusableDirectoryError, TransformersVersionError,
        ),
        "config",
    ),
    ((TieredError, OSError), "failed"),
)  # fmt: skip
EXPECTED_ERRORS = tuple(error for errors, _ in _ERROR_KINDS for error in errors)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A finding about one part of a run.

    Attributes:
        subject: Part of the run.
        severity: "ok", "note", "warning" (the run would start, but may not do what the user wants) or "problem" (the
            run would not start, or would end with an error).
        text: Facts about the part, with a remedy for a problem.
        kind: Category of the problem, or None if there is no problem.
    """

    subject: str
    severity: Literal["ok", "note", "warning", "problem"]
    text: str
    kind: Kind | None = None

    @classmethod
    def from_error(cls, subject: str, error: Exception) -> CheckResult:
        """Return the finding that reports an expected error."""
        kind = next(kind for errors, kind in _ERROR_KINDS if isinstance(error, errors))
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        return cls(subject, "problem", text, kind)

    @property
    def line(self) -> str:
        """Message that the run prints."""
        return f"warning: {self.text}" if self.severity == "warning" else self.text
