"""Homes and sizes of blocks, and the elements that a view or a shard of a block contains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatrain
from megatrain.base.layout import build_layout
from megatrain.embed.activation_blocks import round_block_bytes
from megatrain.embed.activation_cache import ActivationCache, _Route
from megatrain.embed.block_homes import HomeRequest, SharedState, free_home_bytes, shared_state
from megatrain.embed.source_storages import Elements, SourceStorage, StorageView
from megatrain.embed.state_blocks import LayoutShard, StateBlocks
from megatrain.embed.use_order import UseOrder
from megatrain.optim.base import Segment, StateKind
from tiered import CapacityError, GpuTier, KiB, MiB, NvmeTier, RamTier, TieredStore

# -- homes ---------------------------------------------------------------------------------------------------------


def test_blocks_go_to_the_first_tier_with_space(tmp_path: Path) -> None:
    """Homes in RAM leave room for copies. A durable block on a drive also needs space for two generations."""
    with megatrain.open_store(ram=MiB, nvme=tmp_path, nvme_size=4 * MiB) as store:
        shared = shared_state(store)

        def homes(*requests: tuple[int, bool]) -> list[str]:
            return shared.choose_homes(
                [HomeRequest(f"b{n}", kib * KiB, ("ram", "nvme"), durable) for n, (kib, durable) in enumerate(requests)]
            )

        assert homes((1024, True)) == ["ram"]
        assert homes((1028, True)) == ["nvme"]
        assert homes((512, True), (516, False), (512, True)) == ["ram", "nvme", "ram"]
        with shared.working_room(256 * KiB):
            assert homes((768, False), (4, False)) == ["ram", "nvme"]
            assert homes((772, False)) == ["nvme"]
            with pytest.raises(OSError), shared.working_room(512 * KiB):
                raise OSError
            assert shared.working_bytes == 256 * KiB
            with pytest.raises(CapacityError) as caught:
                homes((768, False), (1000, True), (1100, True))
        error = caught.value
        assert (error.tier, error.need_bytes, error.free_bytes) == ("nvme", 1100 * KiB, 1096 * KiB)
        assert str(error).endswith(
            "; for 'b2': ram has 0 B left; nvme has 1.07 MiB left. Increase the size of a tier, or open the store with "
            "nvme=[...]"
        )


def test_registered_blocks_reserve_space_for_their_generations(tmp_path: Path) -> None:
    with megatrain.open_store(ram=MiB, nvme=tmp_path, nvme_size=8 * MiB, keep_generations=3) as store:
        shared = SharedState(store)
        free = {name: free_home_bytes(store, name) for name in ("ram", "nvme")}

        def used() -> tuple[int, int]:
            return tuple(free[name] - free_home_bytes(store, name) for name in ("ram", "nvme"))  # type: ignore[return-value]

        names = [
            shared.register("a", 1024, torch.float32, ("ram", "nvme"), durable=True),
            shared.register("b", 2048, torch.float32, ("nvme",), durable=False),
            shared.register("c", 4096, torch.int16, ("nvme",), durable=True),
        ]
        assert names == ["ram", "nvme", "nvme"]
        found = [(spec.key, spec.shape, spec.dtype, spec.home, spec.durable) for spec in store.blocks()]
        assert found == [
            ("a", (1024,), torch.float32, "ram", True),
            ("b", (2048,), torch.float32, "nvme", False),
            ("c", (4096,), torch.int16, "nvme", True),
        ]
        assert used() == (4096, 8192 + 8192 * (1 + 3))
        shared.unregister("c", "a")
        assert used() == (0, 8192) and [spec.key for spec in store.blocks()] == ["b"]
        with shared.rollback_on_error():
            shared.register("e", 1024, torch.float32, ("ram",), durable=True)
        assert [spec.key for spec in store.blocks()] == ["b", "e"]


def test_sizes_of_activation_blocks() -> None:
    sizes = (0, 1, 4096, 4097, 65_536, 65_537, 70_000, 131_072, 131_073, 147_456, 147_457, 10**7)
    expected = [4096, 4096, 4096, 8192, 65_536, 73_728, 73_728, 131_072, 147_456, 147_456, 163_840, 10_485_760]
    assert list(map(round_block_bytes, sizes)) == expected


def test_routes_of_saved_tensors(tmp_path: Path) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    tiers = [GpuTier(4 * MiB, device="cpu", name="gpu"), RamTier(8 * MiB), NvmeTier([str(tmp_path)], 16 * MiB)]
    with TieredStore(tiers) as store:
        cache = ActivationCache(store, None, None, None)
        assert cache._route(cpu) == _Route(("nvme", "ram"), ("gpu", "ram"), MiB)
        assert ActivationCache(store, "ram", None, 77)._route(cpu) == _Route(("ram",), ("gpu", "ram"), 77)
        assert cache._route(gpu) == _Route(("nvme", "ram", "gpu"), ("gpu", "ram"), MiB)


# -- elements ------------------------------------------------------------------------------------------------------


def elements_of(tensor: Tensor) -> Elements:
    return StorageView.of(tensor).elements


def test_elements_of_views() -> None:
    base = torch.arange(1000, 1240, dtype=torch.int16).view(10, 24)
    assert (
        elements_of(base) == elements_of(base.t()) == elements_of(base.view(5, 2, 24)) == Elements(2, 0, (240,), (1,))
    )
    assert elements_of(base[3:5]) == Elements(2, 144, (48,), (1,))
    assert elements_of(base[2:8:3, 1::5]) == Elements(2, 98, (2, 5), (72, 5))
    assert elements_of(base[:, 4:7].t()) == Elements(2, 8, (10, 3), (24, 1))
    assert elements_of(base[4, 5].expand(3, 7)) == Elements(2, 2 * (4 * 24 + 5), (), ())
    assert elements_of(base[:, :1].expand(10, 6)) == Elements(2, 0, (10,), (24,))
    assert elements_of(base.view(-1).as_strided((4, 6), (3, 1), 7)) == Elements(2, 14, (15,), (1,)), "overlapping"
    assert (elements_of(base[3:5]).nbytes, elements_of(base[2:8:3, 1::5]).nbytes) == (96, 20)


def test_elements_are_restored_at_their_places() -> None:
    base = torch.arange(5000, 6200, dtype=torch.int16).view(50, 24)
    for tensor, first_byte in ((base, 0), (base[3:5], 0), (base[12:48:3, 1::5], 512), (base[45:, 4:7].t(), 2048)):
        view = StorageView.of(tensor)
        assert view.elements.first_byte == first_byte
        contents = torch.empty(view.elements.nbytes, dtype=torch.uint8)
        view.elements.read(tensor.untyped_storage(), contents)
        memory = view.elements.restore(contents, torch.device("cpu"))
        assert memory.nbytes() == 2 * (int(tensor.storage_offset()) + span(tensor)) - first_byte
        restored = view.view(memory, first_byte)
        assert torch.equal(restored, tensor) and restored.stride() == tensor.stride()


def span(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last element of a tensor."""
    return sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def test_a_large_part_is_stored_with_its_whole_storage() -> None:
    base = torch.zeros(400)
    whole = Elements(1, 0, (1600,), (1,))
    source = SourceStorage(base, base.untyped_storage())
    parts = {length: StorageView.of(base[:length]) for length in (400, 200, 199, 100, 99)}
    assert [source.elements_to_store(view) for view in parts.values()] == [
        whole,
        whole,
        *(parts[length].elements for length in (199, 100, 99)),
    ]
    stored: Any = {}
    source.stored = stored
    assert [source.find(view) for view in parts.values()] == [None] * 5
    stored.update({whole: "whole", parts[99].elements: "part", parts[200].elements: "large part"})
    assert [source.find(view) for view in parts.values()] == ["whole"] * 4 + ["part"]
    del stored[whole]
    assert [source.find(view) for view in parts.values()] == [None, "large part", None, None, "part"]
    memory = source.memory()
    assert memory is not None and memory.data_ptr() == base.data_ptr()
    assert source.is_current(0) and not source.is_current(1)
    base.add_(1)
    assert source.memory() is None and not source.is_current(0) and not source.is_current(1)


def test_state_of_a_shard() -> None:
    """The shard owns elements 1500 to 2800 of three parameters, which begin at 0, 1024 and 3072."""
    layout = build_layout("layer", [("a", (700,)), ("b", (40, 50)), ("c", (10,))], trainable=True)
    kinds = [StateKind("m", torch.float32), StateKind("m_scale", torch.float32, granularity=4)]
    shard = LayoutShard(1, 3, range(1500, 2800), 1300)
    names = {"a": "0", "b": "1", "c": "2"}
    with megatrain.open_store(ram=MiB) as store:
        state = StateBlocks(store, "root", layout, kinds, ("ram",), names, shard)
        assert state.keys == {"m": "root/m", "m_scale": "root/m_scale"} and not state.keys_outside_ram
        assert [(spec.key, spec.shape) for spec in store.blocks()] == [("root/m", (1300,)), ("root/m_scale", (325,))]
        flat = torch.arange(1300.0)
        ranges = [state.view("m", flat, entry).tolist() for entry in layout.entries]
        assert ranges == [[], list(range(1300)), []]
        assert [state.view("m_scale", flat[:325], entry).numel() for entry in layout.entries] == [0, 325, 0]
        segments = [state.local_segment(entry, 0.5) for entry in layout.entries]
        assert segments == [None, Segment(0, 1300, 0.5, shape=(40, 50), name="1", param_start=476), None]
        state.close()
        whole = StateBlocks(store, "whole", layout, kinds, ("ram",), names)
        flat = torch.arange(float(layout.num_elements))
        found = [(int(part[0]), len(part)) for part in (whole.view("m", flat, entry) for entry in layout.entries)]
        assert found == [(0, 700), (1024, 2000), (3072, 10)]
        scales = [whole.view("m_scale", flat, entry) for entry in layout.entries]
        assert [(int(part[0]), len(part)) for part in scales] == [(0, 175), (256, 500), (768, 3)]
        assert whole.local_segment(layout.entries[2], 0.25) == Segment(3072, 3082, 0.25, shape=(10,), name="2")


# -- order of use --------------------------------------------------------------------------------------------------


class Prefetches:
    """Store that records prefetches. Prefetches of ``skipped_key`` are skipped."""

    def __init__(self, skipped_key: str = "") -> None:
        self.keys, self.skipped_key, self.skipped = list[str](), skipped_key, False

    def prefetch(self, key: str, tier: str) -> Prefetches:
        self.keys.append(f"{key}->{tier}")
        self.skipped = key == self.skipped_key
        return self


def test_the_next_three_uses_are_prefetched() -> None:
    """After a skipped prefetch, nothing more is requested."""
    requests = {name: [(name, "ram")] for name in "abcde"}
    requests["b"].append(("b2", "gpu"))
    after_a, after_b, after_c = "b->ram b2->gpu c->ram d->ram", "c->ram d->ram e->ram", "d->ram e->ram a->ram"
    for skipped_key, expected in (
        ("", [after_a, after_b, after_c]),
        ("b2", ["b->ram b2->gpu", after_b, after_c]),
        ("d", [after_a, "c->ram d->ram", "d->ram"]),
    ):
        store: Any = Prefetches(skipped_key)
        order, found = UseOrder(store), []
        for event in "abcde":
            order.note(event, requests[event])
        assert not store.keys
        for event in "abc":
            order.note(event, requests[event])
            found.append(" ".join(store.keys))
            store.keys.clear()
        assert found == expected


def test_a_cycle_is_prefetched_once() -> None:
    store: Any = Prefetches()
    order = UseOrder(store)
    for event in "ababa":
        order.note(event, [(event, "ram")])
    assert store.keys == ["b->ram", "a->ram", "b->ram"]
