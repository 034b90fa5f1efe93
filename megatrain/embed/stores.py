"""``open_store`` and ``release``: stores for other trainers."""

from __future__ import annotations

import atexit
import logging
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from weakref import ref

import torch

from megatrain.base.drive_readme import write_readme
from megatrain.base.sizes import Size as ConfigSize
from megatrain.machine.cgroups import available_ram_bytes, total_ram_bytes
from tiered import CopyState, GpuTier, NvmeTier, RamTier, Tier, TieredStore
from tiered.errors import LeaseError
from tiered.units import GiB, KiB, MiB, format_size

#: A number of bytes, or text as in a config: "110GiB", "90%", "auto".
Size = int | str
_log = logging.getLogger(__name__)
_RAM_MARGIN = 0.05
#: Smaller numbers raise an error, because they probably lack a unit. Smaller sizes are possible as text with a unit.
_MIN_BYTES = 64 * KiB
_FREE_DISK_SHARE = 0.9


def open_store(
    *,
    ram: Size = "auto",
    nvme: Sequence[str | os.PathLike[str]] | str | os.PathLike[str] = (),
    nvme_size: Size | None = None,
    gpu: Size | None = None,
    path: str | os.PathLike[str] | None = None,
    keep_generations: int = 2,
    on_full: Literal["pause", "error"] = "error",
) -> TieredStore:
    """Open a store for ``offload``, ``TieredAdamW`` and ``offload_activations``. The store is a context manager.

    Without ``with`` or ``close``, the store is closed when the program ends.

    If ``torch.distributed`` is initialized, each rank uses its own subfolders (``.../rank0``). Percentages and "auto"
    are then divided by the number of ranks on the machine.

    Args:
        ram: Size of the RAM tier: bytes, "110GiB", "90%" of the machine, or "auto" for the free RAM minus a margin. The
            store never exceeds it. Gradients, activations and the user's code need additional memory.
        nvme: Folders on drives. Blocks are striped over several folders.
        nvme_size: Total size on drives. "auto" is nine tenths of the free space, which is also the default, with a
            warning.
        gpu: Size of the tier on the current CUDA device, where modules then compute. None to compute on the CPU.
        path: Folder for checkpoints. Default: the first folder of ``nvme``. Without either, nothing can be saved.
        keep_generations: Number of generations to keep, in addition to generations that trainers' checkpoints refer to.
        on_full: Whether a run pauses or raises an error when a drive fills up.

    Raises:
        ValueError: A size cannot be parsed or exceeds the machine, ``nvme_size`` is set without ``nvme``, or there is
            no CUDA device.
        LockedError: Another process uses one of the folders.
    """
    if on_full not in ("pause", "error"):
        raise ValueError(f'on_full="{on_full}" is invalid. Pass "pause" or "error"')
    folders = [nvme] if isinstance(nvme, str | os.PathLike) else list(nvme)
    if nvme_size is not None and not folders:
        raise ValueError(f'nvme_size={nvme_size!r} needs a folder on a drive: nvme="state/store"')
    rank = f"rank{this_rank()}" if num_ranks() > 1 else ""
    drives = [Path(folder, rank).expanduser() for folder in folders]
    tiers: list[Tier] = []
    try:
        if gpu is not None:
            if not torch.cuda.is_available():
                raise ValueError(f"gpu={gpu!r}, but torch finds no CUDA device. Leave gpu out to compute on the CPU")
            device = torch.device("cuda", torch.cuda.current_device())
            total = torch.cuda.get_device_properties(device).total_memory
            tiers.append(
                GpuTier(_resolve_size("gpu", gpu, total, int(torch.cuda.mem_get_info(device)[0])), device=str(device))
            )
        ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if rank else 1  # torchrun sets the variable
        available = int(available_ram_bytes() * (1 - _RAM_MARGIN))
        ram_bytes, total = _resolve_size("ram", ram, total_ram_bytes() // ranks, available // ranks), total_ram_bytes()
        if ram_bytes > total:
            text = f"ram={ram!r} exceeds the {format_size(total)} of this machine. Pass less, or add a drive with nvme="
            raise ValueError(text)
        tiers.append(RamTier(ram_bytes))
        if drives:
            free = _free_bytes(drives)
            size = _resolve_size("nvme_size", nvme_size or "auto", free // ranks, int(free * _FREE_DISK_SHARE) // ranks)
            if nvme_size is None:
                _log.warning(
                    "nvme_size is not set, so the store may use up to %s of %s, nine tenths of the free space. "
                    'For less: nvme_size="%s"',
                    format_size(size),
                    ", ".join(map(str, drives)),
                    _example_size(size),
                )
            tiers.append(NvmeTier([str(drive) for drive in drives], size, on_full=on_full))
        store = TieredStore(
            tiers,
            path=None if path is None else str(Path(path, rank).expanduser()),
            keep_generations=keep_generations,
            overwrite=True,  # start empty, because load_state_dict can still load a generation
            on_full=on_full,
        )
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    atexit.register(_close, ref(store))
    for drive in drives:
        write_readme(drive, Path(store.path or drive))
    return store


def _close(reference: ref[TieredStore]) -> None:
    """Close the store at the end of the program if it is still open, so that its files do not stay on the drive."""
    if (store := reference()) is not None:
        store.give_up_waiting()
        store.close()


def release(store: TieredStore, tier: str) -> int:
    """Free a tier's unused memory between two steps, and return the number of bytes that stay in use.

    Dirty copies are written back, all copies are evicted, and free buffers are dropped. Another program can then use
    the memory, such as a rollout engine on the same GPU. Homes and reservations stay, so do not place homes on the GPU.
    The next forward allocates memory again and fetches the blocks from slower tiers. Do not call this function during
    a forward or backward.

    Raises:
        LeaseError: A copy is in use or pinned.
        TransferError: A write-back failed.
    """
    owner = store.tier(tier)
    homes = {spec.key: spec.home for spec in store.blocks()}
    copies = [key for key, home in homes.items() if home != tier and tier in store.where(key)]
    for transfer in [store.evict(key, tier) for key in copies]:
        transfer.wait()
    store.wait_idle()
    keys = [key for key in copies if store.where(key).get(tier, CopyState.ABSENT) is not CopyState.ABSENT]
    if keys:
        raise LeaseError(f"{keys[0]} is in use in tier '{tier}'. Call release() between steps, outside of a forward")
    free = owner.usage().free_bytes
    store.reserve(tier, free)  # makes the tier drop its free buffers
    store.reserve(tier, -free)
    return owner.usage().used_bytes


def check_store(store: object, call: str) -> None:
    """Raise ``TypeError`` if ``store`` is not a store, for example a size. ``call`` is the name of the caller."""
    if not isinstance(store, TieredStore):
        example = f'ram="{store}"' if isinstance(store, str) else 'ram="auto"'
        raise TypeError(f"{call} takes the store that megatrain.open_store({example}) returns, not {store!r:.60}")


def _resolve_size(option: str, size: Size, total: int, auto: int) -> int:
    if not isinstance(size, str):
        return _check_byte_count(option, size)
    try:
        return ConfigSize.parse(size).resolve(total, auto_bytes=max(MiB, auto))
    except ValueError as error:
        raise ValueError(f'{option}: {error}. A share such as "90%" and "auto" are also possible') from None


def _check_byte_count(option: str, size: object) -> int:
    """Return a size in bytes. Raise an error if the number is small, because it probably lacks a unit."""
    examples = f'{option}="4GiB", "90%" or "auto"'
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise ValueError(
            f"{option}={size!r} is not a size, which is text or a whole number of bytes. Write for example {examples}"
        )
    nbytes = operator.index(size)
    if nbytes <= 0:
        raise ValueError(f"{option}={nbytes} is not a size. Write for example {examples}")
    if nbytes < _MIN_BYTES:
        raise ValueError(f'{option}={nbytes} means {nbytes} bytes. Write the unit: {option}="{nbytes}GiB"')
    return nbytes


def _example_size(nbytes: int) -> str:
    """Return a round size of at most ``nbytes`` as text, for use as an example."""
    unit, name = (GiB, "GiB") if nbytes >= 2 * GiB else (MiB, "MiB")
    return f"{max(1, nbytes // 2 // unit)}{name}"


def _free_bytes(folders: Sequence[Path]) -> int:
    """Return the free bytes on the folders' file systems. Folders on the same file system count once."""
    free_bytes: dict[int, int] = {}
    for folder in folders:
        ancestor = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        stat = os.statvfs(ancestor)
        free_bytes[ancestor.stat().st_dev] = stat.f_bavail * stat.f_frsize
    return sum(free_bytes.values())


def num_ranks() -> int:
    """Return the world size of ``torch.distributed``, or 1 if it is not initialized."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    return torch.distributed.get_world_size()


def this_rank() -> int:
    """Return the rank of this process in ``torch.distributed``, or 0 if it is not initialized."""
    return torch.distributed.get_rank() if num_ranks() > 1 else 0
