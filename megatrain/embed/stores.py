"""Stores for other trainers: open a store with one call, and choose the home tier of each block.

The engine knows its program, so its placement minimizes traffic (``megatrain.plan.placement``). Other trainers add
modules and optimizers one at a time, and their program is unknown, so each block goes to the first tier with space.
"""

from __future__ import annotations

import atexit
import logging
import operator
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor

from megatrain.base.drive_readme import write_readme
from megatrain.base.sizes import Size as ConfigSize
from megatrain.machine.cgroups import available_ram_bytes, total_ram_bytes
from tiered import CopyState, GpuTier, NvmeTier, RamTier, Tier, TieredStore
from tiered.errors import CapacityError, LeaseError
from tiered.units import GiB, KiB, MiB, format_size

#: A number of bytes, or text as in a config: "110GiB", "90%", "auto".
Size = int | str
_log = logging.getLogger(__name__)
_RAM_MARGIN = 0.05
#: Smaller numbers raise an error, because they probably lack a unit. Smaller sizes are possible as text with a unit.
_LEAST_NUMBER = 64 * KiB
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
                GpuTier(_bytes("gpu", gpu, total, int(torch.cuda.mem_get_info(device)[0])), device=str(device))
            )
        here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if rank else 1  # torchrun sets the variable
        available = int(available_ram_bytes() * (1 - _RAM_MARGIN))
        ram_bytes, total = _bytes("ram", ram, total_ram_bytes() // here, available // here), total_ram_bytes()
        if ram_bytes > total:
            text = f"ram={ram!r} exceeds the {format_size(total)} of this machine. Pass less, or add a drive with nvme="
            raise ValueError(text)
        tiers.append(RamTier(ram_bytes))
        if drives:
            free = _free_bytes(drives)
            size = _bytes("nvme_size", nvme_size or "auto", free // here, int(free * _FREE_DISK_SHARE) // here)
            if nvme_size is None:
                _log.warning(
                    "nvme_size is not set, so the store may use up to %s of %s, nine tenths of the free space. "
                    'For less: nvme_size="%s"',
                    format_size(size),
                    ", ".join(map(str, drives)),
                    _example_of(size),
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
        for one in tiers:
            one.close()
        raise
    atexit.register(_close, ref(store))
    for drive in drives:
        write_readme(drive, Path(store.path or drive))
    return store


def _close(found: ref[TieredStore]) -> None:
    """Close the store at the end of the program if it is still open, so that its files do not stay on the drive."""
    if (store := found()) is not None:
        store.give_up_waiting()
        store.close()


def release(store: TieredStore, tier: str) -> int:
    """Return a tier's memory to its device between two steps. Return the number of bytes that stay in use.

    Dirty copies are written back, all copies are evicted, and free buffers are dropped. Another program can then use
    the memory, such as a rollout engine on the same GPU. Homes and reservations stay, so place no homes on the GPU. The
    next forward allocates memory again and fetches the blocks from slower tiers. Do not call this function during a
    forward or backward.

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
    held = [key for key in copies if store.where(key).get(tier, CopyState.ABSENT) is not CopyState.ABSENT]
    if held:
        raise LeaseError(f"{held[0]} is in use in tier '{tier}'. Call release() between steps, outside of a forward")
    free = owner.usage().free_bytes
    store.reserve(tier, free)  # makes the tier drop its free buffers
    store.reserve(tier, -free)
    return owner.usage().used_bytes


def mapped_copy(tensor: Tensor, store: TieredStore) -> Tensor:
    """Return a CPU copy of a tensor in an unlinked memory-mapped file. The file is freed with the copy.

    The file is created in the store's folder if it has one, else in the temporary folder.

    Raises:
        OSError: The drive has no space.
    """
    if not tensor.numel():
        return tensor.cpu().clone()
    folder = store.path if store.path is not None and os.path.isdir(store.path) else None
    descriptor, path = tempfile.mkstemp(prefix=".state-", dir=folder)
    try:
        os.posix_fallocate(descriptor, 0, tensor.numel() * tensor.element_size())  # a full drive would be a bus error
        copy = torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
    finally:
        os.close(descriptor)
        os.unlink(path)
    return copy.copy_(tensor)


def check_store(store: object, call: str) -> None:
    """Raise ``TypeError`` if ``store`` is not a store, for example a size. ``call`` is the name of the caller."""
    if not isinstance(store, TieredStore):
        given = f'ram="{store}"' if isinstance(store, str) else 'ram="auto"'
        raise TypeError(f"{call} takes the store that megatrain.open_store({given}) returns, not {store!r:.60}")


def compute_tier(store: TieredStore) -> str:
    """Return the tier in which modules compute, which is the fastest tier."""
    return next(iter(store.stats().tiers))


def compute_device(store: TieredStore) -> torch.device:
    """Return the device of the tier in which modules compute."""
    device = store.tier(compute_tier(store)).device
    assert device is not None, "the fastest tier of a store is addressable"
    return device


@dataclass(frozen=True, slots=True)
class HomeRequest:
    """A block that needs a home. ``homes`` lists the allowed tiers, preferred first."""

    key: str
    nbytes: int
    homes: tuple[str, ...]
    durable: bool


class SharedState:
    """State shared by the offloaded modules, optimizers and activations of one store.

    Attributes:
        working_bytes: RAM in bytes that is reserved for fetching blocks from other tiers. It contains no homes.
        num_changes: Number of updates and other writes of weights and state so far.
        committed: (num_changes, generation) of the last commit or load.
        mark: Random text that distinguishes the committed generation from other generations with the same number.
    """

    def __init__(self, store: TieredStore) -> None:
        self._of = ref(store)  # weak, because this object is a value in a dictionary whose weak keys are stores
        self._last_tier = tuple(store.stats().tiers)[-1]
        self._undo: list[str] | None = None
        self.working_bytes = 0
        self.num_changes = 0
        self.committed: tuple[int, int | None] = (0, None)
        self.mark = ""
        self.optimizers: WeakSet[Any] = WeakSet()
        self.modules: WeakSet[Any] = WeakSet()

    @property
    def _store(self) -> TieredStore:
        store = self._of()
        assert store is not None
        return store

    def finish_updates(self) -> None:
        """Apply the deferred updates of all optimizers that use this store."""
        for optimizer in list(self.optimizers):
            optimizer.finish_updates()

    def register(self, key: str, num_elements: int, dtype: torch.dtype, homes: Sequence[str], *, durable: bool) -> str:
        """Register a block in the first tier of ``homes`` with enough space, and return this tier.

        If a durable block gets a home on a drive, space for its copies in generations is also reserved.

        Raises:
            CapacityError: No tier has enough space.
            ValueError: A block with this key exists.
        """
        store = self._store
        wanted = HomeRequest(key, num_elements * dtype.itemsize, tuple(homes), durable)
        (name,) = self.placed([wanted])
        store.register(key, (num_elements,), dtype, home=name, durable=durable)
        kept = _kept_bytes(store, name, wanted)
        if kept:
            store.reserve(name, kept)
        if self._undo is not None:
            self._undo.append(key)
        return name

    def placed(self, blocks: Sequence[HomeRequest]) -> list[str]:
        """Return the homes of blocks, in order of registration. Raise ``CapacityError`` if one fits in no tier."""
        store = self._store
        taken: dict[str, int] = {}
        names = []
        for block in blocks:
            tried = []
            for name in block.homes:
                tier = store.tier(name)
                is_last = name == self._last_tier
                open_bytes = 0 if is_last or tier.device is None else self.working_bytes
                need = tier.slot_bytes(block.nbytes) + _kept_bytes(store, name, block)
                other_bytes = open_bytes + taken.get(name, 0)
                free = tier.usage().free_bytes
                if need + other_bytes > free:  # count copies as free space, because they can be evicted
                    free = room_for_homes(store, name)
                if need + other_bytes <= free:
                    taken[name] = taken.get(name, 0) + need
                    names.append(name)
                    break
                tried.append(f"{name} has {format_size(max(0, free - other_bytes))} left")
            else:
                hint = "Increase the size of a tier, or open the store with nvme=[...]"
                raise CapacityError(
                    block.homes[-1],
                    block.nbytes,
                    max(0, free - other_bytes),
                    detail=f"for '{block.key}': {'; '.join(tried)}. {hint}",
                )
        return names

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """If the context ends with an error, unregister all blocks that were registered inside it."""
        assert self._undo is None, self._undo
        registered: list[str] = []
        self._undo = registered
        try:
            yield
        except BaseException:
            self.unregister(*registered)
            raise
        finally:
            self._undo = None

    def unregister(self, *keys: str) -> None:
        """Unregister blocks and release the space that was reserved for their generations."""
        store = self._store
        specs = {spec.key: spec for spec in store.blocks()}
        for key in keys:
            spec = specs[key]
            tier = store.tier(spec.home)
            store.unregister(key)
            if spec.durable and tier.durable:
                store.reserve(spec.home, -tier.slot_bytes(spec.nbytes) * store.keep_generations)


_SHARED: WeakKeyDictionary[TieredStore, SharedState] = WeakKeyDictionary()


def shared_state(store: TieredStore) -> SharedState:
    """Return the shared state of a store. The first call creates it."""
    if store not in _SHARED:
        _SHARED[store] = SharedState(store)
    return _SHARED[store]


def room_for_homes(store: TieredStore, name: str) -> int:
    """Return a tier's free space for homes, in bytes. Space of copies counts as free, because copies can be evicted."""
    tier = store.tier(name)
    if tier.device is None:
        return tier.usage().free_bytes  # a drive has no copies, and its generations also use space
    return tier.capacity_bytes - store.stats().tiers[name].home_bytes


def _kept_bytes(store: TieredStore, name: str, block: HomeRequest) -> int:
    """Return the bytes that generations of a block use on a drive in addition to its home."""
    tier = store.tier(name)
    return tier.slot_bytes(block.nbytes) * store.keep_generations if block.durable and tier.durable else 0


def home_order(store: TieredStore, homes: Sequence[str] | str) -> tuple[str, ...]:
    """Return the names of the allowed home tiers, preferred first. "auto" means RAM, then drives.

    Raises:
        ValueError: The store does not have one of these tiers.
    """
    names = tuple(store.stats().tiers)
    if homes == "auto":
        return tuple(name for name in names if name != "gpu") or names
    wanted = (homes,) if isinstance(homes, str) else tuple(homes)
    for name in wanted:
        if name not in names:
            raise ValueError(f'this store has no tier "{name}", only {", ".join(names)}. Pass "auto" or one of these')
    return wanted


def _bytes(what: str, size: Size, total: int, auto: int) -> int:
    if not isinstance(size, str):
        return _counted_bytes(what, size)
    try:
        return ConfigSize.parse(size).resolve(total, auto_bytes=max(MiB, auto))
    except ValueError as error:
        raise ValueError(f'{what}: {error}. A share such as "90%" and "auto" are also possible') from None


def _counted_bytes(what: str, size: object) -> int:
    """Return a size that is a number of bytes. Raise an error if it is small, because it probably lacks a unit."""
    forms = f'{what}="4GiB", "90%" or "auto"'
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise ValueError(
            f"{what}={size!r} is not a size, which is text or a whole number of bytes. Write for example {forms}"
        )
    nbytes = operator.index(size)
    if nbytes <= 0:
        raise ValueError(f"{what}={nbytes} is not a size. Write for example {forms}")
    if nbytes < _LEAST_NUMBER:
        raise ValueError(f'{what}={nbytes} means {nbytes} bytes. Write the unit: {what}="{nbytes}GiB"')
    return nbytes


def _example_of(nbytes: int) -> str:
    """Return a round size of at most ``nbytes`` as text, to show it as an example."""
    unit, name = (GiB, "GiB") if nbytes >= 2 * GiB else (MiB, "MiB")
    return f"{max(1, nbytes // 2 // unit)}{name}"


def _free_bytes(folders: Sequence[Path]) -> int:
    """Return the free bytes on the folders' file systems. Folders on the same file system count once."""
    found: dict[int, int] = {}
    for folder in folders:
        existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        stat = os.statvfs(existing)
        found[existing.stat().st_dev] = stat.f_bavail * stat.f_frsize
    return sum(found.values())


def num_ranks() -> int:
    """Return the world size of ``torch.distributed``, or 1 if it is not initialized."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    return torch.distributed.get_world_size()


def this_rank() -> int:
    """Return the rank of this process in ``torch.distributed``, or 0 if it is not initialized."""
    return torch.distributed.get_rank() if num_ranks() > 1 else 0
