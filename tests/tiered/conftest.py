"""Makes tests fail within minutes if a bug in a store lets a thread wait forever."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

#: These limits only end hangs. They are generous, because waits take much longer on a loaded machine.
LONGEST_WAIT_S = 120
LONGEST_TEST_S = 280  # less than the limit for tests in other folders


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # includes the tests of all folders
        if "tests/tiered/" in item.path.as_posix() and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONGEST_TEST_S))


@pytest.fixture(autouse=True)
def bounded_waits() -> Iterator[None]:
    """Make waits without a timeout fail after ``LONGEST_WAIT_S``, even in a closing store. Daemon threads may idle."""
    real = threading.Condition.wait

    def wait(condition: threading.Condition, timeout: float | None = None) -> bool:
        if timeout is not None or threading.current_thread().daemon:
            return real(condition, timeout)
        is_woken = real(condition, LONGEST_WAIT_S)
        assert is_woken, f"a thread waited {LONGEST_WAIT_S} s without a wake-up"
        return is_woken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Condition, "wait", wait)
        yield
