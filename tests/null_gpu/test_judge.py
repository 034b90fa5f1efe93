"""What counts where kernels do nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from null_gpu.judge import TESTS, is_about_numbers

TEST, OURS = str(TESTS / "gpu" / "test_steps.py"), str(Path("/src/megatrain/engine/step.py"))


@pytest.mark.parametrize(
    ("error", "file", "line", "is_number"),
    [
        (AssertionError("0.0 == 3.1"), TEST, "assert result.loss == expected.loss", True),
        (AssertionError("1 == 0"), TEST, "assert done.returncode == 0, done.stderr", False),
        (AssertionError("7 <= 5"), TEST, "assert peak <= graphs + libraries_bytes", False),
        (AssertionError("links"), TEST, "result.assert_as_planned()", False),
        (AssertionError("(3, 4)"), OURS, "assert index == 0, (3, 4)", False),
        (RuntimeError("called a synchronizing CUDA operation"), TEST, "engine.step(batch)", False),
        (ValueError("the loss is not finite"), OURS, "raise NonFiniteLossError(step)", True),
    ],
)
def test_what_is_judged(error: Exception, file: str, line: str, is_number: bool) -> None:
    assert is_about_numbers(type(error), str(error), [(OURS, "..."), (file, line)]) is is_number
