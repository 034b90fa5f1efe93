"""The config's tables of tiers: `[tiers]`, `[tiers.gpu]`, `[tiers.ram]`, `[[tiers.nvme]]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from megatrain.config.fields import AUTO_SIZE, ConfigPath, PlainSize, Rate, Table, as_tuple
from megatrain.config.sizes import Size

__all__ = ["GpuTierConfig", "NvmeTierConfig", "RamTierConfig", "TiersConfig"]


class GpuTierConfig(Table):
    """``[tiers.gpu]``: what fits best there has its home in GPU memory, the rest passes through."""

    size: Size = Field(default=AUTO_SIZE, description='GPU memory this run may use: "22GiB", "90%" or "auto".')


class RamTierConfig(Table):
    """``[tiers.ram]``."""

    size: Size = Field(
        default=AUTO_SIZE, description='RAM for blocks: "110GiB", "90%" or "auto" (measured, cgroup-aware).'
    )
    pinned: Size = Field(default=AUTO_SIZE, description="How much of it is page-locked; auto: all, where CUDA exists.")


class NvmeTierConfig(Table):
    """``[[tiers.nvme]]``: one folder on a drive. Several tables are striped."""

    path: ConfigPath = Field(
        description="Folder for training state on this drive, made when missing. Parts of checkpoints lie there too: "
        "deleting it destroys them."
    )
    size: Size = Field(default=AUTO_SIZE, description='Space it may take: "300GiB", "50%" or "auto" (of what is free).')
    mount_point: ConfigPath | None = Field(
        default=None,
        description='Folder where the drive of this path is mounted, e.g. "/mnt/nvme0": a run is refused while it is '
        "not, so that blocks never fill another drive. Default: not looked at.",
    )
    rate: Rate | None = Field(
        default=None,
        description='Relative weight when striped, e.g. "2.0GB/s". Default: as doctor measured it, else equal.',
    )
    max_written: PlainSize | None = Field(
        default=None,
        ge=1,
        description='Stop before all runs together write more than this there, e.g. "200TB". Default: no limit.',
    )


class TiersConfig(Table):
    """``[tiers]``: what this run may use."""

    safety_margin: Size = Field(
        default=Size("5%", fraction=0.05),
        description='Kept free where a size is "auto"; of GPU memory at least 1 GiB, or a tenth, for libraries.',
    )
    engine: Literal["posix", "auto", "kvikio"] = Field(
        default="posix",
        description="How files are read and written. auto: kvikio where GPUDirect Storage works, else posix.",
    )
    direct: Literal["auto", "off", "on"] = Field(
        default="auto",
        description="Blocks go between drives and GPU memory without passing RAM. auto: where kvikio's probe shows "
        'that GPUDirect Storage does it, and verify is not "always"; on: an error where it does not.',
    )
    verify: Literal["resume", "always", "off"] = Field(
        default="resume",
        description="When files are compared with the checksums taken as they were written. resume: when a generation "
        "is opened; always: at every read, too; off: no checksums in a step.",
    )
    on_disk_full: Literal["pause", "error"] = Field(
        default="pause", description="A drive that is full during the run: pause until there is room, or end the run."
    )
    allow_tmpfs: bool = Field(
        default=False,
        description="Accept a [[tiers.nvme]] path on tmpfs, which is RAM: for tests. Checkpoints there are gone after "
        "a restart.",
    )
    gpu: GpuTierConfig = Field(default_factory=GpuTierConfig, description="GPU memory.")
    ram: RamTierConfig = Field(default_factory=RamTierConfig, description="Host memory.")
    nvme: Annotated[tuple[NvmeTierConfig, ...], BeforeValidator(as_tuple)] = Field(
        default=(), description="Folders on drives; none: nothing is kept in files."
    )
