"""A pytest plugin that reports the largest accepted differences: ``pytest -p oracles.differences``.

For each test, it prints the largest absolute and relative differences that `pytest.approx` and
`torch.testing.assert_close` accepted. For tensors, relative means relative to the tensor's largest expected value. It
also prints how often `torch.equal` found two tensors equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from _pytest.approx import ApproxScalar


@dataclass
class Differences:
    """Number of comparisons in a test, and the largest differences."""

    number: float = 0.0
    number_relative: float = 0.0
    tensor: float = 0.0
    tensor_relative: float = 0.0
    num_numbers: int = 0
    num_tensors: int = 0
    num_equal: int = 0

    def add_tensors(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Record the difference between two tensors."""
        self.num_tensors += 1
        if expected.numel():
            error = float((found.double() - expected.double()).abs().max())
            self.tensor = max(self.tensor, error)
            self.tensor_relative = max(self.tensor_relative, error / (float(expected.double().abs().max()) or 1.0))

    def add_numbers(self, found: float, expected: float) -> None:
        """Record the difference between two numbers."""
        self.num_numbers += 1
        self.number = max(self.number, abs(found - expected))
        self.number_relative = max(self.number_relative, abs(found - expected) / (abs(expected) or 1.0))


_FOUND: dict[str, Differences] = {}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Record the comparisons that a test makes."""
    own = Differences()
    close, equal, approx = torch.testing.assert_close, torch.equal, ApproxScalar.__eq__
    expects = getattr(getattr(item, "module", None), "assert_equal", None)

    def assert_close(actual: Any, expected: Any, *args: Any, **options: Any) -> None:
        if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor) and actual.shape == expected.shape:
            own.add_tensors(actual.detach(), expected.detach())
        close(actual, expected, *args, **options)

    def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
        result = equal(one, other)
        own.num_equal += result
        return result

    def is_near(self: Any, actual: Any) -> bool:
        if isinstance(actual, float) and isinstance(self.expected, float):
            own.add_numbers(actual, self.expected)
        return bool(approx(self, actual))

    def assert_equal(expected: Any, loss: Any, gradients: Any, *args: Any) -> None:
        for name, gradient in expected.gradients.items():
            own.add_tensors(gradients[name], gradient)
        expects(expected, loss, gradients, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.testing, "assert_close", assert_close)
        patch.setattr(torch, "equal", is_equal)
        patch.setattr(ApproxScalar, "__eq__", is_near)
        if expects is not None:
            patch.setattr(item.module, "assert_equal", assert_equal)
        yield
    _FOUND[item.nodeid] = own


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the recorded differences."""
    for name, own in _FOUND.items():
        terminalreporter.write_line(
            f"{name}: {own.num_numbers} numbers {own.number:.1e} ({own.number_relative:.1e}), "
            f"{own.num_tensors} tensors {own.tensor:.1e} ({own.tensor_relative:.1e}), {own.num_equal} equal"
        )
