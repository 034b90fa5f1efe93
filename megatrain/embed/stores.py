"""A store for other trainers: opened in one call, with a home for each block by preference.

The engine's placement knows the program and minimises its traffic (``megatrain.plan.placement``). Here blocks come one
module or optimizer after another, and how they will be used is not known: each gets the first tier with room.
"""

from __future__ import annotations

import atexit
import logging
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary, WeakSet, ref

import torch

from megatrain.base.drive_readme import write_readme
from megatrain.base.sizes import Size as ConfigSize
from megatrain.machine.machine import available_ram_bytes, total_ram_bytes
from tiered import CopyState, GpuTier, NvmeTier, RamTier, TieredStore
from tiered.errors import CapacityError, LeaseError
from tiered.units import GiB, KiB, MiB, format_size

if TYPE_CHECKING:
    from tiered import Tier


#: Bytes, or text as in a config: "110GiB", "90%", "auto".
Size = int | str
_log = logging.getLogger(__name__)
_RAM_MARGIN = 0.05
#: A number below is a mistake: no tier of so few bytes is of use. Text with a unit may say less.
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
    """Open a store for ``offload``, ``TieredAdamW`` and ``offload_activations``. A context manager.

    Without ``with`` or ``close`` it is closed when the program ends.

    With ``torch.distributed`` initialised every rank gets folders of its own (``.../rank0``): its state is its own.
    Shares of the machine and "auto" are then divided by the ranks of the machine.

    Args:
        ram: what may lie in RAM: bytes, "110GiB", "90%" of the machine, or "auto": what is free now less a margin. It
            is never exceeded; gradients, activations and code of your own come on top.
        nvme: folders on drives; several are striped.
        nvme_size: for all of them together; "auto": nine tenths of what is free, and None as well, said in the log.
        gpu: memory of the current CUDA device; modules then compute there. None: they compute on the CPU.
        path: folder of checkpoints; default: the first of ``nvme``. Without either nothing can be saved.
        keep_generations: checkpoints that are kept besides those that a host trainer's checkpoints name.
        on_full: when a drive is full in the middle of the work.

    Raises:
        ValueError: a size that cannot be read, is more than the machine has, or is of a drive that is not named; or
            there is no CUDA device.
        LockedError: another process uses one of the folders.
    """
    if on_full not in ("pause", "error"):
        raise ValueError(f'on_full="{on_full}": there are "pause" and "error"')
    folders = [nvme] if isinstance(nvme, str | os.PathLike) else list(nvme)
    if nvme_size is not None and not folders:
        raise ValueError(f'nvme_size={nvme_size!r} without a drive: name its folder, nvme="state/store"')
    rank = _rank_folder()
    drives = [Path(folder, rank).expanduser() for folder in folders]
    tiers: list[Tier] = []
    if gpu is not None:
        if not torch.cuda.is_available():
            raise ValueError(f"gpu={gpu!r}: torch finds no CUDA device. Leave gpu out: modules then compute on the CPU")
        device = torch.device("cuda", torch.cuda.current_device())
        total = torch.cuda.get_device_properties(device).total_memory
        tiers.append(GpuTier(_bytes("gpu", gpu, total, int(torch.cuda.mem_get_info(device)[0])), device=str(device)))
    here = _processes_here()
    available = int(available_ram_bytes() * (1 - _RAM_MARGIN))
    ram_bytes, total = _bytes("ram", ram, total_ram_bytes() // here, available // here), total_ram_bytes()
    if ram_bytes > total:
        text = f"ram={ram!r} is more than the {format_size(total)} of this machine. Give less, or a drive: nvme="
        raise ValueError(text)
    tiers.append(RamTier(ram_bytes))
    try:
        if drives:
            free = _free_bytes(drives)
            size = _bytes("nvme_size", nvme_size or "auto", free // here, int(free * _FREE_DISK_SHARE) // here)
            if nvme_size is None:
                _log.warning(
                    "no nvme_size is given: up to %s of %s may be filled, nine tenths of what is free. For less: "
                    'nvme_size="%s"',
                    format_size(size),
                    ", ".join(map(str, drives)),
                    _example_of(size),
                )
            tiers.append(NvmeTier([str(drive) for drive in drives], size, on_full=on_full))
        store = TieredStore(
            tiers,
            path=None if path is None else str(Path(path, rank).expanduser()),
            keep_generations=keep_generations,
            overwrite=True,  # load_state_dict, which comes later, decides which generation is continued
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
    """Close the store of a program that ends without closing it: its files would stay until the next run."""
    if (store := found()) is not None:
        store.give_up_waiting()
        store.close()


def release(store: TieredStore, tier: str) -> int:
    """Give the memory of a tier back to its device, between two steps; return the bytes that stay in use.

    Copies leave, changed ones are written back first, and free buffers are dropped: another program, such as a rollout
    engine on the same GPU, may take that memory. What stays are homes and what is reserved, so give blocks no home on
    the GPU. The next forward takes memory again, and finds its bytes in the tiers below. Call it outside of forwards
    and backwards.

    Raises:
        LeaseError: a copy is in use, or pinned.
        TransferError: a write-back failed.
    """
    owner = store.tier(tier)
    homes = {spec.key: spec.home for spec in store.blocks()}
    copies = [key for key, home in homes.items() if home != tier and tier in store.where(key)]
    for transfer in [store.evict(key, tier) for key in copies]:
        transfer.wait()
    store.wait_idle()
    held = [key for key in copies if store.where(key).get(tier, CopyState.ABSENT) is not CopyState.ABSENT]
    if held:
        raise LeaseError(f"{held[0]} is in use in tier '{tier}': release it between steps, outside of a forward")
    free = owner.usage().free_bytes
    store.reserve(tier, free)  # kept buffers make way
    store.reserve(tier, -free)
    return owner.usage().used_bytes


def check_store(store: object, call: str) -> None:
    """Raise ``TypeError`` for what is no store, such as the size of one.

    Args:
        call: the function, for the message.
    """
    if not isinstance(store, TieredStore):
        given = f'ram="{store}"' if isinstance(store, str) else 'ram="auto"'
        raise TypeError(f"{call} takes the store that megatrain.open_store({given}) returns, not {store!r:.60}")


def compute_tier(store: TieredStore) -> str:
    """Return the tier that modules compute in: the fastest one."""
    return next(iter(store.stats().tiers))


def compute_device(store: TieredStore) -> torch.device:
    """Return the device of the tier that modules compute in."""
    device = store.tier(compute_tier(store)).device
    assert device is not None, "the fastest tier of a store is addressable"
    return device


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block that needs a home. ``homes``: tiers, most wanted first."""

    key: str
    nbytes: int
    homes: tuple[str, ...]
    durable: bool


class SharedState:
    """What the offloaded modules, optimizers and activations of one store share.

    Attributes:
        working_bytes: kept free of homes in RAM, so that blocks that live elsewhere can be fetched.
        num_changes: updates and other writes of weights and state so far.
        committed: (num_changes, generation) of the last commit or load.
        mark: random text of that generation, which tells it from others of its number.
    """

    def __init__(self, store: TieredStore) -> None:
        self._of = ref(store)  # weak: the store is the key under which this is kept
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
        """Make the updates that optimizers of this store have deferred."""
        for optimizer in list(self.optimizers):
            optimizer.finish_updates()

    def register(self, key: str, num_elements: int, dtype: torch.dtype, homes: Sequence[str], *, durable: bool) -> str:
        """Register a block in the first of ``homes`` that has room for it; return that.

        A durable block on a drive also reserves what generations keep of it.

        Raises:
            CapacityError: none has.
            ValueError: there is a block of that name.
        """
        store = self._store
        wanted = Wanted(key, num_elements * dtype.itemsize, tuple(homes), durable)
        (name,) = self.placed([wanted])
        store.register(key, (num_elements,), dtype, home=name, durable=durable)
        kept = _kept_bytes(store, name, wanted)
        if kept:
            store.reserve(name, kept)
        if self._undo is not None:
            self._undo.append(key)
        return name

    def placed(self, blocks: Sequence[Wanted]) -> list[str]:
        """Return the home that ``register`` would give to each block, one after the other.

        Raises:
            CapacityError: there is none for one of them.
        """
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
                beside = open_bytes + taken.get(name, 0)
                free = tier.usage().free_bytes
                if need + beside > free:  # copies take room as well, but would make way
                    free = room_for_homes(store, name)
                if need + beside <= free:
                    taken[name] = taken.get(name, 0) + need
                    names.append(name)
                    break
                tried.append(f"{name} has {format_size(max(0, free - beside))} left for homes")
            else:
                hint = "Give a tier more room, or open the store with nvme=[...]"
                raise CapacityError(
                    block.homes[-1],
                    block.nbytes,
                    max(0, free - beside),
                    detail=f"for '{block.key}': {'; '.join(tried)}. {hint}",
                )
        return names

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Unregister what was registered inside, where that ends with an error."""
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
        """Unregister blocks, and give back what is reserved for generations of them."""
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
    """Return what the users of a store share, made at the first call."""
    if store not in _SHARED:
        _SHARED[store] = SharedState(store)
    return _SHARED[store]


def room_for_homes(store: TieredStore, name: str) -> int:
    """Return the bytes of a tier that homes leave, copies not counted."""
    tier = store.tier(name)
    if tier.device is None:
        return tier.usage().free_bytes  # files: there are no copies, and generations take room as well
    return tier.capacity_bytes - store.stats().tiers[name].home_bytes


def _kept_bytes(store: TieredStore, name: str, block: Wanted) -> int:
    """Return what generations take of a drive for one block besides its home."""
    tier = store.tier(name)
    return tier.slot_bytes(block.nbytes) * store.keep_generations if block.durable and tier.durable else 0


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
    if not isinstance(size, str):
        return _counted_bytes(what, size)
    try:
        return ConfigSize.parse(size).resolve(total, auto_bytes=max(MiB, auto))
    except ValueError as error:
        raise ValueError(f'{what}: {error}. A share such as "90%" and "auto" are possible, too') from None


def _counted_bytes(what: str, size: object) -> int:
    """Return a size that was given as a number: bytes. Who writes 4 means another unit, and is asked which."""
    forms = f'{what}="4GiB", "90%" or "auto"'
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise ValueError(
            f"{what}={size!r} is no size: a number means bytes and is a whole one. Write for example {forms}"
        )
    nbytes = operator.index(size)
    if nbytes <= 0:
        raise ValueError(f"{what}={nbytes} is no size. Write for example {forms}")
    if nbytes < _LEAST_NUMBER:
        raise ValueError(f'{what}={nbytes} means {nbytes} bytes. Write the unit: {what}="{nbytes}GiB"')
    return nbytes


def _example_of(nbytes: int) -> str:
    """Return a round size within one of so many bytes, to be shown."""
    unit, name = (GiB, "GiB") if nbytes >= 2 * GiB else (MiB, "MiB")
    return f"{max(1, nbytes // 2 // unit)}{name}"


def _free_bytes(folders: Sequence[Path]) -> int:
    """Return what is free on the file systems of the folders, each counted once."""
    found: Mapping[int, int] = {}
    for folder in folders:
        existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        stat = os.statvfs(existing)
        found = {**found, existing.stat().st_dev: stat.f_bavail * stat.f_frsize}
    return sum(found.values())


def num_ranks() -> int:
    """Return how many processes ``torch.distributed`` has joined; 1 without it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    return torch.distributed.get_world_size()


def this_rank() -> int:
    """Return the number of this process among those that ``torch.distributed`` has joined; 0 without it."""
    return torch.distributed.get_rank() if num_ranks() > 1 else 0


def _rank_folder() -> str:
    return f"rank{this_rank()}" if num_ranks() > 1 else ""


def _processes_here() -> int:
    """Return how many ranks share this machine, as ``torchrun`` says."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if _rank_folder() else 1
