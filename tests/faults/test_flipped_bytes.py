"""If any bit of a checkpoint is flipped, an error names the file, or the contents that are read are unchanged."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fakes.recorded_disk import Disk, scan
from oracles.power_cut_runs import Contents, contents_of, same
from tiered import GenerationReader, KiB, MiB, NvmeTier, RamTier, TieredError, TieredStore

pytestmark = pytest.mark.fault

META = {"number": 2, "rate": 1e-05, "text": "any"}
#: Files and folders that belong to no checkpoint: current contents, reusable files, locks and write counts.
_NOT_OF_IT = {"live", ".pool", "LOCK", "WEAR.json"}
_SMALL = {"a": (4000, "ram"), "layer.0/b": (8100, "nvme"), "layer.0/c": (3900, "nvme")}
_LARGE = {"a": (MiB + 1234, "ram"), "layer.0/b": (3 * MiB - 77, "nvme"), "layer.0/c": (2 * MiB, "nvme")}


@dataclass
class Checkpoint:
    """Second of two generations, on two drives. Its files were copied from RAM, or hard-linked to files on a drive."""

    root: Path
    expected: Contents
    disk: Disk
    files: list[Path]

    @property
    def path(self) -> Path:
        return self.root / "checkpoints"

    def problems(self) -> list[str]:
        """Return the problems found. If there are none, read all blocks and assert that they are unchanged."""
        try:
            reader = GenerationReader(self.path)
            if reader.notice is not None and reader.generation != META["number"]:
                return [reader.notice]  # the earlier generation is read, with a message
            if problems := list(reader.problems()):
                return problems
            found = {}
            for key in reader.blocks:
                spec = reader.spec(key)
                found[key] = torch.empty(spec.num_elements, dtype=spec.dtype)
                reader.read(key, found[key])
        except TieredError as error:
            return [str(error)]
        assert dict(reader.manifest.meta) == META and same(found, self.expected), "changed without an error"
        return []

    def open(self) -> str:
        """Open a store from the checkpoint and commit again. Return the error, or "" if the contents are unchanged."""
        notices: list[str] = []
        try:
            tiers = [RamTier(16 * MiB, pin_memory=False), _drives(self.root)]
            store = TieredStore.open(str(self.path), tiers, on_notice=notices.append)
        except TieredError as error:
            return str(error)
        with store:
            if notices and not same(contents_of(store), self.expected):
                return notices[0]
            assert same(contents_of(store), self.expected), "changed without an error"
            store.commit(META).wait(60)
        return ""

    def restore(self) -> None:
        shutil.rmtree(self.root)
        self.root.mkdir()
        self.disk.make(self.root)

    def twin(self, path: Path) -> Path:
        """Return the file of the first generation that corresponds to a file of the second."""
        return Path(str(path).replace("/00000002/", "/00000001/"))


def _drives(root: Path) -> NvmeTier:
    paths = [root / "drive", root / "second"]
    return NvmeTier(paths, 64 * MiB, chunk_bytes=4 * KiB if _is_small(root) else MiB, on_notice=lambda text: None)


def _is_small(root: Path) -> bool:
    return root.name == "small"


def make_checkpoint(root: Path) -> Checkpoint:
    root.mkdir()
    expected: Contents = {}
    with TieredStore([RamTier(16 * MiB, pin_memory=False), _drives(root)], path=str(root / "checkpoints")) as store:
        for number in (1, 2):
            generator = torch.Generator().manual_seed(number)
            for key, (nbytes, home) in (_SMALL if _is_small(root) else _LARGE).items():
                if number == 1:
                    store.register(key, (nbytes,), torch.uint8, home=home)
                expected[key] = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
                with store.acquire(key, "ram", "w") as lease:
                    lease.tensor.copy_(expected[key])
            store.commit({**META, "number": number}).wait(60)
    for drive in ("drive", "second"):
        shutil.rmtree(root / drive / "live")  # otherwise every linked file would count twice
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink()]
    files = [path for path in files if not _NOT_OF_IT & set(path.parts) and "00000001" not in path.parts]
    files.remove(root / "second" / "zarr.json")  # marks the owner of the directory; not part of the checkpoint
    checkpoint = Checkpoint(root, expected, scan(root)[0], files)
    assert checkpoint.problems() == []
    return checkpoint


@pytest.fixture
def small(folder_in_memory: Path) -> Checkpoint:
    return make_checkpoint(folder_in_memory / "small")


@pytest.fixture
def large(folder_in_memory: Path) -> Checkpoint:
    return make_checkpoint(folder_in_memory / "large")


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def is_named(path: Path, text: str) -> bool:
    return str(path) in text or os.path.realpath(path) in text


def is_contents(path: Path) -> bool:
    return path.name.isdigit()


def flip_and_check(checkpoint: Checkpoint, flips: Iterator[tuple[Path, int, int]]) -> Counter[str]:
    """Flip and restore one bit at a time. Count named and harmless flips, by kind of file."""
    counts: Counter[str] = Counter()
    for path, offset, bit in flips:
        flip(path, offset, bit)
        problems = checkpoint.problems()
        flip(path, offset, bit)
        where = f"bit {bit} of byte {offset} of '{path}'"
        assert not problems or any(is_named(path, text) for text in problems), f"{where}: {problems}"
        kind = "contents" if is_contents(path) else path.name
        if path == checkpoint.path / "zarr.json":  # the program does not use the arrays listed there
            kind = "list of arrays"
        counts[f"{kind}: {'named' if problems else 'harmless'}"] += 1
    assert checkpoint.problems() == []
    return counts


def sample_byte_flips(checkpoint: Checkpoint, every: Callable[[Path], int]) -> Iterator[tuple[Path, int, int]]:
    chance = random.Random(11)
    for path in checkpoint.files:
        for offset in range(chance.randrange(every(path)), path.stat().st_size, every(path)):
            yield path, offset, chance.randrange(8)


def random_bits(checkpoint: Checkpoint, num: int) -> Iterator[tuple[Path, int, int]]:
    chance = random.Random(12)
    sizes = [path.stat().st_size for path in checkpoint.files]
    for path in chance.choices(checkpoint.files, sizes, k=num):
        yield path, chance.randrange(path.stat().st_size), chance.randrange(8)


def show(counts: Counter[str]) -> None:
    print(*(f"{what:<28} {times:>6}" for what, times in sorted(counts.items())), f"{counts.total()} flips", sep="\n")


def check_counts(counts: Counter[str]) -> None:
    show(counts)
    harmless = {what.partition(":")[0] for what in counts if "harmless" in what}
    # Harmless flips: padding, bytes that no reader uses, and, in a manifest, 1E-05 for 1e-05 and format 0 for 1.
    assert harmless <= {"contents", "MANIFEST.json", "list of arrays"}
    assert counts["contents: named"] > 10 * counts["contents: harmless"] or "contents: harmless" not in counts


def test_flipped_bytes_are_named(small: Checkpoint) -> None:
    check_counts(flip_and_check(small, sample_byte_flips(small, lambda path: 61 if is_contents(path) else 11)))


def test_flipped_bits_of_a_larger_checkpoint_are_named(large: Checkpoint) -> None:
    check_counts(flip_and_check(large, random_bits(large, 100)))


@pytest.mark.slow
def test_every_flipped_byte_is_named(small: Checkpoint) -> None:
    counts = flip_and_check(small, sample_byte_flips(small, lambda path: 1))
    assert counts.total() == sum(path.stat().st_size for path in small.files)
    check_counts(counts)


@pytest.mark.slow
def test_2500_flipped_bits_of_a_larger_checkpoint_are_named(large: Checkpoint) -> None:
    check_counts(flip_and_check(large, random_bits(large, 2500)))


def damage_and_open(checkpoint: Checkpoint, flips: Iterator[tuple[Path, int, int]]) -> Counter[str]:
    """Open a store after each flip, and assert that no other file is damaged. Count named and harmless flips."""
    counts: Counter[str] = Counter()
    for path, offset, bit in flips:
        flip(path, offset, bit)
        complaint = checkpoint.open()
        assert not complaint or is_named(path, complaint), f"bit {bit} of byte {offset} of '{path}': {complaint}"
        if complaint:
            flip(path, offset, bit)
            assert checkpoint.open() == "", f"after bit {bit} of byte {offset} of '{path}', mended: {complaint}"
        inherited = [text for text in checkpoint.problems() if not is_named(path, text)]
        assert not inherited, f"bit {bit} of byte {offset} of '{path}' spread: {inherited}"
        counts["named" if complaint else "harmless"] += 1
        checkpoint.restore()
    return counts


def test_store_with_flipped_bytes_opens_unchanged_or_raises(small: Checkpoint) -> None:
    counts = damage_and_open(small, sample_byte_flips(small, lambda path: 1409 if is_contents(path) else 113))
    show(counts)
    assert counts["named"] > 20 and counts["harmless"] > 10


@pytest.mark.slow
def test_store_with_thousands_of_flips_opens_unchanged_or_raises(small: Checkpoint) -> None:
    counts = damage_and_open(small, sample_byte_flips(small, lambda path: 17 if is_contents(path) else 3))
    show(counts)
    assert counts.total() > 1500


# -- other damage ----------------------------------------------------------------------------------------------


def _empty(path: Path, twin: Path) -> None:
    os.truncate(path, 0)


def _cut_off(path: Path, twin: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _append_bytes(path: Path, twin: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(range(1, 255)) * 40)


def _delete_file(path: Path, twin: Path) -> None:
    path.unlink()


def _of_another_generation(path: Path, twin: Path) -> None:
    if twin.exists():
        contents = twin.read_bytes()
        path.unlink()
        path.write_bytes(contents)


def _link_to_another_generation(path: Path, twin: Path) -> None:
    if twin.exists():
        path.unlink()
        path.symlink_to(twin)


def _link_to_nothing(path: Path, twin: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nothing"))


_DAMAGES = [
    _empty,
    _cut_off,
    _append_bytes,
    _delete_file,
    _of_another_generation,
    _link_to_another_generation,
    _link_to_nothing,
]


@pytest.mark.parametrize("damage", _DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_errors_name_replaced_files(damage: Callable[[Path, Path], None], small: Checkpoint) -> None:
    num_named = 0
    for path in small.files:
        before, was_same = path.read_bytes(), False
        damage(path, small.twin(path))
        was_same = path.is_file() and path.read_bytes() == before
        real = os.path.realpath(path.parent) + "/" + path.name
        problems = small.problems()
        assert was_same or any(is_named(path, text) or real in text for text in problems), f"{path}: {problems}"
        num_named += bool(problems)
        complaint = small.open()
        assert not complaint or is_named(path, complaint) or real in complaint, f"{path}: {complaint}"
        small.restore()
    assert num_named >= 4
