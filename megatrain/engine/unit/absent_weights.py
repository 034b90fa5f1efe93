"""Placeholders for unbound weights, with shape, dtype and device but no memory.

Model code can read shape, dtype and device at any time. If it reads the values of a small weight, or a few rows of a
large weight, the engine runs a visit of the unit (`WeightRead`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.base.errors import UnsupportedModelError
from megatrain.engine.unit.arguments import tree_map
from megatrain.engine.unit.suspend import UnitCall, is_suspendable, suspend

#: Tensor methods that need no values. ``embed`` also supports these methods for parameters in the store.
METADATA_QUERIES = frozenset(
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
    }
)


@dataclass(frozen=True, slots=True)
class WeightRead:
    """First argument of a unit call that reads a weight instead of running the unit's forward.

    The optional second argument is an integer tensor with the indexes of the rows to read. The default is all rows.
    """

    owner: str


#: Maximum number of elements that code outside of the weight's module can read: 4 MiB of fp32. No tier counts the copy,
#: which lives as long as model code refers to it.
_MAX_READ_ELEMENTS = 1 << 20


class AbsentWeight(Tensor):
    """Placeholder for an unbound weight, with the weight's shape, dtype and device.

    Model code can read shape, dtype and device at any time. If it reads the values of a small weight, or a few rows of
    a large weight, the engine runs a regular visit of the unit. This visit is planned, leases the weights, and adds its
    gradient to the unit's gradients. Larger reads raise an error.

    Attributes:
        site: Index of the unit and full name of the parameter.
    """

    site: tuple[int, str] | None = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in METADATA_QUERIES | {"__get__", "__repr__"}:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return _call_with_values(func, args, kwargs or {})

    def read_values(self, func: Callable[..., Any], rows: Tensor | None = None) -> Tensor:
        """Return the values of all rows, or of the given rows, for model code that calls the torch function ``func``.

        Raises:
            UnsupportedModelError: If the read is too large, or if the model code runs outside of a pass.
        """
        num_elements = self.numel() if rows is None else rows.numel() * (self.numel() // len(self))
        if self.site is None or num_elements > _MAX_READ_ELEMENTS or not is_suspendable():
            name = "a weight" if self.site is None else self.site[1]
            raise UnsupportedModelError(
                "the model",
                f"its code uses {name} outside of the weight's own module ({getattr(func, '__name__', func)}); such a "
                f"weight cannot be streamed. Reads of up to {_MAX_READ_ELEMENTS:,} elements can",
            )
        unit, owner = self.site
        call_args = (WeightRead(owner),) if rows is None else (WeightRead(owner), rows)
        result: Tensor = suspend(UnitCall(unit, call_args, {}, None))
        return result


def _call_with_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read the values of absent weights among the arguments, and call a torch function with these values."""
    weight = args[0] if args else None
    if isinstance(weight, AbsentWeight):
        request = _requested_rows(func, weight, args[1:], kwargs)
        if request is not None:
            rows, inner_index = request
            values = weight.read_values(func, rows)
            return values[inner_index] if inner_index else values
    return func(
        *tree_map(args, lambda item: item.read_values(func) if isinstance(item, AbsentWeight) else item),
        **tree_map(kwargs, lambda item: item.read_values(func) if isinstance(item, AbsentWeight) else item),
    )


def _requested_rows(
    func: Callable[..., Any], weight: AbsentWeight, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, tuple[Any, ...]] | None:
    """Return which rows of a weight an indexing function reads, and the rest of the index. None for other functions."""
    name, num_rows = getattr(func, "__name__", ""), len(weight)

    def make_index(index: int) -> Tensor:
        if not -num_rows <= index < num_rows:
            raise IndexError(f"index {index} is out of bounds for dimension 0 with size {num_rows}")
        # Do not use `torch.tensor`, because on a device its copy would synchronize the host.
        return torch.full((), index % num_rows, dtype=torch.long, device=weight.device)

    if name == "__getitem__":
        index, *inner_index = args[0] if isinstance(args[0], tuple) else (args[0],)
        if isinstance(index, int) and not isinstance(index, bool):
            return make_index(index), tuple(inner_index)
        if isinstance(index, slice) and not inner_index:
            return torch.arange(*index.indices(num_rows), device=weight.device), ()
        if isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64) and not inner_index:
            return index, ()
    elif name in ("select", "index_select", "narrow") and not kwargs and args[0] in (0, -weight.dim()):
        if name == "select":
            return make_index(args[1]), ()
        if name == "index_select":
            return args[1], ()
        return torch.arange(args[1], args[1] + args[2], device=weight.device), ()
    return None


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a zero-stride tensor of NaN, which uses the memory of one element."""
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)


def absent_weight(parameter: Tensor, device: torch.device) -> AbsentWeight:
    """Return a placeholder on `device` for `parameter`. It uses the memory of one element."""
    weight = Tensor._make_subclass(AbsentWeight, placeholder(parameter.shape, parameter.dtype, device))
    assert isinstance(weight, AbsentWeight)
    return weight
