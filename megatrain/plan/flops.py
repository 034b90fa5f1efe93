"""Operations and memory traffic of a step, counted by the trace or assumed from the number of parameters."""

from __future__ import annotations

import math
from collections import Counter

from megatrain.engine.device.work import NO_WORK, Work
from megatrain.engine.program.step_program import Phase
from megatrain.engine.program.visit_trace import unit_layouts
from megatrain.optim.base import MatrixOptimizer
from megatrain.plan.kept import num_parameters_run_once
from megatrain.plan.plan import PlacedStep
from megatrain.trace.counting import is_counted

#: FLOPs per parameter and token, used if the trace could not count them: forward 2, recompute 2, backward 4.
FLOPS_PER_PARAM_TOKEN = 8
_FORWARD_FLOPS, _RECOMPUTE_FLOPS, _BACKWARD_FLOPS, _HEAD_FLOPS = 2, 2, 4, 6
#: Bytes per gradient element and micro-batch: a matmul reads and writes the fp32 sum.
_SUM_NBYTES = 8


def flops_per_token(step: PlacedStep) -> float:
    """Return a step's FLOPs per token, including recomputed layers.

    The count excludes work that causal attention kernels skip, and experts that a token does not use. Without counts,
    the result is ``8 N`` for N parameters, minus ``2 N`` for the parameters of layers that are not recomputed.
    """
    if is_counted(step.trace):
        return sum(work.computed_flops for work in _visit_work(step).values()) / step.trace.num_tokens
    num_run_once = num_parameters_run_once(step.graph, step.trace, step.program)
    return FLOPS_PER_PARAM_TOKEN * step.graph.num_parameters - _FORWARD_FLOPS * num_run_once


def tick_flops(step: PlacedStep) -> list[float]:
    """Return each tick's FLOPs per token; 0 for updates. Their sum is ``flops_per_token``."""
    ticks, blocks = step.program.ticks, step.program.blocks
    visit_work = _visit_work(step) if is_counted(step.trace) else None
    tick_counts = Counter((tick.phase, tick.visit) for tick in ticks)
    result: list[float] = []
    for tick in ticks:
        flops: float = 0.0
        if tick.phase in ("forward", "head", "backward") and visit_work is not None:
            flops = visit_work[tick.phase, tick.visit].computed_flops
        elif tick.phase in ("forward", "head", "backward"):
            extra = 0 if tick.visit in step.program.recompute.kept_graphs else _RECOMPUTE_FLOPS
            flops = {"forward": _FORWARD_FLOPS, "head": _HEAD_FLOPS, "backward": extra + _BACKWARD_FLOPS}[tick.phase]
            flops *= sum(blocks[key].num_values for key, _ in tick.uses if blocks[key].kind == "weights")
        # If micro-batches run one at a time, each micro-batch has separate ticks.
        result.append(flops / tick_counts[tick.phase, tick.visit])
    total = sum(result)
    return [flops * flops_per_token(step) / total if total else 0.0 for flops in result]


def work_of_phases(step: PlacedStep) -> dict[Phase, Work]:
    """Return the work of the traced micro-batch by phase."""
    result: dict[Phase, Work] = {}
    for (phase, _), work in _visit_work(step).items():
        result[phase] = result.get(phase, NO_WORK) + work
    return result


def _visit_work(step: PlacedStep) -> dict[tuple[Phase, int], Work]:
    """Return the traced micro-batch's work by phase and visit. The first head visit has the work of the whole head."""
    trace, program = step.trace, step.program
    result: dict[tuple[Phase, int], Work] = {}
    for index, visit in enumerate(trace.visits):
        if visit.is_head:
            continue
        backward = visit.backward
        savings = program.recompute.savable_results(index, visit)
        if index in program.recompute.kept_graphs:
            backward -= visit.recompute
        result["forward", index] = visit.forward + savings.copy_work
        result["backward", index] = backward - savings.work
    recompute_flops = trace.logits_flops * max(0, trace.head_parts - program.recompute.kept_parts) // trace.head_parts
    first_head = next((index for index, visit in enumerate(trace.visits) if visit.is_head), len(trace.visits))
    result["head", first_head] = trace.head + Work(product_flops=recompute_flops)
    return result


def gradient_sum_work(step: PlacedStep) -> dict[Phase, Work]:
    """Return the memory traffic for adding a micro-batch's gradients to their sums on a GPU, by phase.

    On a CPU, the measured matmul rate already includes this traffic.
    """
    result: dict[Phase, Work] = {}
    for visit in step.trace.visits if step.device.type == "cuda" else ():
        layouts = [step.graph.layouts[name] for name in unit_layouts(step.graph, visit.unit)]
        num_trained = sum(layout.num_parameters for layout in layouts if layout.trainable)
        if visit.is_head or visit.backward.product_flops:
            phase: Phase = "head" if visit.is_head else "backward"
            result[phase] = result.get(phase, NO_WORK) + Work(moved_nbytes=_SUM_NBYTES * num_trained)
    return result


def matrix_flops(step: PlacedStep) -> dict[int, int]:
    """Return the FLOPs of the orthogonalization in a step, by layout index."""
    optimizer, layouts = step.traced.optimizer, list(step.graph.layouts.values())
    if not isinstance(optimizer, MatrixOptimizer):
        return {}
    result: dict[int, int] = {}
    for index in {tick.visit for tick in step.updates.ticks}:
        entries = [entry for entry in layouts[index].entries if optimizer.has_matrices(entry)]
        shapes = [(entry.shape[-2], entry.shape[-1], math.prod(entry.shape[:-2]), entry.name) for entry in entries]
        result[index] = sum(optimizer.orthogonalize_flops(r, c, name) * count for r, c, count, name in shapes)
    return result
