"""Programs without a backward: evaluation passes, passes that read averages, and generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megatrain.engine.program.block_keys import cache_key
from megatrain.engine.program.block_plan import DURABLE_KINDS, BlockPlan, FrozenWeights, weight_block
from megatrain.engine.program.builder import preceding_gathers
from megatrain.engine.program.encoding import AveragedWeight
from megatrain.engine.program.step_program import Group, GroupUpdates, ModelPhase, Phase, StepProgram, Tick
from megatrain.engine.program.visit_trace import Recompute, VisitTrace, unit_layouts

if TYPE_CHECKING:
    from megatrain.models.graph import ModelGraph


def evaluation_program(program: StepProgram) -> StepProgram:
    """Return the program of one evaluation pass. It has no backward and no updates, and reads only weights.

    If a weight's encoding reads other blocks, the pass reads those blocks instead. The pass leases each unit's weights
    once for all micro-batches. The function is idempotent.
    """
    ticks: dict[tuple[Phase, int, ModelPhase | None], Tick] = {}
    weight_keys = {key for key, block in program.blocks.items() if block.kind == "weights"}
    weight_keys.update(key for encoding in program.encodings.values() for key in encoding.keys)
    for tick in program.ticks:
        if tick.phase in ("forward", "head") or (tick.phase == "gather" and tick.served_phase != "backward"):
            held_blocks, *groups = (
                tuple((key, mode) for key, mode in group if key in weight_keys) for group in (tick.held, *tick.passing)
            )
            groups = [group for group in groups if group]
            pass_tick = Tick(tick.phase, tick.visit, held_blocks, tuple(groups), served_phase=tick.served_phase)
            ticks.setdefault((tick.phase, tick.visit, tick.served_phase), pass_tick)
    updates = replace(program.updates, are_deferred=False, sent_elements={})
    return replace(program, ticks=tuple(ticks.values()), updates=updates, occupants={})


def substitute_averages(program: StepProgram, graph: ModelGraph, kind: str) -> StepProgram:
    """Return a program whose passes read averages instead of weights, and round the averages to the compute dtype.

    Layouts without an average keep their weights. In other layouts, the block of the average replaces the block of the
    weight. If only the average is cut into parts, all its blocks replace the weight's single block.
    """
    encodings, averages = dict(program.encodings), dict[str, Group]()
    for layout in graph.layouts.values():
        keys = program.state_keys(layout, kind)
        if keys[0] in program.blocks:
            weights = program.weight_keys(layout)
            groups = [(key,) for key in keys] if len(keys) == len(weights) else [tuple(keys)]
            reads: list[Group] = [tuple((key, "r") for key in group) for group in groups]
            averages.update(zip(weights, reads, strict=True))
            nbytes = layout.num_elements * program.blocks[keys[0]].dtype.itemsize
            encodings[layout.name] = AveragedWeight(tuple(keys), nbytes, graph.dtype)

    def replace_weights(group: Group) -> Group:
        return tuple(use for key, mode in group for use in averages.get(key, ((key, mode),)))

    ticks = tuple(
        replace(tick, held=replace_weights(tick.held), passing=tuple(replace_weights(group) for group in tick.passing))
        for tick in program.ticks
    )
    blocks = {key: block for key, block in program.blocks.items() if block.kind in DURABLE_KINDS}
    return replace(program, blocks=blocks, ticks=ticks, encodings=encodings)


def frozen_program(graph: ModelGraph, *, compute_tier: str, frozen: FrozenWeights) -> StepProgram:
    """Return a program for a model that is not trained. It has one weight block per layout, and no ticks."""
    blocks: dict[str, BlockPlan] = {}
    for layout in graph.layouts.values():
        encoding, in_place = frozen.encodings.get(layout.name), layout.name in frozen.in_place
        # Adapters come from a separate folder, so the model folder does not have them.
        in_folder = frozen.in_folder and not layout.trainable
        block = weight_block(layout, layout.num_elements, graph.dtype, encoding, in_folder=in_folder, in_place=in_place)
        blocks[block.key] = block
    return StepProgram(blocks, (), compute_tier, updates=GroupUpdates(are_deferred=False), encodings=frozen.encodings)


def generation_program(
    program: StepProgram,
    graph: ModelGraph,
    trace: VisitTrace,
    cache_nbytes: Mapping[int, int],
    *,
    num_micro_batches: int,
    is_first: bool,
) -> StepProgram:
    """Return the program of one generation pass.

    The first pass processes all prompt tokens, and later passes process one token per prompt. Sharded weights are
    gathered before each visit, and each process has some of the prompts.

    Args:
        program: Program that contains the blocks of weights.
        trace: Visits of a forward without a separate head.
        cache_nbytes: Maximum size of one micro-batch's cache in bytes, by visit.
        is_first: Whether this is the first pass, before which the cache is empty.
    """
    blocks = {key: block for key, block in program.blocks.items() if block.kind in DURABLE_KINDS}
    ticks, is_local = list[Tick](), program.sharding.shards.is_local
    passing_pairs: set[tuple[int, str]] = set()
    for visit, visit_trace in enumerate(trace.visits):
        layouts = [graph.layouts[name] for name in unit_layouts(graph, visit_trace.unit)]
        cut_layouts = [layout for layout in layouts if is_local and layout.name in program.cuts.weights]
        passing_pairs.update((visit, layout.name) for layout in cut_layouts)
        whole_layouts = [layout for layout in layouts if layout not in cut_layouts]
        held_blocks = tuple((key, "r") for layout in whole_layouts for key in program.weight_keys(layout))
        groups = [((key, "r"),) for layout in cut_layouts for key in program.weight_keys(layout)]
        for micro_batch in range(num_micro_batches if cache_nbytes.get(visit) else 0):
            key = cache_key(visit, micro_batch)
            blocks[key] = BlockPlan(key, "activations", cache_nbytes[visit], torch.uint8)
            groups.append(((key, "w" if is_first else "rw"),))
        ticks.append(Tick("forward", visit, held_blocks, tuple(groups)))  # type: ignore[arg-type]
    if not is_local:
        gathers = preceding_gathers(ticks, [tick.held for tick in ticks], program.sharding.gathers_ahead)
        ticks = [item for due, tick in zip(gathers, ticks, strict=True) for item in (*due, replace(tick, held=()))]
    return replace(
        program,
        blocks=blocks,
        ticks=tuple(ticks),
        updates=replace(program.updates, are_deferred=False, streamed=frozenset()),
        recompute=Recompute(kept_parts=program.recompute.kept_parts),
        cuts=replace(program.cuts, passing=frozenset(passing_pairs)),
        occupants={},
    )


def whole_head_bytes(program: StepProgram, graph: ModelGraph) -> int:
    """Return the size of the buffer for the head's whole weight; 0 if the weight has one block.

    If weights are sharded, the result is also 0, because the gather already creates the whole weight.
    """
    if not program.sharding.shards.is_local:
        return 0
    head = graph.model.get_output_embeddings()
    names = {name for unit in graph.units if unit.module is head for _, _, name in unit.params}
    return sum(graph.layouts[name].num_elements for name in names & program.cuts.weights) * graph.dtype.itemsize
