"""Parameters whose numbers are in the store: the same objects as before, present only while somebody holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

if TYPE_CHECKING:
    from megatrain.embed.weights import WeightBlock

__all__ = [
    "AbsentWeightError",
    "PresentParameter",
    "StandIn",
    "StoredParameter",
    "attach",
    "block_of",
    "gradient_of",
    "make_absent",
    "make_present",
    "set_gradient",
    "stand_in",
]

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
    """Numbers of a tiered module were asked for while they are in the store.

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
        what = "a tiered module" if asked is None else _what(asked)
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
