"""Runners of a model's forward and backward, with keyword options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatrain.engine.device.host_io import read_numbers
from megatrain.engine.forward import LayerRunner, PassOrder
from megatrain.engine.program.block_access import BlockAccess
from megatrain.engine.program.visit_trace import Recompute
from megatrain.models.graph import ModelGraph

__all__ = ["StepLoss", "StepRunner", "layer_runner"]


@dataclass(frozen=True)
class StepLoss:
    """Loss of one optimizer step, and its number of trained tokens."""

    loss: float
    num_trained_tokens: int


class StepRunner(LayerRunner):
    """Runner that waits for the device after each step and reads the loss."""

    def forward_backward(
        self,
        micro_batches: Sequence[Mapping[str, torch.Tensor]],
        *,
        num_items: int | None = None,
        seed: int = 0,
    ) -> StepLoss:
        """Run the forward and backward of all micro-batches. The block access receives the gradients."""
        queued = self.queue(micro_batches, num_items=num_items, seed=seed)
        return StepLoss(float(sum(read_numbers(queued.terms))), queued.num_trained_tokens)


def layer_runner(
    graph: ModelGraph,
    access: BlockAccess,
    *,
    device: torch.device | str = "cpu",
    order: Literal["layer", "micro_batch"] = "layer",
    head_rows: int | None = None,
    head_columns: int | None = None,
    is_part_major: bool = False,
    kept: Iterable[int] = (),
    saved_attention: Iterable[int] = (),
    saved_results: Iterable[int] = (),
    kept_parts: int = 1,
    **options: Any,
) -> StepRunner:
    """Return a runner whose `PassOrder` and `Recompute` have these options."""
    return StepRunner(
        graph,
        access,
        device=device,
        order=PassOrder(order, head_rows, head_columns, is_part_major),
        recompute=Recompute(frozenset(kept), frozenset(saved_attention), frozenset(saved_results), kept_parts),
        **options,
    )
