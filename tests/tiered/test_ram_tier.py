from __future__ import annotations

import pytest
import torch

from tiered.errors import CapacityError, TransferError
from tiered.memory import slab as slab_module
from tiered.tiers.base import Slot, Tier
from tiered.tiers.ram import RamTier
from tiered.units import MiB


def take(tier: RamTier, nbytes: int) -> Slot:
    slot = tier.allocate(nbytes, name="block", home=False)
    assert slot is not None
    return slot


def test_is_a_tier() -> None:
    assert isinstance(RamTier(MiB), Tier)


def test_slots_are_charged_whole_and_freed() -> None:
    tier = RamTier(MiB)
    slot = take(tier, 5000)
    assert (slot.nbytes, slot.slot_bytes) == (5000, 8192)
    assert tier.usage().used_bytes == tier.slot_bytes(5000) == 8192
    tier.free(slot)
    assert tier.usage().used_bytes == 0
    assert tier.usage().high_water_bytes == 8192
    with pytest.raises(AssertionError):
        tier.free(slot)
    tier.close()


def test_no_room_is_none_not_an_error() -> None:
    tier = RamTier(8192)
    slot = take(tier, 8192)
    assert tier.allocate(1, name="more", home=True) is None
    tier.free(slot)
    assert tier.allocate(1, name="more", home=True) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(3, 5), (), (0,), (0, 4)])
def test_tensor_is_a_view_of_the_slot(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tier = RamTier(MiB)
    numel = torch.Size(shape).numel()
    slot = take(tier, numel * dtype.itemsize)
    tensor = tier.tensor(slot, shape, dtype)
    assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
    tensor.fill_(1)
    assert torch.equal(tier.tensor(slot, shape, dtype), torch.ones(shape, dtype=dtype))
    tier.free(slot)


def test_padding_of_a_reused_slot_is_zero() -> None:
    tier = RamTier(MiB)
    slot = take(tier, 8192)
    tier.tensor(slot, (8192,), torch.uint8).fill_(255)
    tier.free(slot)
    slot = take(tier, 5000)
    assert int(tier.tensor(slot, (8192,), torch.uint8)[5000:].sum()) == 0


def test_reserve_refuses_with_numbers() -> None:
    tier = RamTier(8192)
    tier.reserve(8000)
    assert tier.allocate(4096, name="block", home=False) is None
    with pytest.raises(CapacityError, match="192") as caught:
        tier.reserve(193)
    assert caught.value.free_bytes == 192
    tier.reserve(-8000)
    assert tier.usage().free_bytes == 8192


def test_machine_without_memory_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "_advise", lambda address, nbytes, advice: 12)
    tier = RamTier(MiB)
    with pytest.raises(TransferError, match="fewer bytes") as caught:
        tier.allocate(4096, name="layer.0/weight", home=True)
    assert caught.value.errno == 12
    assert tier.usage().used_bytes == 0
