"""Parameters of a module as blocks of a store: their weights, their gradients, and their tensors saved by autograd.

The engine binds leased weights to a module for one visit, because it runs each unit's forward itself
(``megatrain.engine.bound_unit.BoundUnit``). Here the user's code runs, and the user's optimizer has the parameters. So
the parameters stay the same objects, absent or present, and the graph refers to saved weights by block.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megatrain.base.layout import views
from megatrain.embed.modes import past_modes
from megatrain.embed.stores import compute_device, compute_tier, shared_state
from megatrain.engine.absent_weights import METADATA_QUERIES, placeholder
from megatrain.engine.weight_gradients import GradientAccumulator
from megatrain.optim.clip import squared_norm
from tiered import checksum

if TYPE_CHECKING:
    from megatrain.base.layout import TensorEntry, UnitLayout
    from megatrain.optim.threads import KernelThreads
    from tiered import Mode, TieredStore


class WeightInUseError(RuntimeError):
    """Code outside of a module keeps, or changed, the module's weights in a way that the store cannot handle."""


_GRADIENT_REMEDY = (
    "the gradient of {} left for the tiered store when autograd had computed it. TieredAdamW etc. use it from "
    "there: clip with max_grad_norm=..., read opt.grad_norm, clear with zero_grad() or grad = None; a hook "
    "(register_post_accumulate_grad_hook) sees it before it leaves"
)


class AbsentWeightError(RuntimeError):
    """Values of an offloaded module were read while they are in the store.

    Args:
        what: name of the parameter or module.
    """

    def __init__(self, what: str, operation: str, *, is_gradient: bool = False) -> None:
        if is_gradient:
            super().__init__(f"{operation}: {_GRADIENT_REMEDY.format(what)}")
            return
        super().__init__(
            f"{operation}: the numbers of {what} are in the tiered store. They are in memory during the forward and "
            "backward of its module; elsewhere use `with megatrain.gathered(module):` to read or change them, or "
            "megatrain.named_tensors(model) to send them elsewhere"
        )


#: torch's properties, independent of overrides in a parameter's class.
_DATA: Any = Tensor.data
_GRADIENT: Any = Tensor.grad
_BLOCK = "_megatrain_block"
_CLASS = "_megatrain_class"
_ANSWERED = METADATA_QUERIES | {"requires_grad_", "register_hook", "register_post_accumulate_grad_hook"}
#: Properties that return the values. Like ``detach`` they return a placeholder, which refuses computation.
_CONTENTS = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})


class _OffloadedParameter(nn.Parameter):
    """A parameter whose gradient moves to a store after all other hooks have run."""

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Register a hook that sees, and may change, each gradient before it moves to the store."""
        with torch._C.DisableTorchFunctionSubclass():
            handle = super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        block = block_of(self)
        if block is not None and block.gradients is not None:
            block.gradients.move_hook_last(self)
        return handle


class PresentParameter(_OffloadedParameter):
    """Class of a parameter while it is present: an ``nn.Parameter`` that detects access to its ``data``.

    autograd does not count writes through ``data`` as changes, so they would be lost silently.
    """

    @property
    def data(self) -> Tensor:
        """The values."""
        block = block_of(self)
        if block is not None:
            block.note_data_taken(self)
        values: Tensor = _DATA.__get__(self)
        return values

    @data.setter
    def data(self, values: Tensor) -> None:
        _DATA.__set__(self, values)


class StoredParameter(_OffloadedParameter):
    """Class of a parameter while its values are in the store. An ``nn.Parameter`` changes to it and back.

    It has the right shape, dtype and device and takes the memory of one element. Reading it raises
    ``AbsentWeightError``, so that no wrong value is ever returned. ``grad`` is None, or a placeholder while the store
    holds a gradient; setting it to None discards the gradient.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer metadata queries."""
        return _answer(func, args, kwargs or {})

    @property
    def grad(self) -> Tensor | None:
        """A placeholder if the store holds a gradient of the parameter, else None; in its hooks the gradient."""
        block = block_of(self)
        assert block is not None
        arrived = gradient_of(self)
        if arrived is not None:
            return arrived
        if block.gradients is None or not block.gradients.has(self):
            return None
        return make_placeholder(self, block.name_of(self), is_gradient=True)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        block = block_of(self)
        assert block is not None
        if value is not None and gradient_of(self) is None:
            raise AbsentWeightError(block.name_of(self), "setting a gradient", is_gradient=True)
        set_gradient(self, value)
        if value is None and block.gradients is not None:
            block.gradients.forget(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        block = block_of(self)
        name = "parameter" if block is None else block.name_of(self)
        return f"<{name}: {tuple(self.shape)}, {self.dtype}, in the store>"


class Placeholder(Tensor):
    """Placeholder with the metadata of a tensor in the store; refuses everything else."""

    what: str
    is_gradient: bool

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer metadata queries."""
        return _answer(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "gradient of " if self.is_gradient else ""
        return f"<{kind}{self.what}: {tuple(self.shape)}, {self.dtype}, in the store>"


def block_of(parameter: Tensor) -> WeightBlock | None:
    """Return the block that holds a parameter, or None if it is not in a store."""
    return cast("WeightBlock | None", parameter.__dict__.get(_BLOCK))


def attach(parameter: nn.Parameter, block: WeightBlock, device: torch.device) -> None:
    """Make a parameter absent and assign it to its block; it computes on ``device``."""
    own_class = type(parameter)
    make_absent(parameter, device)
    parameter.__dict__[_BLOCK] = block
    parameter.__dict__[_CLASS] = PresentParameter if own_class is nn.Parameter else own_class


def make_absent(parameter: nn.Parameter, device: torch.device) -> None:
    """Remove a parameter's values; reading it then raises."""
    # Not inference memory: a parameter over such memory could not be trained any more.
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
        empty = placeholder(parameter.shape, parameter.dtype, device)
        if parameter.device.type == "meta":  # its memory cannot be set, only swapped with another tensor's
            swap_tensors: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors
            swap_tensors(parameter, nn.Parameter(empty, parameter.requires_grad))
        else:
            _DATA.__set__(parameter, empty)
    parameter.__class__ = StoredParameter


def make_present(parameter: nn.Parameter, values: Tensor) -> None:
    """Bind a parameter to its values: a view of a slot, with its shape and dtype."""
    with torch.inference_mode(False):
        parameter.__class__ = parameter.__dict__[_CLASS]
        _DATA.__set__(parameter, values)


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the accumulated gradient of a parameter, bypassing the property of its class."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: Tensor | None = _GRADIENT.__get__(parameter)
    return gradient


def set_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Replace the accumulated gradient of a parameter, bypassing the property of its class."""
    with torch._C.DisableTorchFunctionSubclass():
        _GRADIENT.__set__(parameter, gradient)


def make_placeholder(parameter: Tensor, what: str, *, is_gradient: bool = False) -> Placeholder:
    """Return a placeholder with the metadata of ``parameter`` that refuses everything else."""
    with torch._C.DisableTorchFunctionSubclass():
        empty = placeholder(parameter.shape, parameter.dtype, parameter.device)
        made = Tensor._make_subclass(Placeholder, empty)
    assert isinstance(made, Placeholder)
    made.what, made.is_gradient = what, is_gradient
    return made


def _answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of an absent tensor: for metadata, or after fetching the values if its module runs."""
    name = getattr(func, "__name__", str(func))
    property_name = getattr(getattr(func, "__self__", None), "__name__", "")
    is_property = name == "__get__" and property_name not in _CONTENTS
    if not is_property and (name, property_name) != ("__set__", "requires_grad") and name not in _ANSWERED:
        absent = _absent([*args, *kwargs.values()])
        if absent and all(map(_provide, absent)):
            return func(*args, **kwargs)
        if func is torch.autograd.grad:
            return func(*_by_node(args), **dict(zip(kwargs, _by_node(kwargs.values()), strict=True)))
        asked = absent[0] if absent else None
        if asked is not None and (name == "detach" or name == "__get__"):
            return make_placeholder(asked, _what(asked), is_gradient=_is_gradient(asked))
        what = "an offloaded module" if asked is None else _what(asked)
        operation = property_name if name in ("__get__", "__set__") else name
        raise AbsentWeightError(what, operation, is_gradient=_is_gradient(asked))
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _by_node(values: Iterable[Any]) -> list[Any]:
    """Replace absent parameters by their graph nodes, which need no values."""

    def named(value: Any) -> Any:
        if isinstance(value, StoredParameter):
            with torch._C.DisableTorchFunctionSubclass():
                return get_gradient_edge(value)
        return tuple(map(named, value)) if isinstance(value, list | tuple) else value

    return list(map(named, values))


def _absent(values: list[Any]) -> list[Tensor]:
    """Return the absent tensors among arguments, including lists of them."""
    flat = [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]
    return [one for one in flat if isinstance(one, StoredParameter | Placeholder)]


def _provide(parameter: Tensor) -> bool:
    """Fetch a parameter's values if possible; another parameter may have fetched them already."""
    if not isinstance(parameter, StoredParameter):
        return not isinstance(parameter, Placeholder)
    block = block_of(parameter)
    return block is not None and block.owner is not None and block.owner.provide(block)


def _is_gradient(asked: Tensor | None) -> bool:
    return isinstance(asked, Placeholder) and asked.is_gradient


def _what(asked: Tensor) -> str:
    if isinstance(asked, Placeholder):
        return asked.what
    block = block_of(asked)
    return "a parameter" if block is None else block.name_of(asked)


class WeightOwner(Protocol):
    """The module that owns a weight block. ``window``: leases of its backward, possibly of this block."""

    window: BackwardWindow

    def provide(self, block: WeightBlock) -> bool:
        """Hold a block for code that reads weights outside of their module; return whether that is possible."""

    def recover(self) -> None:
        """Release leases of forwards that ended without running their hooks."""


class WeightLease(Protocol):
    """A lease of a whole weight block, or a copy gathered from several ranks."""

    @property
    def tensor(self) -> Tensor:
        """Flat weights, one value per element of the layout."""

    @property
    def mode(self) -> str:
        """Mode of the lease: "r", "rw", or "w" for a block that has no values yet."""

    def release(self) -> None:
        """End the lease; changes are kept."""

    def abandon(self) -> None:
        """End a lease of mode "w"; changes are dropped."""


class ModuleBlocks(Protocol):
    """Access of a process to the weight blocks of one module, alone or together with other ranks.

    Attributes:
        tier: Tier in which this process's block is leased.
    """

    tier: str

    def num_elements(self, layout: UnitLayout) -> int:
        """Return the number of elements of a block that this process stores."""

    def lease(self, key: str, layout: UnitLayout, dtype: torch.dtype, mode: Mode) -> WeightLease:
        """Return a lease of all weights of a layout on the compute device."""

    def filling(self, key: str, layout: UnitLayout, dtype: torch.dtype) -> AbstractContextManager[Tensor]:
        """Return a context with zeros of a layout's length, which become the block."""

    def is_copy(self, home: str) -> bool:
        """Return whether a lease copies the block from another tier."""

    def drop(self, key: str) -> None:
        """Drop a leased copy that was changed without permission."""


class BlockUpdater(Protocol):
    """The optimizer's side of a weight block."""

    def finish_update(self) -> None:
        """Apply the due update, if any. Called before the weights are read or new gradients summed."""

    def weights_changed(self, names: frozenset[str]) -> None:
        """Handle a change of these parameters that was not an update."""


#: Address of leased memory -> the block whose weights it holds.
_HELD: dict[int, WeightBlock] = {}


class WeightBlock:
    """The parameters of one layout: one flat block, and, while it is held, one view of its slot per parameter.

    Held by the forward of every module that uses it, and leased by the backward. Used by one thread at a time.

    Args:
        key: key of its block, which is registered here.
        parameters: by their name in the layout.
        homes: allowed tiers, preferred first.
        access: Leases and fills the blocks of the module.

    Attributes:
        gradients: gradients of its parameters; None if they are frozen.
        missing: names of parameters without values: created on the meta device and not loaded yet.
        owner: the module; None until it is complete.
        updater: the optimizer's group; None without an optimizer.
        version: number of changes of the weights, including due updates.
    """

    def __init__(
        self,
        store: TieredStore,
        key: str,
        layout: UnitLayout,
        parameters: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        homes: Sequence[str],
        access: ModuleBlocks,
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
        self._checksums: dict[str, str] = {}  # of weights that may change without autograd's knowledge
        self.home = shared_state(store).register(key, access.num_elements(layout), dtype, homes, durable=True)
        self.missing = set(parameters)

    def name_of(self, parameter: Tensor) -> str:
        """Return the full name of a parameter of the block."""
        return self._names[id(parameter)]

    def take_over(self) -> None:
        """Move the parameters' values into the block, freeing each parameter's memory after its copy.

        Parameters on the meta device have no values, and are missing until the block is filled.
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
        """Return a context with zeros of the layout's length; values written there become the block."""
        return self.access.filling(self.key, self.layout, self.dtype)

    def filled(self) -> None:
        """Record that all parameters have values, and evict the block from RAM unless RAM is its home."""
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
        """Whether the parameters are present."""
        return self._lease is not None

    @past_modes
    def hold(self, mode: Literal["r", "rw"] = "r", *, is_watched: bool = False) -> None:
        """Make the parameters present until the same number of ``release`` calls.

        Args:
            is_watched: also detect changes without autograd's knowledge, through ``data`` or numpy.

        Raises:
            CapacityError: the compute tier is too small for the unit.
            WeightInUseError: not loaded yet, or requested for writing while held for reading.
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
            raise WeightInUseError(f"{self.layout.name} is read by its forward now; change its weights before or after")
        self._num_holders += 1

    @past_modes
    def release(self, *, is_failing: bool = False) -> None:
        """Undo one ``hold``; after the last one the parameters are absent again.

        Args:
            is_failing: another error is being raised, so report no further one.

        Raises:
            WeightInUseError: weights were changed during a hold for reading, or a view of a copy outlives the hold.
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
            self.access.drop(self.key)  # a lease for reading is not written back
        elif changed:
            self.changed(changed)
        if changed and mode == "r" and not is_failing:
            raise WeightInUseError(
                f"{sorted(changed)[0]} was changed while held for reading: the change would be lost. "
                "Use `with megatrain.gathered(module, writable=True):`"
            )
        if is_shared and not is_failing:
            raise WeightInUseError(
                f"something keeps a view of the weights of {self.layout.name} after its forward; other weights will "
                "overwrite it. Take a clone, or leave the module out: megatrain.offload(..., leave=[...])"
            )

    def _changes(self, lease: WeightLease) -> frozenset[str]:
        """Return the names of parameters that changed while the block was held."""
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
        """Raise for trained parameters that were frozen when they were offloaded, as they have no gradient block.

        Raises:
            WeightInUseError: there is such a parameter.
        """
        if self.gradients is None:
            for name, parameter in self.parameters.items():
                if parameter.requires_grad:
                    raise WeightInUseError(
                        f"{name} was frozen when it was offloaded, so the store has no room for its gradient: set "
                        "requires_grad before megatrain.offload, and freeze afterwards what is not to be trained yet"
                    )

    def note_data_taken(self, parameter: nn.Parameter) -> None:
        """Watch a held parameter whose ``data`` was accessed, because it may be written to."""
        name = self.name_of(parameter)
        if self._lease is not None and name not in self._checksums:
            self._checksums[name] = _checksum(views(self._lease.tensor, self.layout)[name])

    def prepare_update(self) -> None:
        """Release leases left over from a backward, before an optimizer changes the weights.

        Raises:
            WeightInUseError: the weights are held, or a graph still uses them.
        """
        if self._lease is not None and self.owner is not None:
            self.owner.recover()
        if self._lease is not None:
            raise WeightInUseError(
                f"the weights of {self.layout.name} are held now, and cannot be updated: step outside of "
                "megatrain.gathered and of the module's forward"
            )
        if self.owner is not None:
            self.owner.window.close(self)

    def is_unchanged(self, parameter: nn.Parameter) -> None:
        """Record that a held parameter was overwritten with its previous values."""
        self._versions[self.name_of(parameter)] = parameter._version

    def changed(self, names: frozenset[str]) -> None:
        """Record a change of these parameters that was not an update."""
        self.version += 1
        self.missing -= set(names)
        shared_state(self.store).num_changes += 1
        if self.updater is not None:
            self.updater.weights_changed(names)

    def lease(self) -> WeightLease:
        """Return a lease for the backward, which the caller releases; parameters stay absent."""
        return self._acquire("r")

    @property
    def held(self) -> Tensor | None:
        """The flat weights, while held."""
        return None if self._lease is None else self._lease.tensor

    def _acquire(self, mode: Literal["r", "rw"]) -> WeightLease:
        if self.missing and mode == "r":
            raise WeightInUseError(
                f"{sorted(self.missing)[0]} has no numbers yet: the model was made on the meta device. "
                "Use megatrain.load_pretrained(folder, store), or model.load_state_dict(...)"
            )
        how: Mode = "w" if len(self.missing) == len(self.parameters) else mode
        return self.access.lease(self.key, self.layout, self.dtype, how)


def release_all(blocks: Iterable[WeightBlock], *, is_failing: bool) -> None:
    """Release every block, even if a release raises."""
    with ExitStack() as stack:
        for block in blocks:
            stack.callback(block.release, is_failing=is_failing)


def block_under(tensor: Tensor) -> WeightBlock | None:
    """Return the held block that a tensor is a view of, or None."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    block = _HELD.get(_address(tensor))
    return block if block is not None and tensor.dtype == block.dtype else None


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def references(tensor: Tensor) -> int:
    """Return the number of tensors that share the memory of this one."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def _trim_heap() -> None:
    """Return the memory of freed parameters to the system, because the C library would keep blocks of a few MB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def mapped_copy(tensor: Tensor, folder: str | None = None) -> Tensor:
    """Return a CPU copy whose memory is an unlinked file, freed with the tensor.

    Args:
        folder: folder on the drive to use; None for the temporary folder.

    Raises:
        OSError: the drive has no space.
    """
    if not tensor.numel():
        return tensor.cpu().clone()
    descriptor, path = tempfile.mkstemp(prefix=".state-", dir=folder)
    try:
        os.posix_fallocate(descriptor, 0, tensor.numel() * tensor.element_size())  # or a full drive is a bus error
        copy = torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
    finally:
        os.close(descriptor)
        os.unlink(path)
    return copy.copy_(tensor)


def _checksum(values: Tensor) -> str:
    flat = values.detach().reshape(-1)
    return checksum(flat.view(torch.uint8).cpu().numpy()) if flat.numel() else ""


class GradientBlock:
    """The fp32 gradients of the parameters of one layout, summed over the backward passes of a step.

    The engine's ``GradientAccumulator`` adds them like autograd's ``.grad``: sums of fp32 gradients have the same bits.
    Unlike in the engine, gradients arrive one by one from autograd's hooks. Called by the threads that run autograd,
    one at a time.

    Args:
        key: key of its block, which is registered here.
        parameters: by their name in the layout.
        homes: allowed tiers, preferred first.

    Attributes:
        updater: applies the last step's update, which reads this block, before the first gradient of the next step.
        num_changes: number of gradients added or removed so far.
    """

    def __init__(
        self,
        store: TieredStore,
        key: str,
        layout: UnitLayout,
        parameters: Mapping[str, nn.Parameter],
        homes: Sequence[str],
    ) -> None:
        self.key, self.layout = key, layout
        self._store = store
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._entries = {entry.name: entry for entry in layout.entries}
        self._ordinary = {name: p for name, p in parameters.items() if block_of(p) is None}
        self._filled: set[str] = set()
        self.num_changes = 0
        self.updater: BlockUpdater | None = None
        self._tier = compute_tier(store)
        self._register(homes)
        self._hooks: list[Any] = []
        self._nodes: list[Any] = []  # kept alive, because their hooks end with them
        for parameter in parameters.values():
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._take))  # type: ignore[no-untyped-call]
        for parameter in self._ordinary.values():
            node: Any = get_gradient_edge(parameter).node
            self._hooks.append(node.register_prehook(partial(self._drop_placeholder, parameter)))
            self._nodes.append(node)

    def _register(self, homes: Sequence[str]) -> None:
        shared_state(self._store).register(self.key, self.layout.num_elements, torch.float32, homes, durable=False)

    def close(self) -> None:
        """Stop taking gradients, and unregister the block."""
        for hook in self._hooks:
            hook.remove()
        shared_state(self._store).unregister(self.key)

    def move_hook_last(self, parameter: Tensor) -> None:
        """Run this block's hook after all others of a parameter; called when a hook was added."""
        hooks = parameter._post_accumulate_grad_hooks
        for key in [key for key, hook in hooks.items() if hook == self._take]:
            hooks[key] = hooks.pop(key)  # autograd runs hooks in insertion order

    @property
    def filled(self) -> frozenset[str]:
        """Names of the parameters that have a gradient."""
        return frozenset(self._filled)

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter has a gradient."""
        return self._names.get(id(parameter)) in self._filled

    def forget(self, parameter: nn.Parameter) -> None:
        """Drop the gradient of one parameter; the next one starts a new sum."""
        self._filled.discard(self._names[id(parameter)])
        self.num_changes += 1

    def consume(self) -> frozenset[str]:
        """Hand the sums over to an update and return their names; the next gradient starts a new sum.

        Raises:
            RuntimeError: a parameter has another gradient than those that moved to the store.
        """
        for name, parameter in self._ordinary.items():
            gradient = gradient_of(parameter)
            if gradient is not None and not isinstance(gradient, Placeholder):
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} ({name}) has a gradient that autograd did not make "
                    "in this process alone: set by hand, or by DistributedDataParallel. With offload_gradients=True "
                    "nothing else may set gradients"
                )
        self._drop_cleared()
        filled = frozenset(self._filled)
        self.clear()
        return filled

    def clear(self) -> None:
        """Drop all gradients."""
        self._filled.clear()
        self.num_changes += 1
        for parameter in self._ordinary.values():
            set_gradient(parameter, None)

    def _drop_cleared(self) -> None:
        """Drop gradients whose placeholder is gone: the module's ``zero_grad`` removed it."""
        for name, parameter in self._ordinary.items():
            if gradient_of(parameter) is None:
                self._filled.discard(name)

    def view(self, flat: Tensor, entry: TensorEntry) -> Tensor:
        """Return one parameter's flat part of the block's contents."""
        return flat.narrow(0, entry.offset, entry.numel)

    def squared_norms(self, threads: KernelThreads) -> dict[str, float]:
        """Return the sum of squares of each gradient, by name."""
        self._drop_cleared()
        if not self._filled:
            return {}
        with self._store.acquire(self.key, "ram") as lease:
            return {
                entry.name: squared_norm(self.view(lease.tensor, entry), threads)
                for entry in self.layout.entries
                if entry.name in self._filled
            }

    def _take(self, parameter: Tensor) -> None:
        """Move a gradient from its parameter into the block: autograd's hook after adding to ``.grad``."""
        gradient = gradient_of(parameter)
        if gradient is None or isinstance(gradient, Placeholder):
            return
        set_gradient(parameter, None)
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if not self._filled and self.updater is not None:
            self.updater.finish_update()  # reads the sums that this gradient replaces
        name = self._names[id(parameter)]
        self._add(self._entries[name], gradient)
        self.num_changes += 1
        if name in self._ordinary:  # clipping or reading it must raise, instead of finding no gradient
            set_gradient(parameter, make_placeholder(parameter, name, is_gradient=True))

    def _add(self, entry: TensorEntry, gradient: Tensor) -> None:
        with torch.no_grad(), self._store.acquire(self.key, self._tier, "rw" if self._filled else "w") as lease:
            sums = {entry.name: self.view(lease.tensor, entry).view(entry.shape)}
            GradientAccumulator(sums, self._filled).add(entry.name, gradient)

    def _drop_placeholder(self, parameter: Tensor, arriving: Any) -> None:
        """Remove the placeholder of an earlier gradient before autograd adds the next one to it."""
        if isinstance(gradient_of(parameter), Placeholder):
            set_gradient(parameter, None)
        else:
            self._filled.discard(self._names[id(parameter)])  # cleared by zero_grad, or replaced


class SavedTensor(ABC):
    """Placeholder in the graph for a tensor that autograd saved."""

    __slots__ = ()

    @abstractmethod
    def unpack(self) -> Tensor:
        """Return the tensor with its saved values."""


def unpack(saved: SavedTensor) -> Tensor:
    """Return a saved tensor; the second of a pair of hooks."""
    return saved.unpack()


OuterHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def outer_hooks() -> OuterHooks | None:
    """Return the currently installed saved-tensor hooks. autograd calls only the innermost pair."""
    hooks: OuterHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


class Delegated(SavedTensor):
    """A saved tensor that the next outer hooks took over."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, hooks: OuterHooks, tensor: Tensor) -> None:
        self._packed, self._unpack = hooks[0](tensor), hooks[1]

    def unpack(self) -> Tensor:
        return self._unpack(self._packed)


class Versioned(SavedTensor):
    """A tensor whose version is checked here, because autograd does not check tensors that a hook took.

    Args:
        probe: tensor with the version counter of ``tensor``.
    """

    __slots__ = ("_probe", "_version")
    saved_inside = "the forward of an offloaded module"

    def __init__(self, tensor: Tensor, probe: Tensor) -> None:
        self._probe = probe
        self._version = None if tensor.is_inference() else tensor._version

    def check_version(self) -> None:
        """Raise ``RuntimeError`` if the tensor was modified in place since it was saved."""
        if self._version is not None and self._probe._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self._describe()} is at version {self._probe._version}; expected version {self._version} instead. "
                f"It was saved inside {self.saved_inside}; torch.autograd.set_detect_anomaly(True) shows by what"
            )

    def _describe(self) -> str:
        return f"[{self._probe.type()} {list(self._probe.shape)}]"


class KeptInMemory(Versioned):
    """A tensor that stays in memory. Detached, because a saved output must not hold the node that holds it."""

    __slots__ = ()

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor, tensor.detach())

    def unpack(self) -> Tensor:
        self.check_version()
        return self._probe


@dataclass(frozen=True, slots=True)
class _SavedWeight(SavedTensor):
    """A view of a weight block, without its memory. ``version`` is the block's version when it was saved."""

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
                "optimizer's step or otherwise since the forward: run the forward again"
            )
        weights = self.window.weights(self.block)
        return weights.as_strided(self.size, self.stride, weights.storage_offset() + self.offset)


_EVENTS_AHEAD = 3


class UseOrder:
    """Learned access order: an event (a unit's forward, backward or update) is expected to have the same successor.

    The engine compiles its order into a tape. A host trainer may add micro-batches, evaluate in between or skip
    modules. A wrong guess costs a fetch, never an error. Used by one thread at a time.
    """

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._next: dict[Hashable, Hashable] = {}
        self._requests: dict[Hashable, tuple[tuple[str, str], ...]] = {}
        self._last: Hashable = None

    def note(self, event: Hashable, requests: Sequence[tuple[str, str]]) -> None:
        """Record an event and the ``(key, tier)`` pairs that it uses; prefetch for the next expected events."""
        self._requests[event] = tuple(requests)
        if self._last is not None:
            self._next[self._last] = event
        self._last = event
        for _ in range(_EVENTS_AHEAD):
            following = self._next.get(event)
            if following is None or following == self._last:
                return
            event = following
            for key, tier in self._requests[event]:
                if self._store.prefetch(key, tier).skipped:
                    return


class BackwardWindow:
    """Leases of the backward: a unit's weights stay while its nodes run, until another unit's are needed.

    A node drops its weights after it has run. The number of tensors over their memory shows this, so a lease never ends
    under a node that still computes. Used by the thread that runs autograd.
    """

    def __init__(self, order: UseOrder) -> None:
        self._order = order
        self._open: OrderedDict[WeightBlock, tuple[WeightLease, int]] = OrderedDict()

    def weights(self, block: WeightBlock) -> Tensor:
        """Return the flat weights of a block, valid as long as a view of them exists."""
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
        """Release the leases of weights that no tensor views any more."""
        for block, (lease, num_references) in list(self._open.items()):
            if references(lease.tensor) <= num_references:
                del self._open[block]
                lease.release()

    def close(self, block: WeightBlock) -> None:
        """Release the lease of one block, before it changes.

        Raises:
            WeightInUseError: a graph still uses its weights.
        """
        if block not in self._open:
            return
        lease, num_references = self._open[block]
        if references(lease.tensor) > num_references:
            raise WeightInUseError(
                f"a retained graph (create_graph=True) still uses the weights of {block.layout.name}: drop what "
                "was computed with it before they are updated"
            )
        del self._open[block]
        lease.release()

    def _close_after_backward(self) -> None:
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self.close_unused)
        except RuntimeError:
            return  # a saved tensor is read outside of a backward: the next use closes the lease


def weight_hooks(window: BackwardWindow) -> torch.autograd.graph.saved_tensors_hooks:
    """Return saved-tensor hooks for one forward of a unit or of a whole offloaded module: weights are saved by block.

    All other tensors go to the outer hooks: of ``offload_activations``, of ``torch.utils.checkpoint``, or of the
    user.
    """
    outer = outer_hooks()

    def pack(tensor: Tensor) -> SavedTensor:
        block = block_under(tensor)
        if block is not None and block.held is not None:
            offset = int(tensor.storage_offset()) - int(block.held.storage_offset())
            return _SavedWeight(window, block, block.version, tensor.size(), tensor.stride(), offset)
        return KeptInMemory(tensor) if outer is None else Delegated(outer, tensor)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
