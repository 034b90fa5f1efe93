"""Config requests that a machine cannot meet: sizes, file systems that are not drives, and missing mounts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatrain.config import ConfigError, load_config
from megatrain.machine import cgroups, this_machine
from megatrain.machine.file_systems import FileSystem, disk_of, file_system_of, missing_mount
from megatrain.machine.resources import TierSpecs
from megatrain.plan import limits
from megatrain.plan.limits import BeyondMachineError, Objection, drive_paths, find_objections, refuse
from megatrain.training.resolve import resolve_tiers
from tiered import GiB, MiB

CPU = torch.device("cpu")
SHM = Path("/dev/shm")
NO_CGROUP = Path("/no/such/file")
Write = Callable[..., Any]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that loads a config with the given tiers, written as TOML."""

    def write(tiers: str) -> Any:
        path = tmp_path / "run.toml"
        path.write_text(
            'task = "pretrain"\noutput_dir = "out"\n[model]\nmodel_name_or_path = "m"\n'
            f'[[data.train]]\npath = "x.txt"\n{tiers}\n'
        )
        return load_config(path).config

    return write


@pytest.fixture
def ram(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with 16 GiB of RAM, of which 12 GiB are free."""
    monkeypatch.setattr(this_machine, "total_ram_bytes", lambda: 16 * GiB)
    monkeypatch.setattr(this_machine, "available_ram_bytes", lambda: 12 * GiB)


def tiers_of(config: Any) -> TierSpecs:
    return resolve_tiers(config)


def only(found: tuple[Objection, ...], key: str) -> Objection:
    (objection,) = [each for each in found if each.key == key]
    return objection


@pytest.mark.usefixtures("ram")
def test_ram_beyond_the_machine(write: Write) -> None:
    found = only(find_objections(tiers_of(write('[tiers.ram]\nsize = "400GiB"')), CPU), "tiers.ram.size")
    assert found.kind == "size" and found.refuses
    assert found.text.startswith('tiers.ram.size = "400GiB" is too large: ')
    assert "16.00 GiB (12.00 GiB free now) of RAM" in found.text
    assert found.advice == 'Write at most "12GiB", or "auto"'
    with pytest.raises(BeyondMachineError, match=r"^beyond this machine: tiers\.ram\.size"):
        refuse([found])


@pytest.mark.usefixtures("ram")
@pytest.mark.parametrize(
    ("size", "need", "kind"),
    [
        ("16GiB", 0, "note"), ("12GiB", 0, None), ("auto", 0, None), ("90%", 0, "note"),
        ("14GiB", 13, "size"), ("14GiB", 12, "note"),
    ],
)  # fmt: skip
def test_free_memory_is_compared_with_the_plan(write: Write, size: str, need: int, kind: str | None) -> None:
    config = write(f'[tiers.ram]\nsize = "{size}"')
    found = find_objections(tiers_of(config), CPU, {"ram": need * GiB})
    assert [each.kind for each in found] == ([kind] if kind else [])
    if kind == "note":
        refuse(found)


def test_a_limit_of_a_cgroup_is_named(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "total_ram_bytes", lambda: psutil.virtual_memory().total // 2)
    found = only(
        find_objections(tiers_of(write(f'[tiers.ram]\nsize = "{psutil.virtual_memory().total}B"')), CPU),
        "tiers.ram.size",
    )
    assert "a cgroup (of a container or a job) allows this process" in found.text


@pytest.mark.usefixtures("ram")
def test_an_emulated_gpu_takes_ram(write: Write) -> None:
    config = write('[tiers.ram]\nsize = "9GiB"\n[tiers.gpu]\nsize = "8GiB"')
    assert find_objections(tiers_of(config), CPU) == ()  # on a CPU, the GPU size has no effect without emulation
    emulated = config.advanced.model_copy(update={"emulate_gpu": True})
    (found,) = find_objections(tiers_of(config.model_copy(update={"advanced": emulated})), CPU)
    assert found.kind == "size" and 'tiers.ram.size = "9GiB" and tiers.gpu.size = "8GiB" together are' in found.text


def test_the_memory_of_a_gpu(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GiB, 24 * GiB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some Card")
    cuda = torch.device("cuda")
    beyond = only(find_objections(tiers_of(write('[tiers.gpu]\nsize = "80GiB"')), cuda), "tiers.gpu.size")
    assert beyond.kind == "size" and "Some Card, has 24.00 GiB (20.00 GiB free now) of memory" in beyond.text
    taken = find_objections(tiers_of(write('[tiers.gpu]\nsize = "23GiB"')), cuda, {"gpu": 21 * GiB})
    assert [each.kind for each in taken] == ["size"]
    assert find_objections(tiers_of(write('[tiers.gpu]\nsize = "19GiB"')), cuda, {"gpu": 19 * GiB}) == ()


def test_drives_beyond_their_file_system(write: Write, tmp_path: Path) -> None:
    total = drive_paths(tiers_of(write('[[tiers.nvme]]\npath = "a"')).table.nvme)[0].total_bytes
    one = f'[[tiers.nvme]]\npath = "a"\nsize = "{total + 1}B"\n'
    found = only(find_objections(tiers_of(write(one)), CPU), "tiers.nvme.0.size")
    assert found.kind == "size" and str(tmp_path / "a") in found.text and file_system_of(tmp_path).source in found.text
    half = f'size = "{total // 2 + MiB}B"\n'
    two = find_objections(tiers_of(write(f'[[tiers.nvme]]\npath = "a"\n{half}[[tiers.nvme]]\npath = "b"\n{half}')), CPU)
    assert "tiers.nvme.0.size" in two[0].text and "tiers.nvme.1.size" in two[0].text and "together" in two[0].text
    share = find_objections(tiers_of(write('[[tiers.nvme]]\npath = "a"\nsize = "100%"\n')), CPU)
    assert not any(each.refuses for each in share)


def test_paths_on_one_drive_share_its_free_bytes(write: Write, tmp_path: Path) -> None:
    one = '[[tiers.nvme]]\npath = "{}"\n'
    both = write(one.format("a") + one.format("b"))
    alone = tiers_of(write(one.format("a"))).nvme_capacity_bytes(tmp_path)
    assert tiers_of(both).nvme_capacity_bytes(tmp_path) == pytest.approx(alone, rel=0.05)
    note = only(find_objections(tiers_of(both), CPU), "tiers.nvme.1.path")
    assert note.kind == "note" and "are on one drive" in note.text


KINDS = {
    "tmpfs": "memory", "ramfs": "memory", "overlay": "layers", "fuse.fuse-overlayfs": "layers", "nfs4": "network",
    "cifs": "network", "smb3": "network", "fuse.sshfs": "network", "virtiofs": "network", "fuse.mergerfs": "program",
    "9p": "network", "drvfs": "network", "fuseblk": "program", "ext4": "drive",
    "xfs": "drive", "btrfs": "drive", "zfs": "drive",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_file_system_kinds_are_classified(kind: str, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    there = FileSystem("0:99", kind, "source", "/")
    assert there.medium == KINDS[kind]
    monkeypatch.setattr(limits, "file_system_of", lambda path: there)
    monkeypatch.setattr(limits, "missing_mount", lambda path: None)
    found = find_objections(tiers_of(write('[[tiers.nvme]]\npath = "a"')), CPU)
    assert [each.kind for each in found] == {"drive": [], "memory": ["place"]}.get(KINDS[kind], ["note"])
    assert all(kind in each.text and each.key == "tiers.nvme.0.path" for each in found)


#: Mounts of Windows drives in WSL: version 2 with 9p, newer releases with virtiofs, and version 1 with drvfs.
WINDOWS = {"9p": r"9p C:\134 rw,aname=drvfs;path=C:\;uid=1000", "virtiofs": "virtiofs C: rw", "drvfs": "drvfs C: rw"}


@pytest.mark.parametrize("kind", WINDOWS)
def test_windows_drive_under_wsl_is_reported_with_a_remedy(
    kind: str, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts, point = tmp_path / "mountinfo", tmp_path / "mnt" / "c"
    point.mkdir(parents=True)
    mounts.write_text(f"21 1 8:48 / / rw - ext4 /dev/sdd rw\n31 21 0:71 / {point} rw,noatime - {WINDOWS[kind]}\n")
    assert file_system_of(tmp_path, mounts).warning == ""
    monkeypatch.setattr(limits, "file_system_of", lambda path: file_system_of(path, mounts))
    (note,) = find_objections(tiers_of(write(f'[[tiers.nvme]]\npath = "{point / "state"}"\n')), CPU)
    assert note.kind == "note" and f"{kind} is a drive of Windows" in note.text and "disk of WSL" in note.text


@pytest.mark.skipif(file_system_of(SHM).kind != "tmpfs", reason="/dev/shm is not a tmpfs here")
def test_tmpfs_is_refused_unless_allowed(write: Write) -> None:
    path = '[[tiers.nvme]]\npath = "/dev/shm/megatrain-tier-test"\n'
    refused = find_objections(tiers_of(write(path)), CPU)
    with pytest.raises(ConfigError, match=r"tmpfs, which is RAM.*allow_tmpfs = true"):
        refuse(refused)
    allowed = find_objections(tiers_of(write(f"{path}[tiers]\nallow_tmpfs = true")), CPU)
    assert [each.kind for each in allowed] == ["note"]


def test_unmounted_drive_is_refused(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mnt").mkdir()
    table = '[[tiers.nvme]]\npath = "mnt/blocks"\n'
    with pytest.raises(ConfigError, match="nothing is mounted there: blocks would go to"):
        refuse(find_objections(tiers_of(write(f'{table}mount_point = "mnt"')), CPU))
    here = file_system_of(tmp_path).mount_point
    assert find_objections(tiers_of(write(f'{table}mount_point = "{here}"')), CPU) == ()
    with pytest.raises(ConfigError, match="is not on it: blocks would go to"):
        refuse(find_objections(tiers_of(write(f'{table}mount_point = "/proc"')), CPU))
    monkeypatch.setattr(limits, "missing_mount", lambda path: "/mnt")
    (note,) = find_objections(tiers_of(write(table)), CPU)
    assert note.kind == "note" and "/etc/fstab has a drive for /mnt" in note.text


def test_unmounted_fstab_entries_are_found(tmp_path: Path) -> None:
    table = tmp_path / "fstab"
    point = tmp_path / "big drive"
    escaped = str(point).replace(" ", "\\040")
    table.write_text(
        f"# {tmp_path}\nUUID=1 / ext4 defaults 0 1\n\nLABEL=x none swap sw\nUUID=2 {escaped} xfs defaults 0 2\nodd\n"
    )
    assert missing_mount(point / "blocks", table) == str(point)
    assert missing_mount(tmp_path / "other", table) is None
    assert missing_mount(point, tmp_path / "none") is None
    # Only a newline ends a line of fstab, but str.splitlines also splits at other characters.
    other = tmp_path / "a\x85b"
    table.write_bytes(f"UUID=2 {other} xfs defaults 0 2\n".encode())
    assert missing_mount(other / "blocks", table) == str(other)
    table.write_text(f"UUID=2 {file_system_of(tmp_path).mount_point} ext4 defaults 0 2\n")
    assert missing_mount(point, table) is None


def test_partitions_of_one_disk(tmp_path: Path) -> None:
    disk = tmp_path / "devices" / "nvme0n1"
    (disk / "nvme0n1p1").mkdir(parents=True)
    (disk / "nvme0n1p1" / "partition").write_text("1\n")
    numbers = tmp_path / "block"
    numbers.mkdir()
    (numbers / "259:0").symlink_to(disk)
    (numbers / "259:1").symlink_to(disk / "nvme0n1p1")
    whole = FileSystem("259:0", "ext4", "/dev/nvme0n1", "/a")
    assert disk_of(whole, numbers) == disk_of(replace(whole, device="259:1"), numbers) == "nvme0n1"
    other = replace(whole, device="0:42", source="tank")
    assert disk_of(other, numbers) == other.key


def cgroup(root: Path, name: str, limit: str, used: int, cache: int) -> None:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\nactive_file 7\n")


def test_limits_of_a_container_and_of_a_job(tmp_path: Path) -> None:
    """A container sees its cgroup as the root of the tree. The cgroup of a batch job is deeper in the tree."""
    cgroup(tmp_path, "", str(64 * MiB), 30 * MiB, 20 * MiB)
    assert cgroups.total_ram_bytes(tmp_path, NO_CGROUP) == 64 * MiB
    assert cgroups.available_ram_bytes(tmp_path, NO_CGROUP) == 54 * MiB  # file caches are freed when RAM is needed
    own = tmp_path / "own"
    own.write_text("0::/slurm/job_7/step_0\n")
    cgroup(tmp_path, "slurm/job_7", str(32 * MiB), 30 * MiB, 0)
    cgroup(tmp_path, "slurm/job_7/step_0", "max", 1 * MiB, 0)
    assert cgroups.total_ram_bytes(tmp_path, own) == 32 * MiB
    assert cgroups.available_ram_bytes(tmp_path, own) == 2 * MiB


def test_limits_of_the_first_version_of_cgroups(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("3:cpu,cpuacct:/other\n2:memory:/docker/abc\n")
    folder = tmp_path / "memory" / "docker" / "abc"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{16 * MiB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{8 * MiB}\n")
    (folder / "memory.stat").write_text(f"total_inactive_file {2 * MiB}\n")
    assert cgroups.total_ram_bytes(tmp_path, own) == 16 * MiB
    assert cgroups.available_ram_bytes(tmp_path, own) == 10 * MiB
