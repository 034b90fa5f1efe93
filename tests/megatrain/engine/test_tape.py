"""The tape: which copies are fetched, kept, written back or dropped, checked by hand and with a simple model."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.engine.program.block_plan import BlockPlan
from megatrain.engine.program.step_program import StepProgram, Tick
from megatrain.engine.tape.tape import BlockUse, PinnedCopy, Release, TapeStore, Use, compile_step, follow

UPDATE, FORWARD, BACKWARD = range(3)
BLOCKS = {
    "w": BlockPlan("w", "weights", 8, torch.float32),
    "m": BlockPlan("m", "optimizer", 8, torch.float32),
    "g": BlockPlan("g", "gradients", 8, torch.float32),
    "a": BlockPlan("a", "activations", 8, torch.float32),
}
PROGRAM = StepProgram(
    BLOCKS,
    (
        Tick("update", 0, (("w", "rw"), ("m", "rw"), ("g", "r")), spent=frozenset({"g"})),
        Tick("forward", 0, (("w", "r"),), ((("a", "w"),),)),
        Tick("backward", 0, (("w", "r"), ("g", "w")), ((("a", "r"),),), frozenset({"a"})),
    ),
    "ram",
)
HOMES = dict.fromkeys(BLOCKS, "nvme")
MODES = st.sampled_from(["r", "w", "rw"])
TO, BACK = ("nvme", "ram"), ("ram", "nvme")


def test_blocks_without_stays_are_fetched_and_written_back_per_use() -> None:
    tape = compile_step(PROGRAM, HOMES, {})
    moves = [(key, (src, dst)) for key, src, dst in tape.transfers(HOMES)]
    assert moves == [
        *[("w", TO), ("w", BACK), ("m", TO), ("m", BACK), ("g", TO)],  # the gradient is dead after the update
        *[("w", TO), ("a", BACK)],
        *[("w", TO), ("g", BACK), ("a", TO)],
    ]
    assert not tape.pinned


def test_staying_copy_is_fetched_once_and_returns_home_after_last_use() -> None:
    stays = {(UPDATE, "w"): FORWARD, (FORWARD, "w"): BACKWARD, (FORWARD, "a"): BACKWARD, (BACKWARD, "g"): UPDATE}
    first = compile_step(PROGRAM, HOMES, stays, updates=False)
    # A first step only reads w, so w is not written back. A saved block that stays until its next use never leaves.
    assert list(first.transfers(HOMES)) == [("w", *TO)]
    assert first.pinned == {"g": PinnedCopy("ram", is_newer=True)}
    step = compile_step(PROGRAM, HOMES, stays, pinned=first.pinned)
    assert list(step.transfers(HOMES)) == [("w", *TO), ("m", *TO), ("m", *BACK), ("w", *BACK)]
    assert step.pinned == first.pinned
    last = compile_step(PROGRAM, HOMES, stays, passes=False, pinned=step.pinned)
    assert list(last.transfers(HOMES)) == [("w", *TO), ("w", *BACK), ("m", *TO), ("m", *BACK)]
    assert not last.pinned
    by_key = {use.key: use for use in last.ops[0].uses}
    assert by_key["g"].was_pinned and by_key["g"].release is Release.DISCARD
    assert by_key["w"].release is Release.EVICT, "no later forward could use it"


def test_blocks_at_home_do_not_move() -> None:
    homes = {**HOMES, "w": "ram", "g": "ram"}
    tape = compile_step(PROGRAM, homes, {})
    releases = [use.release for op in tape.ops for use in op.uses if use.key in ("w", "g")]
    assert releases == [Release.HOME, Release.DISCARD, Release.HOME, Release.HOME, Release.HOME]
    assert {key for key, _, _ in tape.transfers(homes)} == {"m", "a"}


@pytest.mark.parametrize(("away", "num_groups"), [("", 0), ("m", 2), ("g", 2), ("w", 2)])
def test_update_parts_are_leased_together_if_none_waits_for_space(away: str, num_groups: int) -> None:
    parts = [(("m", "rw"), ("g", "r")), (("a", "rw"),)]
    update = Tick("update", 0, (("w", "rw"),), tuple(parts), frozenset({"g"}))
    forward = Tick("forward", 0, (("w", "r"),), ((("m", "r"),), (("a", "w"),)))
    program = StepProgram(BLOCKS, (update, forward), "ram")
    homes = dict.fromkeys(BLOCKS, "ram") | ({away: "nvme"} if away else {})
    first, second = compile_step(program, homes, {}).ops
    assert [use.key for use in first.uses] == ["w", "m", "g", "a"] and len(first.passing) == num_groups
    assert len(first.held) == (1 if away else 4)
    assert len(second.passing) == 2, "a model leases its parts one after the other, wherever they are"


@given(
    st.lists(
        st.tuples(st.sampled_from(["r", "w", "rw"]), st.sampled_from(["ram", "gpu"]), st.booleans(), st.booleans())
    ),
    st.sampled_from(["ram", "gpu", "nvme"]),
)
@settings(max_examples=200, deadline=None)
def test_followed_copies_match_moved_contents(uses: list[tuple[str, str, bool, bool]], home: str) -> None:
    """If versions move as the tape says, each reader finds the newest version, and every move is needed."""
    accesses = []
    for number, (mode, tier, is_last, wants_stay) in enumerate(uses):
        following = uses[number + 1] if number + 1 < len(uses) else None
        may_stay = following is not None and following[1] == tier != home and following[0] != "w" and not is_last
        accesses.append(BlockUse(number, mode, tier, is_last, wants_stay and may_stay))  # type: ignore[arg-type]
    found, kept = follow("k", accesses, home)
    assert kept is None
    newest = at_home = 0
    here: int | None = None
    is_dead = False
    for access, use in zip(accesses, found, strict=True):
        away = access.tier != home
        assert use.was_pinned == (here is not None)
        if use.needs_fetch:
            assert away and not use.was_pinned and access.mode != "w"
            here = at_home
        if access.mode != "w" and not is_dead:
            assert (here if away else at_home) == newest
        if access.mode != "r":
            newest, is_dead = newest + 1, False
            here, at_home = (newest, at_home) if away else (None, newest)
        if use.needs_write_back:
            assert away and here is not None and here > at_home, "nothing newer to write"
            at_home = here
        if use.release in (Release.EVICT, Release.DISCARD):
            assert use.release is Release.DISCARD or not away or at_home == newest or is_dead, "the newest is lost"
            here = None
        is_dead = is_dead or access.is_last
    for one, following_use in pairwise(found):
        assert following_use.was_pinned == (one.release is Release.PIN)


def test_copy_pinned_away_from_its_next_use_is_an_error() -> None:
    with pytest.raises(AssertionError):
        follow("k", [BlockUse(0, "r", "ram", False, False)], "nvme", PinnedCopy("gpu", is_newer=False))


def test_discards_are_batched_in_tape_order() -> None:
    store, releases = (
        mock.Mock(**{"tiers_between.return_value": ()}),
        ["HOME", "DISCARD", "HOME", "DISCARD", "EVICT", "HOME", "DISCARD"],
    )
    uses = [Use(f"b{number}", "rw", False, False, Release[release], False) for number, release in enumerate(releases)]
    TapeStore(store, dict.fromkeys((use.key for use in uses), "ram")).release_copies(uses, "gpu")
    calls = [call for call in store.mock_calls if call[0] != "tiers_between"]
    assert calls == [mock.call.discard("b1", "b3"), mock.call.evict("b4", "gpu"), mock.call.discard("b6")]
