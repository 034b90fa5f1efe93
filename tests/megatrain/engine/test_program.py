"""A step's program: which copies stay between ticks, where updates run, and the prefetcher's schedule."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from megatrain.base.layout import build_layout, views
from megatrain.engine.program.block_plan import BlockPlan
from megatrain.engine.program.step_program import GroupUpdates, StepProgram, Tick
from megatrain.engine.tape.pieces import zero_gaps
from megatrain.engine.tape.tape import Release, compile_step
from tiered import Access

UPDATE, FORWARD, HEAD, BACKWARD = range(4)
BLOCKS = {
    "w": BlockPlan("w", "weights", 8, torch.float32),
    "m": BlockPlan("m", "optimizer", 8, torch.float32),
    "g": BlockPlan("g", "gradients", 8, torch.float32),
}
TICKS = (
    Tick("update", 0, (("w", "rw"), ("m", "rw"), ("g", "r")), spent=frozenset({"g"})),
    Tick("forward", 0, (("w", "r"),)),
    Tick("head", 1, ()),
    Tick("backward", 0, (("w", "r"), ("g", "w"))),
)
PROGRAM = StepProgram(BLOCKS, TICKS, "gpu", updates=GroupUpdates(in_compute_tier=True))


def test_copy_stays_until_its_next_use() -> None:
    stays = {(UPDATE, "w"): FORWARD, (FORWARD, "w"): BACKWARD, (BACKWARD, "w"): UPDATE}

    program = replace(PROGRAM, compute_tier="ram", updates=GroupUpdates())
    homes = dict.fromkeys(BLOCKS, "nvme")

    def kept(**parts: bool) -> dict[int, set[str]]:
        tape = compile_step(program, homes, stays, **parts)
        return {op.tick: {use.key for use in op.uses if use.release is Release.PIN} for op in tape.ops}

    assert kept() == {UPDATE: {"w"}, FORWARD: {"w"}, HEAD: set(), BACKWARD: {"w"}}
    assert kept(updates=False) == {FORWARD: {"w"}, HEAD: set(), BACKWARD: {"w"}}, "the updates come after it"
    assert kept(passes=False) == {UPDATE: set()}, "no forward comes after the last step's updates"


def test_update_runs_on_the_tier_of_its_surviving_blocks() -> None:
    """The gradient is dead after the update, so its home does not matter."""
    homes = {"w": "gpu", "m": "gpu", "g": "ram"}
    update, forward = TICKS[UPDATE], TICKS[FORWARD]
    assert PROGRAM.tick_tier(update, homes) == "gpu"
    for key in ("w", "m"):
        assert PROGRAM.tick_tier(update, {**homes, key: "ram"}) == "ram"
    assert PROGRAM.tick_tier(forward, {**homes, "w": "ram"}) == "gpu"
    host_updates = StepProgram(BLOCKS, TICKS, "gpu")
    assert host_updates.tick_tier(update, homes) == "ram"


def test_schedule_lists_moved_and_written_blocks() -> None:
    """A read at home needs no schedule entry. A write at home needs one, so that no copy is fetched before it."""
    homes = {"w": "ram", "m": "gpu", "g": "gpu"}
    schedule = PROGRAM.schedule(homes, 2, first_step=3)
    period = len(TICKS)
    reached = [(tick, access) for tick in range(8 * period) for access in schedule.used_at(tick)]
    found = [(tick, access.key, access.tier, access.mode) for tick, access in reached]
    passes = [(FORWARD, "w", "gpu", "r"), (BACKWARD, "w", "gpu", "r"), (BACKWARD, "g", "gpu", "w")]
    updates = [(UPDATE, "w", "ram", "rw"), (UPDATE, "m", "ram", "rw"), (UPDATE, "g", "ram", "r")]
    steps = {3: passes, 4: [*updates, *passes], 5: updates}
    assert found == [(step * period + tick, *rest) for step, uses in steps.items() for tick, *rest in uses]
    assert Access(3 * period + UPDATE, "m", "ram", "rw") not in schedule


def test_gaps_in_gradient_blocks_are_zeroed() -> None:
    """Padding and parameters without a gradient are zeroed, because the norm is computed over the whole block."""
    layout = build_layout("unit", [("a", (3,)), ("b", (5, 2)), ("c", (2, 2))], trainable=True)
    names = [entry.name for entry in layout.entries]
    for count in range(len(names) + 1):
        for filled in itertools.combinations(names, count):
            flat = torch.full((layout.num_elements,), torch.nan)
            for name in filled:
                views(flat, layout)[name].fill_(1.0)
            parts = [range(1000), range(1000, 1500), range(1500, layout.num_elements)]
            zero_gaps([flat[part.start : part.stop] for part in parts], parts, layout, set(filled))
            assert flat.sum() == sum(views(flat, layout)[name].numel() for name in filled), filled
