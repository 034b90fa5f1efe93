"""If CUDA refuses a page lock or has lost one, later kernels report no error, and the slab can be closed."""

from __future__ import annotations

import pytest
import torch

from fakes.virtual_cuda import VirtualCuda
from megatrain.engine.device.host_io import Staging
from tiered import MiB
from tiered.tiers import ram as slab_module
from tiered.tiers.ram import HostSlab


def test_failed_page_lock_leaves_no_pending_cuda_error(virtual: VirtualCuda | None) -> None:
    slab = HostSlab(MiB, pin=True)
    assert slab.is_pinned
    assert not slab_module._register(slab.address, slab.nbytes), "is locked already"
    assert torch.ones(3, device="cuda").sum().item() == 3
    slab.close()


def test_slab_with_a_lost_page_lock_closes(virtual: VirtualCuda | None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    slab = HostSlab(MiB, pin=True)
    assert int(torch.cuda.cudart().cudaHostUnregister(slab.address)) == 0  # type: ignore[no-untyped-call]
    slab.close()
    assert not slab.is_pinned
    assert "unpinning memory" in caplog.text
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_micro_batches_are_staged_in_page_locked_memory(virtual: VirtualCuda | None) -> None:
    staging = Staging(torch.device("cuda"))
    ids = torch.arange(5)
    assert torch.equal(staging.upload({"ids": ids})["ids"].cpu(), ids)
    assert staging._slab is not None and staging._slab.is_pinned
    staging._slab.close()
