"""Parameters whose values are absent or present. Absent parameters have metadata, but reading them raises an error.

The user's code and optimizer refer to the parameters, so these stay the same objects and only change their class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megatrain.engine.absent_weights import METADATA_QUERIES, placeholder

_GRADIENT_REMEDY = (
    "the gradient of {} moved to the tiered store after autograd had computed it. TieredAdamW etc. use it in the "
    "store: clip with max_grad_norm=..., read opt.grad_norm, clear with zero_grad() or grad = None. A hook "
    "(register_post_accumulate_grad_hook) sees the gradient before it moves"
)


class AbsentWeightError(RuntimeError):
    """Values of an offloaded module were read while they were in the store.

    Args:
        what: Name of the parameter or module.
    """

    def __init__(self, what: str, operation: str, *, is_gradient: bool = False) -> None:
        if is_gradient:
            super().__init__(f"{operation}: {_GRADIENT_REMEDY.format(what)}")
            return
        super().__init__(
            f"{operation}: the values of {what} are in the tiered store. They are in memory during the forward and "
            "backward of the module. Elsewhere, use `with megatrain.gathered(module):` to read or change them, or "
            "megatrain.named_tensors(model) to send them to another program"
        )


#: Torch's properties, which bypass the overrides in a parameter's class.
_DATA: Any = Tensor.data
_GRADIENT: Any = Tensor.grad
_BLOCK = "_megatrain_block"
_CLASS = "_megatrain_class"
_ANSWERED = METADATA_QUERIES | {"requires_grad_", "register_hook", "register_post_accumulate_grad_hook"}
#: Properties that return values. For absent parameters they return a placeholder, like ``detach``.
_CONTENTS = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})


class ParameterGradients(Protocol):
    """Interface of a ``GradientBlock``: gradients in the store, by parameter."""

    def has(self, parameter: nn.Parameter) -> bool: ...

    def forget(self, parameter: nn.Parameter) -> None: ...

    def move_hook_last(self, parameter: Tensor) -> None: ...


class ParameterHolder(Protocol):
    """Interface of a ``WeightBlock``, which stores a parameter's values."""

    @property
    def gradients(self) -> ParameterGradients | None: ...

    def name_of(self, parameter: Tensor) -> str: ...

    def note_data_taken(self, parameter: nn.Parameter) -> None: ...

    def provide(self) -> bool: ...


def _answer(
    cls: type, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Call a torch function with absent tensors, if it needs only metadata or if their values can be fetched."""
    kwargs = kwargs or {}
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


class _OffloadedParameter(nn.Parameter):
    """A parameter whose gradient moves to a store after all hooks have run."""

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Register a hook that can read and change each gradient before it moves to the store."""
        with torch._C.DisableTorchFunctionSubclass():
            handle = super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        block = holder_of(self)
        if block is not None and block.gradients is not None:
            block.gradients.move_hook_last(self)
        return handle


class PresentParameter(_OffloadedParameter):
    """Class of a present parameter: an ``nn.Parameter`` that detects access to its ``data``.

    Autograd does not count writes through ``data`` as changes, so without detection they would be lost silently.
    """

    @property
    def data(self) -> Tensor:
        """Values of the parameter."""
        block = holder_of(self)
        if block is not None:
            block.note_data_taken(self)
        values: Tensor = _DATA.__get__(self)
        return values

    @data.setter
    def data(self, values: Tensor) -> None:
        _DATA.__set__(self, values)


class StoredParameter(_OffloadedParameter):
    """Class of a parameter while its values are in the store. A parameter's class changes to this class and back.

    The parameter has the correct shape, dtype and device, but only the memory of one element. Reading it raises
    ``AbsentWeightError``, so it never returns wrong values. ``grad`` is None, or a placeholder while the store contains
    a gradient. Setting ``grad`` to None discards the gradient.
    """

    __torch_function__: Any = classmethod(_answer)

    @property
    def grad(self) -> Tensor | None:
        """A placeholder if the store contains a gradient, otherwise None. In gradient hooks, the gradient itself."""
        block = holder_of(self)
        assert block is not None
        arrived = gradient_of(self)
        if arrived is not None:
            return arrived
        if block.gradients is None or not block.gradients.has(self):
            return None
        return make_placeholder(self, block.name_of(self), is_gradient=True)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        block = holder_of(self)
        assert block is not None
        if value is not None and gradient_of(self) is None:
            raise AbsentWeightError(block.name_of(self), "setting a gradient", is_gradient=True)
        set_gradient(self, value)
        if value is None and block.gradients is not None:
            block.gradients.forget(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        block = holder_of(self)
        name = "parameter" if block is None else block.name_of(self)
        return f"<{name}: {tuple(self.shape)}, {self.dtype}, in the store>"


class Placeholder(Tensor):
    """Placeholder with the metadata of a tensor in the store. All other operations raise an error."""

    what: str
    is_gradient: bool

    __torch_function__: Any = classmethod(_answer)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "gradient of " if self.is_gradient else ""
        return f"<{kind}{self.what}: {tuple(self.shape)}, {self.dtype}, in the store>"


def holder_of(parameter: Tensor) -> ParameterHolder | None:
    """Return the block that stores a parameter, or None if the parameter is not in a store."""
    return cast("ParameterHolder | None", parameter.__dict__.get(_BLOCK))


def attach(parameter: nn.Parameter, block: ParameterHolder, device: torch.device) -> None:
    """Make a parameter absent and assign it to its block. ``device`` is the parameter's compute device."""
    own_class = type(parameter)
    make_absent(parameter, device)
    parameter.__dict__[_BLOCK] = block
    parameter.__dict__[_CLASS] = PresentParameter if own_class is nn.Parameter else own_class


def make_absent(parameter: nn.Parameter, device: torch.device) -> None:
    """Remove a parameter's values, so that reading it raises an error."""
    # Leave inference mode, because a parameter over inference memory cannot be trained afterwards.
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
        empty = placeholder(parameter.shape, parameter.dtype, device)
        if parameter.device.type == "meta":  # torch can only swap the memory of a meta tensor, not set it
            swap_tensors: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors
            swap_tensors(parameter, nn.Parameter(empty, parameter.requires_grad))
        else:
            _DATA.__set__(parameter, empty)
    parameter.__class__ = StoredParameter


def make_present(parameter: nn.Parameter, values: Tensor) -> None:
    """Bind a parameter to its values, which are a view of a slot with the parameter's shape and dtype."""
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
    """Return a placeholder with the metadata of ``parameter``; see ``Placeholder``."""
    with torch._C.DisableTorchFunctionSubclass():
        empty = placeholder(parameter.shape, parameter.dtype, parameter.device)
        made = Tensor._make_subclass(Placeholder, empty)
    assert isinstance(made, Placeholder)
    made.what, made.is_gradient = what, is_gradient
    return made


def _by_node(values: Iterable[Any]) -> list[Any]:
    """Replace absent parameters with their graph nodes, which need no values."""

    def named(value: Any) -> Any:
        if isinstance(value, StoredParameter):
            with torch._C.DisableTorchFunctionSubclass():
                return get_gradient_edge(value)
        return tuple(map(named, value)) if isinstance(value, list | tuple) else value

    return list(map(named, values))


def _absent(values: list[Any]) -> list[Tensor]:
    """Return the absent tensors in arguments and in lists of arguments."""
    flat = [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]
    return [one for one in flat if isinstance(one, StoredParameter | Placeholder)]


def _provide(parameter: Tensor) -> bool:
    """Fetch a parameter's values if they are absent, and return whether the tensor has values now."""
    if not isinstance(parameter, StoredParameter):
        return not isinstance(parameter, Placeholder)
    block = holder_of(parameter)
    return block is not None and block.provide()


def _is_gradient(asked: Tensor | None) -> bool:
    return isinstance(asked, Placeholder) and asked.is_gradient


def _what(asked: Tensor) -> str:
    if isinstance(asked, Placeholder):
        return asked.what
    block = holder_of(asked)
    return "a parameter" if block is None else block.name_of(asked)
