"""Errors about unusable configs and models. Any package can raise them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["ConfigError", "ModelFolderError", "Problem", "UnsupportedModelError"]


class UnsupportedModelError(Exception):
    """Error for a model that cannot be trained. The message names the model, the missing property and the remedy."""

    def __init__(self, model: str, problem: str) -> None:
        self.model = model
        self.problem = problem
        super().__init__(f"{model} is not supported: {problem}")


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a config.

    Attributes:
        key: Dotted key at fault, or "".
        message: The mistake, as a sentence without a full stop.
        remedy: Advice on what to write instead, or "".
        where: File with the mistake, or ``--set``.
        line: Line in this file, counted from 1. None if unknown.
    """

    key: str
    message: str
    remedy: str = ""
    where: str = ""
    line: int | None = None

    def __str__(self) -> str:
        location = f"line {self.line}: " if self.line is not None else ""
        return f"{location}{self.message}" + (f". {self.remedy}" if self.remedy else "")


class ConfigError(Exception):
    """Error for a config that cannot be used.

    Attributes:
        problems: All problems (at least one), in the order of the config file.
        source: The config file.
    """

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems = tuple(sorted(problems, key=lambda problem: (problem.line is None, problem.line or 0)))
        assert self.problems, "a ConfigError needs at least one problem"
        count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        lines = [f"{count} in {source}"]
        for problem in self.problems:
            source_text = f"{problem.where}, " if problem.where and problem.where != source else ""
            lines.append(f"  {source_text}{problem}")
        super().__init__("\n".join(lines))


class ModelFolderError(Exception):
    """Error for a model folder that cannot be used. The message names the problem, the place and the remedy.

    Attributes:
        path: The file or folder at fault.
    """

    def __init__(self, path: Path, problem: str) -> None:
        self.path = path
        super().__init__(f"{path}: {problem}")
