"""A store that has blocks in several homes and commits repeatedly, and checks of its files after a power cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tiered import GenerationError, KiB, MiB, NvmeTier, RamTier, Tier, TieredStore
from tiered.durable.manifest import newest_first, read_manifest

#: Shape and dtype of each block, by name. The blocks need less than one chunk file, exactly one, or several.
BLOCKS = {
    "embedding": ((12_345,), torch.uint8),
    "layer.0/weight": ((30, 50), torch.float32),
    "layer.0/m": ((4096,), torch.bfloat16),
    "layer.1/weight": ((3, 700), torch.float32),
    "never_changed": ((100,), torch.int64),
}

Contents = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """Homes of blocks, and folders of drives and generations below a root folder."""

    name: str
    generations: str
    drives: tuple[str, ...]
    homes: tuple[str, ...]  # assigned to the blocks in turn
    keep: int = 2

    def tiers(self, root: Path) -> list[Tier]:
        tiers: list[Tier] = [RamTier(MiB, pin_memory=False)]
        if self.drives:
            drives = [root / drive for drive in self.drives]
            tiers.append(NvmeTier(drives, 4 * MiB, chunk_bytes=8 * KiB, on_notice=lambda text: None))
        return tiers

    def home(self, number: int) -> str:
        return self.homes[number % len(self.homes)]

    def new(self, root: Path) -> TieredStore:
        return TieredStore(
            self.tiers(root), path=str(root / self.generations), keep_generations=self.keep, overwrite=True
        )

    def open(self, root: Path, generation: int | None = None) -> TieredStore:
        path = str(root / self.generations)
        return TieredStore.open(path, self.tiers(root), generation, keep_generations=self.keep)

    def number(self, root: Path, generation: int | None = None) -> int:
        """Return the number of the commit that made a generation. The default is the current generation."""
        number = read_manifest(root / self.generations, generation).meta["number"]
        assert isinstance(number, int)
        return number


LAYOUTS = [
    Layout("ram", "outputs/checkpoints", (), ("ram",)),
    Layout("nvme", "drive", ("drive",), ("nvme",), keep=1),
    Layout("mixed", "outputs/checkpoints", ("drive",), ("nvme", "ram")),
    Layout("striped", "outputs/checkpoints", ("drive", "second"), ("nvme", "nvme", "ram"), keep=3),
]


@dataclass
class History:
    """Committed contents by commit number, and the commits known to be durable.

    Attributes:
        begun: Number of the newest commit that has begun.
        waited: Numbers of the commits that the run waited for.
        line: Numbers of the last durable commit that a run made or resumed from, and of its predecessors.
    """

    expected: dict[int, Contents] = field(default_factory=dict)
    begun: int = 0
    waited: list[int] = field(default_factory=list)
    line: list[int] = field(default_factory=list)

    def tell(self, what: str, number: int) -> None:
        """Record an event: ``freeze``, ``frozen`` or ``waited`` in a commit, or ``back`` after a resume."""
        if what == "freeze":
            self.begun = number
        elif what == "waited":
            self.waited.append(number)
            self.line.append(number)
        elif what == "back":
            self.line = [earlier for earlier in self.line if earlier <= number]

    @property
    def safe(self) -> int:
        """Number of the newest commit that must not be lost, or 0."""
        return self.line[-1] if self.line else 0

    def kept(self, found: int, keep: int) -> list[int]:
        """Return the numbers of the commits that must be complete if commit ``found`` is the current one."""
        line = self.line if found in self.waited else [*self.line, found]
        return line[-max(1, keep - 1) :]  # a commit may first remove the oldest generation to free space


class Trainer:
    """Stand-in for a training run, which changes and commits blocks.

    ``tell`` is called with each event and commit number.
    """

    def __init__(self, store: TieredStore, history: History, tell: Callable[[str, int], None], start: int = 0) -> None:
        self.store, self.history, self._tell = store, history, tell
        self.present: Contents = dict(history.expected[start]) if start else {}
        self._generator = torch.Generator().manual_seed(len(history.expected))

    def register(self, layout: Layout) -> None:
        for number, (key, (shape, dtype)) in enumerate(BLOCKS.items()):
            self.store.register(key, shape, dtype, home=layout.home(number))
        self.change(*BLOCKS)

    def change(self, *keys: str) -> None:
        specs = {spec.key: spec for spec in self.store.blocks()}
        for key in keys:
            with self.store.acquire(key, "ram", "w") as lease:
                nbytes = specs[key].nbytes
                contents = torch.randint(1, 256, (nbytes,), dtype=torch.uint8, generator=self._generator)
                lease.tensor.reshape(-1).view(torch.uint8).copy_(contents)
            self.present[key] = contents

    def discard(self, key: str, *, forget: bool = False) -> None:
        (self.store.unregister if forget else self.store.discard)(key)
        del self.present[key]

    def commit(self, *changed_meanwhile: str) -> None:
        number = max(self.history.expected, default=0) + 1
        self.history.expected[number] = dict(self.present)
        self._tell("freeze", number)
        commit = self.store.commit({"number": number})
        self._tell("frozen", number)
        self.change(*changed_meanwhile)
        commit.wait(60)
        self._tell("waited", number)


def contents_of(store: TieredStore) -> Contents:
    contents = {}
    for spec in store.blocks():
        with store.acquire(spec.key, "ram") as lease:
            contents[spec.key] = lease.tensor.reshape(-1).view(torch.uint8).clone()
    return contents


def same(found: Contents, expected: Contents) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def check_newest(root: Path, layout: Layout, history: History) -> int:
    """Check the newest generation's contents, and return the number of its commit.

    Return 0 if there is no generation, which is valid only before the first durable commit.
    """
    if not newest_first(root / layout.generations):
        assert history.safe == 0, f"{history.safe} is lost"
        with pytest.raises(GenerationError):
            layout.open(root)
        with layout.new(root):  # a new store can start in this folder
            return 0
    with layout.open(root) as store:
        number = layout.number(root)
        assert history.safe <= number <= history.begun, f"{number} was found where {history.safe} had been waited for"
        assert same(contents_of(store), history.expected[number]), f"{number} is a mixture or incomplete"
    return number


def check_older(root: Path, layout: Layout, history: History, found: int) -> None:
    """Assert that every existing generation has its committed contents, and that no kept generation is missing."""
    path = root / layout.generations
    opened = []
    for generation in newest_first(path):
        number = layout.number(root, generation)
        with layout.open(root, generation) as store:
            assert same(contents_of(store), history.expected[number]), number
        opened.append(number)
    assert found == 0 or set(history.kept(found, layout.keep)) <= set(opened), (history, found, opened)
