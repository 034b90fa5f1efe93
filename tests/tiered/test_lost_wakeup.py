"""If a transfer ends before any thread waits for it, it wakes no thread, so no thread may wait for it later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tiered import MiB, NvmeTier, RamTier, TieredStore, Transfer, TransferError
from tiered.links.files import FileReadLink, FileWriteLink


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TieredStore]:
    def at_once(link: Any) -> None:
        submit = link.submit

        def submit_and_end(*arguments: object) -> Transfer:
            transfer: Transfer = submit(*arguments)
            assert transfer._done.wait(60)
            return transfer

        monkeypatch.setattr(link, "submit", submit_and_end)

    at_once(FileReadLink)
    at_once(FileWriteLink)
    with TieredStore([RamTier(MiB, pin_memory=False), NvmeTier([tmp_path], MiB)]) as store:
        store.register("a", (1000,), torch.float32, home="nvme")
        with store.acquire("a", "ram", "w") as lease:
            lease.tensor.fill_(7)
        yield store


def forbid_waiting(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(timeout: float | None = None) -> bool:
        raise AssertionError("waits for a transfer that has ended: nothing would wake it")

    monkeypatch.setattr(store._movement.changed, "wait", wait)


def test_immediately_completed_fetch_needs_no_wait(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.evict("a", "ram").wait(20)
    forbid_waiting(store, monkeypatch)
    with store.acquire("a", "ram") as lease:
        assert lease.tensor[0] == 7


def test_immediate_transfer_error_is_raised(
    store: TieredStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.evict("a", "ram").wait(20)
    (tmp_path / "live/a/c/0").unlink()
    forbid_waiting(store, monkeypatch)
    with pytest.raises(TransferError, match="read failed"):
        store.acquire("a", "ram")


def test_commit_with_immediate_writes_does_not_wait(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_waiting(store, monkeypatch)
    commit = store.commit()
    commit.wait(60)
    assert commit.is_done and commit.error is None
