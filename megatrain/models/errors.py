"""Errors about a model that cannot be trained."""

from __future__ import annotations

__all__ = ["UnsupportedModelError"]


class UnsupportedModelError(Exception):
    """The model cannot be trained here. The text names the model, what was looked for, and what to do."""

    def __init__(self, model: str, problem: str) -> None:
        self.model = model
        self.problem = problem
        super().__init__(f"{model} is not supported: {problem}")
