"""The command under the name it is installed as, or from its folder where the project is not installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType

import pytest

PACKAGE = "megatrain_tier_cli" if importlib.util.find_spec("megatrain_tier_cli") else "cli"


@pytest.fixture
def cli_package() -> str:
    return PACKAGE


@pytest.fixture
def cli_module() -> Callable[[str], ModuleType]:
    return lambda name: importlib.import_module(f"{PACKAGE}.{name}")
