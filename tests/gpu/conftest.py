"""What tests on a GPU rely on. They run with ``-m gpu``; what has a stand-in on the CPU runs always."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once: cuBLAS then adds in the same order each time

from reference.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with weights, config and tokenizer of the in-repo 0.82 M model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny_model"))
