"""Counts, on a CPU, the operations that would make the host wait for a GPU, because the host reads their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode

# These operations read a value on the host, or create a tensor whose size depends on a value.
WAITS = (
    "_local_scalar_dense",
    "_unique2",
    "allclose",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
)
# These methods bypass torch's dispatcher.
METHODS = ("cpu", "numpy", "tolist")


class CountsWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that counts operations that would make the host wait, by name. Indexing with a mask also counts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        is_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in WAITS or is_mask:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """Count the calling thread's operations that would make the host wait, also in a backward. Yield the counts."""
    counter = CountsWaits()
    with (
        counter,
        mock.patch.multiple(torch.Tensor, **{name: _count_calls_of(name, counter.counts) for name in METHODS}),
    ):
        yield counter.counts


def _count_calls_of(name: str, counts: Counter[str]) -> Any:
    method = getattr(torch.Tensor, name)

    @wraps(method)
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        mirror = _get_current_function_mode()
        before = getattr(mirror, "num_answers", 0)
        result = method(tensor, *args, **kwargs)
        if getattr(mirror, "num_answers", 0) == before:  # otherwise, a host copy answered the call
            counts[name] += 1
        return result

    return call
