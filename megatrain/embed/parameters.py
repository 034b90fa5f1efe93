"""Parameters whose numbers are in the store: the same objects as before, present only while somebody holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from megatrain.embed.weights import WeightBlock

__all__ = ["AbsentWeightError", "StoredParameter", "block_of", "make_absent", "make_present", "stand_in"]

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
#: Properties that hand out the numbers: like ``detach`` they give a stand-in, which refuses to be computed with.
_CONTENTS = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})


class AbsentWeightError(RuntimeError):
    """Numbers of a tiered module were asked for while they are in the store."""

    def __init__(self, what: str, operation: str) -> None:
        super().__init__(
            f"{operation}: the numbers of {what} are in the tiered store. They are there during the forward and "
            "backward of its module; elsewhere use `with megatrain.gathered(module):` to read or change them"
        )


class StandIn(Tensor):
    """Answers for shape, dtype and device of what is in the store; refuses everything else."""

    what: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let questions pass."""
        return _ask(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"<{self.what}: {tuple(self.shape)}, {self.dtype}, in the store>"


class StoredParameter(nn.Parameter):
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
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """A stand-in where the store holds a gradient of the parameter, else None."""
        block = block_of(self)
        assert block is not None
        if block.gradients is None or not block.gradients.has(self):
            return None
        return stand_in(self, f"the gradient of {block.name_of(self)}")

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        block = block_of(self)
        assert block is not None
        if value is not None:
            raise AbsentWeightError(block.name_of(self), "setting a gradient")
        if block.gradients is not None:
            block.gradients.forget(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
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
    parameter.__dict__[_CLASS] = own_class


def make_absent(parameter: nn.Parameter, device: torch.device) -> None:
    """Take the numbers away: whoever reads the parameter now is told."""
    with torch._C.DisableTorchFunctionSubclass():
        nothing = _no_numbers(parameter.shape, parameter.dtype, device)
        if parameter.device.type == "meta":  # such a tensor cannot be given memory: it changes places with another
            torch.utils.swap_tensors(parameter, nn.Parameter(nothing, parameter.requires_grad))
        else:
            parameter.data = nothing
    parameter.__class__ = StoredParameter


def make_present(parameter: nn.Parameter, numbers: Tensor) -> None:
    """Give the parameter its numbers: a view of a slot, of its shape and dtype."""
    parameter.__class__ = parameter.__dict__[_CLASS]
    parameter.data = numbers


def stand_in(parameter: Tensor, what: str) -> StandIn:
    """Return a tensor that answers for the shape, dtype and device of ``parameter`` and refuses everything else."""
    with torch._C.DisableTorchFunctionSubclass():
        empty = _no_numbers(parameter.shape, parameter.dtype, parameter.device)
        standing_in = Tensor._make_subclass(StandIn, empty)
    assert isinstance(standing_in, StandIn)
    standing_in.what = what
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
        if absent and all(isinstance(one, StoredParameter) and _provide(one) for one in absent):
            return func(*args, **kwargs)
        asked = absent[0] if absent else None
        if asked is not None and (name == "detach" or name == "__get__"):
            return stand_in(asked, _what(asked))
        raise AbsentWeightError("a tiered module" if asked is None else _what(asked), property_name or name)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _absent(values: list[Any]) -> list[Tensor]:
    """Return what is absent among arguments, and in lists of them."""
    flat = [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]
    return [one for one in flat if isinstance(one, StoredParameter | StandIn)]


def _provide(parameter: Tensor) -> bool:
    block = block_of(parameter)
    return block is not None and block.provide is not None and block.provide(block)


def _what(asked: Tensor) -> str:
    if isinstance(asked, StandIn):
        return asked.what
    block = block_of(asked)
    return "a parameter" if block is None else block.name_of(asked)
