"""After a power cut, a store opens with a complete generation, at least as new as the last finished commit.

The first tests use a simulated disk, which loses data that real disks would keep. The others use a real file system.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.record_files import record
from fakes.recorded_disk import SURVIVALS, Disk, Mark, Names, Recording, Survival, Sync, cut_power, scan
from oracles.power_cut_runs import LAYOUTS, Contents, History, Layout, Trainer, check_newest, check_older
from tiered import MiB, TieredError
from tiered.durable.manifest import Manifest, forget_generation, list_generations, write_manifest

pytestmark = pytest.mark.fault

Drive = Any  # ``Drive`` in conftest.py


def make_event_recorder(recording: Recording) -> Callable[[str, int], None]:
    """Return a function that records the trainer's events between the operations on the disk."""
    return lambda what, number: recording.mark(f"{what} {number}")


def train(recording: Recording, layout: Layout) -> dict[int, Contents]:
    """Open a store three times and commit ten times in total. Return the committed contents by commit number.

    Blocks are changed, added, discarded and removed. The third opening rolls back to an earlier generation.
    """
    root, history, tell = recording.root, History(), make_event_recorder(recording)
    with layout.new(root) as store:
        trainer = Trainer(store, history, tell)
        trainer.register(layout)
        trainer.commit("embedding")
        trainer.change("layer.0/weight", "layer.0/m")
        trainer.commit("layer.0/weight", "layer.1/weight", "embedding")
        store.register("late", (2500,), torch.float16, home=layout.home(0))
        trainer.change("late", "layer.1/weight")
        trainer.discard("layer.0/m")
        trainer.commit()
        trainer.change("layer.0/m", "embedding")
        trainer.commit("embedding", "late")
    with layout.open(root) as store:
        trainer = Trainer(store, history, tell, start=4)
        trainer.change("layer.0/weight")
        trainer.commit("layer.0/weight", "layer.0/m")
        trainer.discard("layer.1/weight", forget=True)
        trainer.change("embedding", "late")
        trainer.commit("layer.0/m")
        trainer.commit()
    before_last = list_generations(root / layout.generations)[-2:][0]
    number = layout.number(root, before_last)
    with layout.open(root, before_last) as store:
        tell("back", number)
        trainer = Trainer(store, history, tell, start=number)
        for _ in range(3):
            trainer.change("layer.0/m", "embedding")
            trainer.commit("layer.0/weight", "embedding")
    return history.expected


def recorded(layout: Layout, root: Path) -> tuple[Recording, dict[int, Contents]]:
    root.mkdir()
    with record(root) as recording:
        expected = train(recording, layout)
    assert recording.disk().listing() == scan(root)[0].listing(), "an operation was not recorded"
    return recording, expected


def history_at(recording: Recording, expected: dict[int, Contents], cut: int, safe: int = 0) -> History:
    """Return the history of commits up to the power cut. ``safe`` is the last commit before the recording, or 0."""
    history = History(expected, safe, [safe] * bool(safe), [safe] * bool(safe))
    for operation in recording.operations[:cut]:
        if isinstance(operation, Mark):
            what, number = operation.text.split()
            history.tell(what, int(number))
    return history


# -- where to cut ----------------------------------------------------------------------------------------------

_PHASE_AFTER = {
    "freeze": "making room and freezing",
    "frozen": "writing and flushing",
    "waited": "between commits",
    "back": "between commits",
}
_LATE_PHASES = ("sealing", "flipping", "deleting old ones")  # when ``commit`` returns, its thread may already be here


def phases(recording: Recording, generations: str) -> list[str]:
    """Return the phase of a commit that a power cut hits, by the number of operations before the cut."""
    phase, found = "before the first commit", []
    for operation in recording.operations:
        found.append(phase)
        is_manifest = isinstance(operation, Names) and operation.place.endswith("/MANIFEST.tmp")
        is_top = operation.place == f"{generations}/MANIFEST.tmp"
        if isinstance(operation, Mark) and not (phase in _LATE_PHASES and "frozen" in operation.text):
            phase = _PHASE_AFTER[operation.text.split()[0]]
        elif phase in ("making room and freezing", "writing and flushing") and is_manifest and not is_top:
            phase = "sealing"
        elif phase == "sealing" and is_manifest and is_top:
            phase = "flipping"
        elif phase == "flipping" and isinstance(operation, Sync) and operation.place == generations:
            phase = "deleting old ones"
    return [*found, phase]


def choose_cuts(recording: Recording, generations: str, num: int, chance: random.Random) -> list[tuple[int, Survival]]:
    """Choose ``num`` power cuts and what survives each. Two fifths are in the phases sealing and flipping."""
    all_phases = phases(recording, generations)
    dense = [cut for cut, phase in enumerate(all_phases) if phase in ("sealing", "flipping")]
    others = [cut for cut, phase in enumerate(all_phases) if phase not in ("sealing", "flipping")]
    num_dense = num * 2 // 5
    cuts = [dense[int(len(dense) * (i + chance.random()) / num_dense)] for i in range(num_dense)]
    num_others = num - num_dense
    cuts += [others[int(len(others) * (i + chance.random()) / num_others)] for i in range(num_others)]
    survivals = [SURVIVALS[i % len(SURVIVALS)] for i in range(num)]
    chance.shuffle(survivals)
    return list(zip(cuts, survivals, strict=True))


# -- cutting ---------------------------------------------------------------------------------------------------


def recreate_folder(root: Path, disk: Disk) -> None:
    shutil.rmtree(root)
    root.mkdir()
    disk.make(root)


def commit_again(history: History, layout: Layout, root: Path, survival: Survival, chance: random.Random) -> None:
    """Resume from the surviving files, commit once more, and check power cuts during and after this commit."""
    found = check_newest(root, layout, history)
    expected = dict(history.expected)
    with record(root) as recording, layout.open(root) if found else layout.new(root) as store:
        trainer = Trainer(store, History(expected), make_event_recorder(recording), start=found)
        if not found:
            trainer.register(layout)
        trainer.change("embedding")
        trainer.commit("embedding")
    assert recording.disk().listing() == scan(root)[0].listing(), "an operation was not recorded"
    cuts = [len(recording.operations), *(chance.randrange(len(recording.operations)) for _ in range(2))]
    for cut in cuts:
        recreate_folder(root, cut_power(recording, cut, survival, chance))
        check_newest(root, layout, history_at(recording, expected, cut, safe=found))


def check_power_cuts(layout: Layout, folder: Path, num: int) -> Iterator[str]:
    """Cut the power of a recorded run at ``num`` points and check the surviving files. Yield the rows of a table."""
    root = folder / "recorded"
    chance = random.Random(f"{layout.name} {num}")
    recording, expected = recorded(layout, root)
    all_phases = phases(recording, layout.generations)
    rows: Counter[tuple[str, str]] = Counter()
    for count, (cut, survival) in enumerate(choose_cuts(recording, layout.generations, num, chance)):
        disk = cut_power(recording, cut, survival, chance)
        history = history_at(recording, expected, cut)
        recreate_folder(root, disk)
        try:
            found = check_newest(root, layout, history)
            if count % 4 == 0:
                recreate_folder(root, disk)
                check_older(root, layout, history, found)
            elif count % 8 == 1:
                recreate_folder(root, disk)
                commit_again(history, layout, root, survival, chance)
        except Exception as error:
            error.add_note(f"{layout.name}: cut after operation {cut} ({recording.operations[cut - 1]}), {survival}")
            raise
        rows[all_phases[cut], _which(found, history)] += 1
    yield f"{layout.name}: {num} cuts in {len(recording.operations)} operations"
    for (phase, which), times in sorted(rows.items()):
        yield f"  {phase:<26} {which:<36} {times:>5}"


def _which(found: int, history: History) -> str:
    if found > history.safe:
        return "one that had been gone back behind" if found in history.waited else "the one under way"
    return "the last waited for" if found else "none, as there was none"


# -- the tests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_power_cut_leaves_a_whole_generation(layout: Layout, folder_in_memory: Path) -> None:
    rows = list(check_power_cuts(layout, folder_in_memory, 32))
    print("\n".join(rows))
    assert sum(int(row.split()[-1]) for row in rows[1:]) == 32


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_power_cut_before_the_first_commit_leaves_a_usable_folder(layout: Layout, folder_in_memory: Path) -> None:
    root, chance, history = folder_in_memory / "recorded", random.Random(layout.name), History()
    root.mkdir()
    with record(root) as recording, layout.new(root) as store:
        trainer = Trainer(store, History(), make_event_recorder(recording))
        trainer.register(layout)
        trainer.commit()
    for cut in range(40):  # in these operations, directories are created and claimed
        for survival in chance.sample(SURVIVALS, 3):
            recreate_folder(root, cut_power(recording, cut, survival, chance))
            assert check_newest(root, layout, history) == 0, (recording.operations[cut - 1], survival)


def test_a_power_cut_brings_no_forgotten_generation_back(folder_in_memory: Path) -> None:
    root = folder_in_memory / "recorded"
    for generation in (1, 2):
        write_manifest(root, Manifest(generation, ()))
    with record(root) as recording:
        forget_generation(root, 1)
    for survival in SURVIVALS:
        recreate_folder(root, cut_power(recording, len(recording.operations), survival, random.Random(0)))
        assert list_generations(root) == [2], survival


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_600_power_cuts_each_leave_a_whole_generation(layout: Layout, folder_in_memory: Path) -> None:
    rows = list(check_power_cuts(layout, folder_in_memory, 600))
    print("\n".join(rows))
    assert sum(int(row.split()[-1]) for row in rows[1:]) == 600
    assert any("under way" in row for row in rows) and any("waited for" in row for row in rows)


# -- a real file system ----------------------------------------------------------------------------------------


class DoomedRun:
    """Run that commits repeatedly in a thread, until its drive dies."""

    def __init__(self, root: Path, layout: Layout, history: History, start: int) -> None:
        self.history, self.error = history, None
        self._root, self._layout, self._start_number = root, layout, start
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def join(self) -> BaseException:
        self._thread.join(120)
        assert not self._thread.is_alive() and self.error is not None
        return self.error

    def _run(self) -> None:
        self.error: BaseException | None
        try:
            with self._layout.open(self._root) if self._start_number else self._layout.new(self._root) as store:
                trainer = Trainer(store, self.history, self.history.tell, start=self._start_number)
                if not self._start_number:
                    trainer.register(self._layout)
                while True:
                    trainer.commit("embedding", "layer.0/weight")
                    trainer.change("layer.0/m", "layer.1/weight")
        except BaseException as error:
            self.error = error


def check_real_power_cuts(drive: Drive, layout: Layout, num: int, chance: random.Random) -> Counter[str]:
    """Kill a drive ``num`` times during commits, and count which generation survived."""
    history, found = History(), 0
    rows: Counter[str] = Counter()
    for _ in range(num):
        run = DoomedRun(drive.path / "store", layout, history, start=found)
        time.sleep(chance.uniform(0.0, 0.5))
        drive.die()
        error = run.join()
        assert isinstance(error, TieredError | OSError), repr(error)
        drive.start_again()
        found = check_newest(drive.path / "store", layout, history)
        check_older(drive.path / "store", layout, history, found)
        rows[_which(found, history)] += 1
        history.tell("back", found)
        if found and found not in history.line:
            history.tell("waited", found)
    return rows


def test_power_cuts_of_a_real_file_system(make_drive: Callable[[int], Drive]) -> None:
    rows = check_real_power_cuts(make_drive(64 * MiB), LAYOUTS[-1], 3, random.Random(1))
    print(dict(rows))
    assert rows.total() == 3


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_many_power_cuts_of_a_real_file_system(layout: Layout, make_drive: Callable[[int], Drive]) -> None:
    rows = check_real_power_cuts(make_drive(64 * MiB), layout, 24, random.Random(layout.name))
    print(layout.name, dict(rows))
    assert rows.total() == 24 and rows["none, as there was none"] < 24
