"""Parameter groups of an embedded optimizer, updated in ``step`` or before the next use of their weights.

The engine's ``Updater`` applies the same settings of a step to every block group. In torch, parameter groups may change
in every step and each parameter counts its steps, so an update has settings per parameter. Both call the update rules
of ``megatrain.optim`` on the same blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from megatrain.base.layout import UnitLayout
from megatrain.embed.stores import num_ranks, shared_state
from megatrain.embed.weights import GradientBlock, WeightInUseError
from megatrain.engine.program import gradient_key, state_key, weight_key
from megatrain.optim.average import EMA, WeightAverage, begin_average, swap_average
from megatrain.optim.base import GRADIENT_DTYPES, Optimizer, Segment, StateKind, Update
from megatrain.optim.clip import squared_norm, squared_norms
from megatrain.optim.elementwise import ElementwiseOptimizer
from megatrain.optim.threads import elements_per_call, share_out
from megatrain.ranks.dtensors import check_gradient, first_element, is_dtensor, local_of, version_of
from tiered.errors import TieredError
from tiered.ext import HostSlab

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatrain.base.layout import TensorEntry
    from megatrain.embed.weights import WeightBlock
    from megatrain.optim.threads import KernelThreads
    from tiered import Mode, TieredStore


class DeviceCopies:
    """Copies between RAM and parameters on CUDA devices.

    They run on one stream per device, after all work that was queued before the last ``mark``: backwards that compute
    gradients, and kernels that still read parameters.
    Gradients are copied through one pinned buffer, as large as the largest gradient.

    Used by one thread at a time. Touches no device before the first call.
    """

    def __init__(self) -> None:
        self._slab: HostSlab | None = None
        self._streams: dict[torch.device, Any] = {}

    def mark(self, device: torch.device) -> None:
        """Order all later copies of a device after the work queued so far on the calling thread's current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        self._stream(device).wait_event(event)

    def to_ram(self, tensor: Tensor) -> Tensor:
        """Return the dense, flat contents of a device tensor in RAM; valid until the next call."""
        nbytes = tensor.numel() * tensor.element_size()
        if self._slab is None or self._slab.nbytes < nbytes:
            if self._slab is not None:
                self._slab.close()
            self._slab = HostSlab(nbytes, pin=True)
        here = self._slab.tensor[:nbytes].view(tensor.dtype)
        self._copy(here, tensor, tensor.device)
        return here

    def to_device(self, parameter: Tensor, contents: Tensor) -> None:
        """Fill a parameter from RAM; kernels that are queued later read the new values."""
        self._copy(parameter, contents.view(parameter.shape), parameter.device)

    def _copy(self, target: Tensor, source: Tensor, device: torch.device) -> None:
        """Make the source dense and of the target's shape, copy it, and wait for the copy.

        Everything runs on the copy stream. On the caller's stream, the conversion would be queued after the mark, and
        the copy would read unwritten memory. The temporaries live until the host has waited.
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
    """Settings for the update of one parameter in one step.

    Attributes:
        arithmetic: update rule for the settings of its group.
        step: number of this update of the parameter, from 1.
        lr: learning rate of its group.
    """

    arithmetic: Optimizer
    step: int
    lr: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class DueUpdate:
    """An update of a group that is due.

    Attributes:
        settings: by name, for the parameters that have a gradient.
        grad_scale: factor on all gradients.
        gradients: by name, for gradients that are ordinary tensors.
    """

    settings: Mapping[str, Settings]
    grad_scale: float
    gradients: Mapping[str, Tensor]


class StateGroup(ABC):
    """A layout of parameters with one block per kind of state. The constructor registers and zeroes the blocks.

    Args:
        root: prefix of the keys of its blocks.
        parameters: by their name in the layout.
        homes: allowed tiers of the state, preferred first.

    Attributes:
        gradients: block that receives gradients from autograd; None if they stay with the parameters.
        names: name in the layout -> name in segments, which must not depend on the location of the state.
        firsts: name -> index of this rank's first element, for sharded parameters.
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
        self.gradients: GradientBlock | None = None
        self.names: dict[str, str] = {name: name for name in parameters}
        self.firsts = {name: first_element(p) for name, p in parameters.items() if is_dtensor(p)}
        self.kinds = {kind.name: kind for kind in kinds}
        self.keys = {kind.name: state_key(root, kind.name) for kind in kinds}
        self.starts = {kind.name: kind.starts(layout) for kind in kinds}
        self._elsewhere: list[str] = []  # keys of blocks whose home is not RAM
        for kind in kinds:
            key = self.keys[kind.name]
            home = shared_state(store).register(key, self._num_elements(kind), kind.dtype, homes, durable=True)
            with store.acquire(key, "ram", "w") as lease:
                lease.tensor.zero_()
            if home != "ram":
                self._elsewhere.append(key)
        self._evict_state()

    def _num_elements(self, kind: StateKind) -> int:
        return kind.num_elements(self.layout)

    def take_gradients(self) -> Mapping[str, Tensor | None]:
        """Return and consume the gradients of a step by name; None for a gradient in ``gradients``."""
        assert self.gradients is not None, self.layout.name
        return dict.fromkeys(self.gradients.consume())

    def squared_norms(self, threads: KernelThreads) -> Mapping[str, float]:
        """Return the sum of squares of each gradient by name, in the order of the layout."""
        assert self.gradients is not None, self.layout.name
        return self.gradients.squared_norms(threads)

    def gradients_now(self) -> object:
        """Return a value that compares equal until a gradient is added, changed or removed."""
        assert self.gradients is not None, self.layout.name
        return self.gradients.num_changes

    def keys_at_once(self) -> list[str]:
        """Return the keys of the blocks that an update needs in RAM at once."""
        return [*self.keys.values(), *([] if self.gradients is None else [self.gradients.key])]

    def update(self, work: DueUpdate) -> None:
        """Apply an update and return when it is done."""
        gradient = None if self.gradients is None else self.gradients.key
        requests: list[tuple[str, str, Mode]] = [
            (key, "ram", "r" if key == gradient else "rw") for key in self.keys_at_once()
        ]
        with torch.no_grad(), self.store.acquire_many(requests) as group:
            self._apply(work, {lease.key: lease.tensor for lease in group})
        if gradient is not None:
            self.store.discard(gradient)
        self._evict_state()

    @abstractmethod
    def _apply(self, work: DueUpdate, tensors: Mapping[str, Tensor]) -> None:
        """Call the update rules. ``tensors``: contents of all blocks, by key."""

    def prefetch(self) -> None:
        """Prefetch the state for the next update as far as it fits."""
        for key in self._elsewhere:
            self.store.prefetch(key, "ram")

    def _evict_state(self) -> None:
        """Evict state right after its update, so that it is written back while other groups compute."""
        for key in self._elsewhere:
            self.store.evict(key, "ram")

    def segment(self, entry: TensorEntry, settings: Settings, start: int) -> Segment:
        """Return the range of a parameter in a block, with its update settings."""
        own = {name: starts[entry.name] for name, starts in self.starts.items() if self.kinds[name].elements_of}
        return Segment(
            start,
            start + entry.numel,
            settings.weight_decay,
            shape=entry.shape,
            state_starts=own,
            name=self.names[entry.name],
            first=self.firsts.get(entry.name, 0),
        )

    def part(self, kind: str, flat: Tensor, entry: TensorEntry) -> Tensor:
        """Return the flat state of a kind of one parameter."""
        return flat.narrow(0, self.starts[kind][entry.name], self.kinds[kind].length_of(entry))

    @property
    def has_averages(self) -> bool:
        """Whether each weight has an average."""
        return EMA.name in self.keys

    def swap_averages(self, names: Mapping[str, object]) -> None:
        """Swap masters and their averages, in place. A second call restores both.

        Args:
            names: parameters that have been updated.

        Raises:
            WeightInUseError: the weights are held.
        """
        requests: list[tuple[str, str, Mode]] = [(key, "ram", "rw") for key in self._keys_of_masters()]
        with torch.no_grad(), self.store.acquire_many(requests) as group:
            self._swap(names, {lease.key: lease.tensor for lease in group})
        self._evict_state()

    def _keys_of_masters(self) -> list[str]:
        """Return the keys of the blocks with masters or their halves, and with averages."""
        return [self.keys[kind] for kind in ("weight", "low", EMA.name) if kind in self.keys]

    @abstractmethod
    def _swap(self, names: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        """Swap masters and averages. ``tensors``: contents of these blocks, by key."""

    def entries(self, names: Mapping[str, object]) -> Iterator[TensorEntry]:
        """Return the entries of these names, in the order of the layout."""
        return (entry for entry in self.layout.entries if entry.name in names)


class OffloadedGroup(StateGroup):
    """The parameters of an offloaded module that share a block of weights.

    Args:
        deferred: the optimizer's queue of updates that wait for the next use of the weights.
    """

    def __init__(
        self, weights: WeightBlock, kinds: Sequence[StateKind], homes: Sequence[str], *, deferred: DeferredUpdates
    ) -> None:
        assert weights.gradients is not None, weights.key
        root = weights.key.removesuffix("/weight")
        assert weight_key(root) == weights.key, weights.key
        own = [kind for kind in kinds if kind.name != "weight"]
        super().__init__(weights.store, root, weights.layout, weights.parameters, own, homes)
        self.gradients: GradientBlock = weights.gradients
        self.weights, self._deferred = weights, deferred

    @property
    def gradient_factor(self) -> float:
        """Factor on all gradients, in addition to clipping."""
        return 1.0

    def attach(self) -> None:
        """Register as the updater of the weights."""
        assert self.weights.updater is None, self.layout.name
        self.weights.updater = self.gradients.updater = self

    def detach(self) -> None:
        """Unregister as the updater of the weights."""
        self.weights.updater = self.gradients.updater = None

    def defer(self, work: DueUpdate) -> None:
        """Defer an update to the next use of the weights. Graphs of earlier forwards become stale."""
        self._deferred.add(self, work)
        self.weights.version += 1

    def finish_update(self) -> None:
        """Apply the due update, if there is one."""
        self._deferred.finish(self)

    def keys_at_once(self) -> list[str]:
        """Return the keys of the blocks that an update needs in RAM at once, including weights."""
        return [self.weights.key, *super().keys_at_once()]

    def update(self, work: DueUpdate) -> None:
        self.weights.prepare_update()
        super().update(work)

    def _apply(self, work: DueUpdate, tensors: Mapping[str, Tensor]) -> None:
        blocks = {kind: tensors[key] for kind, key in {"weight": self.weights.key, **self.keys}.items()}
        alike: dict[tuple[int, int, float], list[tuple[Segment, Settings]]] = {}
        for entry in self.entries(work.settings):
            settings = work.settings[entry.name]
            segment = self._segment_here(entry, settings)
            if segment is not None:
                if self.has_averages and settings.step == 1:
                    begin_average(*self._master_and_average(entry, tensors))
                like = (id(settings.arithmetic), settings.step, settings.lr)
                alike.setdefault(like, []).append((segment, settings))
        for parts in alike.values():
            settings = parts[0][1]
            now = Update(settings.step, settings.lr, work.grad_scale)
            settings.arithmetic.update(blocks, tensors[self.gradients.key], [segment for segment, _ in parts], now)

    def swap_averages(self, names: Mapping[str, object]) -> None:
        self.weights.prepare_update()
        super().swap_averages(names)
        self.weights.version += 1  # graphs of earlier forwards are stale

    def _keys_of_masters(self) -> list[str]:
        return [self.weights.key, *super()._keys_of_masters()]

    def _swap(self, names: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        for entry in self.entries(names):
            swap_average(*self._master_and_average(entry, tensors))

    def _master_and_average(
        self, entry: TensorEntry, tensors: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return weight, low half and average of a parameter; weight and average have the same offsets."""
        low = self.part("low", tensors[self.keys["low"]], entry) if "low" in self.keys else None
        weight, average = (tensors[key] for key in (self.weights.key, self.keys[EMA.name]))
        return self.part(EMA.name, weight, entry), low, self.part(EMA.name, average, entry)

    def _segment_here(self, entry: TensorEntry, settings: Settings) -> Segment | None:
        """Return the segment of a parameter in the blocks of the group; None if they have no part of it."""
        return self.segment(entry, settings, entry.offset)

    def weights_changed(self, names: frozenset[str]) -> None:
        """Zero the low half of masters whose weights were replaced."""
        if "low" not in self.keys:
            return
        with self.store.acquire(self.keys["low"], "ram", "rw") as lease:
            for entry in self.layout.entries:
                if entry.name in names:
                    self.part("low", lease.tensor, entry).zero_()


class OrdinaryGroup(StateGroup):
    """Ordinary parameters, in RAM or on a CUDA device; only their state is in the store.

    A parameter in RAM is the high half of its master, so nothing is stored twice. For a parameter on a device the
    store has the whole master, and the parameter is a copy. For a sharded parameter (``DTensor``) the layout has this
    rank's part, which is updated without other ranks.

    Args:
        offload_gradients: whether gradients move to the store when autograd computes them.
        copies: copies between devices and RAM.

    Attributes:
        dtensors: names of the parameters that are sharded.
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
        self.dtensors = frozenset(name for name, parameter in parameters.items() if is_dtensor(parameter))
        values = {name: local_of(parameter) for name, parameter in parameters.items()}
        self._on_device = any(value.is_cuda for value in values.values())
        self._copies = copies
        self._places = {name: (value.dtype, value.device) for name, value in values.items()}
        self._versions: dict[str, object] = {}  # of device parameters, at the time they equalled their masters
        own = [kind for kind in kinds if self._on_device or kind.name != "weight"]
        super().__init__(store, root, layout, parameters, own, homes)
        if offload_gradients:
            self.gradients = GradientBlock(store, gradient_key(root, 0), layout, parameters, homes)
        if self._on_device:
            self.copy_masters()

    def gradients_now(self) -> object:
        if self.gradients is not None:
            return super().gradients_now()
        found = (parameter.grad for parameter in self.parameters.values())
        return [None if gradient is None else (id(gradient), version_of(gradient)) for gradient in found]

    def values(self, name: str) -> Tensor:
        """Return this process's part of a parameter: the parameter itself unless it is sharded."""
        parameter = self.parameters[name]
        return local_of(parameter) if name in self.dtensors else parameter

    def copy_masters(self) -> None:
        """Copy device parameters into their masters."""
        with torch.no_grad(), self.store.acquire(self.keys["weight"], "ram", "w") as lease:
            lease.tensor.zero_()
            for entry in self.layout.entries:
                self.part("weight", lease.tensor, entry).copy_(self.values(entry.name).reshape(-1))
                self._note_equal(entry.name)

    def _note_equal(self, name: str) -> None:
        """Record that a device parameter equals its master."""
        self._versions[name] = version_of(self.parameters[name])

    def invalidate_masters(self) -> None:
        """Compare masters with their parameters before the next update, because both were loaded separately."""
        self._versions.clear()

    def take_gradients(self) -> Mapping[str, Tensor | None]:
        for device in {device for _, device in self._places.values() if device.type == "cuda"}:
            self._copies.mark(device)
        if self.gradients is not None:
            return super().take_gradients()
        found = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        for name in found.keys() & self.dtensors:
            parameter = self.parameters[name]
            assert is_dtensor(parameter), name
            check_gradient(found[name], parameter)
            found[name] = local_of(found[name])
        return found

    def squared_norms(self, threads: KernelThreads) -> Mapping[str, float]:
        if self.gradients is not None:
            return super().squared_norms(threads)
        return {
            name: squared_norm(self._flat(gradient), threads)
            for name, gradient in self.take_gradients().items()
            if gradient is not None
        }

    def _apply(self, work: DueUpdate, tensors: Mapping[str, Tensor]) -> None:
        for entry in self.entries(work.settings):
            if self.gradients is not None:
                gradient = self.gradients.view(tensors[self.gradients.key], entry)
            else:
                gradient = self._flat(work.gradients[entry.name])
            self._update_one(entry, work.settings[entry.name], gradient, tensors, work.grad_scale)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters when their state was made."""
        return next(iter(self._places.values()))[0]

    @property
    def is_in_ram(self) -> bool:
        """Whether parameters, gradients and state are all in RAM, so that an update fetches nothing."""
        return not self._on_device and self.gradients is None and not self._elsewhere

    def check_place(self, name: str) -> None:
        """Raise if a parameter's dtype or device has changed since its state was created.

        Raises:
            RuntimeError: the parameter was moved or converted.
        """
        values, place = self.values(name), self._places[name]
        if (values.dtype, values.device) != place:
            raise RuntimeError(
                f"a parameter of shape {tuple(values.shape)} was {place[0]} on {place[1]} when its optimizer was "
                f"made, and is {values.dtype} on {values.device} now: move and convert the module before"
            )

    def _update_one(
        self,
        entry: TensorEntry,
        settings: Settings,
        gradient: Tensor,
        tensors: Mapping[str, Tensor],
        grad_scale: float,
    ) -> None:
        with self._master(entry, tensors) as blocks:
            if self.has_averages and settings.step == 1:
                begin_average(blocks["weight"], blocks.get("low"), blocks[EMA.name])
            now = Update(settings.step, settings.lr, grad_scale)
            settings.arithmetic.update(blocks, gradient, [self.segment(entry, settings, 0)], now)

    def begin_averages(self, names: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        """Initialize the averages of parameters in RAM, if there are any, before their first update.

        Args:
            tensors: contents of all blocks, by key.
        """
        if not self.has_averages or not names:
            return
        for entry in self.entries(names):
            low, average = (
                self.part(kind, tensors[self.keys[kind]], entry) if kind in self.keys else None
                for kind in ("low", EMA.name)
            )
            assert average is not None, entry
            begin_average(self.values(entry.name).detach().reshape(-1), low, average)

    def _swap(self, names: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        for device in {device for _, device in self._places.values() if device.type == "cuda"}:
            self._copies.mark(device)  # after kernels that still read the parameters
        for entry in self.entries(names):
            with self._master(entry, tensors) as blocks:
                swap_average(blocks["weight"], blocks.get("low"), blocks[EMA.name])

    @contextmanager
    def _master(self, entry: TensorEntry, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Yield the state tensors of a parameter, including its weight; copy the updated weight back on exit.

        Args:
            entry: position of the parameter.
            tensors: contents of the blocks, by key.
        """
        parameter, values = self.parameters[entry.name], self.values(entry.name)
        own_length = {name for name, kind in self.kinds.items() if kind.elements_of is not None}
        blocks = {
            kind: tensors[key] if kind in own_length else self.part(kind, tensors[key], entry)
            for kind, key in self.keys.items()
            if key in tensors
        }
        self.check_place(entry.name)
        if not self._on_device:
            blocks["weight"] = values.detach().reshape(-1)
        elif self._versions.get(entry.name) != version_of(parameter):
            _follow(blocks, values.detach().reshape(-1).cpu())
        yield blocks
        if values.is_cuda:
            self._copies.to_device(values, blocks["weight"])
            self._note_equal(entry.name)
        elif blocks["weight"].data_ptr() != values.data_ptr():
            values.copy_(blocks["weight"].view(entry.shape))
            self._note_equal(entry.name)
        else:
            increment_version(values)  # the kernel wrote without autograd: a graph that saved the tensor must raise
        if values is not parameter:
            increment_version(parameter)  # a DTensor has a separate version counter
            self._note_equal(entry.name)

    def _flat(self, gradient: Tensor) -> Tensor:
        """Return a flat gradient, fp32 or bf16, in RAM; a copy from a device is valid until the next call."""
        gradient = gradient.detach()
        if gradient.is_cuda:
            flat = self._copies.to_ram(gradient)
        else:
            flat = (gradient if gradient.layout is torch.strided else gradient.to_dense()).reshape(-1)
        return flat if flat.dtype in GRADIENT_DTYPES else flat.float()


def _follow(blocks: Mapping[str, Tensor], values: Tensor) -> None:
    """Copy a replaced parameter into its master; unchanged elements keep their low half."""
    if "low" in blocks:
        blocks["low"].masked_fill_(blocks["weight"] != values, 0)
    blocks["weight"].copy_(values)


def take_gradients(groups: Sequence[StateGroup]) -> list[tuple[StateGroup, Mapping[str, Tensor | None]]]:
    """Take the gradients of a step from all groups, or from none.

    Raises:
        WeightInUseError: weights to be updated are held, by ``gathered`` or a running forward, which would continue
            with old values.
    """
    for group in groups:
        if isinstance(group, OffloadedGroup) and group.weights.is_held and group.gradients.filled:
            raise WeightInUseError(
                f"optimizer.step() while {group.layout.name} is held: leave `with megatrain.gathered(...)` before, and "
                "step after the forward has ended"
            )
    return [(group, group.take_gradients()) for group in groups]


def update_in_order(works: Mapping[StateGroup, DueUpdate]) -> None:
    """Apply updates in order, prefetching the state of the next one during each."""
    for group, following in zip_longest(works, list(works)[1:]):
        if following is not None:
            following.prefetch()
        group.update(works[group])


@dataclass(slots=True)
class _Batch:
    """Parameters that one kernel call can update: the lists have one entry per parameter.

    Attributes:
        split_master: Whether masters have a low half.
    """

    settings: Settings
    split_master: bool
    gradient_dtype: torch.dtype
    names: list[tuple[OrdinaryGroup, str]] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class _KernelTable:
    """Rows of a kernel call, valid while no tensor moves.

    Attributes:
        places: everything that the rows depend on.
        rows: arguments of the kernel except the addresses of gradients.
        of: index of each row's parameter.
        offsets: first element of each row in its parameter.
        calls: (first row, end row) of each call.
    """

    places: tuple[object, ...]
    rows: NDArray[np.int64]
    of: NDArray[np.int64]
    offsets: NDArray[np.int64]
    calls: list[tuple[int, int]]


class UpdatesInRam:
    """Batches of updates that fetch nothing.

    One kernel call updates many small parameters, so that they use all threads at little cost each. Addresses are
    looked up again only after a tensor has moved. Results are bitwise equal to ``OrdinaryGroup.update``.
    """

    def __init__(self, threads: KernelThreads) -> None:
        self._threads = threads
        self._tables: dict[int, _KernelTable] = {}

    def update(self, works: Mapping[StateGroup, DueUpdate]) -> dict[StateGroup, DueUpdate]:
        """Apply the updates of groups that are in RAM; return the others."""
        mine, alike = _sorted_by_kind(works)
        if mine:
            store, grad_scale = mine[0].store, works[mine[0]].grad_scale
            requests: list[Any] = [(key, "ram", "rw") for group in mine for key in group.keys.values()]
            with torch.no_grad(), store.acquire_many(requests) as leases:
                tensors = {lease.key: lease.tensor for lease in leases}
                addresses = {key: tensor.data_ptr() for key, tensor in tensors.items()}
                calls = list(self._calls(alike, grad_scale, addresses))
                for group in mine:
                    settings = works[group].settings
                    group.begin_averages({name: one for name, one in settings.items() if one.step == 1}, tensors)
                self._threads.run(calls)
            increment_version([parameter for each in alike for parameter in each.parameters])
            increment_version([g.parameters[name] for g in mine for name in g.dtensors & works[g].settings.keys()])
        return {group: work for group, work in works.items() if group not in mine}

    def _calls(
        self, alike: Sequence[_Batch], grad_scale: float, addresses: Mapping[str, int]
    ) -> Iterator[Callable[[], None]]:
        blocks = tuple(addresses.values())
        for number, each in enumerate(alike):
            settings, num_threads = each.settings, self._threads.num_threads
            arithmetic = cast("ElementwiseOptimizer | WeightAverage", settings.arithmetic)
            sizes = [parameter.numel() for parameter in each.parameters]
            assert [gradient.numel() for gradient in each.gradients] == sizes
            own = (each.names, [parameter.data_ptr() for parameter in each.parameters], sizes)
            places = (each.split_master, arithmetic.rows_kinds, num_threads, *own, blocks)
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
    """Return the sums of squares of gradients that kernels can read in place, in a few calls.

    Groups with any other gradient are skipped.
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


def _sorted_by_kind(works: Mapping[StateGroup, DueUpdate]) -> tuple[list[OrdinaryGroup], list[_Batch]]:
    """Return the groups whose tensors the kernels can use in place, and their parameters in batches of equal kind."""
    groups: list[OrdinaryGroup] = []
    alike: dict[tuple[object, ...], _Batch] = {}
    for group, work in works.items():
        if not isinstance(group, OrdinaryGroup) or not group.is_in_ram:
            continue
        dtype, split_master = group.dtype, "low" in group.kinds
        entries: list[tuple[tuple[object, ...], str, Settings, Tensor, Tensor]] = []
        for name, settings in work.settings.items():
            parameter, gradient = group.values(name), work.gradients[name]
            arithmetic = settings.arithmetic
            has_kernel = isinstance(arithmetic, ElementwiseOptimizer | WeightAverage) and arithmetic.has_rows
            if not (has_kernel and parameter.dtype == dtype and parameter.is_contiguous() and _is_flat(gradient)):
                break
            entries.append(((id(settings), dtype, gradient.dtype), name, settings, parameter, gradient))
        else:
            groups.append(group)
            for kind, name, settings, parameter, gradient in entries:
                each = alike.get(kind)
                if each is None:
                    each = alike[kind] = _Batch(settings, split_master, gradient.dtype)
                each.names.append((group, name))
                each.parameters.append(parameter)
                each.gradients.append(gradient)
    return groups, list(alike.values())


def _make_table(
    places: tuple[object, ...],
    each: _Batch,
    arithmetic: ElementwiseOptimizer | WeightAverage,
    addresses: Mapping[str, int],
    num_threads: int,
) -> _KernelTable:
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
    return _KernelTable(places, shaped, np.array(of, np.int64), np.array(offsets, np.int64), calls)


def _place(
    group: OrdinaryGroup, kind: str, name: str, parameter: Tensor, addresses: Mapping[str, int]
) -> tuple[int, int]:
    """Return (address, element size) of a parameter's state of a kind; zeros if the kind is not stored."""
    if kind == "weight":
        return parameter.data_ptr(), parameter.dtype.itemsize
    if kind not in group.keys:
        return 0, 0
    itemsize = group.kinds[kind].dtype.itemsize
    return addresses[group.keys[kind]] + group.starts[kind][name] * itemsize, itemsize


def _is_flat(gradient: Tensor) -> bool:
    is_strided = gradient.layout is torch.strided and gradient.is_contiguous()
    return is_strided and not gradient.is_cuda and gradient.dtype in GRADIENT_DTYPES


class InterruptedUpdateError(RuntimeError):
    """Updates were partially applied: some weights have made a step that others have not."""


class DeferredUpdates:
    """Updates of offloaded groups that wait for the next use of their weights. Used by one thread at a time."""

    def __init__(self) -> None:
        self._due: dict[OffloadedGroup, DueUpdate] = {}
        self._is_partial = False

    def add(self, group: OffloadedGroup, work: DueUpdate) -> None:
        """Defer an update of a group that has none waiting."""
        self._due[group] = work

    def finish(self, group: OffloadedGroup | None = None) -> None:
        """Apply the waiting update of a group, or all waiting updates if no group is given.

        Raises:
            InterruptedUpdateError: no group was given, and updates were partially applied before. Raised once.
        """
        if group is None and self._is_partial:
            self._is_partial = False
            raise InterruptedUpdateError(
                "an update of this optimizer ended halfway, with an error or an interrupt: some weights have made the "
                "step, others not. Load a saved state; or repeat this call to continue from here"
            )
        for one in list(self._due) if group is None else [group]:
            if (work := self._due.get(one)) is not None:
                with self.applying():
                    one.update(work)
                del self._due[one]  # only now: if the store raised an error, the update is still due

    @contextmanager
    def applying(self, *, is_atomic: bool = True) -> Iterator[None]:
        """Record if the updates inside end halfway.

        Args:
            is_atomic: whether they belong to one group, so that an error of the store precedes any change.
        """
        try:
            yield
        except (TieredError, WeightInUseError):
            self._is_partial = self._is_partial or not is_atomic
            raise
        except BaseException:
            self._is_partial = True
            self._due.clear()
            raise
