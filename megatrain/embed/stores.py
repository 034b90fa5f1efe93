"""A store for a trainer of one's own: opened in one call, with homes found by preference."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import torch

from megatrain.plan.machine import available_ram_bytes, total_ram_bytes
from tiered.errors import CapacityError
from tiered.store import TieredStore
from tiered.tiers.gpu import GpuTier
from tiered.tiers.nvme import NvmeTier
from tiered.tiers.ram import RamTier
from tiered.units import MiB, format_size, parse_size

if TYPE_CHECKING:
    from tiered.tiers.base import Tier

__all__ = ["Ledger", "Size", "compute_device", "compute_tier", "ledger_of", "open_store"]

#: Bytes, or text as in a config: "110GiB", "90%", "auto".
Size = int | str
_RAM_MARGIN = 0.05
_FREE_DISK_SHARE = 0.9


def open_store(
    *,
    ram: Size = "auto",
    nvme: Sequence[str | os.PathLike[str]] | str | os.PathLike[str] = (),
    nvme_size: Size = "auto",
    gpu: Size | None = None,
    path: str | os.PathLike[str] | None = None,
    keep_generations: int = 2,
    on_full: Literal["pause", "error"] = "error",
) -> TieredStore:
    """Open a store for ``tier``, ``TieredAdamW`` and ``offload_activations``. A context manager; ``close`` at the end.

    With ``torch.distributed`` initialised every rank gets folders of its own (``.../rank0``): its state is its own.

    Args:
        ram: what may lie in RAM: bytes, "110GiB", "90%" of the machine, or "auto": what is free now less a margin.
            It is never exceeded; gradients, activations and code of your own come on top.
        nvme: folders on drives; several are striped.
        nvme_size: for all of them together; "auto": nine tenths of what is free.
        gpu: memory of the current CUDA device; modules then compute there. None: they compute on the CPU.
        path: folder of checkpoints; default: the first of ``nvme``. Without either nothing can be saved.
        keep_generations: checkpoints that are kept besides those that a host trainer's checkpoints name.
        on_full: when a drive is full in the middle of the work.

    Raises:
        ValueError: a size that cannot be read. LockedError: another process uses one of the folders.
    """
    folders = [nvme] if isinstance(nvme, str | os.PathLike) else list(nvme)
    rank = _rank_folder()
    drives = [Path(folder, rank) for folder in folders]
    tiers: list[Tier] = []
    if gpu is not None:
        device = torch.device("cuda", torch.cuda.current_device())
        total = torch.cuda.get_device_properties(device).total_memory
        tiers.append(GpuTier(_bytes("gpu", gpu, total, int(torch.cuda.mem_get_info(device)[0])), device=str(device)))
    available = int(available_ram_bytes() * (1 - _RAM_MARGIN))
    tiers.append(RamTier(_bytes("ram", ram, total_ram_bytes(), available), pin_memory=gpu is not None))
    try:
        if drives:
            free = _free_bytes(drives)
            size = _bytes("nvme_size", nvme_size, free, int(free * _FREE_DISK_SHARE))
            tiers.append(NvmeTier([str(drive) for drive in drives], size, on_full=on_full))
        return TieredStore(
            tiers,
            path=None if path is None else str(Path(path, rank)),
            keep_generations=keep_generations,
            on_full=on_full,
        )
    except BaseException:
        for one in tiers:
            one.close()
        raise


def compute_tier(store: TieredStore) -> str:
    """Return the tier that modules compute in: the fastest one."""
    return next(iter(store.stats().tiers))


def compute_device(store: TieredStore) -> torch.device:
    """Return the device of the tier that modules compute in."""
    device = store.tier(compute_tier(store)).device
    assert device is not None, "the fastest tier of a store is addressable"
    return device


@dataclass(slots=True)
class Ledger:
    """What all tiered things of one store share.

    Attributes:
        working_bytes: kept free of homes in RAM, so that what lives elsewhere can be fetched.
        num_changes: updates and other writes of weights and state so far. committed: (num_changes, generation) of
            the last commit or load.
    """

    store_tiers: tuple[str, ...]
    working_bytes: int = 0
    num_changes: int = 0
    committed: tuple[int, int | None] = (0, None)

    def register(
        self,
        store: TieredStore,
        key: str,
        num_elements: int,
        dtype: torch.dtype,
        homes: Sequence[str],
        *,
        durable: bool,
    ) -> str:
        """Register a block in the first of ``homes`` that has room for it; return that.

        A durable block on a drive also reserves what the generations will keep of it.

        Raises:
            CapacityError: none has.
        """
        nbytes = num_elements * dtype.itemsize
        tried = []
        for name in homes:
            tier = store.tier(name)
            is_last = name == self.store_tiers[-1]
            need = tier.slot_bytes(nbytes)
            kept = need * store.keep_generations if durable and tier.durable else 0
            open_bytes = 0 if is_last or tier.device is None else self.working_bytes
            free = tier.usage().free_bytes
            if need + kept + open_bytes > free:
                tried.append(f"{name} has {format_size(max(0, free - open_bytes))} left for homes")
                continue
            store.register(key, (num_elements,), dtype, home=name, durable=durable)
            if kept:
                store.reserve(name, kept)
            return name
        raise CapacityError(
            homes[-1], nbytes, 0, detail=f"for '{key}': {'; '.join(tried)}. Give a tier more room, or add nvme=[...]"
        )


_LEDGERS: WeakKeyDictionary[TieredStore, Ledger] = WeakKeyDictionary()


def ledger_of(store: TieredStore) -> Ledger:
    """Return what the tiered things of a store share; made at the first call."""
    if store not in _LEDGERS:
        _LEDGERS[store] = Ledger(tuple(store.stats().tiers))
    return _LEDGERS[store]


def home_order(store: TieredStore, homes: Sequence[str] | str) -> tuple[str, ...]:
    """Return the tiers that blocks may live in, most wanted first; "auto": RAM, then drives.

    Raises:
        ValueError: the store has no such tier.
    """
    names = tuple(store.stats().tiers)
    if homes == "auto":
        return tuple(name for name in names if name != "gpu") or names
    wanted = (homes,) if isinstance(homes, str) else tuple(homes)
    for name in wanted:
        if name not in names:
            raise ValueError(f'no tier "{name}" in this store; it has {", ".join(names)}. Write "auto" or one of these')
    return wanted


def _bytes(what: str, size: Size, total: int, auto: int) -> int:
    if isinstance(size, int):
        return size
    if size == "auto":
        return max(MiB, auto)
    text = size.strip()
    if text.endswith("%"):
        try:
            return int(total * float(text[:-1]) / 100)
        except ValueError:
            raise ValueError(f'{what}={size!r} is no share. Write for example "90%"') from None
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _free_bytes(folders: Sequence[Path]) -> int:
    """Return what is free on the file systems of the folders, each counted once."""
    found: Mapping[int, int] = {}
    for folder in folders:
        existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        stat = os.statvfs(existing)
        found = {**found, existing.stat().st_dev: stat.f_bavail * stat.f_frsize}
    return sum(found.values())


def _rank_folder() -> str:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        if torch.distributed.get_world_size() > 1:
            return f"rank{torch.distributed.get_rank()}"
    return ""
