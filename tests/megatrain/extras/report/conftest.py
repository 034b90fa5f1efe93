"""A model to make a run of, and the command."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from oracles.tiered_run import write_tiny_model

PACKAGE = "megatrain_tier_cli" if importlib.util.find_spec("megatrain_tier_cli") else "cli"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with weights, config and tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture
def cli_call() -> Callable[..., Any]:
    group = importlib.import_module(f"{PACKAGE}.main").command_group
    return lambda *words: CliRunner().invoke(group, list(map(str, words)))
