"""Parameters of a module as blocks of a store: weights, gradients, and what autograd saves of them."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megatrain.embed.stores import compute_device, compute_tier, ledger_of
from megatrain.models.layout import views
from megatrain.optim.clip import squared_norm
from tiered import checksum

if TYPE_CHECKING:
    from megatrain.models.layout import TensorEntry, UnitLayout
    from megatrain.optim.threads import KernelThreads
    from tiered import Lease, TieredStore

__all__ = [
    "AbsentWeightError",
    "BackwardWindow",
    "GradientBlock",
    "PresentParameter",
    "StandIn",
    "StoredParameter",
    "UseOrder",
    "WeightBlock",
    "WeightHooks",
    "WeightInUseError",
    "attach",
    "block_of",
    "block_under",
    "gradient_of",
    "let_go",
    "make_absent",
    "make_present",
    "references",
    "set_gradient",
    "stand_in",
]

_EVENTS_AHEAD = 3


class UseOrder:
    """The order of events (a unit's forward, its backward, its update), as it was the last time.

    A host trainer may add micro-batches, evaluate in between or leave modules out: what follows an event is what
    followed it last. A wrong guess costs a fetch; it is never an error. Used by one thread at a time.
    """

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._next: dict[Hashable, Hashable] = {}
        self._requests: dict[Hashable, tuple[tuple[str, str], ...]] = {}
        self._last: Hashable = None

    def note(self, event: Hashable, requests: Sequence[tuple[str, str]]) -> None:
        """Note that an event takes place now, which uses ``(key, tier)``, and fetch for those that should follow."""
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


_HELD: dict[int, WeightBlock] = {}
"""Address of the memory that holds numbers now -> the block whose they are."""


class WeightInUseError(RuntimeError):
    """Code outside of a module keeps, or changed, the module's weights in a way that the store cannot follow."""


class WeightBlock:
    """The parameters of one layout: one flat block, and one view of a slot per parameter while it is held.

    Held by the forward of every module that uses it, and borrowed by the backward. One thread at a time.

    Args:
        key: of its block, which is registered here.
        parameters: by the name that the layout has for them.
        homes: tiers that it may live in, most wanted first.

    Attributes:
        gradients: of its parameters; None where they are frozen.
        missing: names of those that have no numbers yet.
        before_use: called before anybody reads or changes the weights: an update that is due is made then.
        provide: called when code wants numbers that nobody holds; returns whether it held them.
        after_change: called with the names of parameters that somebody other than the optimizer changed.
        recover: called when they are held and should not be: whoever died without letting go does so then.
        window: leases of the backward, among them perhaps one of this block.
        version: changes of the numbers so far, those that are due included.
    """

    def __init__(
        self,
        store: TieredStore,
        key: str,
        layout: UnitLayout,
        parameters: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        homes: Sequence[str],
    ) -> None:
        self.store, self.key, self.layout, self.dtype = store, key, layout, dtype
        self.parameters = dict(parameters)
        self.gradients: GradientBlock | None = None
        self.before_use: Callable[[], None] | None = None
        self.provide: Callable[[WeightBlock], bool] | None = None
        self.after_change: Callable[[frozenset[str]], None] | None = None
        self.recover: Callable[[], None] | None = None
        self.window: BackwardWindow | None = None
        self.version = 0
        self.tier, self._device = compute_tier(store), compute_device(store)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._lease: Lease | None = None
        self._num_holders = 0
        self._num_references = 0
        self._versions: dict[str, int] = {}
        self._addresses: dict[str, int] = {}
        self._checksums: dict[str, str] = {}  # of numbers that somebody may change without autograd's notice
        self.home = ledger_of(store).register(store, key, layout.num_elements, dtype, homes, durable=True)
        self.missing = set(parameters)

    def name_of(self, parameter: Tensor) -> str:
        """Return the full name of a parameter of the block."""
        return self._names[id(parameter)]

    def take_over(self) -> None:
        """Move the parameters' numbers into the block; each parameter's own memory is free as soon as it was copied.

        Parameters on the meta device have none: they are missing until somebody fills them.
        """
        self.missing = {name for name, parameter in self.parameters.items() if parameter.device.type == "meta"}
        if len(self.missing) == len(self.parameters):
            for name in self.parameters:
                self._detach(name)
            return
        with torch.no_grad(), self.store.acquire(self.key, "ram", "w") as lease:
            lease.tensor.zero_()
            for name, place in views(lease.tensor, self.layout).items():
                if name not in self.missing:
                    place.copy_(self.parameters[name])
                self._detach(name)
        _return_memory()
        self._go_home()

    def filled(self) -> None:
        """Note that the block has the numbers of all its parameters, and let it go home from RAM."""
        self.missing.clear()
        self._go_home()

    def _go_home(self) -> None:
        if self.home != "ram":
            self.store.evict(self.key, "ram")

    def _detach(self, name: str) -> None:
        attach(self.parameters[name], self, self._device)

    # -- holding -----------------------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Return whether the parameters have their numbers now."""
        return self._lease is not None

    def hold(self, mode: Literal["r", "rw"] = "r", *, is_watched: bool = False) -> None:
        """Give the parameters their numbers, until as many ``let_go`` have followed.

        Args:
            is_watched: changes that autograd does not see, through ``data`` or numpy, count too.

        Raises:
            CapacityError: the compute tier is too small for the unit.
            WeightInUseError: nothing was loaded yet, or held for reading and now wanted for writing.
        """
        if self._num_holders == 0:
            if self.before_use is not None:
                self.before_use()
            self._lease = self._acquire(mode)
            self._num_references = references(self._lease.tensor)
            _HELD[_address(self._lease.tensor)] = self
            self._checksums.clear()
            for name, numbers in views(self._lease.tensor, self.layout).items():
                parameter = self.parameters[name]
                if is_watched and name not in self.missing:
                    self._checksums[name] = _checksum(numbers)
                make_present(parameter, numbers)
                self._versions[name], self._addresses[name] = parameter._version, parameter.data_ptr()
        elif mode == "rw" and self._lease is not None and self._lease.mode == "r":
            raise WeightInUseError(f"{self.layout.name} is read by its forward now; change its weights before or after")
        self._num_holders += 1

    def let_go(self, *, is_failing: bool = False) -> None:
        """Reverse one ``hold``; after the last one the parameters are absent again.

        Args:
            is_failing: because of an error, which is the one to tell: this says nothing more.

        Raises:
            WeightInUseError: weights were changed under a hold for reading, or a view of a copy outlives the hold.
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
        is_shared = references(lease.tensor) > self._num_references and self.tier != self.home
        mode = lease.mode
        if mode == "w" and not changed:
            lease.abandon()
        else:
            lease.release()
        if changed and mode == "r" and self.tier != self.home:
            self.store.evict(self.key, self.tier)  # a copy with numbers that its home has not
        elif changed:
            self.changed(changed)
        if changed and mode == "r" and not is_failing:
            raise WeightInUseError(
                f"{sorted(changed)[0]} was changed while held for reading: the change would be lost. "
                "Use `with megatrain.gathered(module, writable=True):`"
            )
        if is_shared and not is_failing:
            raise WeightInUseError(
                f"something keeps a view of the weights of {self.layout.name} after its forward; the room is used for "
                "other weights next. Take a clone, or leave the module out: megatrain.offload(..., leave=[...])"
            )

    def _changes(self, lease: Lease) -> frozenset[str]:
        """Return the names of what was changed while it was held, however that was done."""
        changed = set()
        with torch.no_grad():
            for name, place in views(lease.tensor, self.layout).items():
                parameter = self.parameters[name]
                if place.numel() and parameter.data_ptr() != self._addresses[name]:  # its data was replaced
                    changed.add(name)
                    if lease.mode != "r":
                        place.copy_(parameter)
                elif parameter._version != self._versions[name] or (
                    name in self._checksums and (name in self.missing or _checksum(place) != self._checksums[name])
                ):
                    changed.add(name)
        return frozenset(changed)

    def check_frozen(self) -> None:
        """Refuse parameters that were frozen when they were tiered and are to be trained now: nobody would.

        Raises:
            WeightInUseError: there is one.
        """
        if self.gradients is None:
            for name, parameter in self.parameters.items():
                if parameter.requires_grad:
                    raise WeightInUseError(
                        f"{name} was frozen when it was offloaded, so the store has no room for its gradient: set "
                        "requires_grad before megatrain.offload, and freeze afterwards what is not to be trained yet"
                    )

    def note_data_taken(self, parameter: nn.Parameter) -> None:
        """Note that somebody takes ``data`` of a held parameter, and may write there."""
        name = self.name_of(parameter)
        if self._lease is not None and name not in self._checksums:
            self._checksums[name] = _checksum(views(self._lease.tensor, self.layout)[name])

    def prepare_update(self) -> None:
        """Let go of what is left of a backward, before an optimizer changes the numbers.

        Raises:
            WeightInUseError: somebody holds them now, or a graph still looks at them.
        """
        if self._lease is not None and self.recover is not None:
            self.recover()
        if self._lease is not None:
            raise WeightInUseError(
                f"the weights of {self.layout.name} are held now, and cannot be updated: step outside of "
                "megatrain.gathered and of the module's forward"
            )
        if self.window is not None:
            self.window.close(self)

    def is_unchanged(self, parameter: nn.Parameter) -> None:
        """Note that what was written to a held parameter is what it had."""
        self._versions[self.name_of(parameter)] = parameter._version

    def changed(self, names: frozenset[str]) -> None:
        """Note that somebody other than the optimizer changed these parameters."""
        self.version += 1
        self.missing -= set(names)
        ledger_of(self.store).num_changes += 1
        if self.after_change is not None:
            self.after_change(names)

    def borrow(self) -> Lease:
        """Return a lease for the backward, which the caller gives back; parameters stay absent."""
        return self._acquire("r")

    @property
    def held(self) -> Tensor | None:
        """The flat numbers, while held."""
        return None if self._lease is None else self._lease.tensor

    def _acquire(self, mode: Literal["r", "rw"]) -> Lease:
        if self.missing and mode == "r":
            raise WeightInUseError(
                f"{sorted(self.missing)[0]} has no numbers yet: the model was made on the meta device. "
                "Use megatrain.load_pretrained(folder, store), or model.load_state_dict(...)"
            )
        return self.store.acquire(self.key, self.tier, "w" if len(self.missing) == len(self.parameters) else mode)


def block_under(tensor: Tensor) -> WeightBlock | None:
    """Return the block that a tensor is a view of while the block is held; None for all other tensors."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    block = _HELD.get(_address(tensor))
    return block if block is not None and tensor.dtype == block.dtype else None


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def references(tensor: Tensor) -> int:
    """Return how many tensors share the memory of this one."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def _return_memory() -> None:
    """Let the C library give the system back what parameters have left free: it keeps blocks of some MB otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def _checksum(numbers: Tensor) -> str:
    flat = numbers.detach().reshape(-1)
    return checksum(flat.view(torch.uint8).cpu().numpy()) if flat.numel() else ""


def let_go(blocks: Iterable[WeightBlock], *, is_failing: bool) -> None:
    """Let go of blocks, of all of them whatever one of them says."""
    with ExitStack() as stack:
        for block in blocks:
            stack.callback(block.let_go, is_failing=is_failing)


#: What torch itself gives and takes, whatever a parameter's class says.
_DATA: Any = Tensor.data
_GRADIENT: Any = Tensor.grad
_BLOCK = "_megatrain_block"
_CLASS = "_megatrain_class"
#: What may be asked of a parameter that is not here: nothing that needs its numbers.
_QUESTIONS = frozenset(
    {
        "size",
        "dim",
        "numel",
        "nelement",
        "stride",
        "ndimension",
        "element_size",
        "get_device",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "is_sparse",
        "__len__",
        "__hash__",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
    }
)
_GRADIENT_REMEDY = (
    "the gradient of {} left for the tiered store when autograd had made it. TieredAdamW and its like use it from "
    "there: clip with max_grad_norm=..., read opt.grad_norm, clear with zero_grad() or grad = None; a hook "
    "(register_post_accumulate_grad_hook) sees it before it leaves"
)
#: Properties that hand out the numbers: like ``detach`` they give a stand-in, which refuses to be computed with.
_CONTENTS = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})


class AbsentWeightError(RuntimeError):
    """Numbers of an offloaded module were asked for while they are in the store.

    Args:
        what: they are numbers of.
        operation: that needs them.
        is_gradient: of the gradient of it.
    """

    def __init__(self, what: str, operation: str, *, is_gradient: bool = False) -> None:
        if is_gradient:
            super().__init__(f"{operation}: {_GRADIENT_REMEDY.format(what)}")
            return
        super().__init__(
            f"{operation}: the numbers of {what} are in the tiered store. They are there during the forward and "
            "backward of its module; elsewhere use `with megatrain.gathered(module):` to read or change them"
        )


class StandIn(Tensor):
    """Answers for shape, dtype and device of what is in the store; refuses everything else."""

    what: str
    is_gradient: bool

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let questions pass."""
        return _ask(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "gradient of " if self.is_gradient else ""
        return f"<{kind}{self.what}: {tuple(self.shape)}, {self.dtype}, in the store>"


class _TieredParameter(nn.Parameter):
    """A parameter whose gradient leaves for a store after all other hooks have seen it."""

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Let a hook see, and change, each gradient before it leaves."""
        with torch._C.DisableTorchFunctionSubclass():
            handle = super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        block = block_of(self)
        if block is not None and block.gradients is not None:
            block.gradients.come_last(self)
        return handle


class PresentParameter(_TieredParameter):
    """What a parameter is while its numbers are here: an ``nn.Parameter`` that notes who takes ``data``.

    Writes through ``data`` do not count as changes for autograd, so they would be lost without a word.
    """

    @property
    def data(self) -> Tensor:
        """The numbers, for anything."""
        block = block_of(self)
        if block is not None:
            block.note_data_taken(self)
        numbers: Tensor = _DATA.__get__(self)
        return numbers

    @data.setter
    def data(self, numbers: Tensor) -> None:
        _DATA.__set__(self, numbers)


class StoredParameter(_TieredParameter):
    """What a parameter is while its numbers are in the store. Never made: an ``nn.Parameter`` becomes one and back.

    It has the right shape, dtype and device and takes the memory of one number. Reading it raises
    ``AbsentWeightError``: a wrong number is never given out. ``grad`` is None, or a stand-in while the store holds a
    gradient; setting it to None discards that.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let questions pass."""
        return _ask(func, args, kwargs or {})

    @property
    def grad(self) -> Tensor | None:
        """A stand-in where the store holds a gradient of the parameter, else None; in its own hooks the gradient."""
        block = block_of(self)
        assert block is not None
        arrived = gradient_of(self)
        if arrived is not None:
            return arrived
        if block.gradients is None or not block.gradients.has(self):
            return None
        return stand_in(self, block.name_of(self), is_gradient=True)

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


def block_of(parameter: Tensor) -> WeightBlock | None:
    """Return the block that holds a parameter, or None for one that is not in a store."""
    return cast("WeightBlock | None", parameter.__dict__.get(_BLOCK))


def attach(parameter: nn.Parameter, block: WeightBlock, device: torch.device) -> None:
    """Take the numbers away from a parameter, for good a block's; it computes on ``device``."""
    own_class = type(parameter)
    make_absent(parameter, device)
    parameter.__dict__[_BLOCK] = block
    parameter.__dict__[_CLASS] = PresentParameter if own_class is nn.Parameter else own_class


def make_absent(parameter: nn.Parameter, device: torch.device) -> None:
    """Take the numbers away: whoever reads the parameter now is told."""
    # Memory made for inference must not become a parameter's: that could not be trained any more.
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
        nothing = _no_numbers(parameter.shape, parameter.dtype, device)
        if parameter.device.type == "meta":  # such a tensor cannot be given memory: it changes places with another
            swap_tensors: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors
            swap_tensors(parameter, nn.Parameter(nothing, parameter.requires_grad))
        else:
            _DATA.__set__(parameter, nothing)
    parameter.__class__ = StoredParameter


def make_present(parameter: nn.Parameter, numbers: Tensor) -> None:
    """Give the parameter its numbers: a view of a slot, of its shape and dtype."""
    with torch.inference_mode(False):
        parameter.__class__ = parameter.__dict__[_CLASS]
        _DATA.__set__(parameter, numbers)


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return what autograd has accumulated in a parameter, whatever its class says."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: Tensor | None = _GRADIENT.__get__(parameter)
    return gradient


def set_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Replace what autograd has accumulated in a parameter, whatever its class says."""
    with torch._C.DisableTorchFunctionSubclass():
        _GRADIENT.__set__(parameter, gradient)


def stand_in(parameter: Tensor, what: str, *, is_gradient: bool = False) -> StandIn:
    """Return a tensor that answers for the shape, dtype and device of ``parameter`` and refuses everything else."""
    with torch._C.DisableTorchFunctionSubclass():
        empty = _no_numbers(parameter.shape, parameter.dtype, parameter.device)
        standing_in = Tensor._make_subclass(StandIn, empty)
    assert isinstance(standing_in, StandIn)
    standing_in.what, standing_in.is_gradient = what, is_gradient
    return standing_in


def _no_numbers(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)


def _ask(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer a question about something absent; where its module runs bring the numbers in, else raise."""
    name = getattr(func, "__name__", str(func))
    property_name = getattr(getattr(func, "__self__", None), "__name__", "")
    is_property = name == "__get__" and property_name not in _CONTENTS
    if not is_property and (name, property_name) != ("__set__", "requires_grad") and name not in _QUESTIONS:
        absent = _absent([*args, *kwargs.values()])
        if absent and all(map(_provide, absent)):
            return func(*args, **kwargs)
        if func is torch.autograd.grad:
            return func(*_by_node(args), **dict(zip(kwargs, _by_node(kwargs.values()), strict=True)))
        asked = absent[0] if absent else None
        if asked is not None and (name == "detach" or name == "__get__"):
            return stand_in(asked, _what(asked), is_gradient=_is_gradient(asked))
        what = "an offloaded module" if asked is None else _what(asked)
        operation = property_name if name in ("__get__", "__set__") else name
        raise AbsentWeightError(what, operation, is_gradient=_is_gradient(asked))
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _by_node(values: Iterable[Any]) -> list[Any]:
    """Name parameters by their place in the graph, which needs no numbers."""

    def named(value: Any) -> Any:
        if isinstance(value, StoredParameter):
            with torch._C.DisableTorchFunctionSubclass():
                return get_gradient_edge(value)
        return tuple(map(named, value)) if isinstance(value, list | tuple) else value

    return list(map(named, values))


def _absent(values: list[Any]) -> list[Tensor]:
    """Return what is absent among arguments, and in lists of them."""
    flat = [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]
    return [one for one in flat if isinstance(one, StoredParameter | StandIn)]


def _provide(parameter: Tensor) -> bool:
    """Bring numbers in, where they may be; they may have come with those of another parameter already."""
    if not isinstance(parameter, StoredParameter):
        return not isinstance(parameter, StandIn)
    block = block_of(parameter)
    return block is not None and block.provide is not None and block.provide(block)


def _is_gradient(asked: Tensor | None) -> bool:
    return isinstance(asked, StandIn) and asked.is_gradient


def _what(asked: Tensor) -> str:
    if isinstance(asked, StandIn):
        return asked.what
    block = block_of(asked)
    return "a parameter" if block is None else block.name_of(asked)


class GradientBlock:
    """The fp32 gradients of the parameters of one layout, summed over the backward passes of a step.

    The first gradient of a parameter is copied in and later ones are added, as autograd does with ``.grad``: so sums
    of fp32 gradients have the same bits. Called by the threads that run autograd, one at a time.

    Args:
        key: of its block, which is registered here.
        parameters: by the name that the layout has for them.
        homes: tiers that it may live in, most wanted first.
        before_add: called before the first gradient of a step: whoever still reads the last step's finishes.

    Attributes:
        num_changes: gradients that came or went so far.
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
        self.before_add: Callable[[], None] | None = None
        self._tier = compute_tier(store)
        ledger_of(store).register(store, key, layout.num_elements, torch.float32, homes, durable=False)
        self._hooks: list[Any] = []
        self._nodes: list[Any] = []  # kept, or their hooks go
        for parameter in parameters.values():
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._take))  # type: ignore[no-untyped-call]
        for parameter in self._ordinary.values():
            node: Any = get_gradient_edge(parameter).node
            self._hooks.append(node.register_prehook(partial(self._make_way, parameter)))
            self._nodes.append(node)

    def close(self) -> None:
        """Leave gradients with their parameters from now on, and forget the block."""
        for hook in self._hooks:
            hook.remove()
        ledger_of(self._store).unregister(self._store, self.key)

    def come_last(self, parameter: Tensor) -> None:
        """Take a gradient after all other hooks have seen it; called when there is a new one."""
        hooks = parameter._post_accumulate_grad_hooks
        for key in [key for key, hook in hooks.items() if hook == self._take]:
            hooks[key] = hooks.pop(key)  # autograd looks at the order of insertion alone

    @property
    def filled(self) -> frozenset[str]:
        """Names of the parameters that have a gradient now."""
        return frozenset(self._filled)

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter has a gradient now."""
        return self._names.get(id(parameter)) in self._filled

    def forget(self, parameter: nn.Parameter) -> None:
        """Drop the gradient of one parameter: the next one starts a new sum."""
        self._filled.discard(self._names[id(parameter)])
        self.num_changes += 1

    def consume(self) -> frozenset[str]:
        """Hand the sums over to an update: return whose they are; the next gradient starts a new sum.

        Raises:
            RuntimeError: another gradient came to a parameter than those that left for the store.
        """
        for name, parameter in self._ordinary.items():
            gradient = gradient_of(parameter)
            if gradient is not None and not isinstance(gradient, StandIn):
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
        """Drop those whose stand-in somebody took away: ``zero_grad`` of the module."""
        for name, parameter in self._ordinary.items():
            if gradient_of(parameter) is None:
                self._filled.discard(name)

    def view(self, flat: Tensor, entry: TensorEntry) -> Tensor:
        """Return the part of the block's contents that is one parameter's, flat."""
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
        """Move a gradient from its parameter into the block: autograd's hook, after it has added to ``.grad``."""
        gradient = gradient_of(parameter)
        if gradient is None or isinstance(gradient, StandIn):
            return
        set_gradient(parameter, None)
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if not self._filled and self.before_add is not None:
            self.before_add()
        name = self._names[id(parameter)]
        entry = self._entries[name]
        with torch.no_grad(), self._store.acquire(self.key, self._tier, "rw" if self._filled else "w") as lease:
            place = self.view(lease.tensor, entry).view(entry.shape)
            if name in self._filled:
                place.add_(gradient)
            else:
                place.copy_(gradient)
        self._filled.add(name)
        self.num_changes += 1
        if name in self._ordinary:  # whoever clips or reads it is told, instead of finding nothing
            set_gradient(parameter, stand_in(parameter, name, is_gradient=True))

    def _make_way(self, parameter: Tensor, arriving: Any) -> None:
        """Take the stand-in of an earlier gradient away before autograd adds the next one to it."""
        if isinstance(gradient_of(parameter), StandIn):
            set_gradient(parameter, None)
        else:
            self._filled.discard(self._names[id(parameter)])  # cleared by zero_grad, or replaced


@dataclass(frozen=True, slots=True)
class _SavedWeight:
    """A view of a block's numbers, without them. ``version``: of the block, as it was saved."""

    block: WeightBlock
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _SavedHere:
    """Any other tensor. Hooks keep autograd from seeing that it was changed in between: so its version is kept."""

    tensor: Tensor
    version: int


@dataclass(frozen=True, slots=True)
class _SavedElsewhere:
    """What the hooks around these ones made of a tensor."""

    unpack: Callable[[Any], Tensor]
    packed: Any


class BackwardWindow:
    """Leases of the backward: a unit's weights stay while its nodes run, and go when another unit's are wanted.

    A node of the graph has let go of its weights when it has run: that is seen by the number of tensors that share
    their memory, so a lease never ends under a node that still computes. Used by the thread that runs autograd.
    """

    def __init__(self, order: UseOrder) -> None:
        self._order = order
        self._open: OrderedDict[WeightBlock, tuple[Lease, int]] = OrderedDict()

    def numbers(self, block: WeightBlock) -> Tensor:
        """Return the flat numbers of a block, which stay valid until no view of them is left."""
        if block.held is not None:
            return block.held
        if block not in self._open:
            self.close_unused()
            if not self._open:
                self._close_after_backward()
            self._order.note(("backward", block.key), [(block.key, block.tier)])
            lease = block.borrow()
            self._open[block] = (lease, references(lease.tensor))
        return self._open[block][0].tensor

    def close_unused(self) -> None:
        """Give back the leases whose numbers nobody looks at."""
        for block, (lease, num_references) in list(self._open.items()):
            if references(lease.tensor) <= num_references:
                del self._open[block]
                lease.release()

    def close(self, block: WeightBlock) -> None:
        """Give back the lease of one block, which is about to change.

        Raises:
            WeightInUseError: something still looks at its numbers.
        """
        if block not in self._open:
            return
        lease, num_references = self._open[block]
        if references(lease.tensor) > num_references:
            raise WeightInUseError(
                f"a graph that is kept (create_graph=True) still uses the weights of {block.layout.name}: drop what "
                "was computed with it before they are updated"
            )
        del self._open[block]
        lease.release()

    def _close_after_backward(self) -> None:
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self.close_unused)
        except RuntimeError:
            return  # a saved tensor is looked at outside of a backward: the next use closes it


class WeightHooks:
    """Saved-tensor hooks for one forward of a unit, or of a whole offloaded module; entered and left once.

    Only the innermost pair of hooks is asked by autograd, so what is no weight goes to the pair around: that of
    ``offload_activations``, of ``torch.utils.checkpoint``, or of the user.
    """

    def __init__(self, window: BackwardWindow) -> None:
        self._window = window
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._outer: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = outer
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def enter(self) -> None:
        """Be asked from now on."""
        self._hooks.__enter__()

    def leave(self) -> None:
        """Be asked no more."""
        self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> Any:
        block = block_under(tensor)
        if block is not None and block.held is not None:
            offset = int(tensor.storage_offset()) - int(block.held.storage_offset())
            return _SavedWeight(block, block.version, tensor.size(), tensor.stride(), offset)
        if self._outer is None:
            return tensor if tensor.is_inference() else _SavedHere(tensor, tensor._version)
        pack, unpack = self._outer
        return _SavedElsewhere(unpack, pack(tensor))

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _SavedHere):
            if packed.tensor._version != packed.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{packed.tensor.dtype} {tuple(packed.tensor.shape)} is at version {packed.tensor._version}; "
                    f"expected version {packed.version} instead"
                )
            return packed.tensor
        if isinstance(packed, _SavedWeight):
            if packed.block.version != packed.version:
                raise RuntimeError(
                    f"the weights of {packed.block.layout.name}, needed for gradient computation, have been changed by "
                    "an optimizer's step or otherwise since the forward: run the forward again"
                )
            numbers = self._window.numbers(packed.block)
            return numbers.as_strided(packed.size, packed.stride, numbers.storage_offset() + packed.offset)
        if isinstance(packed, _SavedElsewhere):
            return packed.unpack(packed.packed)
        assert isinstance(packed, Tensor), type(packed)
        return packed
