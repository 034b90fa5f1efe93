from __future__ import annotations

import time

import pytest
import torch

from tiered import MiB, RamTier, TransferError
from tiered.ext import Slot
from tiered.tiers import ram as slab_module


def take(tier: RamTier, nbytes: int) -> Slot:
    slot = tier.allocate(nbytes, name="block", home=False)
    assert slot is not None
    return slot


def test_padding_of_a_reused_slot_is_zero() -> None:
    tier = RamTier(MiB)
    slot = take(tier, 8192)
    tier.tensor(slot, (8192,), torch.uint8).fill_(255)
    tier.free(slot)
    slot = take(tier, 5000)
    assert int(tier.tensor(slot, (8192,), torch.uint8)[5000:].sum()) == 0


def test_machine_without_memory_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "_advise", lambda address, nbytes, advice: 12)
    tier = RamTier(MiB)
    with pytest.raises(TransferError, match="fewer bytes") as caught:
        tier.allocate(4096, name="layer.0/weight", home=True)
    assert caught.value.errno == 12
    assert tier.usage().used_bytes == 0
    with pytest.raises(TransferError, match="no memory for the buffers of copies"):
        tier.keep_buffers({4096: 2})
    assert tier.usage().used_bytes == 0


def test_what_slabs_took_to_make_is_counted_and_so_are_those_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "_register", lambda address, nbytes: time.sleep(0.01) or True)
    monkeypatch.setattr(slab_module, "_unregister", lambda address: None)
    tier = RamTier(MiB, pin_memory=True)
    first, second = take(tier, 8192), take(tier, 300 * 1024)
    assert tier.made_bytes == 308 * 1024 and tier.populate_s > 0 and tier.pin_s >= 0.02
    tier.free(first)
    tier.free(second)
    take(tier, 8192)
    assert (tier.num_drops, tier.made_bytes) == (0, 308 * 1024), "a slab that is there is used again"
    take(tier, 900 * 1024)
    assert tier.num_drops == 1, "there was no room beside the one that nobody uses"
