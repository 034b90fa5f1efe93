"""Planned workspace of a step whose blocks are all in the compute tier."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatrain.engine.program.builder import ProgramBuilder
from megatrain.engine.program.step_program import StepProgram
from megatrain.engine.program.visit_trace import VisitTrace
from megatrain.engine.program.workspace import kept_graphs, peak_bytes, step_workspace_bytes, visit_transients
from megatrain.models.graph import ModelGraph
from megatrain.optim.elementwise import AdamW


def planned_workspace(graph: ModelGraph, trace: VisitTrace, num_micro_batches: int, kept_parts: int = 1) -> int:
    """Return the planned workspace of a step without kept graphs, in bytes.

    Args:
        graph: Model of the step.
        trace: Traced visits of the model.
        num_micro_batches: Number of micro-batches that each visit processes.
        kept_parts: Number of vocabulary parts whose logits are kept for the second pass of the head.
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
    return step_workspace_bytes(graph, trace, program, num_micro_batches, torch.device("cpu"))


def max_workspace_bytes(graph: ModelGraph, trace: VisitTrace, program: StepProgram, num_micro_batches: int) -> int:
    """Return the workspace in bytes of a single-process step that keeps the graphs of all visits before the head.

    Args:
        graph: Model of the step.
        trace: Traced visits of the model.
        program: Program of the step. Its own kept graphs are ignored.
        num_micro_batches: Number of micro-batches that exist at the same time.
    """
    trunk = [number for number, visit in enumerate(trace.visits) if not visit.is_head]
    in_visits = visit_transients(graph, trace, program, num_micro_batches, torch.device("cpu"))
    return peak_bytes([*in_visits, *kept_graphs(trace, program, trunk, num_micro_batches)])
