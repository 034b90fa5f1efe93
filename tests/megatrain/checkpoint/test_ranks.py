"""Checkpoints of several ranks: generations of real stores, combined into a checkpoint by one document."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.base.names import RANKS_NAME
from megatrain.checkpoint.document import Checkpoint
from megatrain.checkpoint.listing import folder_notices, read_checkpoints
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.checkpoint.removal import forget_checkpoint
from megatrain.checkpoint.state import CheckpointError
from megatrain.checkpoint.writer import CheckpointFolder, CheckpointWriter
from megatrain.ranks.shards import RankShards
from megatrain.ranks.world import rank_folder_name, store_paths
from tiered import GenerationReader, NvmeTier, RamTier, TieredStore, list_generations
from tiered.errors import CorruptBlockError, GenerationError, NewerFormatError

#: Elements of each unsharded block. Shards consist of units of 65,536 elements: a block may have less than one unit, or
#: more than five.
SIZES = {"norm/weight": 1024, "layer/weight": 5 * 65_536 + 3072, "layer/m": 65_536, "layer/v": 2 * 65_536}
PATIENCE_S = 20.0


class Gatherer:
    """Exchange of objects between threads that act as ranks."""

    def __init__(self, size: int) -> None:
        self._items: list[object] = [None] * size
        self._barrier = threading.Barrier(size, timeout=PATIENCE_S)

    def gather(self, rank: int, item: object) -> list[object]:
        self._items[rank] = item
        self._barrier.wait()
        found = list(self._items)
        self._barrier.wait()
        return found


def contents(key: str, step: int) -> torch.Tensor:
    return torch.randn(SIZES[key], generator=torch.Generator().manual_seed(sum(map(ord, key)) + 1000 * step))


@contextmanager
def rank_store(folder: Path, rank: int, size: int) -> Iterator[TieredStore]:
    """Open a rank's store with its shards. The blocks are alternately in RAM and on the rank's drive."""
    name = store_paths(size)[rank]
    tiers = [RamTier(32 << 20), NvmeTier([str(folder / "drive" / name)], 64 << 20)]
    with TieredStore(tiers, path=str(folder / "checkpoints" / name), overwrite=True) as store:
        shards = RankShards(rank, size)
        for number, (key, length) in enumerate(SIZES.items()):
            home = "nvme" if number % 2 else "ram"
            store.register(key, (shards.num_elements(range(length)),), torch.float32, home=home)
        yield store


def fill(store: TieredStore, rank: int, size: int, step: int) -> None:
    shards = RankShards(rank, size)
    for key, length in SIZES.items():
        owned = shards.owned_range(range(length))
        with store.acquire(key, "ram", "w") as lease:
            lease.tensor.zero_()
            lease.tensor[: len(owned)] = contents(key, step)[owned.start : owned.stop]


def make_writer(
    folder: Path, rank: int, gather: Callable[[object], Sequence[Any]], store: TieredStore
) -> CheckpointWriter:
    kept = CheckpointFolder(folder / "checkpoints", rank, gather, 2, print)
    return CheckpointWriter(kept, store, lanes=4, elements=SIZES)


def write(folder: Path, size: int, steps: Sequence[int]) -> list[Checkpoint]:
    """Save the steps with ``size`` threads as ranks. Return the checkpoints that the document lists."""
    gatherer, problems = Gatherer(size), []

    def run(rank: int) -> None:
        try:
            with rank_store(folder, rank, size) as store:
                saves = make_writer(folder, rank, lambda item: gatherer.gather(rank, item), store)
                for step in steps:
                    fill(store, rank, size, step)
                    saves.begin()
                    meta = {"step": step}
                    saves.finish(store.commit(meta), meta)
        except BaseException as error:
            problems.append(error)
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not problems and not any(thread.is_alive() for thread in threads), problems
    return read_checkpoints(folder / "checkpoints")


def assert_contents_match(checkpoint: Checkpoint) -> None:
    reader = CheckpointReader(checkpoint)
    for key in SIZES:
        out = torch.empty(SIZES[key])
        reader.read(key, out)
        assert torch.equal(out, contents(key, checkpoint.meta["step"])), (key, checkpoint.meta)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Save step 7 with 1, 2 and 3 ranks. Return the folder for each number of ranks."""
    folders = {size: tmp_path_factory.mktemp(f"world{size}") for size in (1, 2, 3)}
    for size, folder in folders.items():
        write(folder, size, [7])
    return folders


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_other_world_sizes_read_their_block_ranges(written: dict[int, Path], data: st.DataObject) -> None:
    """A rank in a run with another number of ranks reads its range of a block correctly from the old shards."""
    folder = written[data.draw(st.sampled_from([1, 2, 3]))]
    (checkpoint,) = read_checkpoints(folder / "checkpoints")
    reader, key = CheckpointReader(checkpoint), data.draw(st.sampled_from(list(SIZES)))
    world = data.draw(st.integers(1, 6))
    shards = RankShards(data.draw(st.integers(0, world - 1)), world)
    owned = shards.owned_range(range(SIZES[key]))
    found = reader.read_range(key, 4 * owned.start, 4 * owned.stop).view(torch.float32)
    assert torch.equal(found, contents(key, 7)[owned.start : owned.stop])
    assert list(reader.problems()) == []


def test_document_limits_the_checkpoints_that_stores_keep(tmp_path: Path) -> None:
    known = write(tmp_path, 2, [1, 2, 3, 4])
    assert [each.meta["step"] for each in known] == [3, 4]
    for each in known:
        assert_contents_match(each)
    for rank in range(2):
        named = [each.ranks[rank].generation for each in known]
        assert list_generations(tmp_path / "checkpoints" / rank_folder_name(rank)) == named
    forget_checkpoint(known[0])
    assert [each.meta["step"] for each in read_checkpoints(tmp_path / "checkpoints")] == [4]
    assert_contents_match(known[1])
    assert list_generations(tmp_path / "checkpoints" / rank_folder_name(1)) == [known[1].ranks[1].generation]


def test_restarted_run_keeps_unnamed_generations_until_its_checkpoint(tmp_path: Path) -> None:
    """A copy of a live run may lack ``RANKS.json``. Its generations are then not checkpoints, but stay for a while."""
    write(tmp_path, 2, [1, 2])
    folder = tmp_path / "checkpoints"
    (folder / "RANKS.json").unlink()
    assert read_checkpoints(folder) == []
    (notice,) = folder_notices(folder)
    assert "RANKS.json' names no checkpoint" in notice and "rank00000: 1, 2; rank00001: 1, 2" in notice
    gatherer = Gatherer(2)
    seen: dict[int, list[list[int]]] = {0: [], 1: []}

    def start_over(rank: int) -> None:
        def gather(item: object) -> Sequence[Any]:
            return gatherer.gather(rank, item)

        with rank_store(tmp_path, rank, 2) as store:
            kept = CheckpointFolder(folder, rank, gather, 2, print)
            saves = CheckpointWriter(kept, store, lanes=4, elements=SIZES, is_new_run=True)
            for step in (5, 6, 7):
                fill(store, rank, 2, step)
                saves.begin()
                commit = store.commit({"step": step})
                commit.wait(60)
                seen[rank].append(list_generations(folder / rank_folder_name(rank)))
                saves.finish(commit, {"step": step})

    threads = [threading.Thread(target=start_over, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    # The first commit leaves the old generations. The second commit, after this run's first checkpoint, removes them.
    assert seen[0] == seen[1] == [[1, 2, 3], [3, 4], [4, 5]]
    assert [each.meta["step"] for each in read_checkpoints(folder)] == [6, 7] and folder_notices(folder) == []


def test_generations_without_a_document_are_abandoned(tmp_path: Path) -> None:
    """If only one rank has the next generation, the document is unchanged. The next start resumes its checkpoint."""
    (before,) = write(tmp_path, 2, [1])
    with rank_store(tmp_path, 0, 2) as store:
        store.load(before.ranks[0].generation)
        store.keep_only(lambda: [before.ranks[0].generation])
        fill(store, 0, 2, 2)
        store.commit({}).wait()
    assert read_checkpoints(tmp_path / "checkpoints") == [before]
    assert_contents_match(before)

    gatherer = Gatherer(2)

    def go_on(rank: int) -> None:
        with rank_store(tmp_path, rank, 2) as store:
            saves = make_writer(tmp_path, rank, lambda item: gatherer.gather(rank, item), store)
            store.load(before.ranks[rank].generation)
            fill(store, rank, 2, 3)
            saves.begin()
            saves.finish(store.commit({}), {"step": 3})

    with ExitStack() as stack:
        threads = [threading.Thread(target=go_on, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
            stack.callback(thread.join, PATIENCE_S)
    known = read_checkpoints(tmp_path / "checkpoints")
    assert [each.meta["step"] for each in known] == [1, 3]
    for each in known:
        assert_contents_match(each)
    # The abandoned generations are gone.
    assert len(list_generations(tmp_path / "checkpoints" / "rank00000")) == 2


def test_first_save_drops_unloadable_checkpoints(tmp_path: Path) -> None:
    """The older, loadable checkpoint stays, because a crash in the save would otherwise leave none.
    All ranks agree on the free space and on the stop.
    """
    one, two = write(tmp_path, 2, [1, 2])
    gatherer, found, files = Gatherer(2), {}, []
    for each in two.ranks:  # a copy of the checkpoint on the same file system may link to its files
        numbered = sorted((tmp_path / "checkpoints" / each.path / "snap" / f"{each.generation:08d}").rglob("c/*"))
        os.link(numbered[0], tmp_path / f"copy of {each.path}")
        files += [os.open(path, os.O_RDONLY) for path in numbered]

    def run(rank: int) -> None:
        with rank_store(tmp_path, rank, 2) as store:
            saves = CheckpointWriter(
                CheckpointFolder(tmp_path / "checkpoints", rank, lambda item: gatherer.gather(rank, item), 2, print),
                store,
                lanes=4,
                elements=SIZES,
                is_past=lambda each: each.meta["step"] < 2,
            )
            store.load(read_checkpoints(tmp_path / "checkpoints")[0].ranks[rank].generation)
            free, stops = saves.agree_on_free_space(lambda: 10, is_stopping=rank == 1)
            saves.begin()
            left = [each.meta["step"] for each in read_checkpoints(tmp_path / "checkpoints")]
            fill(store, rank, 2, 3)
            saves.finish(store.commit({}), {"step": 3})
            found[rank] = left, free, stops

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found[0] == found[1]
    left, free, stops = found[0]
    sizes = [(status.st_nlink, status.st_blocks * 512) for status in map(os.fstat, files)]
    for file in files:
        os.close(file)
    assert {links for links, _ in sizes} == {0, 1}, "all files of step 2 were removed; copies keep theirs"
    assert left == [1] and stops and free == 10 + sum(nbytes for links, nbytes in sizes if not links) > 10
    assert read_checkpoints(tmp_path / "checkpoints")[0] == one
    one, three = read_checkpoints(tmp_path / "checkpoints")
    assert_contents_match(one)
    assert_contents_match(three)


def test_failed_write_of_a_rank_keeps_the_old_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (before,) = write(tmp_path, 2, [1])
    gatherer, raised = Gatherer(2), []

    def run(rank: int) -> None:
        with rank_store(tmp_path, rank, 2) as store:
            saves = make_writer(tmp_path, rank, lambda item: gatherer.gather(rank, item), store)
            fill(store, rank, 2, 2)
            saves.begin()
            commit = store.commit({})
            if rank == 1:
                commit.wait()
                (
                    tmp_path / "checkpoints" / "rank00001" / "snap" / f"{commit.generation:08d}" / "MANIFEST.json"
                ).unlink()
            try:
                saves.finish(commit, {"step": 2})
            except CheckpointError as error:
                raised.append(str(error))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(raised) == 2 and all("no checkpoint was made: rank 1:" in text for text in raised)
    assert read_checkpoints(tmp_path / "checkpoints") == [before]
    assert_contents_match(before)


def test_damage_is_named_with_its_rank(tmp_path: Path) -> None:
    (checkpoint,) = write(tmp_path, 2, [1])
    folder = tmp_path / "checkpoints"
    file = Path(GenerationReader(folder / "rank00001").files("layer/weight")[0].path)
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    reader = CheckpointReader(checkpoint)
    with pytest.raises(CorruptBlockError, match=r"rank 1: block 'layer/weight'"):
        reader.read("layer/weight", torch.empty(SIZES["layer/weight"]))
    assert any(problem.startswith("rank 1: ") for problem in reader.problems())
    manifest = next((folder / "rank00000" / "snap").glob("*/MANIFEST.json"))
    manifest.write_text(manifest.read_text() + " ")
    with pytest.raises(GenerationError, match=r"rank 0 .*RANKS\.json says"):
        CheckpointReader(checkpoint)
    (folder / "rank00001").rename(folder / "elsewhere")
    manifest.write_text(manifest.read_text()[:-1])
    with pytest.raises(GenerationError, match=r"rank 1 \('.*rank00001'\)"):
        CheckpointReader(checkpoint)


def test_a_document_that_is_damaged_or_newer_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 2, [1])
    path = tmp_path / "checkpoints" / RANKS_NAME
    text = path.read_text()
    path.write_text(text.replace('"step": 1', '"step": 2'))
    with pytest.raises(GenerationError, match="its checksum does not match"):
        read_checkpoints(path.parent)
    path.write_text(json.dumps({**json.loads(text), "format": 99}))
    with pytest.raises(NewerFormatError, match="has format 99"):
        read_checkpoints(path.parent)
    path.write_text("{")
    with pytest.raises(GenerationError, match="cannot be read"):
        read_checkpoints(path.parent)


def gather_by_files(folder: Path, rank: int, size: int) -> Callable[[object], list[Any]]:
    """Return a function that exchanges objects between processes. A process exits if another one stays silent."""
    turn = iter(range(1 << 30))

    def gather(item: object) -> list[Any]:
        number = next(turn)
        mine = folder / f"{number}.{rank}"
        mine.with_suffix(f".{rank}.tmp").write_bytes(pickle.dumps(item))
        mine.with_suffix(f".{rank}.tmp").rename(mine)
        found, deadline = [], time.monotonic() + PATIENCE_S
        for other in range(size):
            while not (path := folder / f"{number}.{other}").exists():
                if time.monotonic() > deadline:
                    os._exit(3)
                time.sleep(0.0005)
            found.append(pickle.loads(path.read_bytes()))
        return found

    return gather


def _rank_process(folder: Path, meeting: Path, rank: int, size: int) -> None:
    """Resume the newest checkpoint, and save step after step until a rank is killed."""
    torch.set_num_threads(1)
    with rank_store(folder, rank, size) as store:
        saves = make_writer(folder, rank, gather_by_files(meeting, rank, size), store)
        known = read_checkpoints(folder / "checkpoints")
        step = 0
        if known:
            store.load(known[-1].ranks[rank].generation)
            step = known[-1].meta["step"]
        while True:
            step += 1
            fill(store, rank, size, step)
            saves.begin()
            saves.finish(store.commit({}), {"step": step})
            if rank == 0:
                (folder / "acknowledged.tmp").write_text(str(step))
                (folder / "acknowledged.tmp").rename(folder / "acknowledged")


@pytest.mark.parametrize("num_kills", [5, pytest.param(150, marks=pytest.mark.slow)])
def test_killing_a_rank_at_any_time_loses_no_checkpoint(num_kills: int, tmp_path: Path) -> None:
    """After each kill, the document names generations that are complete on all ranks. No acknowledged step is lost."""
    chance, size = random.Random(3), 2
    newest = 0
    for number in range(num_kills):
        meeting = tmp_path / f"meeting{number}"
        meeting.mkdir()
        children: list[int] = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                try:
                    _rank_process(tmp_path, meeting, rank, size)
                finally:
                    os._exit(4)
            children.append(child)
        acknowledged = tmp_path / "acknowledged"
        if number % 2:  # wait for a new checkpoint; otherwise, kill at any instant
            deadline = time.monotonic() + PATIENCE_S
            before = acknowledged.stat().st_mtime_ns if acknowledged.exists() else 0
            while not acknowledged.exists() or acknowledged.stat().st_mtime_ns == before:
                assert time.monotonic() < deadline, "no checkpoint was made"
                time.sleep(0.002)
        time.sleep(chance.uniform(0.0, 0.4))
        victim = children[number // 2 % size]
        os.kill(victim, signal.SIGKILL)
        time.sleep(chance.uniform(0.0, 0.1))  # meanwhile, the other rank must not save half a checkpoint
        for child in children:
            if child != victim:
                os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        known = read_checkpoints(tmp_path / "checkpoints")
        for each in known:
            assert_contents_match(each)
        said = int(acknowledged.read_text()) if acknowledged.exists() else 0
        assert (known[-1].meta["step"] if known else 0) >= max(said, newest)
        newest = known[-1].meta["step"] if known else 0
    assert newest > 0, "no process reached a checkpoint"
