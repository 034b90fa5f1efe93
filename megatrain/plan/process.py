"""Prediction of a run's resident memory per process, for users who set a container limit. CUDA memory is not counted.

The RAM tier is known exactly. The rest is this process's current memory plus the memory that a run loads later. The
prediction assumes that ``engine/device/freed_memory.py`` returns freed memory to the system in time.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatrain.engine.device.freed_memory import trim
from megatrain.engine.program.workspace import computing_bytes
from megatrain.plan.plan import Plan
from tiered.units import MiB

#: numba with LLVM, compiled kernels, and the parts of torch that the first step loads. Measured on Linux, x86-64
#: (`bench/process_memory.py`): 93 MiB if the kernels come from numba's cache, 120 if the first run compiles them.
_KERNELS_BYTES = 120 * MiB
#: Memory of rows, batches and tokenizer threads. Measured: 2 MiB with cached rows, 30 MiB if rows are tokenized.
_DATA_BYTES = 14 * MiB
#: Memory of a tokenizer per byte of its ``tokenizer.json``, measured with a vocabulary of 128,000.
_TOKENIZER_FACTOR = 26
#: Heap memory that the C library keeps after steps have freed small tensors. The benchmark measured 0 to 80 MiB.
HEAP_BYTES = 40 * MiB
_KERNELS_MODULE = "megatrain.optim.kernels"


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Parts of a run's peak resident memory.

    Attributes:
        tier_bytes: Memory of the RAM tier, and of the GPU tier if it is emulated in RAM. Includes prefetched copies,
            which can fill the tier up to its capacity.
        libraries_bytes: Current memory of the process: Python, libraries, the model without weights, and the plan.
        kernels_bytes: Memory of update kernels and their compiler; 0 if they are already loaded.
        data_bytes: Memory of the tokenizer and rows.
        heap_bytes: Freed memory that the C library keeps.
    """

    tier_bytes: int
    libraries_bytes: int
    kernels_bytes: int
    data_bytes: int
    heap_bytes: int

    @property
    def non_tier_bytes(self) -> int:
        """Bytes outside of the tiers."""
        return self.libraries_bytes + self.kernels_bytes + self.data_bytes + self.heap_bytes

    @property
    def total_bytes(self) -> int:
        """Smallest sufficient memory limit for a container."""
        return self.tier_bytes + self.non_tier_bytes


def process_memory(plan: Plan) -> ProcessMemory:
    """Predict the memory of the process that runs a plan. Call this in the planning process, before training."""
    tokenizer = Path(plan.run.model.tokenizer_folder, "tokenizer.json")
    tokenizer_bytes = tokenizer.stat().st_size if tokenizer.is_file() else 0
    return ProcessMemory(
        tier_bytes=_tier_bytes(plan),
        libraries_bytes=own_bytes(),
        kernels_bytes=_KERNELS_BYTES if plan.updates.ticks and _KERNELS_MODULE not in sys.modules else 0,
        data_bytes=_DATA_BYTES + _TOKENIZER_FACTOR * tokenizer_bytes,
        heap_bytes=HEAP_BYTES,
    )


def most_resident_bytes(plan: Plan) -> int:
    """Return the limit for this process's resident memory at the start of an op, in bytes.

    The limit leaves room for workspace that the op will allocate, such as hidden states between layers. Call this
    when the run begins, because the memory that the process has then is part of the result.
    """
    free_bytes = sum(plan.placement.workspace_bytes.values()) - plan.kept_bytes
    free_bytes -= max(computing_bytes(plan.trace, plan.program))
    return own_bytes() + _tier_bytes(plan) + HEAP_BYTES - free_bytes


def _tier_bytes(plan: Plan) -> int:
    in_ram = ["ram", "gpu"] if plan.run.tiers.emulates_gpu else ["ram"]
    return sum(resident_bytes(plan, tier) for tier in in_ram if tier in plan.tiers)


def resident_bytes(plan: Plan, tier: str) -> int:
    """Return the peak bytes that a run has in a tier: homes, workspace, and all kept or prefetched copies that fit."""
    placement, budget = plan.placement, plan.budgets_by_tier[tier]
    tiers_by_key: dict[str, set[str]] = {}
    for access in plan.program.accesses(placement.homes):
        tiers_between = (tier for _, tier in placement.routes.between(placement.homes[access.key], access.tier))
        tiers_by_key.setdefault(access.key, set()).update(tiers_between)
    copies = [key for key, tiers in tiers_by_key.items() if tier in tiers]
    copy_bytes = sum(budget.slot_bytes(plan.program.blocks[key].nbytes) for key in copies)
    min_bytes = placement.peak_bytes(tier)
    return max(min_bytes, min(budget.capacity_bytes, min_bytes - placement.working_bytes[tier] + copy_bytes))


def own_bytes() -> int:
    """Return this process's resident memory, after the C library has returned freed memory to the system."""
    trim()
    return int(psutil.Process().memory_info().rss)
