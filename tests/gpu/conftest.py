"""Fixtures for GPU tests. With ``-m gpu``, tests run on a real GPU. Otherwise, most run on a software device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read only once; makes cuBLAS add in a fixed order

from fakes.gpu_run import virtual_gpu
from fakes.virtual_cuda import VirtualCuda
from oracles.tiered_run import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with weights, config and tokenizer of the repository's model with 0.82 M parameters."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(params=["virtual", pytest.param("real", marks=pytest.mark.gpu)])
def virtual(request: pytest.FixtureRequest) -> Iterator[VirtualCuda | None]:
    """Yield a software device for the test. With ``-m gpu``, yield None: the test then runs on a real GPU."""
    if request.param == "real":
        yield None
        return
    with virtual_gpu() as device:
        yield device
