"""What tests on a GPU rely on. With ``-m gpu`` they run on one; what a device in software can show runs always."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once: cuBLAS then adds in the same order each time

from fakes.gpu_run import virtual_gpu
from fakes.virtual_cuda import VirtualCuda
from oracles.tiered_run import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with weights, config and tokenizer of the in-repo 0.82 M model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(params=["virtual", pytest.param("real", marks=pytest.mark.gpu)])
def virtual(request: pytest.FixtureRequest) -> Iterator[VirtualCuda | None]:
    """Run the test on a device in software, which it gets, and with ``-m gpu`` on the GPU, where it gets None."""
    if request.param == "real":
        yield None
        return
    with virtual_gpu() as device:
        yield device
