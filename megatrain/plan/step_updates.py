"""Updates in a step, and the memory in which each runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megatrain.engine.program.step_program import StepProgram, Tick


class StepUpdates:
    """Updates of a step.

    Args:
        homes: Home tier by block key.
        device: Device that computes the layers.

    Attributes:
        ticks: Ticks of all updates.
        gpu_memory_ticks: Ticks of updates that run in GPU memory, or in the part of RAM that emulates it.
    """

    def __init__(self, program: StepProgram, homes: Mapping[str, str], device: torch.device) -> None:
        self._blocks, self._has_gpu = program.blocks, device.type == "cuda"
        self.ticks = [tick for tick in program.ticks if tick.phase == "update"]
        compute_tier = program.compute_tier
        self.gpu_memory_ticks = [tick for tick in self.ticks if program.tick_tier(tick, homes) == compute_tier != "ram"]

    def num_weights(self, *, on_gpu: bool) -> int:
        """Return the number of weights that a step updates, on a GPU or on the host (which can emulate a GPU)."""
        gpu_ticks = self.gpu_memory_ticks if self._has_gpu else ()
        return self.count_weights(gpu_ticks if on_gpu else [tick for tick in self.ticks if tick not in gpu_ticks])

    def count_weights(self, updates: Iterable[Tick]) -> int:
        """Return the number of weights that these updates change."""
        blocks = [self._blocks[key] for tick in updates for key, _ in tick.uses]
        return sum(block.num_elements for block in blocks if block.kind == "weights")
