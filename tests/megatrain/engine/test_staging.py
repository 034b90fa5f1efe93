"""Micro-batches pass through page-locked memory, and losses and norms return in one read. tests/gpu uses a device."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatrain.engine.device.host_io import Staging, read_numbers
from megatrain.engine.micro_batches import MicroBatches, count_labels, labelled_rows
from tiered import MiB
from tiered.tiers.ram import HostSlab

CPU = torch.device("cpu")


class Event:
    """Stand-in for a device event, which logs its calls."""

    log: list[str]

    def __init__(self) -> None:
        Event.log.append("made")

    def record(self) -> None:
        Event.log.append("recorded")

    def synchronize(self) -> None:
        Event.log.append("awaited")


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> Staging:
    """Return a ``Staging`` that copies as for a device, but into host memory."""
    Event.log = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    made = Staging(CPU, make_slab=lambda nbytes: HostSlab(nbytes))
    made._is_staged = True
    return made


def test_tensors_of_any_size_are_staged(staging: Staging) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, 1), (2, 7), (0,), (3, 5, 11), (1,), (2, 0)]
    dtypes = [torch.int64, torch.int32, torch.bool, torch.float32, torch.uint8]
    tensors = {
        (number, dtype): torch.randint(0, 2, shape, generator=generator).to(dtype)
        for number, shape in enumerate(shapes)
        for dtype in dtypes
    }
    placed = staging.upload(tensors)
    assert list(placed) == list(tensors)
    for name, tensor in tensors.items():
        assert placed[name] is not tensor and placed[name].dtype == tensor.dtype
        assert torch.equal(placed[name], tensor) and placed[name].shape == tensor.shape


def test_slab_is_reused_only_after_its_copies_finish(staging: Staging) -> None:
    for number in range(3):
        staging.upload({0: torch.full((10,), number)})
    assert Event.log == ["made", "recorded", *["awaited", "made", "recorded"] * 2]


def test_the_slab_grows_in_powers_of_two(staging: Staging) -> None:
    """A slab is closed before a larger one is made, so that the two never take memory at the same time."""
    sizes, slabs = [], list[HostSlab]()

    def make_slab(nbytes: int) -> HostSlab:
        assert all(slab._tensor is None for slab in slabs)
        slabs.append(HostSlab(nbytes))
        return slabs[-1]

    staging._make_slab = make_slab
    for num_elements in (10, 100_000, 131_072, 131_073, 5, 200_000, 600_000):
        staging.upload({0: torch.zeros(num_elements, dtype=torch.int64)})
        sizes.append(slabs[-1].nbytes // MiB)
    assert sizes == [1, 1, 1, 2, 2, 2, 8] and len(slabs) == 3


def test_on_the_cpu_nothing_is_copied() -> None:
    tensors = {"ids": torch.arange(5)}
    assert Staging(CPU).upload(tensors)["ids"] is tensors["ids"]
    assert MicroBatches(CPU).mirror is None


def test_rows_with_a_label() -> None:
    labels = torch.tensor([-100, 5, -100, 0, 7, -100])
    rows, found = labelled_rows(labels)
    assert rows.tolist() == [1, 3, 4] and found.tolist() == [5, 0, 7]
    assert rows.dtype == found.dtype == torch.int64
    assert count_labels(labels) == 3
    rows, found = labelled_rows(torch.full((4,), -100))
    assert len(rows) == len(found) == 0


def test_micro_batches_and_their_rows() -> None:
    labels = {3: torch.tensor([-100, 1]), 1: torch.tensor([4, -100])}
    micro_batches = {number: {"input_ids": torch.tensor([[number, 2]])} for number in labels}
    labelled = {number: labelled_rows(each) for number, each in labels.items()}
    teacher = {3: {"scores": torch.tensor([0.5])}}
    batches, rows, read = MicroBatches(CPU).upload(micro_batches, labelled, teacher)
    assert read == {3: {"scores": torch.tensor([0.5])}, 1: {}}
    assert {number: batch["input_ids"].tolist() for number, batch in batches.items()} == {3: [[3, 2]], 1: [[1, 2]]}
    assert {number: (pair[0].tolist(), pair[1].tolist()) for number, pair in rows.items()} == {
        3: ([1], [1]),
        1: ([0], [4]),
    }


def test_numbers_are_read_in_order_and_exactly() -> None:
    values = [
        torch.tensor(0.1),
        2.5,
        torch.tensor(1 / 3, dtype=torch.float64),
        torch.tensor([7.0], dtype=torch.bfloat16),
    ]
    expected = [float(np.float32(0.1)), 2.5, 1 / 3, 7.0]
    assert read_numbers(values) == expected
    assert read_numbers([]) == []
    assert read_numbers([1.5, 2.0]) == [1.5, 2.0]
    found = read_numbers([torch.tensor(math.inf), torch.tensor(math.nan)])
    assert found[0] == math.inf and math.isnan(found[1])
