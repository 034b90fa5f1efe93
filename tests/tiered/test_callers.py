"""If an autograd thread requests a block that the caller of ``backward()`` has leased, it gets an error.

Without this check, the two threads would deadlock.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import graph

from tiered import CapacityError, KiB, LeaseError, NvmeTier, RamTier, TieredStore, leasing

BLOCK = 64 * KiB


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieredStore]:
    drive = NvmeTier([str(tmp_path_factory.mktemp("drive"))], 4 * BLOCK)
    with TieredStore([RamTier(BLOCK), drive]) as store:
        for key in ("one", "two"):
            store.register(key, (BLOCK // 4,), torch.float32, home="nvme")
            store.acquire(key, "ram", "w").release()
        yield store


@pytest.fixture
def caller(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Thread]:
    """Yield a thread that waits inside autograd's engine. It has leased "one", which fills RAM."""
    has_lease, end = threading.Event(), threading.Lock()
    end.acquire()
    # The real engine waits in C++, so the innermost Python frame belongs to the engine's caller.
    engine = SimpleNamespace(run_backward=end.acquire)
    monkeypatch.setattr(graph, "Variable", SimpleNamespace(_execution_engine=engine))

    def call_backward() -> None:
        with store.acquire("one", "ram", "rw"):
            has_lease.set()
            graph._engine_run_backward(True, 60.0)  # type: ignore[arg-type]

    thread = threading.Thread(target=call_backward)
    thread.start()
    assert has_lease.wait(60)
    while graph._engine_run_backward.__code__ is not _innermost(thread):
        assert thread.is_alive()
    yield thread
    end.release()
    thread.join(60)
    assert not thread.is_alive()


def _innermost(thread: threading.Thread) -> object:
    assert thread.ident is not None
    return sys._current_frames()[thread.ident].f_code


@pytest.mark.usefixtures("caller")
def test_leases_of_a_backward_belong_to_its_caller(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "_CAN_SEE_FRAMES", True)
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 1)
    with pytest.raises(CapacityError):
        store.acquire("two", "ram", "r")
    with pytest.raises(LeaseError, match="by the caller of this backward"):
        store.acquire("one", "ram", "r")


@pytest.mark.usefixtures("caller")
def test_leases_are_awaited_outside_a_backward(store: TieredStore) -> None:
    for key in ("one", "two"):
        with pytest.raises(TimeoutError):
            store.acquire(key, "ram", "r", timeout_s=0.05)
