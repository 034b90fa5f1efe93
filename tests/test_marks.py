"""Which cases of long matrices are left for every change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from conftest import FEWEST, SHARE, mark_long_matrices


class _Item(SimpleNamespace):
    def get_closest_marker(self, name: str) -> Any:
        return name if name in self.marks else None

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark.name)


def test_cases_on_a_device_in_software_leave_some_on_a_gpu() -> None:
    """Counted as one, every 17th of cases that alternate would be of one kind for a test with fewer than 17."""
    items = [
        _Item(nodeid=f"tests/gpu/test_it.py::test_it[{kind}-{number}]", marks=["gpu"] if kind == "real" else [])
        for number in range(FEWEST + 1)
        for kind in ("virtual", "real")
    ]
    mark_long_matrices(items)  # type: ignore[arg-type]
    left = [item for item in items if "slow" not in item.marks]
    assert [bool(item.get_closest_marker("gpu")) for item in left] == [False, True]
    assert SHARE > FEWEST and pytest.mark.slow.name == "slow"
