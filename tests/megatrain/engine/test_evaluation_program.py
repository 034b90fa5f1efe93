"""An evaluation pass leases only the units' weights, in the order of the forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.converters.spec import build_graph
from megatrain.engine.program.builder import ProgramBuilder
from megatrain.engine.program.forward_programs import evaluation_program
from megatrain.engine.program.step_program import GroupUpdates, StepProgram
from megatrain.optim.elementwise import AdamW
from megatrain.trace.trace import trace_visits
from oracles.families import tiny_config


def program_of(order: Any, *, defer_updates: bool = True, family: str = "llama") -> StepProgram:
    graph = build_graph(tiny_config(family, tied=True))
    trace = trace_visits(graph, 2, 8, torch.float32)
    return ProgramBuilder(
        graph,
        trace,
        num_micro_batches=3,
        order=order,
        compute_tier="ram",
        optimizer=AdamW(),
        updates=GroupUpdates(are_deferred=defer_updates),
    ).build()


@pytest.mark.parametrize("defer_updates", [True, False])
@pytest.mark.parametrize("order", ["layer", "micro_batch"])
def test_evaluation_pass_uses_only_weights_in_forward_and_head(order: Any, defer_updates: bool) -> None:
    program = evaluation_program(program_of(order, defer_updates=defer_updates))
    assert [(tick.phase, tick.visit) for tick in program.ticks] == [*(("forward", n) for n in range(5)), ("head", 5)]
    for tick in program.ticks:
        assert not tick.passing and not tick.spent
        assert all(mode == "r" and program.blocks[key].kind == "weights" for key, mode in tick.held)
    assert program.ticks == evaluation_program(program_of("layer")).ticks
    assert program.ticks[0].held == program.ticks[-1].held  # the head is tied to the embedding
    assert len(program.select_ticks()) == len(program.ticks)


def test_the_schedule_ends_with_the_last_pass() -> None:
    program = evaluation_program(program_of("layer"))
    homes = dict.fromkeys(program.blocks, "nvme")
    schedule = program.schedule(homes, 2)
    period = len(program.ticks)
    assert [tick for tick, _ in schedule.walk(period - 1)] == sorted(
        period + number for number, tick in enumerate(program.ticks) for _ in tick.held
    )
    assert not list(schedule.walk(2 * period - 1))
    assert not list(program.schedule(dict.fromkeys(program.blocks, "ram"), 2).walk(-1))
