"""Optimizers whose time on the host follows from the rate of the AdamW kernel that ``doctor`` times."""

from __future__ import annotations

from megatrain.optim.average import WeightAverage
from megatrain.optim.base import Optimizer, bytes_per_parameter
from megatrain.optim.elementwise import AdamW, ElementwiseOptimizer
from megatrain.optim.muon import Muon

__all__ = ["ADAMW_TOUCHED", "is_bound_by_ram", "is_timed_optimizer"]

_ADAMW_BYTES = 12  # bytes of master, m and v in the kernels that doctor times
#: These kernels read the 12 bytes and an fp32 gradient, and write back the 12 bytes.
ADAMW_TOUCHED = 28


def is_timed_optimizer(optimizer: Optimizer, *, split_master: bool) -> bool:
    """Return whether doctor measures the kernel of an optimizer."""
    return type(optimizer) is AdamW and bytes_per_parameter(optimizer.state_kinds(split_master)) == _ADAMW_BYTES


def is_bound_by_ram(optimizer: Optimizer) -> bool:
    """Return whether memory bandwidth limits updates. False for bf16 or int8 moments and for custom optimizers.

    On two cores, Lion, SGD and averages reach AdamW's bytes per second within 12 %. Updates take longer than their
    bytes predict for bf16 moments (1.4 to 2.5 times) and for int8 moments in blocks of 256 (nine times).
    """
    inner = optimizer.inner if isinstance(optimizer, WeightAverage) else optimizer
    is_fp32 = isinstance(inner, ElementwiseOptimizer) and inner.state_dtype == "float32"
    return is_fp32 or isinstance(inner, Muon)
