"""What the memory of a run's process comes to, for those who set a container's limit by it. Not counted: CUDA.

The RAM tier is counted exactly, the rest is what this process has now and what a run will load besides. That sum holds
only while memory of freed tensors goes back to the system where there would be more: ``engine/freed_memory.py`` sees to
it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from megatrain.engine.freed_memory import trim
from megatrain.engine.workspace import computing_bytes
from tiered.units import MiB

if TYPE_CHECKING:
    from megatrain.plan.plan import Plan

__all__ = ["HEAP_BYTES", "ProcessMemory", "most_resident_bytes", "own_bytes", "process_memory", "resident_bytes"]

#: numba with LLVM, compiled kernels, and the parts of torch that the first step loads. Measured on Linux, x86-64
#: (`bench/process_memory.py`): 93 MiB if the kernels come from numba's cache, 120 if the first run compiles them.
_KERNELS_BYTES = 120 * MiB
#: Rows, batches, threads of the tokenizer: 2 MiB where the rows are in the cache, 30 where they are tokenized.
_DATA_BYTES = 14 * MiB
#: Memory of a tokenizer for each byte of its ``tokenizer.json``, measured with 128,000 words.
_TOKENIZER_FACTOR = 26
#: Freed memory of steps in the heap: tensors too small to be mapped alone. 0 to 80 MiB in the cases of that bench.
HEAP_BYTES = 40 * MiB
_KERNELS_MODULE = "megatrain.optim.kernels"


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The parts of a run's resident memory at its fullest.

    Attributes:
        tier_bytes: the RAM tier, and a GPU tier that is emulated in RAM, with the copies that the room between what a
            step needs at once and the capacity comes to hold.
        libraries_bytes: Python and libraries now, with the model's skeleton and the plan.
        kernels_bytes: what the kernels of updates will take, and their compiler; 0 where they are loaded already.
        data_bytes: the tokenizer and rows.
        heap_bytes: what the C library keeps of freed memory.
    """

    tier_bytes: int
    libraries_bytes: int
    kernels_bytes: int
    data_bytes: int
    heap_bytes: int

    @property
    def beside_tier_bytes(self) -> int:
        """All but the tier."""
        return self.libraries_bytes + self.kernels_bytes + self.data_bytes + self.heap_bytes

    @property
    def total_bytes(self) -> int:
        """What a container must allow at least."""
        return self.tier_bytes + self.beside_tier_bytes


def process_memory(plan: Plan) -> ProcessMemory:
    """Predict the memory of the process that runs a plan. Call it where that was made, and nothing was trained."""
    tokenizer = Path(plan.run.model.tokenizer_folder, "tokenizer.json")
    tokenizer_bytes = tokenizer.stat().st_size if tokenizer.is_file() else 0
    return ProcessMemory(
        tier_bytes=_tier_bytes(plan),
        libraries_bytes=own_bytes(),
        kernels_bytes=_KERNELS_BYTES if plan.updates and _KERNELS_MODULE not in sys.modules else 0,
        data_bytes=_DATA_BYTES + _TOKENIZER_FACTOR * tokenizer_bytes,
        heap_bytes=HEAP_BYTES,
    )


def most_resident_bytes(plan: Plan) -> int:
    """Return the resident memory that an op may begin with, and the bytes that it computes in, together.

    The process then stays within its planned memory. The workspace besides, such as streams between layers, may be
    made within the op. Call it where the run begins: memory that is loaded by then counts as it is.
    """
    besides = sum(plan.placement.workspace_bytes.values()) - plan.kept_bytes
    besides -= max(computing_bytes(plan.trace, plan.program))
    return own_bytes() + _tier_bytes(plan) + HEAP_BYTES - besides


def _tier_bytes(plan: Plan) -> int:
    in_ram = ["ram", "gpu"] if plan.run.tiers.emulates_gpu else ["ram"]
    return sum(resident_bytes(plan, tier) for tier in in_ram if tier in plan.tiers)


def resident_bytes(plan: Plan, tier: str) -> int:
    """Return what a tier comes to hold in a run: copies stay there, and are fetched ahead, as far as there is room."""
    placement, budget = plan.placement, plan.budgets_by_tier[tier]
    ends: dict[str, set[str]] = {}
    for access in plan.program.accesses(placement.homes):
        used_in = (tier for _, tier in placement.routes.between(placement.homes[access.key], access.tier))
        ends.setdefault(access.key, set()).update(used_in)
    copies = [key for key, tiers in ends.items() if tier in tiers]
    room = sum(budget.slot_bytes(plan.program.blocks[key].nbytes) for key in copies)
    least = placement.peak_bytes(tier)
    return max(least, min(budget.capacity_bytes, least - placement.working_bytes[tier] + room))


def own_bytes() -> int:
    """Return the resident memory of this process, without what the C library kept of freed memory."""
    trim()
    return int(psutil.Process().memory_info().rss)
