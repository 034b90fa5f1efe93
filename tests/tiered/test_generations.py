"""Committing and reopening stores, with real tiers in a temporary directory."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import tiered
from oracles.example_files import load_example
from processes import warm
from tiered import (
    CorruptBlockError,
    GenerationError,
    GenerationReader,
    KiB,
    LeaseError,
    LockedError,
    MiB,
    NvmeTier,
    RamTier,
    Tier,
    TieredStore,
    TransferError,
)
from tiered.durable import zarr_folder
from tiered.durable.manifest import MANIFEST_NAME, current_generation, list_generations, read_manifest
from tiered.durable.ownership import StoreIdentity
from tiered.tiers.layout import array_document
from tiered.tiers.nvme import Verify

KEYS = ["layer.0/weight", "layer.0/m", "layer.1/weight"]
SHAPE = (30, 1000)  # 120 000 bytes: not a multiple of 4096

MakeTiers = Callable[[], list[Tier]]


def ram() -> RamTier:
    return RamTier(2 * MiB, pin_memory=False)


def file_tier(*paths: Path) -> NvmeTier:
    return NvmeTier(list(paths), 4 * MiB, chunk_bytes=32 * KiB)


def homes_of(kind: str) -> dict[str, str]:
    if kind == "mixed":
        return dict(zip(KEYS, ["nvme", "ram", "nvme"], strict=True))
    return dict.fromkeys(KEYS, "ram" if kind == "ram" else "nvme")


def put(store: TieredStore, key: str, value: float) -> None:
    with store.acquire(key, "ram", "w") as lease:
        lease.tensor.fill_(value)


def value_of(store: TieredStore, key: str) -> float:
    with store.acquire(key, "ram") as lease:
        first = float(lease.tensor.flatten()[0])
        assert torch.equal(lease.tensor, torch.full_like(lease.tensor, first))
    return first


@pytest.fixture(params=["ram", "nvme", "striped", "mixed"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_tiers(kind: str, tmp_path: Path) -> MakeTiers:
    def make() -> list[Tier]:
        if kind == "ram":
            return [ram()]
        paths = [tmp_path / "run"] + [tmp_path / "other"] * (kind == "striped")
        return [ram(), file_tier(*paths)]

    return make


def filled(tiers: list[Tier], kind: str, path: Path) -> TieredStore:
    store = TieredStore(tiers, path=str(path / "run"))
    for value, (key, home) in enumerate(homes_of(kind).items(), start=1):
        store.register(key, SHAPE, torch.float32, home=home)
        put(store, key, value)
    return store


def test_a_commit_can_be_opened_again(make_tiers: MakeTiers, kind: str, tmp_path: Path) -> None:
    with filled(make_tiers(), kind, tmp_path) as store:
        commit = store.commit({"step": 7})
        commit.wait(60)
        assert commit.generation == 1 and store.path is not None
    with TieredStore.open(str(tmp_path / "run"), make_tiers()) as store:
        assert {spec.key: spec.home for spec in store.blocks()} == homes_of(kind)
        assert [value_of(store, key) for key in KEYS] == [1, 2, 3]
        put(store, KEYS[0], 10)
        assert store.commit().generation == 2
    with TieredStore.open(str(tmp_path / "run"), make_tiers()) as store:
        assert [value_of(store, key) for key in KEYS] == [10, 2, 3]


def test_commit_reports_its_cost(make_tiers: MakeTiers, kind: str, tmp_path: Path) -> None:
    with filled(make_tiers(), kind, tmp_path) as store:
        commit = store.commit()
        commit.wait(60)
        assert commit.is_done
        figures = commit.figures
        num_linked = sum(home == "nvme" for home in homes_of(kind).values())
        assert figures.nbytes == 3 * 120_000
        assert figures.linked_bytes == num_linked * 4 * 32 * KiB and figures.written_bytes == (3 - num_linked) * 122_880
        assert 0 < figures.freeze_s <= figures.seconds
        paths = {tier.name: tuple(tier.paths) for tier in store._movement.tiers.values() if isinstance(tier, NvmeTier)}
    assert read_manifest(tmp_path / "run").paths == paths


def test_unchanged_files_are_flushed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, flushed = os.fdatasync, list[str]()

    def watched(fd: int) -> None:
        flushed.append(str(Path(os.readlink(f"/proc/self/fd/{fd}")).parent.parent.relative_to(tmp_path / "run/snap")))
        real(fd)

    monkeypatch.setattr(os, "fdatasync", watched)
    with filled([ram(), file_tier(tmp_path / "run")], "nvme", tmp_path) as store:
        found = []
        for changed in (None, None, KEYS[1], None):
            if changed is not None:
                put(store, changed, 8)
            store.commit().wait(60)
            found.append(sorted(flushed))
            flushed.clear()
    assert found == [sorted(f"00000001/{key}" for key in KEYS for _ in range(4)), [], [f"00000003/{KEYS[1]}"] * 4, []]


def test_commit_and_load_report_their_byte_counts(make_tiers: MakeTiers, kind: str, tmp_path: Path) -> None:
    with filled(make_tiers(), kind, tmp_path) as store:
        commit = store.commit()
        assert commit.num_bytes == 3 * 120_000
        commit.wait(60)
        assert commit.done_bytes == commit.num_bytes
        loaded: list[int] = []
        store.load(on_bytes=loaded.append)
        assert loaded == [120_000] * 3


def test_changes_after_a_commit_do_not_reach_it(make_tiers: MakeTiers, kind: str, tmp_path: Path) -> None:
    with filled(make_tiers(), kind, tmp_path) as store:
        commit = store.commit()
        put(store, KEYS[0], 50)  # waits until the commit has read the block, and never raises
        with store.acquire(KEYS[1], "ram", "rw") as lease:
            lease.tensor.add_(50)
        store.discard(KEYS[2])
        commit.wait(60)
        assert value_of(store, KEYS[1]) == 52
    with TieredStore.open(str(tmp_path / "run"), make_tiers()) as store:
        assert [value_of(store, key) for key in KEYS] == [1, 2, 3]


def test_discarded_and_never_written_blocks_are_absent(make_tiers: MakeTiers, kind: str, tmp_path: Path) -> None:
    with filled(make_tiers(), kind, tmp_path) as store:
        store.register("never", (4,), torch.int16, home="ram")
        store.register("scratch", (4,), torch.int16, home="ram", durable=False)
        put(store, "scratch", 1)
        store.commit().wait(60)
        store.discard(KEYS[1])
        store.commit().wait(60)
    with TieredStore.open(str(tmp_path / "run"), make_tiers()) as store:
        assert [spec.key for spec in store.blocks()] == [KEYS[0], KEYS[2]]
    with TieredStore.open(str(tmp_path / "run"), make_tiers(), generation=1) as store:
        assert [spec.key for spec in store.blocks()] == KEYS
        assert value_of(store, KEYS[1]) == 2
        assert store.commit().generation == 3, "numbers continue from the newest, not from the opened one"


def test_only_the_last_two_generations_are_kept(make_tiers: MakeTiers, kind: str, tmp_path: Path) -> None:
    with filled(make_tiers(), kind, tmp_path) as store:
        for value in range(10, 15):
            put(store, KEYS[0], value)
            store.commit().wait(60)
        assert list_generations(tmp_path / "run") == [4, 5]
        assert sorted(f.name for f in (tmp_path / "run/snap").iterdir() if f.is_dir()) == ["00000004", "00000005"]
        for tier in store._movement.tiers.values():
            if isinstance(tier, NvmeTier):
                assert tier.snapshots.nbytes == _snapshot_only_bytes(tier), "the ledger equals the disk usage"
    with TieredStore.open(str(tmp_path / "run"), make_tiers(), generation=4) as store:
        assert value_of(store, KEYS[0]) == 13


def _snapshot_only_bytes(tier: NvmeTier) -> int:
    """Return the total size in bytes of the files that have links below ``snap/`` but not below ``live/``."""
    live = {f.stat().st_ino for d in tier.directories for f in d.live.rglob("c/*") if not f.is_symlink()}
    frozen = [f.stat() for d in tier.directories for f in d.snap.rglob("c/*") if not f.is_symlink()]
    return sum({status.st_ino: status.st_size for status in frozen if status.st_ino not in live}.values())


def test_zarr_opens_a_committed_block(make_tiers: MakeTiers, kind: str, tmp_path: Path) -> None:
    with filled(make_tiers(), kind, tmp_path) as store:
        store.commit().wait(60)
    group = zarr.open_group(tmp_path / "run/snap/00000001", mode="r")
    for value, key in enumerate(KEYS, start=1):
        array = group[key]
        assert array.shape == (30_000,) and array.dtype == np.float32
        assert np.all(np.asarray(array[:]) == value)


def test_zarr_opens_the_folder_of_a_store(tmp_path: Path) -> None:
    """The link ``latest`` follows commits and removals, and zarr does not warn about unknown files."""
    folder = tmp_path / "run"

    def shown() -> list[str]:
        group = zarr.open(folder, mode="r")  # pytest turns warnings into errors
        assert isinstance(group, zarr.Group)
        return sorted(name for name, _ in group.members(max_depth=None))

    with filled([ram(), file_tier(folder)], "mixed", tmp_path) as store:
        for value in (5, 6):
            put(store, KEYS[0], value)
            store.commit().wait(60)
            latest = zarr.open(folder / "latest", mode="r")
            assert isinstance(latest, zarr.Group) and latest[KEYS[0]][7] == value
        members = ["latest", "latest/layer.0", "latest/layer.1", *(f"latest/{key}" for key in KEYS)]
        assert shown() == sorted(members)
        assert {f"latest/{name}" for name, _ in latest.members(max_depth=None)} == set(members) - {"latest"}
    TieredStore([ram(), file_tier(folder)], overwrite=True).close()  # keeps the folder's zarr.json
    assert shown() == sorted(members)
    tiered.remove_generation(folder, 2)
    assert os.readlink(folder / "latest") == "snap/00000001"
    assert zarr.open(folder, mode="r")[f"latest/{KEYS[0]}"][7] == 5
    tiered.remove_generation(folder, 1)
    assert not (folder / "latest").is_symlink()


def test_documents_of_the_folders_list_all_members(tmp_path: Path) -> None:
    with filled([ram()], "ram", tmp_path) as store:
        store.commit().wait(60)
        store.commit().wait(60)
    group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    arrays = {key: array_document(key, SHAPE, torch.float32, 122_880) for key in KEYS}
    members = {"layer.0": group, KEYS[0]: arrays[KEYS[0]], KEYS[1]: arrays[KEYS[1]], "layer.1": group}
    members[KEYS[2]] = arrays[KEYS[2]]

    def listing(document: dict[str, Any], entries: dict[str, Any]) -> dict[str, Any]:
        return {**document, "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": entries}}

    inner = json.loads((tmp_path / "run/snap/00000002/zarr.json").read_text())
    assert inner == listing(group, members) and list(inner["consolidated_metadata"]["metadata"]) == list(members)
    outer = json.loads((tmp_path / "run/zarr.json").read_text())
    base = {**group, "attributes": {"megatrain": {"format": 1, "page_bytes": 4096}}}
    assert outer == listing(base, {"latest": group, **{f"latest/{key}": each for key, each in members.items()}})
    assert json.loads((tmp_path / "run/snap/zarr.json").read_text()) == group
    assert json.loads((tmp_path / "run/snap/00000002/layer.1/zarr.json").read_text()) == group
    assert os.readlink(tmp_path / "run/latest") == "snap/00000002"
    for _ in range(2):  # with the link, and without it
        (tmp_path / "run/zarr.json").write_text(json.dumps(outer))
        zarr_folder.show_latest(tmp_path / "run", None)
        assert not (tmp_path / "run/latest").is_symlink()
        assert json.loads((tmp_path / "run/zarr.json").read_text()) == base


def test_commit_works_without_symlinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "not here")

    monkeypatch.setattr(zarr_folder.os, "symlink", refuse)
    with filled([ram()], "ram", tmp_path) as store:
        store.commit().wait(60)
    assert not (tmp_path / "run/latest").exists()
    with TieredStore.open(str(tmp_path / "run"), [ram()]) as store:
        assert value_of(store, KEYS[0]) == 1


def test_open_detects_flipped_bytes_and_missing_files(make_tiers: MakeTiers, kind: str, tmp_path: Path) -> None:
    with filled(make_tiers(), kind, tmp_path) as store:
        store.commit().wait(60)
    part = tmp_path / "run/snap/00000001" / KEYS[1] / "c/0"
    contents = bytearray(part.read_bytes())
    contents[100] ^= 1
    part.write_bytes(contents)
    with pytest.raises(CorruptBlockError, match=f"'{KEYS[1]}' of generation 1 is damaged"):
        TieredStore.open(str(tmp_path / "run"), make_tiers())
    part.unlink()
    with pytest.raises(GenerationError, match="is missing"):
        TieredStore.open(str(tmp_path / "run"), make_tiers())


@pytest.mark.parametrize("new_kind", ["ram", "elsewhere"])
def test_generation_opens_with_other_tiers(make_tiers: MakeTiers, kind: str, new_kind: str, tmp_path: Path) -> None:
    with filled(make_tiers(), kind, tmp_path) as store:
        store.commit().wait(60)
    tiers: list[Tier] = [ram()] if new_kind == "ram" else [ram(), file_tier(tmp_path / "new")]
    with TieredStore.open(str(tmp_path / "run"), tiers) as store:
        assert [value_of(store, key) for key in KEYS] == [1, 2, 3]
        assert store.commit().generation == 2
    again: list[Tier] = [ram()] if new_kind == "ram" else [ram(), file_tier(tmp_path / "new")]
    with TieredStore.open(str(tmp_path / "run"), again) as store:
        assert [value_of(store, key) for key in KEYS] == [1, 2, 3]


def test_an_unfinished_generation_is_removed(make_tiers: MakeTiers, kind: str, tmp_path: Path) -> None:
    with filled(make_tiers(), kind, tmp_path) as store:
        store.commit().wait(60)
    identity = StoreIdentity.of(tmp_path / "run")
    for root in tmp_path.iterdir():  # the files that a crash during the second commit leaves
        identity.mark(root / "snap/00000002")
        (root / "snap/00000002/layer.0/weight/c").mkdir(parents=True)
        (root / "snap/00000002/layer.0/weight/c/0").write_bytes(bytes(4096))
    with TieredStore.open(str(tmp_path / "run"), make_tiers()) as store:
        assert [value_of(store, key) for key in KEYS] == [1, 2, 3]
        assert not list(tmp_path.glob("*/snap/00000002"))
        assert store.commit().generation == 2


_KILLED = """
import os, signal, sys, torch, tiered
from tiered.durable import generations
root = sys.argv[1]
store = tiered.TieredStore([tiered.RamTier(2**20, pin_memory=False), tiered.NvmeTier([root], 2**20)])
for key, home in (("a", "ram"), ("b", "nvme")):
    store.register(key, (1000,), torch.float32, home=home)
def fill(value):
    for key in "ab":
        with store.acquire(key, "ram", "w") as lease:
            lease.tensor.fill_(value)
fill(1)
store.commit({"value": 1}).wait()
fill(2)
generations.write_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
store.commit({"value": 2}).wait()
"""


def test_killed_commit_leaves_the_previous_generation_current(tmp_path: Path) -> None:
    process = warm.run([sys.executable, "-c", _KILLED, str(tmp_path)], timeout=120)
    assert process.returncode == -9
    assert (tmp_path / "snap/00000002").is_dir() and current_generation(tmp_path) == 1
    with TieredStore.open(str(tmp_path), [ram(), NvmeTier([tmp_path], MiB)]) as store:
        assert value_of(store, "a") == value_of(store, "b") == 1
        assert not (tmp_path / "snap/00000002").exists()


def test_failed_commit_is_reported_and_removed(
    make_tiers: MakeTiers, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(make_tiers(), kind, tmp_path) as store:
        store.commit().wait(60)

        def refuse(*_: object) -> None:
            raise TransferError("no space", tier="ram", errno=28)

        with monkeypatch.context() as patch:
            patch.setattr("tiered.durable.generations.write_manifest", refuse)
            failing = store.commit()
            with pytest.raises(TransferError, match="no space"):
                failing.wait(60)
            store.commit()
            with pytest.raises(TransferError, match="no space"):
                store.commit()  # raises the error of the previous commit, which was not awaited
        assert list_generations(tmp_path / "run") == [1] and not (tmp_path / "run/snap/00000002").exists()
        put(store, KEYS[0], 9)
        last = store.commit()
        last.wait(60)
        assert last.generation == 2


def test_full_drive_is_detected_before_a_block_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with filled([ram()], "ram", tmp_path) as store:
        store.commit().wait(60)
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", refuse)
            with pytest.raises(TransferError, match=r"cannot be written: No space left on device.*/c/0") as caught:
                store.commit().wait(60)
        assert caught.value.errno == errno.ENOSPC
        assert not (tmp_path / "run/snap/00000002").exists() and current_generation(tmp_path / "run") == 1


def test_unawaited_failure_raises_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise TransferError("no space", tier="ram", errno=28)

    store = filled([ram()], "ram", tmp_path)
    monkeypatch.setattr("tiered.durable.generations.write_manifest", refuse)
    store.commit()
    with pytest.warns(RuntimeWarning, match="generation 1 was not committed: no space"):
        store.close()


def test_store_is_usable_while_a_commit_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiered.durable import commit as module

    go, write = threading.Event(), module.write_array

    def slow(*arguments: object) -> object:
        assert go.wait(60)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "write_array", slow)
    with filled([ram()], "ram", tmp_path) as store:
        begin_s = time.perf_counter()
        commit = store.commit()
        assert not commit.is_done
        assert value_of(store, KEYS[0]) == 1, "reading does not wait"
        with pytest.raises(TimeoutError):
            store.acquire(KEYS[0], "ram", "w", timeout_s=0.1)
        go.set()
        put(store, KEYS[0], 5)
        commit.wait(60)
        assert 0.09 <= store.stats().stall_s["lease"] < time.perf_counter() - begin_s, "and the one that gave up"


@pytest.mark.parametrize("verify", ["resume", "off"])
def test_commit_checksums_exclude_concurrent_writes(
    verify: Verify, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit takes no checksum of bytes that are written while it flushes its files.

    Otherwise, the next commit would reuse the checksum for other contents, and its generation could not be opened.
    """
    flush, is_flushing, may_flush = os.fdatasync, threading.Event(), threading.Event()

    def held(fd: int) -> None:
        is_flushing.set()
        assert may_flush.wait(60)
        flush(fd)

    def tiers() -> list[Tier]:
        return [ram(), NvmeTier([tmp_path], MiB, verify=verify)]

    with TieredStore(tiers()) as store:
        store.register("block", SHAPE, torch.float32, home="nvme")
        put(store, "block", 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", held)
            first = store.commit()
            assert is_flushing.wait(60)
            put(store, "block", 2)
            store.evict("block", "ram").wait(60)
            may_flush.set()
            first.wait(60)
        store.commit().wait(60)
    for generation in (1, 2):
        assert list(GenerationReader(tmp_path, generation).problems()) == []
        with TieredStore.open(str(tmp_path), tiers(), generation=generation) as store:
            assert value_of(store, "block") == generation


def test_dtypes_shapes_and_empty_blocks_survive(tmp_path: Path) -> None:
    tensors = {
        "bf16": torch.arange(7, dtype=torch.bfloat16),
        "mask": torch.tensor([[True, False], [False, True]]),
        "number": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty((0, 4)),
        "complex": torch.tensor([1 + 2j]),
    }
    with TieredStore([ram(), file_tier(tmp_path)]) as store:
        for home in ("ram", "nvme"):
            for name, tensor in tensors.items():
                store.register(f"{home}/{name}", tensor.shape, tensor.dtype, home=home)
                with store.acquire(f"{home}/{name}", "ram", "w") as lease:
                    lease.tensor.copy_(tensor)
        store.commit().wait(60)
    with TieredStore.open(str(tmp_path), [ram(), file_tier(tmp_path)]) as store:
        for spec in store.blocks():
            expected = tensors[spec.key.split("/")[1]]
            with store.acquire(spec.key, "ram") as lease:
                assert lease.tensor.dtype == expected.dtype and torch.equal(lease.tensor, expected)
        assert len(list(store.blocks())) == 2 * len(tensors)


def test_invalid_generation_calls_raise_with_advice(tmp_path: Path) -> None:
    with TieredStore([ram()]) as store, pytest.raises(GenerationError, match="pass path="):
        store.commit()
    with pytest.raises(GenerationError, match="nothing was committed"):
        TieredStore.open(str(tmp_path / "none"), [ram()])
    assert not (tmp_path / "none").exists()
    with filled([ram()], "ram", tmp_path) as store:
        with pytest.raises(GenerationError, match="must be JSON"):
            store.commit({"model": object()})  # type: ignore[dict-item]
        with store.acquire(KEYS[0], "ram", "rw"), pytest.raises(LeaseError, match="by this thread"):
            store.commit()
        store.commit().wait(60)
        with pytest.raises(LockedError):
            TieredStore.open(str(tmp_path / "run"), [ram()])
        store.register("layer.0", (1,), torch.float32, home="ram")
        with pytest.raises(GenerationError, match=r"is inside block 'layer\.0'"):
            store.commit()
    with pytest.raises(GenerationError, match="no generation 9"):
        TieredStore.open(str(tmp_path / "run"), [ram()], generation=9)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/thesis.txt").write_text("mine")
    with (
        TieredStore([ram()], path=str(tmp_path / "foreign")) as store,
        pytest.raises(tiered.TieredError, match="not empty"),
    ):
        store.commit()
    assert (tmp_path / "foreign/thesis.txt").read_text() == "mine"
    assert (tmp_path / "run" / MANIFEST_NAME).exists()


def test_a_commit_reads_blocks_through_ram_and_leaves_no_copy(tmp_path: Path) -> None:
    tiers = [RamTier(MiB), load_example("extend/compressed_ram_tier.py").CompressedRamTier(MiB)]
    with TieredStore(tiers, path=str(tmp_path / "store")) as store:
        for number in range(2):
            store.register(f"b{number}", (1024,), torch.float32, home="compressed")
            with store.acquire(f"b{number}", "ram", "w") as lease:
                lease.tensor.fill_(number)
            store.evict(f"b{number}", "ram").wait()
        store.pin("b1", "ram")
        store.commit().wait()
        assert [sorted(store.where(f"b{number}")) for number in range(2)] == [["compressed"], ["compressed", "ram"]]
        store.unpin("b1", "ram")
