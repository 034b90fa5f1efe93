"""A runner of a model's passes, with what it is made of by keywords."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch

from megatrain.engine.forward import LayerRunner, PassOrder
from megatrain.engine.program import BlockAccess, Recompute
from megatrain.models.graph import ModelGraph

__all__ = ["layer_runner"]


def layer_runner(
    graph: ModelGraph,
    access: BlockAccess,
    *,
    device: torch.device | str = "cpu",
    order: Literal["layer", "micro_batch"] = "layer",
    head_rows: int | None = None,
    head_columns: int | None = None,
    parts_in_turn: bool = False,
    kept: Iterable[int] = (),
    saved_attention: Iterable[int] = (),
    saved_results: Iterable[int] = (),
    kept_parts: int = 1,
    **options: Any,
) -> LayerRunner:
    """Return a runner with this `PassOrder` and this `Recompute`."""
    return LayerRunner(
        graph,
        access,
        device=device,
        order=PassOrder(order, head_rows, head_columns, parts_in_turn),
        recompute=Recompute(frozenset(kept), frozenset(saved_attention), frozenset(saved_results), kept_parts),
        **options,
    )
