"""A layer's weights in one block of a store. Forward and backward lease the block while they use the weights.

The engine runs each unit's forward, so it can bind leased weights to the module for one visit
(``megatrain.engine.unit.bound_unit.BoundUnit``). For an offloaded module, the user's code runs the forward and the
user's optimizer refers to the parameters. The parameters must therefore stay the same objects, and the autograd graph
saves a reference to the block instead of the weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Literal, Protocol, cast

import torch
from torch import Tensor, nn

from megatrain.base.layout import views
from megatrain.embed.absent_parameters import attach, holder_of, make_absent
from megatrain.embed.block_homes import compute_device, shared_state
from megatrain.embed.gradient_block import BlockUpdater, GradientBlock
from megatrain.embed.held_weights import HeldWeights
from megatrain.embed.partition import Part
from megatrain.embed.patches.modes import bypass_modes
from megatrain.embed.room import Homes, LocalBlocks, WeightLease
from tiered import Mode


class WeightInUseError(RuntimeError):
    """A module's weights were used or changed at a time or in a way that the store does not support."""


class WeightOwner(Protocol):
    """Owner of a weight block: an offloaded module."""

    def provide_weights(self, block: WeightBlock) -> bool:
        """Hold a block for code that reads weights outside of their module. Return False if that is impossible."""

    def recover(self) -> None:
        """Release the leases of forwards that ended without running their hooks."""

    def release_backward(self, block: WeightBlock) -> None:
        """Release the backward's lease of a block. Raise ``WeightInUseError`` if a graph still uses the weights."""

    def saving_hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return hooks that make the graph save block references instead of weights."""


#: Held blocks by the address of their leased memory.
_HELD_BLOCKS: dict[int, WeightBlock] = {}


class WeightBlock:
    """Block that stores the parameters of one part. While the block is held, each parameter is a view of its slot.

    The constructor registers the part's blocks and copies the parameters' values to the weight block. Each module that
    uses the block holds it during its forward. The backward leases it. Used by one thread at a time.

    Args:
        homes: Home tiers of the part's blocks, by key.
        access: Access to the module's complete or sharded blocks.
        owner: Offloaded module that contains the part.

    Attributes:
        gradients: Gradients of the parameters; None if the parameters are frozen.
        missing_names: Names of parameters that were created on the meta device and are not loaded yet.
        updater: Group of the optimizer; None without an optimizer.
        version: Number of changes to the weights, including deferred updates.
    """

    def __init__(self, part: Part, homes: Homes, access: LocalBlocks, owner: WeightOwner) -> None:
        self.part, self.access, self.owner = part, access, owner
        self.store, self.tier = access.store, access.tier
        self.key, self.layout, self.dtype, self.parameters = part.weight_key, part.layout, part.dtype, part.parameters
        self.home = homes[self.key]
        self.updater: BlockUpdater | None = None
        self.version = 0
        self._device = compute_device(self.store)
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._held: HeldWeights | None = None
        shared = shared_state(self.store)
        shared.register(self.key, access.num_elements(self.layout), self.dtype, (self.home,), durable=True)
        self.missing_names = {name for name, parameter in self.parameters.items() if parameter.device.type == "meta"}
        self.gradients: GradientBlock | None = None  # set below: its hooks need absent parameters
        self._store_values()
        if self.layout.trainable:
            for key, num_elements in access.gradient_elements(part).items():
                shared.register(key, num_elements, torch.float32, (homes[key],), durable=False)
            self.gradients = access.gradient_block(part)

    def name_of(self, parameter: Tensor) -> str:
        """Return the full name of a parameter of the block."""
        return self._names[id(parameter)]

    def _store_values(self) -> None:
        """Copy the parameters' values to the block, and free each parameter's memory after its copy.

        Parameters on the meta device have no values, so they stay missing until the block is filled.
        """
        for name in self.missing_names:
            attach(self.parameters[name], self, self._device)
        if len(self.missing_names) == len(self.parameters):
            return
        with self.new_contents() as flat:
            for name, target in views(flat, self.layout).items():
                if name not in self.missing_names:
                    target.copy_(self.parameters[name])
                    attach(self.parameters[name], self, self._device)
        _trim_heap()
        self._evict()

    def new_contents(self) -> AbstractContextManager[Tensor]:
        """Return a context that yields a flat tensor of zeros. On exit, its values become the block's contents."""
        return self.access.new_contents(self.part)

    def mark_filled(self) -> None:
        """Record that all parameters now have values. Evict the block from RAM unless RAM is its home."""
        self.missing_names.clear()
        self._evict()

    def _evict(self) -> None:
        if self.home != "ram":
            self.store.evict(self.key, "ram")

    @bypass_modes
    def hold(self, mode: Literal["r", "rw"] = "r", *, is_watched: bool = False) -> None:
        """Load the parameters into memory. They stay until ``release`` has been called as often as ``hold``.

        Args:
            is_watched: Whether to detect changes that autograd does not see, such as changes through ``data`` or numpy.

        Raises:
            CapacityError: The compute tier is too small for the unit.
            WeightInUseError: Parameters are not loaded yet, or ``mode`` is "rw" while the block is held for reading.
        """
        if self._held is None:
            if self.updater is not None:
                self.updater.finish_update()
            lease = self.lease(mode)
            self._held = HeldWeights(self.part, lease, self.missing_names, is_watched=is_watched)
            _HELD_BLOCKS[_address(lease.tensor)] = self
        elif mode == "rw" and self._held.lease.mode == "r":
            raise WeightInUseError(
                f"{self.layout.name} is in use by its forward. Change its weights before or after it"
            )
        self._held.num_holders += 1

    @bypass_modes
    def release(self, *, is_failing: bool = False) -> None:
        """Undo one ``hold`` call. The last ``release`` removes the parameters from memory again.

        Args:
            is_failing: Whether another error is already being raised, so that this method must not raise.

        Raises:
            WeightInUseError: Weights changed while they were held for reading, or a view of a copy still exists.
        """
        held = self._held
        assert held is not None, self.key
        held.num_holders -= 1
        if held.num_holders:
            return
        self._held, lease = None, held.lease
        _HELD_BLOCKS.pop(_address(lease.tensor), None)
        changed_names = held.changed_names(self.missing_names)
        for parameter in self.parameters.values():
            make_absent(parameter, self._device)
        is_copy = self.access.is_copy(self.home)
        is_shared = held.has_views and is_copy
        mode = lease.mode
        if mode == "w" and not changed_names:
            lease.abandon()
        else:
            lease.release()
        if changed_names and mode == "r" and is_copy:
            self.access.evict_copy(self.part)  # drop the changed copy, which a read-only lease does not write back
        elif changed_names:
            self.record_changes(changed_names)
        if changed_names and mode == "r" and not is_failing:
            raise WeightInUseError(
                f"{sorted(changed_names)[0]} was changed while it was held for reading, so the change would be lost. "
                "Use `with megatrain.gathered(module, writable=True):`"
            )
        if is_shared and not is_failing:
            raise WeightInUseError(
                f"a view of the weights of {self.layout.name} still exists after its forward, but other weights will "
                "overwrite its memory. Use a clone, or leave the module out: megatrain.offload(..., leave=[...])"
            )

    def check_frozen(self) -> None:
        """Raise ``WeightInUseError`` if a parameter requires a gradient now, but was frozen when it was offloaded."""
        if self.gradients is None:
            for name, parameter in self.parameters.items():
                if parameter.requires_grad:
                    raise WeightInUseError(
                        f"{name} was frozen when it was offloaded, so the store has no space for its gradient. Set "
                        "requires_grad before megatrain.offload, and freeze parameters afterwards"
                    )

    def watch_data(self, parameter: nn.Parameter) -> None:
        """Watch a held parameter for changes, because its ``data`` was accessed."""
        if self._held is not None:
            self._held.watch(self.name_of(parameter))

    def prepare_update(self) -> None:
        """Release the backward's remaining leases before an optimizer changes the weights.

        Raises:
            WeightInUseError: The weights are held, or a graph still uses them.
        """
        if self._held is not None:
            self.owner.recover()
        if self._held is not None:
            raise WeightInUseError(
                f"the weights of {self.layout.name} are in use and cannot be updated. Step outside of "
                "megatrain.gathered and of the module's forward"
            )
        self.owner.release_backward(self)

    def mark_unchanged(self, parameter: nn.Parameter) -> None:
        """Record that a held parameter was overwritten with the values that it already had."""
        assert self._held is not None, self.key
        self._held.mark_unchanged(self.name_of(parameter))

    def record_changes(self, names: frozenset[str]) -> None:
        """Record that code other than the optimizer changed these parameters."""
        self.version += 1
        self.missing_names -= set(names)
        shared_state(self.store).note_change()
        if self.updater is not None:
            self.updater.handle_changed_weights(names)

    def provide_weights(self) -> bool:
        """Hold the block for code that reads weights outside of their module. Return False if that is impossible."""
        return self.owner.provide_weights(self)

    @property
    def held(self) -> Tensor | None:
        """Flat weights while the block is held, otherwise None."""
        return None if self._held is None else self._held.lease.tensor

    def lease(self, mode: Literal["r", "rw"] = "r") -> WeightLease:
        """Return a lease, which the caller must release. The parameters stay absent."""
        if self.missing_names and mode == "r":
            raise WeightInUseError(
                f"{sorted(self.missing_names)[0]} has no values yet, because the model was created on the meta device. "
                "Use megatrain.load_pretrained(folder, store), or model.load_state_dict(...)"
            )
        lease_mode: Mode = "w" if len(self.missing_names) == len(self.parameters) else mode
        return self.access.lease(self.part, lease_mode)


def block_of(parameter: Tensor) -> WeightBlock | None:
    """Return the block that stores a parameter, or None if the parameter is not in a store."""
    return cast("WeightBlock | None", holder_of(parameter))


def release_all(blocks: Iterable[WeightBlock], *, is_failing: bool) -> None:
    """Release every block, even if one of the releases raises an error."""
    with ExitStack() as stack:
        for block in blocks:
            stack.callback(block.release, is_failing=is_failing)


def find_held_block(tensor: Tensor) -> WeightBlock | None:
    """Return the held block whose memory ``tensor`` views, or None."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    block = _HELD_BLOCKS.get(_address(tensor))
    return block if block is not None and tensor.dtype == block.dtype else None


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _trim_heap() -> None:
    """Return freed memory to the system, because the C library keeps freed parameters of a few MB in its heap."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has this function
    if trim is not None:
        trim(0)
