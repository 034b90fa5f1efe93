"""Optimizer groups of an embedded optimizer: in the store or in RAM, updated in the step or behind the forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from megatrain.embed.stores import ledger_of, num_ranks
from megatrain.embed.weights import GradientBlock, WeightInUseError
from megatrain.engine.program import gradient_key, state_key, weight_key
from megatrain.models.layout import UnitLayout
from megatrain.optim.base import GRADIENT_DTYPES, Optimizer, Segment, StateKind, Update
from megatrain.optim.clip import squared_norm, squared_norms
from megatrain.optim.elementwise import ElementwiseOptimizer
from megatrain.optim.threads import elements_per_call, share_out
from tiered.ext import HostSlab

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatrain.embed.weights import WeightBlock
    from megatrain.models.layout import TensorEntry
    from megatrain.optim.threads import KernelThreads
    from tiered import Mode, TieredStore

__all__ = [
    "DeviceCopies",
    "InterruptedUpdateError",
    "Settings",
    "StateGroup",
    "OffloadedGroup",
    "OrdinaryGroup",
    "UpdatesBehind",
    "UpdatesInRam",
    "Work",
    "norms_in_ram",
    "take_gradients",
    "update_in_order",
]


class DeviceCopies:
    """Copies of an optimizer whose parameters are on CUDA devices.

    They run on one stream of their own per device, behind what was queued before the last ``mark``: backwards that make
    gradients, and kernels that still read parameters. What is queued later, the next forward, does not hold them
    up. Gradients pass page-locked memory of the size of the largest one, which stays for the next.

    Used by one thread at a time. Touches no device before the first call.
    """

    def __init__(self) -> None:
        self._slab: HostSlab | None = None
        self._streams: dict[torch.device, Any] = {}

    def mark(self, device: torch.device) -> None:
        """Order all later copies of a device behind what the calling thread's current stream has now."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        self._stream(device).wait_event(event)

    def to_ram(self, tensor: Tensor) -> Tensor:
        """Return contents of a tensor on a device, dense and flat; they stay until the next call."""
        nbytes = tensor.numel() * tensor.element_size()
        if self._slab is None or self._slab.nbytes < nbytes:
            if self._slab is not None:
                self._slab.close()
            self._slab = HostSlab(nbytes, pin=True)
        here = self._slab.tensor[:nbytes].view(tensor.dtype)
        self._copy(here, tensor, tensor.device)
        return here

    def to_new_ram(self, tensor: Tensor) -> Tensor:
        """Return contents of a tensor on a device, dense and flat, in memory of their own."""
        here = torch.empty(tensor.numel(), dtype=tensor.dtype)
        self._copy(here, tensor, tensor.device)
        return here

    def to_device(self, parameter: Tensor, contents: Tensor) -> None:
        """Fill a parameter from RAM; its kernels that are queued from now on read what is new."""
        self._copy(parameter, contents.view(parameter.shape), parameter.device)

    def _copy(self, target: Tensor, source: Tensor, device: torch.device) -> None:
        """Copy and wait for it, making the source dense and of the target's shape before.

        All of it on the stream of the copies: kernels that do that on the caller's would be queued behind the mark, and
        the copy would read what they have not written yet. What they allocate lives until the host has waited.
        """
        stream = self._stream(device)
        with torch.cuda.stream(stream):
            dense = source if source.layout is torch.strided else source.to_dense()
            if dense.shape != target.shape:
                dense = dense.reshape(target.shape)
            target.copy_(dense, non_blocking=True)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        event.synchronize()

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


@dataclass(frozen=True, slots=True)
class Settings:
    """How one parameter is updated in one step.

    Attributes:
        arithmetic: of its group's settings.
        step: updates of it with this one.
        lr: of its group.
        weight_decay: of its group.
    """

    arithmetic: Optimizer
    step: int
    lr: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class Work:
    """An update of a group that is due.

    Attributes:
        settings: by name, of the parameters that have a gradient.
        grad_scale: factor on all gradients.
        gradients: by name, where they are ordinary tensors.
    """

    settings: Mapping[str, Settings]
    grad_scale: float
    gradients: Mapping[str, Tensor]


class StateGroup(ABC):
    """A layout of parameters with one block per kind of state. Blocks are registered, and zeroed, when it is made.

    Args:
        root: of the keys of its blocks.
        parameters: by the name that the layout has for them.
        kinds: what the store keeps of them.
        homes: tiers that state may live in, most wanted first.
    """

    def __init__(
        self,
        store: TieredStore,
        root: str,
        layout: UnitLayout,
        parameters: Mapping[str, nn.Parameter],
        kinds: Sequence[StateKind],
        homes: Sequence[str],
    ) -> None:
        self.store, self.layout, self.parameters = store, layout, dict(parameters)
        self.kinds = {kind.name: kind for kind in kinds}
        self.keys = {kind.name: state_key(root, kind.name) for kind in kinds}
        self.starts = {kind.name: kind.starts(layout) for kind in kinds}
        self._elsewhere: list[str] = []  # keys of blocks that RAM only has copies of
        for kind in kinds:
            key = self.keys[kind.name]
            home = ledger_of(store).register(store, key, kind.num_elements(layout), kind.dtype, homes, durable=True)
            with store.acquire(key, "ram", "w") as lease:
                lease.tensor.zero_()
            if home != "ram":
                self._elsewhere.append(key)
        self._leave()

    @property
    @abstractmethod
    def gradients(self) -> GradientBlock | None:
        """Where gradients are while autograd runs; None: with the parameters."""

    @abstractmethod
    def take_gradients(self) -> Mapping[str, Tensor | None]:
        """Take the gradients of a step away: by name, the tensor, or None for one in ``gradients``."""

    @abstractmethod
    def squared_norms(self, threads: KernelThreads) -> Mapping[str, float]:
        """Return the sum of squares of each gradient that there is, by name, in the order of the layout."""

    @abstractmethod
    def update(self, work: Work) -> None:
        """Make an update and return when it is done."""

    def keys_at_once(self) -> list[str]:
        """Return the keys of the blocks that an update needs in RAM together."""
        gradients = self.gradients
        return [*self.keys.values(), *([] if gradients is None else [gradients.key])]

    @abstractmethod
    def gradients_now(self) -> object:
        """Return what is equal as long as no gradient came, changed or went."""

    def prefetch(self) -> None:
        """Start fetching what the next update needs, as far as there is room."""
        for key in self._elsewhere:
            self.store.prefetch(key, "ram")

    def _leave(self) -> None:
        """Let state go home as soon as it is not needed before the next step: it is written while others compute."""
        for key in self._elsewhere:
            self.store.evict(key, "ram")

    def segment(self, entry: TensorEntry, settings: Settings, start: int) -> Segment:
        """Return the range of a block that one parameter has there, and how it is updated."""
        own = {name: starts[entry.name] for name, starts in self.starts.items() if self.kinds[name].elements_of}
        return Segment(start, start + entry.numel, settings.weight_decay, shape=entry.shape, state_starts=own)

    def part(self, kind: str, flat: Tensor, entry: TensorEntry) -> Tensor:
        """Return what a block of a kind holds of one parameter, flat."""
        elements_of = self.kinds[kind].elements_of
        length = entry.numel if elements_of is None else elements_of(entry)
        return flat.narrow(0, self.starts[kind][entry.name], length)

    def entries(self, names: Mapping[str, object]) -> Iterator[TensorEntry]:
        """Return the entries of these names, in the order of the layout."""
        return (entry for entry in self.layout.entries if entry.name in names)


class OffloadedGroup(StateGroup):
    """The parameters of an offloaded module that share a block of weights."""

    def __init__(self, weights: WeightBlock, kinds: Sequence[StateKind], homes: Sequence[str]) -> None:
        root = weights.key.removesuffix("/weight")
        assert weight_key(root) == weights.key, weights.key
        own = [kind for kind in kinds if kind.name != "weight"]
        super().__init__(weights.store, root, weights.layout, weights.parameters, own, homes)
        self.weights = weights

    def keys_at_once(self) -> list[str]:
        """Return the keys of the blocks that an update needs in RAM together, weights too."""
        return [self.weights.key, *super().keys_at_once()]

    def gradients_now(self) -> object:
        assert self.weights.gradients is not None, self.layout.name
        return self.weights.gradients.num_changes

    @property
    def gradients(self) -> GradientBlock | None:
        return self.weights.gradients

    def take_gradients(self) -> Mapping[str, Tensor | None]:
        assert self.weights.gradients is not None, self.layout.name
        return dict.fromkeys(self.weights.gradients.consume())

    def squared_norms(self, threads: KernelThreads) -> Mapping[str, float]:
        assert self.weights.gradients is not None, self.layout.name
        return self.weights.gradients.squared_norms(threads)

    @property
    def has_gradients(self) -> bool:
        """Whether some parameter has a gradient now."""
        return self.weights.gradients is not None and bool(self.weights.gradients.filled)

    def update(self, work: Work) -> None:
        assert self.weights.gradients is not None, self.layout.name
        self.weights.prepare_update()
        keys = {"weight": self.weights.key, **self.keys}
        requests: list[tuple[str, str, Mode]] = [(key, "ram", "rw") for key in keys.values()]
        with self.store.acquire_many([*requests, (self.weights.gradients.key, "ram", "r")]) as group:
            tensors = {lease.key: lease.tensor for lease in group}
            blocks = {kind: tensors[key] for kind, key in keys.items()}
            alike: dict[tuple[int, int, float], list[tuple[Segment, Settings]]] = {}
            for entry in self.entries(work.settings):
                settings = work.settings[entry.name]
                like = (id(settings.arithmetic), settings.step, settings.lr)
                alike.setdefault(like, []).append((self.segment(entry, settings, entry.offset), settings))
            for parts in alike.values():
                settings = parts[0][1]
                now = Update(settings.step, settings.lr, work.grad_scale)
                gradient = tensors[self.weights.gradients.key]
                settings.arithmetic.update(blocks, gradient, [segment for segment, _ in parts], now)
        self.store.discard(self.weights.gradients.key)
        self._leave()

    def reset_low(self, names: frozenset[str]) -> None:
        """Forget what the master had below the precision of weights that somebody replaced."""
        if "low" not in self.keys:
            return
        with self.store.acquire(self.keys["low"], "ram", "rw") as lease:
            for entry in self.layout.entries:
                if entry.name in names:
                    self.part("low", lease.tensor, entry).zero_()


class OrdinaryGroup(StateGroup):
    """Ordinary parameters, in RAM or on a CUDA device; only their state is in the store.

    In RAM the parameter is the upper part of its own master: nothing is kept twice. A parameter on a device has its
    whole master in the store, and is a copy of it.

    Args:
        offload_gradients: gradients leave for the store as soon as autograd has made them.
        copies: between devices and RAM.
    """

    def __init__(
        self,
        store: TieredStore,
        root: str,
        layout: UnitLayout,
        parameters: Mapping[str, nn.Parameter],
        kinds: Sequence[StateKind],
        homes: Sequence[str],
        *,
        offload_gradients: bool,
        copies: DeviceCopies,
    ) -> None:
        if offload_gradients and num_ranks() > 1:
            raise ValueError(
                "offload_gradients=True with several ranks: gradients would leave before they are averaged"
            )
        self._on_device = any(parameter.is_cuda for parameter in parameters.values())
        self._copies = copies
        self._places = {name: (parameter.dtype, parameter.device) for name, parameter in parameters.items()}
        self._versions: dict[str, int] = {}  # of those on a device, as of when they were equal to their masters
        own = [kind for kind in kinds if self._on_device or kind.name != "weight"]
        super().__init__(store, root, layout, parameters, own, homes)
        self._gradients: GradientBlock | None = None
        if offload_gradients:
            self._gradients = GradientBlock(store, gradient_key(root, 0), layout, parameters, homes)
        if self._on_device:
            self.copy_masters()

    @property
    def gradients(self) -> GradientBlock | None:
        return self._gradients

    def gradients_now(self) -> object:
        if self._gradients is not None:
            return self._gradients.num_changes
        found = (parameter.grad for parameter in self.parameters.values())
        return [None if gradient is None else (id(gradient), gradient._version) for gradient in found]

    def copy_masters(self) -> None:
        """Take the masters of parameters on a device from them."""
        with torch.no_grad(), self.store.acquire(self.keys["weight"], "ram", "w") as lease:
            lease.tensor.zero_()
            for entry in self.layout.entries:
                self.part("weight", lease.tensor, entry).copy_(self.parameters[entry.name].reshape(-1))
                self._versions[entry.name] = self.parameters[entry.name]._version

    def doubt_masters(self) -> None:
        """Compare masters with their parameters before the next update: they were loaded apart from each other."""
        self._versions.clear()

    def take_gradients(self) -> Mapping[str, Tensor | None]:
        for device in {parameter.device for parameter in self.parameters.values() if parameter.is_cuda}:
            self._copies.mark(device)
        if self._gradients is not None:
            return dict.fromkeys(self._gradients.consume())
        found: dict[str, Tensor | None] = {}
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if gradient is not None:
                found[name] = gradient
        return found

    def squared_norms(self, threads: KernelThreads) -> Mapping[str, float]:
        if self._gradients is not None:
            return self._gradients.squared_norms(threads)
        return {
            name: squared_norm(self._flat(gradient), threads)
            for name, gradient in self.take_gradients().items()
            if gradient is not None
        }

    def update(self, work: Work) -> None:
        requests: list[tuple[str, str, Mode]] = [(key, "ram", "rw") for key in self.keys.values()]
        if self._gradients is not None:
            requests.append((self._gradients.key, "ram", "r"))
        with torch.no_grad(), self.store.acquire_many(requests) as group:
            tensors = {lease.key: lease.tensor for lease in group}
            for entry in self.entries(work.settings):
                if self._gradients is not None:
                    gradient = self._gradients.view(tensors[self._gradients.key], entry)
                else:
                    gradient = self._flat(work.gradients[entry.name])
                self._update_one(entry, work.settings[entry.name], gradient, tensors, work.grad_scale)
        if self._gradients is not None:
            self.store.discard(self._gradients.key)
        self._leave()

    @property
    def dtype(self) -> torch.dtype:
        """What the parameters were when their state was made."""
        return next(iter(self._places.values()))[0]

    @property
    def is_in_ram(self) -> bool:
        """Whether parameters, gradients and state are all in RAM, so that an update fetches nothing."""
        return not self._on_device and self._gradients is None and not self._elsewhere

    def check_place(self, name: str) -> None:
        """Refuse a parameter that is no longer what its state was made for.

        Raises:
            RuntimeError: it was moved or converted.
        """
        parameter, place = self.parameters[name], self._places[name]
        if (parameter.dtype, parameter.device) != place:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} was {place[0]} on {place[1]} when its optimizer was "
                f"made, and is {parameter.dtype} on {parameter.device} now: move and convert the module before"
            )

    def _update_one(
        self,
        entry: TensorEntry,
        settings: Settings,
        gradient: Tensor,
        tensors: Mapping[str, Tensor],
        grad_scale: float,
    ) -> None:
        parameter = self.parameters[entry.name]
        own_length = {name for name, kind in self.kinds.items() if kind.elements_of is not None}
        blocks = {
            kind: tensors[key] if kind in own_length else self.part(kind, tensors[key], entry)
            for kind, key in self.keys.items()
        }
        self.check_place(entry.name)
        if not self._on_device:
            blocks["weight"] = parameter.detach().reshape(-1)
        elif self._versions.get(entry.name) != parameter._version:
            # On the stream of the copies: this thread's own may have no order with the kernels that replaced it.
            _follow(blocks, self._copies.to_new_ram(parameter.detach()))
        now = Update(settings.step, settings.lr, grad_scale)
        settings.arithmetic.update(blocks, gradient, [self.segment(entry, settings, 0)], now)
        if parameter.is_cuda:
            self._copies.to_device(parameter, blocks["weight"])
            self._versions[entry.name] = parameter._version
        elif blocks["weight"].data_ptr() != parameter.data_ptr():
            parameter.copy_(blocks["weight"].view(entry.shape))
            self._versions[entry.name] = parameter._version
        else:
            increment_version(parameter)  # a graph that saved it is out of date, and autograd says so

    def _flat(self, gradient: Tensor) -> Tensor:
        """Return a gradient as the kernels take it, flat, fp32 or bf16, in RAM: one of a device until the next call."""
        gradient = gradient.detach()
        if gradient.is_cuda:
            flat = self._copies.to_ram(gradient)
        else:
            flat = (gradient if gradient.layout is torch.strided else gradient.to_dense()).reshape(-1)
        return flat if flat.dtype in GRADIENT_DTYPES else flat.float()


def _follow(blocks: Mapping[str, Tensor], numbers: Tensor) -> None:
    """Let a master follow a parameter that somebody replaced; where it is the same the master keeps all its bits."""
    if "low" in blocks:
        blocks["low"].masked_fill_(blocks["weight"] != numbers, 0)
    blocks["weight"].copy_(numbers)


def take_gradients(groups: Sequence[StateGroup]) -> list[tuple[StateGroup, Mapping[str, Tensor | None]]]:
    """Take the gradients of a step away from all groups, or from none.

    Raises:
        WeightInUseError: weights that are to be updated are held, by ``gathered`` or a forward that still runs: whoever
            holds them would go on with those of before the step.
    """
    for group in groups:
        if isinstance(group, OffloadedGroup) and group.weights.is_held and group.has_gradients:
            raise WeightInUseError(
                f"optimizer.step() while {group.layout.name} is held: leave `with megatrain.gathered(...)` before, and "
                "step after the forward has ended"
            )
    return [(group, group.take_gradients()) for group in groups]


def update_in_order(works: Mapping[StateGroup, Work]) -> None:
    """Make updates one after the other, fetching the state of the next one meanwhile."""
    for group, following in zip_longest(works, list(works)[1:]):
        if following is not None:
            following.prefetch()
        group.update(works[group])


@dataclass(slots=True)
class _Alike:
    """Parameters that one call of a kernel can update, one entry of each list for each.

    Attributes:
        settings: of all of them.
        split_master: there is a low half.
        gradient_dtype: of the gradients.
    """

    settings: Settings
    split_master: bool
    gradient_dtype: torch.dtype
    names: list[tuple[OrdinaryGroup, str]] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class _Table:
    """Rows of a kernel, as long as everything lies where it lay.

    Attributes:
        places: all that the rows were made of.
        rows: for the kernel, but the addresses of gradients.
        of: of each row, the number of its parameter and how many elements of that come before.
        offsets: of each row, the number of its parameter and how many elements of that come before.
        calls: first row and one past the last row of each call.
    """

    places: tuple[object, ...]
    rows: NDArray[np.int64]
    of: NDArray[np.int64]
    offsets: NDArray[np.int64]
    calls: list[tuple[int, int]]


class UpdatesInRam:
    """Makes the updates of a step for which nothing has to be fetched.

    Small parameters then keep all threads busy, and what one costs besides its numbers is little: a kernel is called
    for many at once, and where their numbers are is looked up again only when something has moved. The bits are those
    of ``OrdinaryGroup.update``.
    """

    def __init__(self, threads: KernelThreads) -> None:
        self._threads = threads
        self._tables: dict[int, _Table] = {}

    def update(self, works: Mapping[StateGroup, Work]) -> dict[StateGroup, Work]:
        """Make the updates of groups that are in RAM; return the others."""
        mine, alike = _sorted_by_kind(works)
        if mine:
            store, grad_scale = mine[0].store, works[mine[0]].grad_scale
            requests: list[Any] = [(key, "ram", "rw") for group in mine for key in group.keys.values()]
            with torch.no_grad(), store.acquire_many(requests) as leases:
                addresses = {lease.key: lease.tensor.data_ptr() for lease in leases}
                self._threads.run(list(self._calls(alike, grad_scale, addresses)))
            increment_version([parameter for each in alike for parameter in each.parameters])
        return {group: work for group, work in works.items() if group not in mine}

    def _calls(
        self, alike: Sequence[_Alike], grad_scale: float, addresses: Mapping[str, int]
    ) -> Iterator[Callable[[], None]]:
        blocks = tuple(addresses.values())
        for number, each in enumerate(alike):
            settings, num_threads = each.settings, self._threads.num_threads
            arithmetic = cast("ElementwiseOptimizer", settings.arithmetic)
            sizes = [parameter.numel() for parameter in each.parameters]
            assert [gradient.numel() for gradient in each.gradients] == sizes
            own = (list(map(id, each.parameters)), [parameter.data_ptr() for parameter in each.parameters], sizes)
            places = (each.split_master, type(arithmetic), num_threads, *own, blocks)
            table = self._tables.get(number)
            if table is None or table.places != places:
                table = self._tables[number] = _make_table(places, each, arithmetic, addresses, num_threads)
            starts = np.array([gradient.data_ptr() for gradient in each.gradients], np.int64)
            table.rows[:, -2] = starts[table.of] + table.offsets * each.gradient_dtype.itemsize
            update = Update(settings.step, settings.lr, grad_scale)
            segment = Segment(0, 0, settings.weight_decay)
            call = arithmetic.rows_call(each.split_master, each.gradient_dtype, segment, update)
            for first, last in table.calls:
                yield partial(call, table.rows[first:last])


def norms_in_ram(groups: list[OrdinaryGroup], threads: KernelThreads) -> dict[nn.Parameter, float]:
    """Return the sums of squares of gradients that the kernels can read where they are, in a few calls.

    Of groups with another gradient there is none: those are not read here.
    """
    found: dict[nn.Parameter, Tensor] = {}
    for group in groups:
        if group.gradients is not None:
            continue
        own = {group.parameters[name]: gradient for name, gradient in group.take_gradients().items()}
        flat = {parameter: gradient for parameter, gradient in own.items() if gradient is not None}
        if all(map(_is_flat, flat.values())):
            found.update(flat)
    return dict(zip(found, squared_norms(list(found.values()), threads), strict=True))


def _sorted_by_kind(works: Mapping[StateGroup, Work]) -> tuple[list[OrdinaryGroup], list[_Alike]]:
    """Return the groups of which every number is where the kernels can take it, and their parameters by kind."""
    groups: list[OrdinaryGroup] = []
    alike: dict[tuple[object, ...], _Alike] = {}
    for group, work in works.items():
        if not isinstance(group, OrdinaryGroup) or not group.is_in_ram:
            continue
        dtype, split_master = group.dtype, "low" in group.kinds
        entries: list[tuple[tuple[object, ...], str, Settings, nn.Parameter, Tensor]] = []
        for name, settings in work.settings.items():
            parameter, gradient = group.parameters[name], work.gradients[name]
            has_kernel = isinstance(settings.arithmetic, ElementwiseOptimizer)
            if not (has_kernel and parameter.dtype == dtype and parameter.is_contiguous() and _is_flat(gradient)):
                break
            entries.append(((id(settings), dtype, gradient.dtype), name, settings, parameter, gradient))
        else:
            groups.append(group)
            for kind, name, settings, parameter, gradient in entries:
                each = alike.get(kind)
                if each is None:
                    each = alike[kind] = _Alike(settings, split_master, gradient.dtype)
                each.names.append((group, name))
                each.parameters.append(parameter)
                each.gradients.append(gradient)
    return groups, list(alike.values())


def _make_table(
    places: tuple[object, ...],
    each: _Alike,
    arithmetic: ElementwiseOptimizer,
    addresses: Mapping[str, int],
    num_threads: int,
) -> _Table:
    at_once = elements_per_call(sum(parameter.numel() for parameter in each.parameters), num_threads)
    kinds = arithmetic.rows_kinds
    rows: list[list[int]] = []
    of: list[int] = []
    offsets: list[int] = []
    for number, ((group, name), parameter) in enumerate(zip(each.names, each.parameters, strict=True)):
        group.check_place(name)
        begins = [_place(group, kind, name, parameter, addresses) for kind in kinds]
        for start in range(0, parameter.numel(), at_once):
            size = min(at_once, parameter.numel() - start)
            rows.append([*(address + start * itemsize for address, itemsize in begins), 0, size])
            of.append(number)
            offsets.append(start)
    shaped = np.array(rows, np.int64).reshape(len(rows), len(kinds) + 2)
    calls = share_out([row[-1] for row in rows], at_once)
    return _Table(places, shaped, np.array(of, np.int64), np.array(offsets, np.int64), calls)


def _place(
    group: OrdinaryGroup, kind: str | None, name: str, parameter: nn.Parameter, addresses: Mapping[str, int]
) -> tuple[int, int]:
    """Return where a parameter's numbers of a kind begin, and the bytes of each; nowhere for what is not kept."""
    if kind == "weight":
        return parameter.data_ptr(), parameter.dtype.itemsize
    if kind is None or kind not in group.keys:
        return 0, 0
    itemsize = group.kinds[kind].dtype.itemsize
    return addresses[group.keys[kind]] + group.starts[kind][name] * itemsize, itemsize


def _is_flat(gradient: Tensor) -> bool:
    is_strided = gradient.layout is torch.strided and gradient.is_contiguous()
    return is_strided and not gradient.is_cuda and gradient.dtype in GRADIENT_DTYPES


class InterruptedUpdateError(RuntimeError):
    """Some weights have made a step that others have not."""


class UpdatesBehind:
    """Makes the updates of a step in order, on one thread; a module waits for its own parameters before its forward.

    For models whose modules use the parameters that they own: others' parameters are not waited for. Whoever reads
    weights or gradients in another way calls ``finish`` first; ``state_dict`` and ``load_state_dict`` of the model do.
    ``start``, ``finish`` and the forward belong to one thread.

    Args:
        model: whose forward follows.
        on_error: called, on the thread, when an update ended halfway.
    """

    def __init__(self, model: nn.Module, on_error: Callable[[], None]) -> None:
        self._on_error = on_error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="update-behind")
        self._running: list[Future[None]] = []
        self._update_of: dict[int, Future[None]] = {}
        self._has_failed = False
        for module in model.modules():
            if any(parameter is not None for parameter in module._parameters.values()):
                module.register_forward_pre_hook(self._before, prepend=True)
            module.register_state_dict_pre_hook(self._before_reading)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(self._before_reading)  # type: ignore[no-untyped-call]

    def start(self, works: Mapping[StateGroup, Work]) -> None:
        """Begin the updates of a step. Gradients leave their parameters: the next ones will be new tensors."""
        assert not self._running, "the updates of the step before have not been waited for"
        self._has_failed = False
        groups = list(works)
        for number, group in enumerate(groups):
            for name in works[group].gradients:
                group.parameters[name].grad = None
            following = groups[number + 1] if number + 1 < len(groups) else None
            update = self._thread.submit(self._make, group, works[group], following)
            self._running.append(update)
            self._update_of.update((id(group.parameters[name]), update) for name in works[group].settings)

    def finish(self) -> None:
        """Wait for all updates. Raises the error of the first one that failed; none after it was made."""
        running, self._running = self._running, []
        self._update_of.clear()
        for update in running:
            update.exception()  # all have ended before anybody is told
        for update in running:
            update.result()

    def _make(self, group: StateGroup, work: Work, following: StateGroup | None) -> None:
        if self._has_failed:
            raise InterruptedUpdateError("an update before this one failed")
        try:
            if following is not None:
                following.prefetch()
            group.update(work)
        except BaseException:
            self._has_failed = True
            self._on_error()
            raise

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if self._update_of:
            for parameter in module._parameters.values():
                update = self._update_of.get(id(parameter))
                if update is not None:
                    update.result()

    def _before_reading(self, *_: Any) -> None:
        self.finish()
