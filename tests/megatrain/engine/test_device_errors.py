"""Device and memory errors of torch become messages for users. All other errors pass through unchanged."""

from __future__ import annotations

import pytest
import torch

from megatrain.engine.device.environment import DeviceError, explain_device_errors
from tiered import TransferError

COPY_FAILED = TransferError("copy of 8 bytes failed", tier="gpu->ram")


def test_failed_ram_allocation_error_names_its_bytes() -> None:
    said = "out of RAM: can't allocate memory: you tried to allocate 36028797018963968 bytes"
    with pytest.raises(DeviceError, match=said), explain_device_errors():
        torch.empty(1 << 55, dtype=torch.uint8)


def test_failed_copy_raises_the_causing_device_error() -> None:
    cause = torch.AcceleratorError("CUDA error: unspecified launch failure\nhints for who writes kernels")
    said = r"the GPU failed: CUDA error: unspecified launch failure\. "
    with pytest.raises(DeviceError, match=said), explain_device_errors():
        raise COPY_FAILED from cause


@pytest.mark.parametrize("error", [TransferError("copy failed", tier="gpu"), RuntimeError("shapes"), ValueError("1")])
def test_unrelated_errors_are_reraised_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explain_device_errors():
        raise error
    assert caught.value is error
