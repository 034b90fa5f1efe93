"""Parameter groups of embedded optimizers. They are updated in ``step``, or before the next use of their weights.

The engine's ``Updater`` applies the same settings to all groups of a step. In torch, settings can change in every step
and each parameter counts its own steps, so an update has settings per parameter. Embedded optimizers and the engine
share the update rules of ``megatrain.optim``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatrain.base.layout import TensorEntry
from megatrain.embed.gradient_block import GradientBlock
from megatrain.embed.state_blocks import StateBlocks
from megatrain.embed.weights import WeightBlock, WeightInUseError
from megatrain.optim.average import EMA, begin_average, swap_average
from megatrain.optim.base import Optimizer, Segment, Update
from megatrain.optim.threads import KernelThreads
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
    """

    settings: Mapping[str, Settings]
    grad_scale: float


class GradientSource(Protocol):
    """Interface through which a group reads its gradients, from a block of the store or from ``grad``."""

    @property
    def key(self) -> str | None:
        """Key of the block that contains the gradients; None if they are in ``grad``."""

    @property
    def factor(self) -> float:
        """Factor by which all gradients are multiplied, in addition to clipping."""

    @property
    def version(self) -> object:
        """Value that changes whenever a gradient is added, changed or removed."""

    def take(self) -> Collection[str]:
        """Return the names of parameters with a gradient. Gradients in a block are marked as consumed."""

    def squared_norms(self, threads: KernelThreads) -> Mapping[str, float]:
        """Return each gradient's sum of squares by name, in the order of the layout."""

    def read(self, entry: TensorEntry, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a parameter's flat gradient in RAM, valid until the next call. ``tensors``: leased blocks by key."""

    def clear(self) -> None:
        """Drop all gradients."""


class StateGroup(ABC):
    """Parameters whose optimizer state shares one block per kind, and which are updated together.

    Args:
        parameters: Parameters by name in the layout of the state.
    """

    #: Whether the parameters are in an offloaded module.
    is_offloaded = False

    def __init__(self, parameters: Mapping[str, nn.Parameter], state: StateBlocks, gradients: GradientSource) -> None:
        self.parameters, self.state, self.gradients = dict(parameters), state, gradients
        self.store, self.layout = state.store, state.layout

    @abstractmethod
    def check_free(self) -> None:
        """Raise ``WeightInUseError`` if ``gathered`` or a running forward uses weights that a step would change."""

    def leased_keys(self) -> list[str]:
        """Return the keys of all blocks that an update leases in RAM at the same time."""
        return [*self.state.keys.values(), *([] if self.gradients.key is None else [self.gradients.key])]

    @abstractmethod
    def submit(self, update: GroupUpdate, updates: dict[Any, GroupUpdate]) -> None:
        """Defer an update until the next use of the weights, or add it to ``updates`` if it must not wait."""

    def update(self, update: GroupUpdate) -> None:
        """Apply an update synchronously."""
        gradient_key = self.gradients.key
        leases = self.store.acquire_many([(k, "ram", "r" if k == gradient_key else "rw") for k in self.leased_keys()])
        with torch.no_grad(), leases as group:
            self._apply(update, {lease.key: lease.tensor for lease in group})
        if gradient_key is not None:
            self.store.discard(gradient_key)
        self.state.evict()

    @abstractmethod
    def _apply(self, update: GroupUpdate, tensors: Mapping[str, Tensor]) -> None:
        """Call the update rules. ``tensors`` contains the contents of all blocks by key."""

    def close(self) -> None:
        """Unregister the state blocks. Committed generations keep their contents."""
        self.state.close()

    @property
    def has_averages(self) -> bool:
        """Whether the group stores averages of its weights."""
        return EMA.name in self.state.keys

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
        with torch.no_grad(), self.store.acquire_many([(key, "ram", "rw") for key in self._master_keys()]) as group:
            tensors = {lease.key: lease.tensor for lease in group}
            for entry in self.entries(names):
                with self._master(entry, tensors) as blocks:
                    swap_average(blocks["weight"], blocks.get("low"), blocks[EMA.name])
        self.state.evict()

    def _master_keys(self) -> list[str]:
        """Return the keys of the blocks that contain masters, halves of masters, or averages."""
        keys = self.state.keys
        return [keys[kind] for kind in ("weight", "low", EMA.name) if kind in keys]

    @abstractmethod
    def _master(self, entry: TensorEntry, tensors: Mapping[str, Tensor]) -> AbstractContextManager[dict[str, Tensor]]:
        """Yield views of a parameter's weight and state by kind. On exit, keep changes. ``tensors``: blocks by key."""

    def entries(self, names: Mapping[str, object]) -> Iterator[TensorEntry]:
        """Return the layout entries with these names, in the order of the layout."""
        return (entry for entry in self.layout.entries if entry.name in names)


class OffloadedGroup(StateGroup):
    """Parameters of an offloaded module that share a weight block.

    Args:
        deferred: The optimizer's queue of updates that wait for the next use of their weights.
    """

    is_offloaded = True
    gradients: GradientBlock

    def __init__(self, weights: WeightBlock, state: StateBlocks, *, deferred: DeferredUpdates) -> None:
        assert weights.gradients is not None, weights.key
        super().__init__(weights.parameters, state, weights.gradients)
        self.weights, self._deferred = weights, deferred

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

    def submit(self, update: GroupUpdate, updates: dict[Any, GroupUpdate]) -> None:
        self._deferred.add(self, update)
        self.weights.version += 1  # graphs of earlier forwards become stale

    def finish_update(self) -> None:
        """Apply the deferred update, if any."""
        self._deferred.finish(self)

    def leased_keys(self) -> list[str]:
        return [self.weights.key, *super().leased_keys()]

    def update(self, update: GroupUpdate) -> None:
        self.weights.prepare_update()
        super().update(update)

    def _apply(self, update: GroupUpdate, tensors: Mapping[str, Tensor]) -> None:
        blocks = {kind: tensors[key] for kind, key in {"weight": self.weights.key, **self.state.keys}.items()}
        batches: dict[tuple[int, int, float], list[tuple[Segment, Settings]]] = {}
        for entry in self.entries(update.settings):
            settings = update.settings[entry.name]
            segment = self.state.local_segment(entry, settings.weight_decay)
            if segment is not None:
                if self.has_averages and settings.step == 1:
                    with self._master(entry, tensors) as views:
                        begin_average(views["weight"], views.get("low"), views[EMA.name])
                batch_key = (id(settings.rule), settings.step, settings.lr)
                batches.setdefault(batch_key, []).append((segment, settings))
        for batch in batches.values():
            settings = batch[0][1]
            scalars = Update(settings.step, settings.lr, update.grad_scale)
            settings.rule.update(blocks, tensors[self.gradients.key], [segment for segment, _ in batch], scalars)

    def read_master(self, entry: TensorEntry) -> Tensor:
        master = torch.empty(entry.numel)
        keys = [self.weights.key, *(key for kind, key in self.state.keys.items() if kind == "low")]
        with self.store.acquire_many([(key, "ram", "r") for key in keys]) as leases:
            weight, *low = (self.state.view(EMA.name, lease.tensor, entry) for lease in leases)
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

    @contextmanager
    def _master(self, entry: TensorEntry, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        keys = {kind: key for kind, key in self.state.keys.items() if key in tensors}
        state = {kind: self.state.view(kind, tensors[key], entry) for kind, key in keys.items()}
        yield {"weight": self.state.view(EMA.name, tensors[self.weights.key], entry), **state}

    def handle_changed_weights(self, names: frozenset[str]) -> None:
        """Zero the low halves of masters, because code other than the optimizer replaced their weights."""
        if "low" not in self.state.keys:
            return
        with self.state.lease("low", "rw") as lease:
            for entry in self.layout.entries:
                if entry.name in names:
                    self.state.view("low", lease.tensor, entry).zero_()


class InterruptedUpdateError(RuntimeError):
    """Updates were applied only partially, so only some weights contain the step's changes."""


class DeferredUpdates:
    """Updates of offloaded groups that wait for the next use of the groups' weights. Used by one thread at a time."""

    def __init__(self) -> None:
        self._pending: dict[OffloadedGroup, GroupUpdate] = {}
        self._is_partial = False

    def add(self, group: OffloadedGroup, update: GroupUpdate) -> None:
        """Defer an update of a group that has no deferred update yet."""
        self._pending[group] = update

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
        for owner in list(self._pending) if group is None else [group]:
            if (update := self._pending.get(owner)) is not None:
                with self.recording_interrupts():
                    owner.update(update)
                del self._pending[owner]  # not before: if the store raises an error, the update is still due

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
