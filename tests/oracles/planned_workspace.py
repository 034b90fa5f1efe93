"""The workspace that is planned for a step of a traced model whose blocks all lie where it computes."""

from __future__ import annotations

from dataclasses import replace

from megatrain.engine.program import ProgramBuilder, VisitTrace
from megatrain.engine.workspace import step_workspace_bytes
from megatrain.models.graph import ModelGraph
from megatrain.optim.elementwise import AdamW


def planned_workspace(graph: ModelGraph, trace: VisitTrace, num_micro_batches: int, kept_parts: int = 1) -> int:
    """Return the bytes outside of blocks, but for kept graphs.

    Args:
        graph: The model.
        trace: Its visits.
        num_micro_batches: Micro-batches that pass it together.
        kept_parts: Parts of the vocabulary whose logits are kept for the second pass of the head.
    """
    builder = ProgramBuilder(
        graph,
        trace,
        num_micro_batches=num_micro_batches,
        order="layer",
        compute_tier="ram",
        optimizer=AdamW(),
    )
    program = builder.build()
    program = replace(program, recompute=replace(program.recompute, kept_parts=kept_parts))
    return step_workspace_bytes(graph, trace, program, num_micro_batches)
