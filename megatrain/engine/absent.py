"""Stand-ins for weights that are elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.models.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AbsentWeight", "absent_weight"]

_QUESTIONS = frozenset(
    {
        "__get__",
        "size",
        "dim",
        "numel",
        "stride",
        "ndimension",
        "element_size",
        "get_device",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "__len__",
        "__repr__",
        "__hash__",
    }
)


class AbsentWeight(Tensor):
    """Answers for a weight's shape, dtype and device, and refuses to be computed with.

    Model code may ask these of a weight at any time; the numbers are there only while the engine runs the unit.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") not in _QUESTIONS:
            raise UnsupportedModelError(
                "the model",
                f"its code uses a weight outside of the weight's own module ({getattr(func, '__name__', func)}); "
                "such a weight cannot be streamed",
            )
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def absent_weight(parameter: Tensor, device: torch.device) -> AbsentWeight:
    """Return a stand-in with the shape and dtype of `parameter` on `device`; it takes the memory of one number."""
    nan = torch.full((), float("nan"), dtype=parameter.dtype, device=device)
    standing_in = Tensor._make_subclass(AbsentWeight, nan.expand(parameter.shape))
    assert isinstance(standing_in, AbsentWeight)
    return standing_in
