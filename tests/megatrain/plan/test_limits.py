"""Config requests that a machine cannot meet: sizes, file systems that are not drives, and missing mounts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from megatrain.config import ConfigError, load_config
from megatrain.machine import cgroups, file_systems, this_machine
from megatrain.machine.file_systems import FileSystem, Space, disk_of, file_system_of, missing_mount
from megatrain.machine.planned_machine import find_machine
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
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16 * GiB))
    monkeypatch.setattr(this_machine, "total_ram_bytes", lambda: 16 * GiB)
    monkeypatch.setattr(this_machine, "available_ram_bytes", lambda: 12 * GiB)


RAM = "this machine has 16.00 GiB (12.00 GiB free now) of RAM"


def tiers_of(config: Any) -> TierSpecs:
    return resolve_tiers(config)


def only(found: tuple[Objection, ...], key: str) -> Objection:
    (objection,) = [each for each in found if each.key == key]
    return objection


@pytest.mark.usefixtures("ram")
def test_ram_beyond_the_machine(write: Write) -> None:
    (found,) = find_objections(tiers_of(write('[tiers.ram]\nsize = "400GiB"')), CPU)
    text = f'tiers.ram.size = "400GiB" is too large: {RAM}'
    assert found == Objection("tiers.ram.size", text, 'Write at most "12GiB", or "auto"', "size") and found.refuses
    with pytest.raises(BeyondMachineError) as refused:
        refuse([replace(found, kind="note"), found, replace(found, text="Another")])
    advice = 'Write at most "12GiB", or "auto"'
    assert str(refused.value) == f"beyond this machine: {text}. {advice}\nAnother. {advice}"
    with pytest.raises(ConfigError) as misplaced:
        refuse([found, replace(found, kind="place"), replace(found, key="tiers", text="Another", kind="place")])
    assert str(misplaced.value) == f"2 problems in the config\n  {text}. {advice}\n  Another. {advice}"


@pytest.mark.usefixtures("ram")
@pytest.mark.parametrize(
    ("size", "need", "text", "advice", "kind"),
    [
        ("16GiB", 0, f"is more than is free now: {RAM}; the run may use all of this size", '"12GiB"', "note"),
        ("12GiB", 0, "", "", None),
        ("auto", 13, "", "", None),
        ("90%", 0, f"is more than is free now: {RAM}; the run may use all of this size", '"12GiB"', "note"),
        ("14GiB", 13, f"this run takes at least 13.00 GiB of it, but {RAM}", "", "size"),
        ("14GiB", 12, f"is more than is free now: {RAM}; the run may use all of this size", '"12GiB"', "note"),
        ("17GiB", 13, f"is too large: {RAM}", '"12GiB", or "auto"', "size"),
    ],
)
def test_free_memory_is_compared_with_the_plan(
    write: Write, size: str, need: int, text: str, advice: str, kind: Any
) -> None:
    found = find_objections(tiers_of(write(f'[tiers.ram]\nsize = "{size}"')), CPU, {"ram": need * GiB, "gpu": GiB})
    separator = ": " if text.startswith("this run") else " "
    advice = f"Write at most {advice}" if advice else SMALLER
    expected = Objection("tiers.ram.size", f'tiers.ram.size = "{size}"{separator}{text}', advice, kind)
    assert found == ((expected,) if kind else ())
    if kind == "note":
        refuse(found)


SMALLER = "Free memory, or write a smaller size so that more blocks go to drives"


@pytest.mark.usefixtures("ram")
def test_a_limit_of_a_cgroup_is_named(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16 * GiB + 1))
    (found,) = find_objections(tiers_of(write('[tiers.ram]\nsize = "17GiB"')), CPU)
    allowed = "a cgroup (of a container or a job) allows this process 16.00 GiB (12.00 GiB free now) of RAM"
    assert found.text == f'tiers.ram.size = "17GiB" is too large: {allowed}'


@pytest.mark.usefixtures("ram")
@pytest.mark.parametrize(
    ("gib", "needs", "text", "advice", "kind"),
    [
        (9, {}, f" together are too large: {RAM}", 'Write at most "12GiB" together', "size"),
        (7, {"ram": 7, "gpu": 6, "nvme": 9}, f": this run takes at least 13.00 GiB of it, but {RAM}", SMALLER, "size"),
        (
            7,
            {"ram": 6, "gpu": 6, "nvme": 9},
            f" together are more than is free now: {RAM}; the run may use all of this size",
            'Write at most "12GiB" together',
            "note",
        ),
    ],
)
def test_an_emulated_gpu_takes_ram(
    write: Write, gib: int, needs: dict[str, int], text: str, advice: str, kind: Any
) -> None:
    config = write(f'[tiers.ram]\nsize = "{gib}GiB"\n[tiers.gpu]\nsize = "8GiB"')
    assert find_objections(tiers_of(config), CPU) == ()  # on a CPU, the GPU size has no effect without emulation
    emulated = config.advanced.model_copy(update={"emulate_gpu": True})
    tiers = tiers_of(config.model_copy(update={"advanced": emulated}))
    sizes = f'tiers.ram.size = "{gib}GiB" and tiers.gpu.size = "8GiB"'
    expected = Objection("tiers.ram.size", f"{sizes}{text}", advice, kind)
    assert find_objections(tiers, CPU, {tier: need * GiB for tier, need in needs.items()}) == (expected,)
    config = write('[tiers.gpu]\nsize = "18GiB"')  # the size of RAM is "auto"
    (found,) = find_objections(tiers_of(config.model_copy(update={"advanced": emulated})), CPU)
    expected = Objection(
        "tiers.gpu.size", f'tiers.gpu.size = "18GiB" is too large: {RAM}', 'Write at most "12GiB", or "auto"', "size"
    )
    assert found == expected


def test_the_memory_of_a_gpu(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GiB, 24 * GiB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some Card")
    cuda, card = torch.device("cuda"), "this GPU, Some Card, has 24.00 GiB (20.00 GiB free now) of memory"
    (beyond,) = find_objections(tiers_of(write('[tiers.gpu]\nsize = "80GiB"')), cuda)
    text = f'tiers.gpu.size = "80GiB" is too large: {card}'
    assert beyond == Objection("tiers.gpu.size", text, 'Write at most "20GiB", or "auto"', "size")
    (taken,) = find_objections(tiers_of(write('[tiers.gpu]\nsize = "23GiB"')), cuda, {"gpu": 21 * GiB, "ram": 1})
    text = f'tiers.gpu.size = "23GiB": this run takes at least 21.00 GiB of it, but {card}'
    assert taken == Objection("tiers.gpu.size", text, SMALLER, "size")
    assert find_objections(tiers_of(write('[tiers.gpu]\nsize = "19GiB"')), cuda, {"gpu": 19 * GiB}) == ()
    assert find_objections(tiers_of(write("")), cuda, {"gpu": 21 * GiB}) == ()


def test_drives_of_another_machine(write: Write) -> None:
    """The machine has two drives of 4 TB. Sizes are in the order of the drives."""
    machine = find_machine("rtx4090-128gb")

    def objections(*sizes: str) -> tuple[Objection, ...]:
        tables = (f'[[tiers.nvme]]\npath = "{index}"\nsize = "{size}"\n' for index, size in enumerate(sizes))
        tiers = replace(tiers_of(write("".join(tables))), machine=machine)
        return find_objections(tiers, CPU, {"ram": 1 << 50, "gpu": 1 << 50})

    def too_large(index: int, size: str) -> Objection:
        place = "rtx4090-128gb has 3.64 TiB there (PCIe 4.0 client NVMe, 4 TB (Samsung 990 PRO))"
        text = f'tiers.nvme.{index}.size = "{size}" is too large: {place}'
        return Objection(f"tiers.nvme.{index}.size", text, 'Write at most "3725GiB", or "auto"', "size")

    def note(number: int) -> Objection:
        text = f"rtx4090-128gb has 2 drives, but {number} of them are not in [[tiers.nvme]]"
        return Objection("tiers.nvme", text, "More drives are faster if the plan is bound by nvme", "note")

    many = "3 paths in [[tiers.nvme]], but rtx4090-128gb has 2 drives"
    assert objections("4TB", "auto") == () and objections() == (note(2),)
    assert objections("5TB") == (too_large(0, "5TB"), note(1))
    assert objections("4TB", "4.1TB") == (too_large(1, "4.1TB"),)
    assert objections("5TB", "6TB", "1TB") == (
        Objection("tiers.nvme", many, "Name no more paths than drives", "place"),
        too_large(0, "5TB"),
        too_large(1, "6TB"),
    )
    gpu = replace(tiers_of(write('[tiers.gpu]\nsize = "25GiB"\n[tiers.ram]\nsize = "123GiB"')), machine=machine)
    found = find_objections(gpu, torch.device("cuda"), {"ram": 1 << 50})
    assert [(each.key, each.text, each.kind) for each in found[:2]] == [
        (
            "tiers.gpu.size",
            'tiers.gpu.size = "25GiB" is too large: a GPU of rtx4090-128gb has 24.00 GiB of memory',
            "size",
        ),
        (
            "tiers.ram.size",
            'tiers.ram.size = "123GiB" is more than is free now: rtx4090-128gb has 128.00 GiB (122.00 GiB free now) of '
            "RAM; the run may use all of this size",
            "note",
        ),
    ]


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> FileSystem:
    """Simulate a drive of 100 GiB, of which 40.5 GiB are free, and return its file system."""
    monkeypatch.setattr(file_systems, "disk_usage", lambda path: Space(100 * GiB, 40 * GiB + 512 * MiB))
    monkeypatch.setattr(limits, "missing_mount", lambda path: None)
    there = FileSystem("0:99", "ext4", "/dev/big", "/big")
    monkeypatch.setattr(limits, "file_system_of", lambda path: there)
    return there


def test_drives_beyond_their_file_system(write: Write, tmp_path: Path, drive: FileSystem) -> None:
    def objections(*sizes: str) -> tuple[Objection, ...]:
        tables = (f'[[tiers.nvme]]\npath = "{"abc"[index]}"\nsize = "{size}"\n' for index, size in enumerate(sizes))
        return find_objections(tiers_of(write("".join(tables))), CPU)

    def same_drive(*names: str) -> Objection:
        paths = ", ".join(str(tmp_path / name) for name in names)
        text = f"{paths} are on one drive ({drive.key}): blocks striped over them share its speed and its space"
        advice = "Name only one of them in [[tiers.nvme]], and folders on other drives"
        return Objection("tiers.nvme.1.path", text, advice, "note")

    place = (
        f"the file system of {tmp_path / 'a'} (ext4 on /dev/big, mounted at /big) has 100.00 GiB, 40.50 GiB of it free"
    )
    text = f'tiers.nvme.0.size = "101GiB" is too large: {place}'
    assert objections("101GiB") == (Objection("tiers.nvme.0.size", text, 'Write at most "40GiB", or "auto"', "size"),)
    assert objections("100GiB") == objections("100%") == objections("auto") == ()
    settings = 'tiers.nvme.0.size = "61GiB" and tiers.nvme.2.size = "40%"'
    text = f"{settings} together are too large: {place}"
    both = Objection("tiers.nvme.0.size", text, 'Write at most "40GiB" together, or "auto"', "size")
    assert objections("61GiB", "auto", "40%") == (both, same_drive("a", "b", "c"))
    assert objections("60GiB", "40GiB") == (same_drive("a", "b"),)


def test_drive_paths_have_the_space_of_their_file_system(write: Write, tmp_path: Path, drive: FileSystem) -> None:
    table = '[[tiers.nvme]]\npath = "a"\nsize = "25%"\n[[tiers.nvme]]\npath = "b"\n'
    paths = drive_paths(tiers_of(write(table)).table.nvme)
    assert [(each.key, each.spec.path.name, each.size_bytes) for each in paths] == [
        ("tiers.nvme.0", "a", 25 * GiB),
        ("tiers.nvme.1", "b", 0),
    ]
    assert {(each.file_system, each.free_bytes, each.total_bytes) for each in paths} == {
        (drive, 40 * GiB + 512 * MiB, 100 * GiB)
    }
    space = "ext4 on /dev/big, mounted at /big, 100.00 GiB, 40.50 GiB of it free"
    assert [str(each) for each in paths] == [
        f"tiers.nvme.0: {tmp_path / 'a'}: {space}",
        f"tiers.nvme.1: {tmp_path / 'b'}: {space}",
    ]


def test_paths_on_one_drive_share_its_free_bytes(write: Write, tmp_path: Path) -> None:
    one = '[[tiers.nvme]]\npath = "{}"\n'
    both = write(one.format("a") + one.format("b"))
    alone = tiers_of(write(one.format("a"))).nvme_capacity_bytes(tmp_path)
    assert tiers_of(both).nvme_capacity_bytes(tmp_path) == pytest.approx(alone, rel=0.05)


@pytest.mark.parametrize(("nbytes", "text"), [(GiB, "1GiB"), (GiB - 1, "1023MiB"), (2 * MiB - 1, "1MiB"), (1, "1MiB")])
def test_sizes_in_advice_are_rounded_down(
    nbytes: int, text: str, write: Write, drive: FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_systems, "disk_usage", lambda path: Space(100 * GiB, nbytes))
    (found,) = find_objections(tiers_of(write('[[tiers.nvme]]\npath = "a"\nsize = "101GiB"')), CPU)
    assert found.advice == f'Write at most "{text}", or "auto"'


KINDS = {
    "tmpfs": "memory", "ramfs": "memory", "overlay": "layers", "fuse.fuse-overlayfs": "layers", "nfs4": "network",
    "cifs": "network", "smb3": "network", "fuse.sshfs": "network", "virtiofs": "network", "fuse.mergerfs": "program",
    "9p": "network", "drvfs": "network", "fuseblk": "program", "ext4": "drive",
    "xfs": "drive", "btrfs": "drive", "zfs": "drive",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_file_system_kinds_are_classified(
    kind: str, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = FileSystem("0:99", kind, "source", "/")
    assert there.medium == KINDS[kind]
    monkeypatch.setattr(limits, "file_system_of", lambda path: there)
    monkeypatch.setattr(limits, "missing_mount", lambda path: None)
    found = find_objections(tiers_of(write('[[tiers.nvme]]\npath = "a"')), CPU)
    key, path = "tiers.nvme.0.path", tmp_path / "a"
    if KINDS[kind] == "drive":
        assert found == ()
    elif KINDS[kind] == "memory":
        reason = "which is RAM, not a drive: blocks there use RAM outside all configured limits, and are gone after a"
        advice = "Name a folder on a drive, or write allow_tmpfs = true in [tiers]"
        assert found == (Objection(key, f"{key}: {path} is on {kind}, {reason} restart", advice, "place"),)
    else:
        advice = "Name a folder on a drive of this machine for speed, and for checkpoints that stay"
        assert found == (Objection(key, f"{key}: {path}: {there.warning}", advice, "note"),)


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
    table = '[[tiers.nvme]]\npath = "{}"\n[[tiers.nvme]]\npath = "mnt/blocks"\n'
    monkeypatch.setattr(limits, "disk_of", str)  # simulate two drives
    here = file_system_of(tmp_path)
    monkeypatch.setattr(
        limits,
        "file_system_of",
        lambda path: file_system_of(path) if "x" not in path.name else replace(here, source="x"),
    )

    def refused(mount_point: str, reason: str) -> None:
        text = f'tiers.nvme.1.mount_point = "{mount_point}", but {reason}: blocks would go to {here}'
        advice = "Mount the drive, or write the path of a folder on it"
        expected = Objection("tiers.nvme.1.mount_point", text, advice, "place")
        config = write(f'{table.format("x")}mount_point = "{mount_point}"')
        assert find_objections(tiers_of(config), CPU) == (expected,)

    refused(str(tmp_path / "mnt"), "nothing is mounted there")
    refused("/proc", f"{tmp_path / 'mnt' / 'blocks'} is not on it")
    assert find_objections(tiers_of(write(f'{table.format("x")}mount_point = "{here.mount_point}"')), CPU) == ()
    monkeypatch.setattr(limits, "missing_mount", lambda path: "/mnt" if path.name == "blocks" else None)
    key = "tiers.nvme.1.path"
    text = f"{key}: /etc/fstab has a drive for /mnt, but it is not mounted: blocks would go to {here}"
    advice = 'Mount it; mount_point = "/mnt" refuses a run without it'
    assert find_objections(tiers_of(write(table.format("x"))), CPU) == (Objection(key, text, advice, "note"),)


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
