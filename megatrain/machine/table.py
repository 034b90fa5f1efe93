"""The table [tiers]: the resources of a machine that a run can use."""

from __future__ import annotations

from typing import Literal

from megatrain.base.sizes import Size
from megatrain.base.table import ConfigPath, Listed, PlainSize, Rate, Table, all_alter, key

AUTO_SIZE = Size("auto")
TierName = Literal["gpu", "ram", "folder", "nvme"]  # the tiers of ``[tiers]``, and the model's folder


class GpuTierConfig(Table):
    """``[tiers.gpu]``: the home of the blocks that save the most traffic. Other blocks are only copied here."""

    size: Size = key('GPU memory of the run: "22GiB", "90%" or "auto".', AUTO_SIZE)


class RamTierConfig(Table):
    """``[tiers.ram]``."""

    size: Size = key('RAM for blocks: "110GiB", "90%" or "auto" (measured, cgroup-aware).', AUTO_SIZE)
    pinned: Size = key("Pinned part of the tier; auto: all of it if CUDA exists.", AUTO_SIZE)


class NvmeTierConfig(Table):
    """``[[tiers.nvme]]``: one folder on a drive. Several tables are striped."""

    path: ConfigPath = key(
        "Folder for training state on this drive; it is created. It also contains parts of checkpoints: deleting "
        "it destroys them.",
        examples=["state"],
    )
    size: Size = key('Space of the tier: "300GiB", "50%" or "auto" (of the free space).', AUTO_SIZE)
    mount_point: ConfigPath | None = key(
        'Mount point of the drive, e.g. "/mnt/nvme0". Runs are refused while nothing is mounted there, so that blocks '
        "never fill another drive. Default: not checked.",
        None,
    )
    rate: Rate | None = key(
        'Rate that weights the drive in stripes, e.g. "2.0GB/s". Default: the rate from doctor, or equal weights.', None
    )
    max_written: PlainSize | None = key(
        'Stop before all runs together have written more than this to the folder, e.g. "200TB". Default: no limit.',
        None,
        ge=1,
    )


class TiersConfig(Table, json_schema_extra=all_alter("no")):
    """``[tiers]``: the resources that this run may use."""

    safety_margin: Size = key(
        'Memory that a size of "auto" leaves free. On a GPU at least 1 GiB (below 10 GiB: a tenth), for libraries.',
        Size("5%", fraction=0.05),
    )
    engine: Literal["posix", "auto", "kvikio"] = key(
        "Library for file I/O. auto: kvikio if GPUDirect Storage works, else posix.", "posix"
    )
    direct: Literal["auto", "off", "on"] = key(
        "Copy blocks directly between drives and GPU memory. auto: if kvikio's probe confirms GPUDirect Storage "
        'and verify is not "always"; on: always, with an error if the probe does not confirm it.',
        "auto",
    )
    verify: Literal["resume", "always", "off"] = key(
        "When checksums of files are compared. resume: when a generation is opened; always: also at every read; "
        "off: no checksums during a step.",
        "resume",
    )
    on_disk_full: Literal["pause", "error"] = key(
        "If a drive fills up during the run: pause until space is free, or end the run.", "pause"
    )
    allow_tmpfs: bool = key(
        "Accept a [[tiers.nvme]] path on tmpfs, which is RAM, for tests. Checkpoints there vanish after a restart.",
        False,
    )
    gpu: GpuTierConfig = key("GPU memory.", default_factory=GpuTierConfig)
    ram: RamTierConfig = key("Host memory.", default_factory=RamTierConfig)
    nvme: Listed[NvmeTierConfig] = key("Folders on drives. Without any, no blocks are stored in files.", ())
