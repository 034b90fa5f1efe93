"""Fixtures for the command: the installed package, or the folder ``cli`` if the project is not installed."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from processes import saved_run


@pytest.fixture
def cli_package() -> str:
    return saved_run.PACKAGE


@pytest.fixture
def cli_module() -> Callable[[str], ModuleType]:
    return saved_run.cli_module
