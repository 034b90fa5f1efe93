"""Parameters whose values are in memory (present) or only in the store (absent).

Reading absent values raises an error, unless a running forward or backward can fetch them. The user's code and
optimizer refer to the parameters, so parameters must stay the same objects. Only their class changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megatrain.engine.unit.absent_weights import METADATA_QUERIES, placeholder

_GRADIENT_REMEDY = (
    "the gradient of {} moved to the tiered store after autograd had computed it. TieredAdamW etc. use it in the "
    "store: clip with max_grad_norm=..., read opt.grad_norm, clear with zero_grad() or grad = None. A hook "
    "(register_post_accumulate_grad_hook) sees the gradient before it moves"
)


class AbsentWeightError(RuntimeError):
    """A module's values were read while they were only in the store.

    Args:
        name: Name of the parameter or module.
    """

    def __init__(self, name: str, operation: str, *, is_gradient: bool = False) -> None:
        if is_gradient:
            super().__init__(f"{operation}: {_GRADIENT_REMEDY.format(name)}")
            return
        super().__init__(
            f"{operation}: the values of {name} are in the tiered store. They are in memory during the forward and "
            "backward of the module. Elsewhere, use `with megatrain.gathered(module):` to read or change them, or "
            "megatrain.named_tensors(model) to send them to another program"
        )


#: Torch's original properties, without the overrides in a parameter's class.
_DATA: Any = Tensor.data
_GRADIENT: Any = Tensor.grad
_BLOCK_ATTRIBUTE = "_megatrain_block"
_CLASS_ATTRIBUTE = "_megatrain_class"
_ALLOWED_CALLS = METADATA_QUERIES | {"requires_grad_", "register_hook", "register_post_accumulate_grad_hook"}
#: Properties that return values. For an absent parameter they return a placeholder, like ``detach``.
_VALUE_PROPERTIES = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})


class ParameterGradients(Protocol):
    """Interface of ``GradientBlock``: gradients in the store, by parameter."""

    def has_gradient(self, parameter: nn.Parameter) -> bool: ...

    def drop_gradient(self, parameter: nn.Parameter) -> None: ...

    def move_hook_last(self, parameter: Tensor) -> None: ...


class ParameterHolder(Protocol):
    """Interface of ``WeightBlock``, which stores a parameter's values."""

    @property
    def gradients(self) -> ParameterGradients | None: ...

    def name_of(self, parameter: Tensor) -> str: ...

    def watch_data(self, parameter: nn.Parameter) -> None: ...

    def provide_weights(self) -> bool: ...


def _dispatch(
    cls: type, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Call a torch function with absent tensors. Raise an error if it needs values that cannot be fetched."""
    kwargs = kwargs or {}
    name = getattr(func, "__name__", str(func))
    property_name = getattr(getattr(func, "__self__", None), "__name__", "")
    is_property = name == "__get__" and property_name not in _VALUE_PROPERTIES
    if not is_property and (name, property_name) != ("__set__", "requires_grad") and name not in _ALLOWED_CALLS:
        absent = _find_absent([*args, *kwargs.values()])
        if absent and all(map(_provide, absent)):
            return func(*args, **kwargs)
        if func is torch.autograd.grad:
            return func(*_replace_by_nodes(args), **dict(zip(kwargs, _replace_by_nodes(kwargs.values()), strict=True)))
        absent_tensor = absent[0] if absent else None
        if absent_tensor is not None and (name == "detach" or name == "__get__"):
            return make_placeholder(absent_tensor, _name_of(absent_tensor), is_gradient=_is_gradient(absent_tensor))
        owner = "an offloaded module" if absent_tensor is None else _name_of(absent_tensor)
        operation = property_name if name in ("__get__", "__set__") else name
        raise AbsentWeightError(owner, operation, is_gradient=_is_gradient(absent_tensor))
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


class _OffloadedParameter(nn.Parameter):
    """A parameter whose gradient moves to a store after all its gradient hooks have run."""

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Register a hook that can read and change each gradient before the gradient moves to the store."""
        with torch._C.DisableTorchFunctionSubclass():
            handle = super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        block = holder_of(self)
        if block is not None and block.gradients is not None:
            block.gradients.move_hook_last(self)
        return handle


class PresentParameter(_OffloadedParameter):
    """Class of a parameter while its values are present. It detects access to ``data``.

    Autograd does not count writes through ``data`` as changes, so undetected writes would be lost silently.
    """

    @property
    def data(self) -> Tensor:
        """Values of the parameter."""
        block = holder_of(self)
        if block is not None:
            block.watch_data(self)
        values: Tensor = _DATA.__get__(self)
        return values

    @data.setter
    def data(self, values: Tensor) -> None:
        _DATA.__set__(self, values)


class StoredParameter(_OffloadedParameter):
    """A parameter whose values are only in the store. While they are in memory, the class is ``PresentParameter``.

    The parameter has the correct shape, dtype and device, but uses the memory of only one element. Reading values that
    cannot be fetched raises ``AbsentWeightError``, so wrong values are never returned. ``grad`` is None, or a
    placeholder if the store contains a gradient. Setting ``grad`` to None discards the gradient.
    """

    __torch_function__: Any = classmethod(_dispatch)

    @property
    def grad(self) -> Tensor | None:
        """A placeholder if the store contains a gradient, otherwise None. In gradient hooks, the gradient itself."""
        block = holder_of(self)
        assert block is not None
        gradient = gradient_of(self)
        if gradient is not None:
            return gradient
        if block.gradients is None or not block.gradients.has_gradient(self):
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
            block.gradients.drop_gradient(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        block = holder_of(self)
        name = "parameter" if block is None else block.name_of(self)
        return f"<{name}: {tuple(self.shape)}, {self.dtype}, in the store>"


class Placeholder(Tensor):
    """Tensor with the metadata of a tensor in the store. Operations that need values raise an error."""

    source_name: str
    is_gradient: bool

    __torch_function__: Any = classmethod(_dispatch)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "gradient of " if self.is_gradient else ""
        return f"<{kind}{self.source_name}: {tuple(self.shape)}, {self.dtype}, in the store>"


def holder_of(parameter: Tensor) -> ParameterHolder | None:
    """Return the block that stores a parameter, or None if the parameter is not in a store."""
    return cast("ParameterHolder | None", parameter.__dict__.get(_BLOCK_ATTRIBUTE))


def attach(parameter: nn.Parameter, block: ParameterHolder, device: torch.device) -> None:
    """Make a parameter absent and assign it to its block. Its ``device`` attribute is then ``device``."""
    own_class = type(parameter)
    make_absent(parameter, device)
    parameter.__dict__[_BLOCK_ATTRIBUTE] = block
    parameter.__dict__[_CLASS_ATTRIBUTE] = PresentParameter if own_class is nn.Parameter else own_class


def make_absent(parameter: nn.Parameter, device: torch.device) -> None:
    """Drop a parameter's values. Reading them then raises an error."""
    # Leave inference mode, because a parameter whose memory was created in inference mode cannot be trained.
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
        empty = placeholder(parameter.shape, parameter.dtype, device)
        if parameter.device.type == "meta":  # torch cannot assign memory to a meta tensor, only swap it
            swap_tensors: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors
            swap_tensors(parameter, nn.Parameter(empty, parameter.requires_grad))
        else:
            _DATA.__set__(parameter, empty)
    parameter.__class__ = StoredParameter


def make_present(parameter: nn.Parameter, values: Tensor) -> None:
    """Bind a parameter to its values: a view of leased memory with the parameter's shape and dtype."""
    with torch.inference_mode(False):
        parameter.__class__ = parameter.__dict__[_CLASS_ATTRIBUTE]
        _DATA.__set__(parameter, values)


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return a parameter's accumulated gradient, bypassing the property of its class."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: Tensor | None = _GRADIENT.__get__(parameter)
    return gradient


def set_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Replace a parameter's accumulated gradient, bypassing the property of its class."""
    with torch._C.DisableTorchFunctionSubclass():
        _GRADIENT.__set__(parameter, gradient)


def make_placeholder(parameter: Tensor, name: str, *, is_gradient: bool = False) -> Placeholder:
    """Return a ``Placeholder`` with the metadata of ``parameter``."""
    with torch._C.DisableTorchFunctionSubclass():
        empty = placeholder(parameter.shape, parameter.dtype, parameter.device)
        result = Tensor._make_subclass(Placeholder, empty)
    assert isinstance(result, Placeholder)
    result.source_name, result.is_gradient = name, is_gradient
    return result


def _replace_by_nodes(values: Iterable[Any]) -> list[Any]:
    """Replace absent parameters with their graph nodes, which ``torch.autograd.grad`` accepts without values."""

    def to_node(value: Any) -> Any:
        if isinstance(value, StoredParameter):
            with torch._C.DisableTorchFunctionSubclass():
                return get_gradient_edge(value)
        return tuple(map(to_node, value)) if isinstance(value, list | tuple) else value

    return list(map(to_node, values))


def _find_absent(values: list[Any]) -> list[Tensor]:
    """Return the absent tensors among arguments, including those inside lists."""
    flat = [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]
    return [item for item in flat if isinstance(item, StoredParameter | Placeholder)]


def _provide(parameter: Tensor) -> bool:
    """Fetch a parameter's values if they are absent. Return whether the values are present now."""
    if not isinstance(parameter, StoredParameter):
        return not isinstance(parameter, Placeholder)
    block = holder_of(parameter)
    return block is not None and block.provide_weights()


def _is_gradient(tensor: Tensor | None) -> bool:
    return isinstance(tensor, Placeholder) and tensor.is_gradient


def _name_of(tensor: Tensor) -> str:
    if isinstance(tensor, Placeholder):
        return tensor.source_name
    block = holder_of(tensor)
    return "a parameter" if block is None else block.name_of(tensor)
