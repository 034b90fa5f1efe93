"""Fixtures: the folder of a tiny model, and a function that calls the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from oracles.tiered_run import write_tiny_model
from processes.saved_run import command_group


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder with weights, config and tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture
def cli_call() -> Callable[..., Any]:
    group = command_group()
    return lambda *words: CliRunner().invoke(group, list(map(str, words)))
