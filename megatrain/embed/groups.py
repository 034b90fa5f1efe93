"""Parameter groups of embedded optimizers. They are updated in ``step``, or before the next use of their weights.

The engine's ``Updater`` applies the same settings to all groups of a step. In torch, settings can change in every step
and each parameter counts its own steps, so an update has settings per parameter. Embedded optimizers and the engine
share the update rules of ``megatrain.optim``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.base.layout import TensorEntry, UnitLayout
from megatrain.embed.block_homes import shared_state
from megatrain.embed.gradient_block import GradientBlock
from megatrain.embed.weights import WeightBlock, WeightInUseError
from megatrain.engine.program.block_keys import state_key, weight_key
from megatrain.optim.average import EMA, begin_average, swap_average
from megatrain.optim.base import Optimizer, Segment, StateKind, Update
from megatrain.optim.threads import KernelThreads
from tiered import Mode, TieredStore
from tiered.errors import TieredError


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings for one update of one parameter.

    Attributes:
        rule: Update rule with the settings of the parameter's group.
        step: Number of the update among this parameter's updates, starting at 1.
        lr: Learning rate of the parameter's group.
    """

    rule: Optimizer
    step: int
    lr: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class GroupUpdate:
    """Update of a group that has not been applied yet.

    Attributes:
        settings: Settings of each parameter that has a gradient, by name.
        grad_scale: Factor by which all gradients are multiplied.
        gradients: Gradients that are ordinary tensors, by name.
    """

    settings: Mapping[str, Settings]
    grad_scale: float
    gradients: Mapping[str, Tensor]


class StateGroup(ABC):
    """Parameters that share one block per kind of state. The constructor registers the blocks, filled with zeros.

    Args:
        root: Key prefix of the group's blocks.
        parameters: Parameters by name in the layout.
        homes: Allowed home tiers of the state, preferred first.

    Attributes:
        gradients: Block that receives gradients from autograd; None if gradients stay with the parameters.
        is_offloaded: Whether the parameters are in an offloaded module.
        shard: (index, number of shards) if the blocks contain only this process's shard; None if they are whole.
        gradient_factor: Factor by which all gradients are multiplied, in addition to clipping.
        names: Segment names, by name in the layout. They must not depend on where the state is stored.
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
        self.is_offloaded = False
        self.shard: tuple[int, int] | None = None
        self.gradient_factor = 1.0
        self.names: dict[str, str] = {name: name for name in parameters}
        self.kinds = {kind.name: kind for kind in kinds}
        self.keys = {kind.name: state_key(root, kind.name) for kind in kinds}
        self.starts = {kind.name: kind.starts(layout) for kind in kinds}
        self._keys_outside_ram: list[str] = []  # keys of state blocks whose home is outside of RAM
        for kind in kinds:
            key = self.keys[kind.name]
            home = shared_state(store).register(key, self._num_elements(kind), kind.dtype, homes, durable=True)
            with store.acquire(key, "ram", "w") as lease:
                lease.tensor.zero_()
            if home != "ram":
                self._keys_outside_ram.append(key)
        self._evict_state()

    def _num_elements(self, kind: StateKind) -> int:
        return kind.num_elements(self.layout)

    @abstractmethod
    def check_free(self) -> None:
        """Raise ``WeightInUseError`` if ``gathered`` or a running forward uses weights that a step would change."""

    def take_gradients(self) -> Mapping[str, Tensor | None]:
        """Return a step's gradients by name and mark them as consumed. The value is None for gradients in a block."""
        assert self.gradients is not None, self.layout.name
        return dict.fromkeys(self.gradients.consume())

    def squared_norms(self, threads: KernelThreads) -> Mapping[str, float]:
        """Return each gradient's sum of squares by name, in the order of the layout."""
        assert self.gradients is not None, self.layout.name
        return self.gradients.squared_norms(threads)

    def gradients_version(self) -> object:
        """Return a value that changes whenever a gradient is added, changed or removed."""
        assert self.gradients is not None, self.layout.name
        return self.gradients.num_changes

    def leased_keys(self) -> list[str]:
        """Return the keys of all blocks that an update leases in RAM at the same time."""
        return [*self.keys.values(), *([] if self.gradients is None else [self.gradients.key])]

    @abstractmethod
    def submit(self, pending: GroupUpdate, due: dict[Any, GroupUpdate]) -> None:
        """Defer an update until the next use of the weights, or add it to ``due`` if the step must apply it."""

    def update(self, pending: GroupUpdate) -> None:
        """Apply an update synchronously."""
        gradient = None if self.gradients is None else self.gradients.key
        requests: list[tuple[str, str, Mode]] = [
            (key, "ram", "r" if key == gradient else "rw") for key in self.leased_keys()
        ]
        with torch.no_grad(), self.store.acquire_many(requests) as group:
            self._apply(pending, {lease.key: lease.tensor for lease in group})
        if gradient is not None:
            self.store.discard(gradient)
        self._evict_state()

    @abstractmethod
    def _apply(self, pending: GroupUpdate, tensors: Mapping[str, Tensor]) -> None:
        """Call the update rules. ``tensors`` contains the contents of all blocks by key."""

    def close(self) -> None:
        """Unregister the state blocks. Committed generations keep their contents."""
        shared_state(self.store).unregister(*self.keys.values())

    def prefetch(self) -> None:
        """Prefetch as much of the state for the next update as fits in RAM."""
        for key in self._keys_outside_ram:
            self.store.prefetch(key, "ram")

    def _evict_state(self) -> None:
        """Start to evict the state right after its update, so that its write-back overlaps with other updates."""
        for key in self._keys_outside_ram:
            self.store.evict(key, "ram")

    def segment(self, entry: TensorEntry, settings: Settings, start: int, *, first: int = 0) -> Segment:
        """Return the range that a parameter occupies in a block, with the parameter's update settings.

        Args:
            first: Index of the range's first element within the parameter.
        """
        own = {name: starts[entry.name] for name, starts in self.starts.items() if self.kinds[name].elements_of}
        return Segment(
            start,
            start + entry.numel,
            settings.weight_decay,
            shape=entry.shape,
            state_starts=own,
            name=self.names[entry.name],
            first=first,
        )

    def state_view(self, kind: str, flat: Tensor, entry: TensorEntry) -> Tensor:
        """Return a flat view of a parameter's state of the given kind."""
        return flat.narrow(0, self.starts[kind][entry.name], self.kinds[kind].length_of(entry))

    @property
    def has_averages(self) -> bool:
        """Whether the group stores averages of its weights."""
        return EMA.name in self.keys

    @abstractmethod
    def read_master(self, entry: TensorEntry) -> Tensor:
        """Return a parameter's fp32 master as a flat tensor."""

    @abstractmethod
    def handle_loaded_state(self, *, with_weights: bool) -> None:
        """Record that the state was loaded, and whether the contents of weight blocks were also loaded."""

    def swap_averages(self, names: Mapping[str, object]) -> None:
        """Swap masters and their averages in place. A second call restores both.

        Args:
            names: Mapping whose keys are the names of the parameters that have been updated.

        Raises:
            WeightInUseError: The weights are in use.
        """
        requests: list[tuple[str, str, Mode]] = [(key, "ram", "rw") for key in self._master_keys()]
        with torch.no_grad(), self.store.acquire_many(requests) as group:
            self._swap(names, {lease.key: lease.tensor for lease in group})
        self._evict_state()

    def _master_keys(self) -> list[str]:
        """Return the keys of the blocks that contain masters, halves of masters, or averages."""
        return [self.keys[kind] for kind in ("weight", "low", EMA.name) if kind in self.keys]

    @abstractmethod
    def _swap(self, names: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        """Swap masters and averages. ``tensors`` contains the contents of their blocks by key."""

    def entries(self, names: Mapping[str, object]) -> Iterator[TensorEntry]:
        """Return the layout entries with these names, in the order of the layout."""
        return (entry for entry in self.layout.entries if entry.name in names)


class OffloadedGroup(StateGroup):
    """Parameters of an offloaded module that share a weight block.

    Args:
        deferred: The optimizer's queue of updates that wait for the next use of their weights.
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
        self.is_offloaded = True

    def attach(self) -> None:
        """Register this group as the updater of its weights."""
        assert self.weights.updater is None, self.layout.name
        self.weights.updater = self.gradients.updater = self

    def close(self) -> None:
        self.weights.updater = self.gradients.updater = None
        super().close()

    def check_free(self) -> None:
        if self.weights.held is not None and self.gradients.filled_names:
            raise WeightInUseError(
                f"optimizer.step() while {self.layout.name} is in use. Call it outside of "
                "`with megatrain.gathered(...)` and after the forward has ended"
            )

    def submit(self, pending: GroupUpdate, due: dict[Any, GroupUpdate]) -> None:
        self._deferred.add(self, pending)
        self.weights.version += 1  # graphs of earlier forwards become stale

    def finish_update(self) -> None:
        """Apply the deferred update, if any."""
        self._deferred.finish(self)

    def leased_keys(self) -> list[str]:
        """Return the keys of all blocks that an update leases in RAM at the same time, including the weights."""
        return [self.weights.key, *super().leased_keys()]

    def update(self, pending: GroupUpdate) -> None:
        self.weights.prepare_update()
        super().update(pending)

    def _apply(self, pending: GroupUpdate, tensors: Mapping[str, Tensor]) -> None:
        blocks = {kind: tensors[key] for kind, key in {"weight": self.weights.key, **self.keys}.items()}
        alike: dict[tuple[int, int, float], list[tuple[Segment, Settings]]] = {}
        for entry in self.entries(pending.settings):
            settings = pending.settings[entry.name]
            segment = self._local_segment(entry, settings)
            if segment is not None:
                if self.has_averages and settings.step == 1:
                    begin_average(*self._master_and_average(entry, tensors))
                like = (id(settings.rule), settings.step, settings.lr)
                alike.setdefault(like, []).append((segment, settings))
        for parts in alike.values():
            settings = parts[0][1]
            now = Update(settings.step, settings.lr, pending.grad_scale)
            settings.rule.update(blocks, tensors[self.gradients.key], [segment for segment, _ in parts], now)

    def read_master(self, entry: TensorEntry) -> Tensor:
        master = torch.empty(entry.numel)
        keys = [self.weights.key, *([self.keys["low"]] if "low" in self.keys else [])]
        with self.store.acquire_many([(key, "ram", "r") for key in keys]) as leases:
            weight, *low = (self.state_view(EMA.name, lease.tensor, entry) for lease in leases)
            begin_average(weight, low[0] if low else None, master)
        return master

    def handle_loaded_state(self, *, with_weights: bool) -> None:
        if with_weights:
            self.weights.missing_names.clear()
            self.weights.version += 1

    def swap_averages(self, names: Mapping[str, object]) -> None:
        self.weights.prepare_update()
        super().swap_averages(names)
        self.weights.version += 1  # graphs of earlier forwards become stale

    def _master_keys(self) -> list[str]:
        return [self.weights.key, *super()._master_keys()]

    def _swap(self, names: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        for entry in self.entries(names):
            swap_average(*self._master_and_average(entry, tensors))

    def _master_and_average(
        self, entry: TensorEntry, tensors: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return a parameter's weight, low half and average. Weight and average start at the same offset."""
        low = self.state_view("low", tensors[self.keys["low"]], entry) if "low" in self.keys else None
        weight, average = (tensors[key] for key in (self.weights.key, self.keys[EMA.name]))
        return self.state_view(EMA.name, weight, entry), low, self.state_view(EMA.name, average, entry)

    def _local_segment(self, entry: TensorEntry, settings: Settings) -> Segment | None:
        """Return a parameter's segment in the blocks of this process, or None if the blocks contain none of it."""
        return self.segment(entry, settings, entry.offset)

    def handle_changed_weights(self, names: frozenset[str]) -> None:
        """Zero the low halves of masters, because code other than the optimizer replaced their weights."""
        if "low" not in self.keys:
            return
        with self.store.acquire(self.keys["low"], "ram", "rw") as lease:
            for entry in self.layout.entries:
                if entry.name in names:
                    self.state_view("low", lease.tensor, entry).zero_()


class InterruptedUpdateError(RuntimeError):
    """Updates were applied only partially, so only some weights contain the step's changes."""


class DeferredUpdates:
    """Updates of offloaded groups. Each waits for the next use of its weights. Used by one thread at a time."""

    def __init__(self) -> None:
        self._pending: dict[OffloadedGroup, GroupUpdate] = {}
        self._is_partial = False

    def add(self, group: OffloadedGroup, pending: GroupUpdate) -> None:
        """Defer an update of a group that has no deferred update yet."""
        self._pending[group] = pending

    def finish(self, group: OffloadedGroup | None = None) -> None:
        """Apply the deferred update of one group, or all deferred updates if ``group`` is None.

        Raises:
            InterruptedUpdateError: ``group`` is None, and an earlier update was partially applied. This is raised only
                once.
        """
        if group is None and self._is_partial:
            self._is_partial = False
            raise InterruptedUpdateError(
                "an error or an interrupt ended an update of this optimizer halfway, so only some weights have made "
                "the step. Load a saved state, or repeat this call to continue anyway"
            )
        for one in list(self._pending) if group is None else [group]:
            if (pending := self._pending.get(one)) is not None:
                with self.recording_interrupts():
                    one.update(pending)
                del self._pending[one]  # after the update, because the update is still due if the store raised an error

    @contextmanager
    def recording_interrupts(self, *, is_atomic: bool = True) -> Iterator[None]:
        """Record whether an error or an interrupt stops an update halfway inside the context.

        Args:
            is_atomic: Whether all updates belong to one group, so that errors of the store occur before any change.
        """
        try:
            yield
        except (TieredError, WeightInUseError):
            self._is_partial = self._is_partial or not is_atomic
            raise
        except BaseException:
            self._is_partial = True
            self._pending.clear()
            raise
