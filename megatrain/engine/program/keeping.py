"""Variants of a program whose visits keep their graphs, or save results, so that the backward recomputes less."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatrain.engine.program.block_keys import activation_key, results_key
from megatrain.engine.program.block_plan import BlockPlan
from megatrain.engine.program.step_program import Group, StepProgram, Tick
from megatrain.engine.program.visit_trace import VisitTrace


def activation_keys(program: StepProgram) -> dict[int, set[str]]:
    """Return the keys of activation blocks, by visit, for all visits before the head."""
    keys: dict[int, set[str]] = {}
    for tick in program.ticks:
        if tick.phase == "forward":
            tick_keys = {key for group in tick.passing for key, _ in group if program.blocks[key].kind == "activations"}
            keys.setdefault(tick.visit, set()).update(tick_keys)
    return keys


def keep_graphs(program: StepProgram, visits: frozenset[int]) -> StepProgram:
    """Return a copy of the program in which these visits keep their graphs and use no activation blocks."""
    dropped_keys = {key for visit, keys in activation_keys(program).items() if visit in visits for key in keys}

    def is_input(group: Group) -> bool:
        return any(program.blocks[key].kind == "activations" for key, _ in group)

    ticks = tuple(
        replace(
            tick,
            passing=tuple(group for group in tick.passing if not is_input(group)),
            spent=tick.spent - dropped_keys,
        )
        if tick.phase in ("forward", "backward") and tick.visit in visits
        else tick
        for tick in program.ticks
    )
    blocks = {key: block for key, block in program.blocks.items() if key not in dropped_keys}
    assert all(key in blocks for tick in ticks for key, _ in tick.uses), "a later visit recomputes from such an input"
    choice = program.recompute
    recompute = replace(
        choice,
        kept_graphs=choice.kept_graphs | visits,
        saved_attention=choice.saved_attention - visits,
        saved_results=choice.saved_results - visits,
    )
    return replace(program, blocks=blocks, ticks=ticks, recompute=recompute)


def save_results(
    program: StepProgram, trace: VisitTrace, visits: frozenset[int], *, with_products: bool = False
) -> StepProgram:
    """Return a copy of the program in which these visits save results, in one uint8 block per micro-batch.

    Args:
        visits: Visits that have savable results, save none yet and do not keep their graphs.
        with_products: Whether to save matmul results in addition to attention results.
    """
    blocks, ticks = dict(program.blocks), list(program.ticks)
    for index, tick in enumerate(ticks):
        if tick.phase in ("forward", "backward") and tick.visit in visits:
            visit_trace = trace.visits[tick.visit]
            ticks[index] = _add_results_block(tick, program, len(visit_trace.saved_inputs) - len(visit_trace.aliases))
            nbytes = (visit_trace.results if with_products else visit_trace.attention).nbytes
            # Add blocks in the order of the tick, because the planner resolves ties between blocks by their order.
            for key in [key for key in dict(ticks[index].uses) if key not in blocks]:
                blocks[key] = BlockPlan(key, "activations", nbytes, torch.uint8)
    choice = program.recompute
    if with_products:
        recompute = replace(choice, saved_results=choice.saved_results | visits)
    else:
        recompute = replace(choice, saved_attention=choice.saved_attention | visits)
    return replace(program, blocks=blocks, ticks=tuple(ticks), recompute=recompute)


def _add_results_block(tick: Tick, program: StepProgram, num_written: int) -> Tick:
    """Return a copy of a visit's tick in which each micro-batch also leases its results block, after its inputs.

    Args:
        num_written: Number of inputs per micro-batch that the visit's forward writes. Earlier visits write the rest.
    """
    groups: list[Group] = []
    num_groups = num_written if tick.phase == "forward" else 1
    slots = [slot for slot in range(len(tick.passing)) if activation_key(tick.visit, slot, 0) in program.blocks]
    for slot in slots:
        inputs = tick.passing[slot * num_groups : (slot + 1) * num_groups]
        key = results_key(tick.visit, slot)
        if tick.phase == "forward":
            groups += [*inputs, ((key, "w"),)]
        else:  # the recompute needs inputs and results at the same time
            groups.append((*(use for group in inputs for use in group), (key, "r")))
    other_groups = tick.passing[len(slots) * num_groups :]
    spent_keys = {results_key(tick.visit, slot) for slot in slots} if tick.phase == "backward" else set()
    return replace(tick, passing=(*groups, *other_groups), spent=tick.spent | spent_keys)
