"""[tiers]: what a run may use of a machine."""

from __future__ import annotations

from typing import Literal

from megatrain.base.sizes import Size
from megatrain.base.table import ConfigPath, Listed, PlainSize, Rate, Table, all_alter, key

AUTO_SIZE = Size("auto")


class GpuTierConfig(Table):
    """``[tiers.gpu]``: what fits best there has its home in GPU memory, the rest passes through."""

    size: Size = key('GPU memory this run may use: "22GiB", "90%" or "auto".', AUTO_SIZE)


class RamTierConfig(Table):
    """``[tiers.ram]``."""

    size: Size = key('RAM for blocks: "110GiB", "90%" or "auto" (measured, cgroup-aware).', AUTO_SIZE)
    pinned: Size = key("How much of it is pinned; auto: all, where CUDA exists.", AUTO_SIZE)


class NvmeTierConfig(Table):
    """``[[tiers.nvme]]``: one folder on a drive. Several tables are striped."""

    path: ConfigPath = key(
        "Folder for training state on this drive, made when missing. Parts of checkpoints lie there too: "
        "deleting it destroys them.",
        examples=["state"],
    )
    size: Size = key('Space it may take: "300GiB", "50%" or "auto" (of what is free).', AUTO_SIZE)
    mount_point: ConfigPath | None = key(
        'Folder where the drive of this path is mounted, e.g. "/mnt/nvme0": a run is refused while it is '
        "not, so that blocks never fill another drive. Default: not looked at.",
        None,
    )
    rate: Rate | None = key(
        'Relative weight when striped, e.g. "2.0GB/s". Default: as doctor measured it, else equal.', None
    )
    max_written: PlainSize | None = key(
        'Stop before all runs together write more than this there, e.g. "200TB". Default: no limit.', None, ge=1
    )


class TiersConfig(Table, json_schema_extra=all_alter("no")):
    """``[tiers]``: what this run may use."""

    safety_margin: Size = key(
        'Kept free where a size is "auto"; of GPU memory at least 1 GiB, or a tenth, for libraries.',
        Size("5%", fraction=0.05),
    )
    engine: Literal["posix", "auto", "kvikio"] = key(
        "How files are read and written. auto: kvikio where GPUDirect Storage works, else posix.", "posix"
    )
    direct: Literal["auto", "off", "on"] = key(
        "Blocks go between drives and GPU memory without passing RAM. auto: where kvikio's probe shows "
        'that GPUDirect Storage does it, and verify is not "always"; on: an error where it does not.',
        "auto",
    )
    verify: Literal["resume", "always", "off"] = key(
        "When files are compared with the checksums taken as they were written. resume: when a generation "
        "is opened; always: at every read, too; off: no checksums in a step.",
        "resume",
    )
    on_disk_full: Literal["pause", "error"] = key(
        "A drive that is full during the run: pause until there is room, or end the run.", "pause"
    )
    allow_tmpfs: bool = key(
        "Accept a [[tiers.nvme]] path on tmpfs, which is RAM: for tests. Checkpoints there are gone after a restart.",
        False,
    )
    gpu: GpuTierConfig = key("GPU memory.", default_factory=GpuTierConfig)
    ram: RamTierConfig = key("Host memory.", default_factory=RamTierConfig)
    nvme: Listed[NvmeTierConfig] = key("Folders on drives; none: nothing is kept in files.", ())
