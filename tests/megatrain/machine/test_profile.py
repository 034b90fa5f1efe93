"""Profiles are stored completely or not at all. Damaged profiles and other machines' profiles are not used."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from megatrain.machine import file_systems, profiles
from megatrain.machine.files import Bandwidth
from megatrain.machine.planned_machine import PlannedMachine, find_machine
from megatrain.machine.profiles import (
    DriveProfile,
    MachineProfile,
    load_profile,
    profile_path,
    store_profile,
)
from megatrain.machine.resources import stripe_rates, unified_reserve_bytes
from megatrain.machine.this_machine import THIS_MACHINE
from tiered.units import GiB

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def drive(path: str = "/somewhere", **rates: float) -> DriveProfile:
    names = ("read", "write", "mixed")
    values = {f"{name}_bytes_per_s": 1e9 for name in names} | rates
    return DriveProfile(path=path, filesystem="ext4", measured_at=NOW, is_quick=True, is_direct=True, **values)


def make_machine(**changes: object) -> MachineProfile:
    values: dict[str, object] = {
        "host": platform.node(),
        "cpu": profiles.cpu_name(),
        "ram_bytes": psutil.virtual_memory().total,
        "measured_at": NOW,
        "is_quick": False,
        "num_threads": 2,
        "ram_update_bytes_per_s": 2e10,
        "adamw_params_per_s": {"float32": 1e9},
        "matmul_flops_per_s": {"cpu/float32": 1e11},
        "drives": {"1:2 /dev/x": drive()},
    }
    return MachineProfile.model_validate(values | changes)


def test_stored_profile_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "profile.json"
    assert load_profile(path).machine is None
    assert load_profile(path).note is None
    stored = make_machine()
    assert store_profile(stored, path) == path
    assert load_profile(path).machine == stored
    assert os.listdir(path.parent) == ["profile.json"]
    assert json.loads(path.read_text())["version"] == 1


def test_profile_is_stored_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profile_path() == tmp_path / "megatrain-tier" / "profile.json"
    monkeypatch.setenv("HOME", "/home/somebody")
    for not_absolute in ("", "cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", not_absolute)
        assert profile_path() == Path("/home/somebody/.cache/megatrain-tier/profile.json")


def test_storing_a_profile_keeps_other_machines_and_drives(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    store_profile(make_machine(host="another"), path)
    store_profile(make_machine(), path)
    store_profile(make_machine(drives={"3:4 /dev/y": drive("/y")}, num_threads=7), path)
    loaded = load_profile(path).machine
    assert loaded is not None
    assert sorted(loaded.drives) == ["1:2 /dev/x", "3:4 /dev/y"]
    assert loaded.num_threads == 7
    assert len(json.loads(path.read_text())["machines"]) == 2


def test_the_figures_of_another_machine_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    store_profile(make_machine(host="another", ram_bytes=7 << 30), path)
    loaded = load_profile(path)
    assert loaded.machine is None
    assert loaded.note is not None
    assert "another" in loaded.note and "7 GiB" in loaded.note


DAMAGED = {
    "empty": b"",
    "cut off": b'{"format": "megatrain-tier pro',
    "not json": b"\xff\xfe\x00hello",
    "list": b"[]",
    "foreign": b'{"format": "something else", "machines": {}}',
    "newer": b'{"format": "megatrain-tier profile", "version": 2, "machines": {}}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("contents", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named_and_replaced(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(contents)
    loaded = load_profile(path)
    assert loaded.machine is None
    assert loaded.note is not None and loaded.note.startswith(f"{path} is not used: ")
    store_profile(make_machine(), path)
    assert load_profile(path).machine == make_machine()


def test_a_profile_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Profiles of earlier versions have rates of plain reads, writes and copies, which plans ignore."""
    path = tmp_path / "profile.json"
    store_profile(make_machine(), path)
    values = json.loads(path.read_text())
    stored = values["machines"][make_machine().key]
    stored |= {"ram_read_bytes_per_s": 3e10, "ram_copy_bytes_per_s": 2e10}
    for each in stored["drives"].values():
        each |= {f"bare_{name}_bytes_per_s": 2e9 for name in ("read", "write", "mixed")}
    path.write_text(json.dumps(values))
    assert load_profile(path).machine == make_machine()
    stored["other_bytes_per_s"] = 1e9
    path.write_text(json.dumps(values))
    assert load_profile(path).machine is None


@pytest.mark.parametrize("rate", [0, -1.0, "fast", None, float("inf"), float("nan")])
def test_invalid_rate_marks_the_profile_damaged(tmp_path: Path, rate: object) -> None:
    path = tmp_path / "profile.json"
    store_profile(make_machine(), path)
    values = json.loads(path.read_text())
    next(iter(values["machines"].values()))["ram_update_bytes_per_s"] = rate
    path.write_text(json.dumps(values))
    loaded = load_profile(path)
    assert loaded.machine is None
    assert (loaded.note is not None and "ram_update_bytes_per_s" in loaded.note) or rate != rate or rate == float("inf")


def test_folder_in_place_of_the_profile_is_reported(tmp_path: Path) -> None:
    (tmp_path / "profile.json").mkdir()
    loaded = load_profile(tmp_path / "profile.json")
    assert loaded.machine is None
    assert loaded.note is not None and "Is a directory" in loaded.note


def test_a_failed_store_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    store_profile(make_machine(), path)

    def refuse(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        store_profile(make_machine(num_threads=9), path)
    assert load_profile(path).machine == make_machine()
    assert os.listdir(tmp_path) == ["profile.json"]


def test_the_drive_of_a_path(tmp_path: Path) -> None:
    here = file_systems.file_system_of(tmp_path)
    number = tmp_path.stat().st_dev
    assert here.device == f"{os.major(number)}:{os.minor(number)}"
    assert here == file_systems.file_system_of(tmp_path / "not" / "made" / "yet")
    known = make_machine(drives={here.key: drive(str(tmp_path))})
    assert known.drive_of(tmp_path / "later") == drive(str(tmp_path))
    assert make_machine().drive_of(tmp_path) is None


def test_mounts_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    mounts = tmp_path / "mountinfo"
    point = str(folder.resolve()).replace(" ", "\\040")
    mounts.write_text(
        "21 1 8:1 / / rw - ext4 /dev/root rw\n"
        f"22 21 8:2 / {point} rw,relatime shared:1 master:2 - xfs /dev/my\\040disk rw\n"
        "23 21 8:3 / /elsewhere rw - btrfs /dev/other rw\n"
        "a line of another kind\n"
    )
    found = file_systems.file_system_of(folder, mounts)
    assert (found.kind, found.source, found.mount_point) == ("xfs", "/dev/my disk", str(folder.resolve()))
    assert file_systems.file_system_of(tmp_path, mounts).kind == "ext4"
    assert file_systems.file_system_of(tmp_path, tmp_path / "none").kind == "unknown"


def test_age_days_is_never_negative() -> None:
    assert profiles.age_days(datetime.now(UTC) - timedelta(days=31)) == pytest.approx(31, abs=0.01)
    assert profiles.age_days(datetime.now(UTC) + timedelta(days=1)) == 0


def planned_machine(num_drives: int) -> PlannedMachine:
    """Return a machine whose n-th drive has a mixed read and write rate of n GB/s."""
    file = find_machine("cpu-server-512gb").file
    rates = [Bandwidth.model_validate({"is": f"{n + 1}GB/s", "estimate": "a guess"}) for n in range(num_drives)]
    drives = [
        file.drives[0].model_copy(update={"name": f"Drive {number}", "count": 1, "mixed": rate})
        for number, rate in enumerate(rates)
    ]
    return PlannedMachine("planned", file.model_copy(update={"drives": tuple(drives)}))


def test_stripe_rates_are_the_given_ones_or_one_for_a_single_drive() -> None:
    paths = [Path("/a"), Path("/b")]
    assert stripe_rates(paths, [3.0, 1.0], planned_machine(2)) == [3.0, 1.0]
    assert stripe_rates(paths[:1], [], planned_machine(2)) == [1.0]
    assert stripe_rates([], [], THIS_MACHINE) == []


def test_stripe_rates_of_a_planned_machine_are_its_mixed_rates_in_order() -> None:
    paths = [Path("/a"), Path("/b"), Path("/c")]
    assert stripe_rates(paths[:2], [], planned_machine(3)) == [1e9, 2e9]
    assert stripe_rates(paths, [], planned_machine(3)) == [1e9, 2e9, 3e9]
    assert stripe_rates(paths, [], planned_machine(2)) == [1.0, 1.0, 1.0]  # one drive has no rate


def test_stripe_rates_of_this_machine_are_equal_unless_all_drives_were_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths = [tmp_path / "a", tmp_path / "b"]
    assert stripe_rates(paths, [], THIS_MACHINE) == [1.0, 1.0]
    store_profile(make_machine())
    assert stripe_rates(paths, [], THIS_MACHINE) == [1.0, 1.0]
    store_profile(make_machine(drives={file_systems.file_system_of(tmp_path).key: drive(mixed_bytes_per_s=5e9)}))
    assert stripe_rates(paths, [], THIS_MACHINE) == [5e9, 5e9]


@pytest.mark.parametrize(
    ("total_bytes", "reserve_bytes"),
    [(120 * GiB, 12 * GiB), (20 * GiB, 2 * GiB), (8 * GiB, 2 * GiB), (4 * GiB, 2 * GiB), (2 * GiB, GiB), (0, 0)],
)
def test_unified_memory_reserve_is_a_tenth_within_limits(total_bytes: int, reserve_bytes: int) -> None:
    assert unified_reserve_bytes(total_bytes) == reserve_bytes


def test_a_btrfs_is_on_the_disk_of_its_source(tmp_path: Path) -> None:
    """Other file systems are on the disk with their own device number."""
    for number in ("1:3", "8:3"):  # /dev/null is 1:3 on every Linux
        (tmp_path / number).mkdir()
    found = [
        file_systems.disk_of(file_systems.FileSystem(device, kind, source, "/"), tmp_path)
        for device, kind, source in (("0:45", "btrfs", "/dev/null"), ("8:3", "ext4", "/dev/null"))
    ]
    assert found == ["1:3", "8:3"]
    memory = file_systems.FileSystem("0:46", "tmpfs", "tmpfs", "/")
    assert file_systems.disk_of(memory, tmp_path) == memory.key
