"""Bytes of one checkpoint, split into those written to ``output_dir`` and those that stay on drives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from megatrain.engine.program.step_program import StepProgram
from megatrain.plan.placement import Placement, TierBudget


@dataclass(frozen=True, slots=True)
class CheckpointBytes:
    """Bytes of one checkpoint.

    Attributes:
        output_dir_bytes: Bytes that are written to ``output_dir``, because no durable tier contains them.
        drive_bytes: Bytes that stay on the drives. A complete copy also writes them to ``output_dir``.
        traffic: Bytes moved to RAM from tiers that are neither addressable nor durable, by link.
    """

    output_dir_bytes: int
    drive_bytes: int
    traffic: Mapping[str, int]

    @classmethod
    def of(cls, program: StepProgram, placement: Placement, budgets: Mapping[str, TierBudget]) -> Self:
        """Return the bytes of a checkpoint, given the homes of the blocks."""
        nbytes, traffic = {True: 0, False: 0}, Counter[str]()
        for key, home in placement.homes.items():
            budget, block = budgets[home], program.blocks[key]
            if not block.is_saved:
                continue
            nbytes[budget.is_durable] += block.nbytes
            if not budget.is_addressable and not budget.is_durable:
                for src, dst in placement.routes.between(home, "ram"):
                    traffic[f"{src}->{dst}"] += block.nbytes
        return cls(nbytes[False], nbytes[True], traffic)
