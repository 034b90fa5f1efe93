"""On a GPU: only kernels whose results are the same at every run, so that placement alone cannot change a bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatrain.models.errors import UnsupportedModelError

__all__ = ["deterministic_kernels"]


@contextmanager
def deterministic_kernels(device: torch.device, model_type: str, *, enabled: bool = True) -> Iterator[None]:
    """Have torch choose kernels that add in a fixed order; by default some use atomics, in the order of arrival.

    On the CPU nothing is to be done. To be entered before the process first uses cuBLAS, which reads its setting once.

    Args:
        model_type: class of the model, for what is said of an operation that has no such kernel.

    Raises:
        UnsupportedModelError: there is an operation without one.
    """
    if device.type == "cpu" or not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    deterministic: Any = torch.utils.deterministic  # a module whose attributes are set: no type knows them
    fills, mode = deterministic.fill_uninitialized_memory, torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # a second pass over every new tensor, which all are written anyway
    try:
        yield
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        operation = str(error).partition(" does not have")[0]
        reason = f"its {operation} has no kernel on {device.type} that gives the same bits at every run. "
        raise UnsupportedModelError(model_type, f"{reason}Write full_determinism = false") from error
    finally:
        torch.set_deterministic_debug_mode(mode)
        deterministic.fill_uninitialized_memory = fills
