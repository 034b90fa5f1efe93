"""How checkpoints are found, in which order a run tries them, and which checkpoints a save removes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.base.names import RANKS_NAME
from megatrain.checkpoint.document import Checkpoint, RankGeneration, merge_by_save
from megatrain.checkpoint.inventory import RunInventory, find_checkpoint, next_start, usable_checkpoint
from megatrain.checkpoint.listing import read_checkpoints
from megatrain.checkpoint.removal import prune
from megatrain.checkpoint.resume import find_candidates
from megatrain.checkpoint.writer import CheckpointFolder, CheckpointWriter
from megatrain.config.load import load_config
from megatrain.training.resolve import resolve_checkpoint
from megatrain.training.run_parts import make_copier
from oracles.run_state import make_state
from processes.golden import unpack
from processes.saved_run import SavedRun
from tiered import MiB, RamTier, TieredStore, list_generations


def single_rank_checkpoint(number: int, saved_at: str) -> Checkpoint:
    meta = {"saved_at": saved_at} if saved_at else {}
    return Checkpoint(Path("checkpoints"), number, (RankGeneration("", number),), meta)


def test_unreadable_checkpoints_rank_behind_newer_ones() -> None:
    """Otherwise a copy that is older than all readable checkpoints would come first, as if it were the newest."""
    damaged, own = single_rank_checkpoint(3, ""), single_rank_checkpoint(2, "2026-02")
    for saved_at, place in (("2026-01", 2), ("2026-02", 2), ("2026-03", 1)):
        copy = single_rank_checkpoint(1, saved_at)
        assert merge_by_save([damaged, own], [copy]).index(copy) == place
        assert merge_by_save([own, damaged], [copy]).index(copy) == (0 if saved_at == "2026-03" else 2)


def test_later_of_two_saves_in_one_second_resumes() -> None:
    """One process saves. Right afterwards, a run of two processes saves, with unrelated generation numbers."""
    state = make_state()
    first, second = (single_rank_checkpoint(number, state.with_save_time().saved_at) for number in (2, 1))
    of_before = single_rank_checkpoint(3, first.saved_at[:19] + "+00:00")  # saved by a version that wrote whole seconds
    for own, others in (([first], [second]), ([second], [first])):
        assert merge_by_save(own, others) == [second, first]
    assert merge_by_save([of_before], [first]) == [first, of_before]


def counted(number: int, save_number: int, saved_at: str) -> Checkpoint:
    return replace(single_rank_checkpoint(number, saved_at), meta={"saved_at": saved_at, "save_number": save_number})


def test_save_number_takes_precedence_over_clocks() -> None:
    """The clock was two hours ahead during the third save and its copy, and was then corrected."""
    own = [counted(5, 5, "2026-11-28T10:02"), counted(4, 4, "2026-11-28T10:01"), counted(3, 3, "2026-11-28T12:00")]
    copy = replace(own[2], folder=Path("copies"))
    assert merge_by_save(own, [copy]) == [*own, copy]
    # One process continued a run of several ranks. Their checkpoint has a larger generation number and a later time,
    # but is older.
    of_ranks = replace(counted(9, 2, "2027-01-01"), ranks=(RankGeneration("rank00000", 7, "0" * 16),))
    assert merge_by_save(own, [of_ranks]) == [*own, of_ranks] == merge_by_save([of_ranks], own)
    assert of_ranks.is_not_newer_than(own[2]) and not own[2].is_not_newer_than(of_ranks)
    assert own[0].order_key > own[2].order_key > of_ranks.order_key


def test_uncounted_saves_precede_counted_ones_in_time_order() -> None:
    old = [single_rank_checkpoint(2, "2026-11-02"), single_rank_checkpoint(1, "2026-11-01")]
    new = counted(3, 1, "2020-01-01")
    between = replace(single_rank_checkpoint(8, "2026-11-01T12"), folder=Path("copies"))
    assert merge_by_save([new, *old], [between]) == [new, old[0], between, old[1]]
    # An older version continued the run. Its saves count as newer than the last counted save.
    after = single_rank_checkpoint(4, "2019-01-01")
    copy = replace(new, folder=Path("copies"))
    assert merge_by_save([after, new, *old], [copy, between]) == [after, new, copy, old[0], between, old[1]]


def test_newest_and_best_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, 0, lambda item: [item], 2, print)
    known = [single_rank_checkpoint(number, f"2026-0{number}") for number in (1, 2, 3, 4)]
    assert folder.newest(known, 2) == known[2:] and folder.newest(known, 0) == []
    # The best checkpoint is identified by its generations, as a checkpoint of several ranks may have the same number.
    folder.best = replace(known[0], folder=tmp_path, lanes=9)
    assert folder.newest(known, 2) == [known[0], *known[2:]] and folder.newest(known, 0) == known[:1]
    folder.best = known[3]
    assert folder.newest(known, 2) == known[1:] and folder.newest(known, 0) == known[3:], "in addition to the newest"
    folder.best = replace(known[0], ranks=(RankGeneration("rank00000", 1, "0" * 16),))
    assert folder.newest(known, 2) == known[2:]


@pytest.mark.parametrize("keep", [1, 2])
def test_single_process_writer_lists_the_kept_checkpoints(keep: int, tmp_path: Path) -> None:
    """The writer also knows which checkpoint the next commit replaces, because a copy of it must end first."""
    tiers = [RamTier(MiB, pin_memory=False)]
    with TieredStore(tiers, path=str(tmp_path), keep_generations=keep) as store:
        folder = CheckpointFolder(tmp_path, 0, lambda item: [item], keep, print)
        writer, made = CheckpointWriter(folder, store, lanes=1, elements={}), []
        for step in (1, 2, 3):
            store.put("a", torch.full((1000,), float(step)))
            assert writer.outgoing() == (made[-1:] if keep == 1 else made[-2:-1])
            writer.begin()
            meta = {"step": step}
            made.append(writer.finish(store.commit(meta), meta))
            assert folder.known == made[-keep:]
            assert [each.ranks for each in read_checkpoints(tmp_path)] == [each.ranks for each in folder.known]
    assert not (tmp_path / RANKS_NAME).exists()


def test_ranks_remove_checkpoints_of_an_earlier_single_process(tmp_path: Path) -> None:
    folder = unpack("one", tmp_path).out / "checkpoints"
    known = read_checkpoints(folder)
    assert [each.number for each in known] == list_generations(folder) and len(known) == 2
    ranks = ["rank00000", "rank00001"]
    prune(folder, known, ranks)
    assert list_generations(folder) == [each.number for each in known]
    prune(folder, known[1:], ranks)
    assert list_generations(folder) == [known[1].number]
    prune(folder, [], [""])
    assert list_generations(folder) == [known[1].number], "the store of one process prunes its own"
    prune(folder, [], ranks)
    assert list_generations(folder) == []


def test_copy_size_includes_all_ranks(tmp_path: Path) -> None:
    """Homes may differ between ranks: rank 1 has five bytes on drives, and this rank has one."""

    class Group:
        def gather(self, item: object) -> list[object]:
            return [item, 5 if item == 1 else item]

    run = unpack("ranks", tmp_path)
    config = load_config(run.folder / "run.toml", overrides=["checkpoint.save_copy=true"]).config
    spec, world = resolve_checkpoint(config), SimpleNamespace(rank=0)
    run_spec = SimpleNamespace(checkpoint=spec, world=world)
    plan: Any = SimpleNamespace(checkpoint=SimpleNamespace(drive_bytes=1), run=run_spec)
    group: Any = Group()
    assert make_copier(plan, group, print)._drive_bytes == 6


def candidates_of(run: SavedRun) -> list[Checkpoint]:
    return find_candidates(resolve_checkpoint(load_config(run.folder / "run.toml").config), print)


def test_missing_drive_of_one_rank_is_reported(tmp_path: Path) -> None:
    """The drive may belong to another host: `ckpt` reports the missing path, and a run still tries the checkpoint."""
    run = unpack("ranks", tmp_path)
    gone = run.folder / "drive/rank00001"
    shutil.rmtree(gone)
    entries = RunInventory(run.out).entries
    for each in entries[:2]:
        (part,) = each.lost
        assert (part.path, part.is_there) == (str(gone), False)
        assert each.problem is not None and str(part) in each.problem
        assert {key.rpartition("/")[2] for key in part.blocks} == {"low", "m", "v"} and part.num_blocks == 12
    assert next_start(entries) is entries[3] and find_checkpoint(run.out).checkpoint.is_copy
    assert [(each.step, each.is_copy) for each in candidates_of(run)] == [(2, False), (2, True), (1, False), (1, True)]
    found = usable_checkpoint(run.out)
    assert found is not None and not found.is_copy


def test_copies_are_usable_after_a_drive_is_lost(tmp_path: Path) -> None:
    run = unpack("one", tmp_path)
    shutil.rmtree(run.folder / "drive")
    assert [(each.step, each.is_copy) for each in candidates_of(run)] == [(2, True), (1, True)]
    found = usable_checkpoint(run.out)
    assert found is not None and found.is_copy
