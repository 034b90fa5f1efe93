"""Runs on a GPU, or with a lazy device and host memory in its place where there is none: the same tests for both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatrain import session
from megatrain.plan import machine
from reference.lazy_device import LazyDevice
from reference.tiered_run import config_text
from tiered.units import MiB

#: For ``pytest.mark.parametrize``: the device itself with ``-m gpu``, its stand-in in every run of the tests.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GPU_TIER_BYTES = 64 * MiB


@contextmanager
def gpu_tier(device: str, capacity_bytes: int = GPU_TIER_BYTES) -> Iterator[None]:
    """Let runs on ``device`` have a GPU tier; on "cpu" it is host memory behind CUDA links of a lazy device."""
    if device != "cpu":
        yield
        return
    with (
        LazyDevice().in_place() as lazy,
        mock.patch.object(machine, "compute_tier", return_value="gpu"),
        mock.patch.object(machine, "gpu_capacity_bytes", return_value=capacity_bytes),
        mock.patch.object(session, "GpuTier", lambda capacity, **options: lazy.gpu_tier(capacity)),
    ):
        yield


def gpu_config_text(folder: Path, model: Path, device: str, **tables: str) -> str:
    """Return ``config_text`` for a device, with a GPU tier of ``GPU_TIER_BYTES``."""
    text = config_text(folder, model, **tables).replace('device = "cpu"', f'device = "{device}"')
    return text + (f'[tiers.gpu]\nsize = "{GPU_TIER_BYTES // MiB}MiB"\n' if device != "cpu" else "")


@contextmanager
def deterministic(device: str) -> Iterator[None]:
    """Let torch choose kernels that add in a fixed order, where it has a choice: what differs then, placement did.

    CUBLAS_WORKSPACE_CONFIG must be set before the first use of cuBLAS: ``tests/gpu/conftest.py`` does.
    """
    if device == "cpu":
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def no_waits_allowed(device: str) -> Iterator[None]:
    """Let torch raise where an operation makes the host wait for the GPU."""
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
