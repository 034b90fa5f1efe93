"""Fixture that writes the repository's 0.82 M-parameter model with fixed random weights, once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from oracles.tiered_run import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with weights, a config and a tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny_model"))
