"""A layer's weights in one block of a store. Forward and backward lease the block while they use the weights.

The engine runs each unit's forward, so it can bind leased weights to the module for one visit
(``megatrain.engine.unit.bound_unit.BoundUnit``). For an offloaded module, the user's code runs the forward and the
user's optimizer refers to the parameters. The parameters must therefore stay the same objects, and the autograd graph
saves a reference to the block instead of the weights.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
from torch import Tensor, nn

from megatrain.base.layout import UnitLayout, views
from megatrain.embed.absent_parameters import attach, holder_of, make_absent, make_present
from megatrain.embed.gradient_block import BlockUpdater, GradientBlock
from megatrain.embed.modes import past_modes
from megatrain.embed.room import WeightLease, WholeBlocks
from megatrain.embed.saved_tensors import KeptInMemory, OuterSavedTensor, SavedTensor, outer_hooks, saving
from megatrain.embed.stores import compute_device, shared_state
from megatrain.embed.use_order import UseOrder
from tiered import Mode, TieredStore, checksum


class WeightInUseError(RuntimeError):
    """A module's weights were used or changed at a time or in a way that the store does not support."""


class WeightOwner(Protocol):
    """Owner of a weight block: an offloaded module. ``window`` contains the leases of the module's backward."""

    window: BackwardWindow

    def provide(self, block: WeightBlock) -> bool:
        """Hold a block for code that reads weights outside of their module. Return False if that is impossible."""

    def recover(self) -> None:
        """Release the leases of forwards that ended without running their hooks."""


#: Held blocks by the address of their leased memory.
_HELD: dict[int, WeightBlock] = {}


class WeightBlock:
    """Block that stores the parameters of one layout. While the block is held, each parameter is a view of its slot.

    Each module that uses the block holds it during its forward. The backward leases it. Used by one thread at a time.

    Args:
        key: Key of the block, which the constructor registers.
        parameters: Parameters by name in the layout.
        homes: Allowed home tiers, preferred first.
        access: Leases and fills the blocks of the module.

    Attributes:
        gradients: Gradients of the parameters; None if the parameters are frozen.
        missing: Names of parameters that were created on the meta device and are not loaded yet.
        owner: Offloaded module; None until the module is complete.
        updater: Group of the optimizer; None without an optimizer.
        version: Number of changes of the weights, including deferred updates.
    """

    def __init__(
        self,
        store: TieredStore,
        key: str,
        layout: UnitLayout,
        parameters: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        homes: Sequence[str],
        access: WholeBlocks,
    ) -> None:
        self.store, self.key, self.layout, self.dtype, self.access = store, key, layout, dtype, access
        self.parameters = dict(parameters)
        self.gradients: GradientBlock | None = None
        self.owner: WeightOwner | None = None
        self.updater: BlockUpdater | None = None
        self.version = 0
        self.tier = access.tier
        self._device = compute_device(store)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._lease: WeightLease | None = None
        self._num_holders = 0
        self._num_references = 0
        self._versions: dict[str, int] = {}
        self._addresses: dict[str, int] = {}
        self._checksums: dict[str, str] = {}  # checksums of weights that can change without autograd seeing it
        self.home = shared_state(store).register(key, access.num_elements(layout), dtype, homes, durable=True)
        self.missing = set(parameters)

    def name_of(self, parameter: Tensor) -> str:
        """Return the full name of a parameter of the block."""
        return self._names[id(parameter)]

    def take_over(self) -> None:
        """Copy the parameters' values to the block, and free each parameter's memory after its copy.

        Parameters on the meta device have no values. They are listed in ``missing`` until the block is filled.
        """
        self.missing = {name for name, parameter in self.parameters.items() if parameter.device.type == "meta"}
        if len(self.missing) == len(self.parameters):
            for name in self.parameters:
                self._detach(name)
            return
        with self.filling() as flat:
            for name, place in views(flat, self.layout).items():
                if name not in self.missing:
                    place.copy_(self.parameters[name])
                self._detach(name)
        _trim_heap()
        self._evict()

    def filling(self) -> AbstractContextManager[Tensor]:
        """Return a context that yields a flat tensor of zeros. On exit, its values become the block's contents."""
        return self.access.filling(self.key, self.layout, self.dtype)

    def filled(self) -> None:
        """Record that all parameters now have values. Evict the block from RAM unless RAM is its home."""
        self.missing.clear()
        self._evict()

    def _evict(self) -> None:
        if self.home != "ram":
            self.store.evict(self.key, "ram")

    def _detach(self, name: str) -> None:
        attach(self.parameters[name], self, self._device)

    # -- holding -----------------------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Whether the parameters are currently in memory."""
        return self._lease is not None

    @past_modes
    def hold(self, mode: Literal["r", "rw"] = "r", *, is_watched: bool = False) -> None:
        """Load the parameters into memory. They stay until ``release`` was called as often as ``hold``.

        Args:
            is_watched: Whether to detect changes that autograd does not see, such as changes through ``data`` or numpy.

        Raises:
            CapacityError: The compute tier is too small for the unit.
            WeightInUseError: Parameters are not loaded yet, or ``mode`` is "rw" while the block is held for reading.
        """
        if self._num_holders == 0:
            if self.updater is not None:
                self.updater.finish_update()
            self._lease = self._acquire(mode)
            self._num_references = references(self._lease.tensor)
            _HELD[_address(self._lease.tensor)] = self
            self._checksums.clear()
            for name, values in views(self._lease.tensor, self.layout).items():
                parameter = self.parameters[name]
                if is_watched and name not in self.missing:
                    self._checksums[name] = _checksum(values)
                make_present(parameter, values)
                self._versions[name], self._addresses[name] = parameter._version, parameter.data_ptr()
        elif mode == "rw" and self._lease is not None and self._lease.mode == "r":
            raise WeightInUseError(
                f"{self.layout.name} is in use by its forward. Change its weights before or after it"
            )
        self._num_holders += 1

    @past_modes
    def release(self, *, is_failing: bool = False) -> None:
        """Undo one ``hold`` call. The last ``release`` removes the parameters from memory again.

        Args:
            is_failing: Whether another error is already being raised, so that this method must not raise.

        Raises:
            WeightInUseError: Weights changed while they were held for reading, or a view of a copy still exists.
        """
        self._num_holders -= 1
        if self._num_holders:
            return
        lease, self._lease = self._lease, None
        assert lease is not None, self.key
        _HELD.pop(_address(lease.tensor), None)
        changed = self._changes(lease)
        for parameter in self.parameters.values():
            make_absent(parameter, self._device)
        is_copy = self.access.is_copy(self.home)
        is_shared = references(lease.tensor) > self._num_references and is_copy
        mode = lease.mode
        if mode == "w" and not changed:
            lease.abandon()
        else:
            lease.release()
        if changed and mode == "r" and is_copy:
            self.access.drop(self.key)  # a read-only lease does not write changes back
        elif changed:
            self.changed(changed)
        if changed and mode == "r" and not is_failing:
            raise WeightInUseError(
                f"{sorted(changed)[0]} was changed while it was held for reading, so the change would be lost. "
                "Use `with megatrain.gathered(module, writable=True):`"
            )
        if is_shared and not is_failing:
            raise WeightInUseError(
                f"a view of the weights of {self.layout.name} still exists after its forward, but other weights will "
                "overwrite its memory. Use a clone, or leave the module out: megatrain.offload(..., leave=[...])"
            )

    def _changes(self, lease: WeightLease) -> frozenset[str]:
        """Return the names of the parameters that changed while the block was held."""
        changed = set()
        with torch.no_grad():
            for name, place in views(lease.tensor, self.layout).items():
                parameter = self.parameters[name]
                if place.numel() and parameter.data_ptr() != self._addresses[name]:  # ``data`` was replaced
                    changed.add(name)
                    if lease.mode != "r":
                        place.copy_(parameter)
                elif parameter._version != self._versions[name] or (
                    name in self._checksums and (name in self.missing or _checksum(place) != self._checksums[name])
                ):
                    changed.add(name)
        return frozenset(changed)

    def check_frozen(self) -> None:
        """Raise an error if a trained parameter has no gradient block because it was offloaded as frozen.

        Raises:
            WeightInUseError: A parameter requires a gradient now, but was frozen when it was offloaded.
        """
        if self.gradients is None:
            for name, parameter in self.parameters.items():
                if parameter.requires_grad:
                    raise WeightInUseError(
                        f"{name} was frozen when it was offloaded, so the store has no space for its gradient. Set "
                        "requires_grad before megatrain.offload, and freeze parameters afterwards"
                    )

    def note_data_taken(self, parameter: nn.Parameter) -> None:
        """Watch a held parameter for changes, because its ``data`` was accessed."""
        name = self.name_of(parameter)
        if self._lease is not None and name not in self._checksums:
            self._checksums[name] = _checksum(views(self._lease.tensor, self.layout)[name])

    def prepare_update(self) -> None:
        """Release the backward's remaining leases before an optimizer changes the weights.

        Raises:
            WeightInUseError: The weights are held, or a graph still uses them.
        """
        if self._lease is not None and self.owner is not None:
            self.owner.recover()
        if self._lease is not None:
            raise WeightInUseError(
                f"the weights of {self.layout.name} are in use and cannot be updated. Step outside of "
                "megatrain.gathered and of the module's forward"
            )
        if self.owner is not None:
            self.owner.window.close(self)

    def is_unchanged(self, parameter: nn.Parameter) -> None:
        """Record that a held parameter was overwritten with the values that it already had."""
        self._versions[self.name_of(parameter)] = parameter._version

    def changed(self, names: frozenset[str]) -> None:
        """Record that code other than the optimizer changed these parameters."""
        self.version += 1
        self.missing -= set(names)
        shared_state(self.store).num_changes += 1
        if self.updater is not None:
            self.updater.weights_changed(names)

    def lease(self) -> WeightLease:
        """Return a lease for the backward. The caller must release it. The parameters are not loaded."""
        return self._acquire("r")

    def provide(self) -> bool:
        """Hold the block for code that reads weights outside of their module. Return False if that is impossible."""
        return self.owner is not None and self.owner.provide(self)

    @property
    def held(self) -> Tensor | None:
        """Flat weights while the block is held, otherwise None."""
        return None if self._lease is None else self._lease.tensor

    def _acquire(self, mode: Literal["r", "rw"]) -> WeightLease:
        if self.missing and mode == "r":
            raise WeightInUseError(
                f"{sorted(self.missing)[0]} has no values yet, because the model was created on the meta device. "
                "Use megatrain.load_pretrained(folder, store), or model.load_state_dict(...)"
            )
        how: Mode = "w" if len(self.missing) == len(self.parameters) else mode
        return self.access.lease(self.key, self.layout, self.dtype, how)


def block_of(parameter: Tensor) -> WeightBlock | None:
    """Return the block that stores a parameter, or None if the parameter is not in a store."""
    return cast("WeightBlock | None", holder_of(parameter))


def release_all(blocks: Iterable[WeightBlock], *, is_failing: bool) -> None:
    """Release every block, even if one of the releases raises an error."""
    with ExitStack() as stack:
        for block in blocks:
            stack.callback(block.release, is_failing=is_failing)


def block_under(tensor: Tensor) -> WeightBlock | None:
    """Return the held block whose memory ``tensor`` views, or None."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    block = _HELD.get(_address(tensor))
    return block if block is not None and tensor.dtype == block.dtype else None


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def references(tensor: Tensor) -> int:
    """Return the number of tensors that share the memory of ``tensor``."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def _trim_heap() -> None:
    """Return freed memory to the system, because the C library keeps freed parameters of a few MB in its heap."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has this function
    if trim is not None:
        trim(0)


def _checksum(values: Tensor) -> str:
    flat = values.detach().reshape(-1)
    return checksum(flat.view(torch.uint8).cpu().numpy()) if flat.numel() else ""


@dataclass(frozen=True, slots=True)
class _SavedWeight(SavedTensor):
    """Saved view of a weight block, without its memory. ``version`` is the block's version when the view was saved."""

    window: BackwardWindow
    block: WeightBlock
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def unpack(self) -> Tensor:
        if self.block.version != self.version:
            raise RuntimeError(
                f"the weights of {self.block.layout.name}, needed for gradient computation, have been changed by an "
                "optimizer's step or by other code since the forward. Run the forward again"
            )
        weights = self.window.weights(self.block)
        return weights.as_strided(self.size, self.stride, weights.storage_offset() + self.offset)


class BackwardWindow:
    """Leases of the backward. A unit's weights stay leased until the backward needs another unit's weights.

    A graph node drops its weights after it ran. The number of tensors that share the memory shows whether a node still
    uses the weights, so a lease in use never ends. Used by the thread that runs autograd.
    """

    def __init__(self, order: UseOrder) -> None:
        self._order = order
        self._open: OrderedDict[WeightBlock, tuple[WeightLease, int]] = OrderedDict()

    def weights(self, block: WeightBlock) -> Tensor:
        """Return a block's flat weights, which stay valid while a view of them exists."""
        if block.held is not None:
            return block.held
        if block not in self._open:
            self.close_unused()
            if not self._open:
                self._close_after_backward()
            self._order.note(("backward", block.key), [(block.key, block.tier)])
            lease = block.lease()
            self._open[block] = (lease, references(lease.tensor))
        return self._open[block][0].tensor

    def close_unused(self) -> None:
        """Release the leases whose weights have no remaining views."""
        for block, (lease, num_references) in list(self._open.items()):
            if references(lease.tensor) <= num_references:
                del self._open[block]
                lease.release()

    def close(self, block: WeightBlock) -> None:
        """Release a block's lease before the block changes.

        Raises:
            WeightInUseError: A graph still uses the weights.
        """
        if block not in self._open:
            return
        lease, num_references = self._open[block]
        if references(lease.tensor) > num_references:
            raise WeightInUseError(
                f"a retained graph (create_graph=True) still uses the weights of {block.layout.name}. Delete its "
                "results before the weights are updated"
            )
        del self._open[block]
        lease.release()

    def _close_after_backward(self) -> None:
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self.close_unused)
        except RuntimeError:
            return  # no backward is running, so the next use releases the lease


def weight_hooks(window: BackwardWindow) -> torch.autograd.graph.saved_tensors_hooks:
    """Return saved-tensor hooks for a forward of a unit or module. They save weights as block references.

    All other tensors are passed to the outer hooks, such as hooks of ``offload_activations``,
    ``torch.utils.checkpoint`` or the user.
    """
    outer = outer_hooks()

    def pack(tensor: Tensor) -> SavedTensor:
        block = block_under(tensor)
        if block is not None and block.held is not None:
            offset = int(tensor.storage_offset()) - int(block.held.storage_offset())
            return _SavedWeight(window, block, block.version, tensor.size(), tensor.stride(), offset)
        return KeptInMemory(tensor) if outer is None else OuterSavedTensor(outer, tensor)

    return saving(pack)
