"""Gradients share blocks, one after the other. The number of blocks is the largest number of concurrent gradients."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.engine.program.block_plan import BlockPlan
from megatrain.engine.program.sharing import MIN_FILL, share_gradients
from megatrain.engine.program.step_program import GroupUpdates, StepProgram, Tick

Lives = list[tuple[int, int, int]]  # first tick, last tick, elements


def program_of(lives: Lives, num_ticks: int = 30, *, deferred: bool = False) -> StepProgram:
    """Return a program with one gradient per lifetime. Ticks between the first and the last add to the gradient."""
    blocks = {
        f"u{n}/grad.0": BlockPlan(f"u{n}/grad.0", "gradients", size, torch.float32)
        for n, (*_, size) in enumerate(lives)
    }
    ticks = []
    for number in range(num_ticks):
        held, spent = [], set()
        for key, (start, stop, _) in zip(blocks, lives, strict=True):
            if start <= number <= stop:
                first, last = ("r", "w") if deferred else ("w", "r")
                held.append((key, first if number == start else last if number == stop else "rw"))
                if number == (start if deferred else stop):
                    spent.add(key)
        ticks.append(Tick("backward", number, tuple(held), spent=frozenset(spent)))
    return StepProgram(blocks, tuple(ticks), "ram", updates=GroupUpdates(are_deferred=deferred))


lives = st.lists(
    st.tuples(st.integers(0, 28), st.integers(1, 10), st.sampled_from([1024, 1024, 2048, 3072])).map(
        lambda life: (life[0], min(29, life[0] + life[1]), life[2])
    ),
    max_size=12,
)


@given(lives)
def test_live_gradients_never_share_a_block(given: Lives) -> None:
    before = program_of(given)
    after = share_gradients(before)
    where: dict[str, set[str]] = {}
    for number, (old, new) in enumerate(zip(before.ticks, after.ticks, strict=True)):
        assert len({key for key, _ in new.held}) == len(new.held) == len(old.held), "two in one block in one tick"
        for (key, mode), (block, new_mode) in zip(old.held, new.held, strict=True):
            assert after.contents(number, block) == before.blocks[key] and mode == new_mode
            assert after.blocks[block].num_elements * MIN_FILL <= before.blocks[key].num_elements
            assert after.blocks[block].num_elements >= before.blocks[key].num_elements
            assert (key in old.spent) == (block in new.spent)
            where.setdefault(key, set()).add(block)
    assert all(len(blocks) == 1 for blocks in where.values()), "a gradient never moves"
    for first, (start, stop, _) in zip(before.blocks, given, strict=True):
        for second, (other_start, other_stop, _) in zip(before.blocks, given, strict=True):
            if first != second and where[first] == where[second]:
                assert stop < other_start or other_stop < start, "the time between two uses is also a life"


@given(st.lists(st.tuples(st.integers(0, 28), st.integers(1, 10)), max_size=15))
def test_shared_blocks_match_concurrent_lifetimes(given: list[tuple[int, int]]) -> None:
    spans = [(start, min(29, start + length), 1024) for start, length in given]
    most = max((sum(start <= tick <= stop for start, stop, _ in spans) for tick in range(30)), default=0)
    assert len(share_gradients(program_of(spans)).blocks) == most


def test_blocks_alive_in_the_next_step_are_not_shared() -> None:
    spans = [(n, 29 - n, 1024) for n in range(5)]
    held = program_of(spans, deferred=True)
    assert share_gradients(held) == held


def test_many_layer_sizes_share_few_blocks() -> None:
    """Even if all layers have different sizes, as from an architecture search, a few blocks are enough."""
    chance = random.Random(7)
    sizes = [1024 * chance.randint(64, 128) for _ in range(40)]
    program = program_of([(2 * n, 2 * n + 1, size) for n, size in enumerate(sizes)], num_ticks=80)
    shared = share_gradients(program)
    assert len(shared.blocks) == 3
    assert 4 * max(sizes) < sum(block.nbytes for block in shared.blocks.values()) <= 3 * 4 * max(sizes)
