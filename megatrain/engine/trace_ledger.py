"""What operations on fake tensors would take: FLOPs, and bytes of live storages."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.flops import count_flops

__all__ = ["Ledger"]


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs and the bytes of live storages, and answers the questions about values that fake tensors cannot."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_nbytes = 0
        self.peak_nbytes = 0
        self.num_flops = 0
        self.exact = True
        self.new_nbytes: dict[int, int] = {}  # by storage: those alive that were made since this was cleared
        self._known: dict[int, int] = {}
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what is made inside: it is accounted for as blocks."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default:
            if (known := getattr(args[0], "constant", None)) is not None:
                return known.item()
            self.exact = False
            if args[0].dtype == torch.bool:
                return True  # validity checks pass
            return 0.0 if args[0].is_floating_point() else 0
        if func is aten.nonzero.default:
            self.exact = False
            found = max(args[0].shape, default=1)
            result: Any = torch.zeros(found, args[0].dim(), dtype=torch.long, device=args[0].device)
        elif func is aten.rand.default and not args[0]:
            # One number, drawn to leave out a layer by chance where it is below a rate. The plan is for all layers.
            options = kwargs or {}
            result = torch.tensor(1.0, dtype=options.get("dtype"), device=options.get("device"))
        elif func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # torch knows the shape of the result for bf16 alone; the kernel itself takes fp32 too.
            with self.paused():
                lowered = [arg.to(torch.bfloat16) for arg in args[:2]]
                shape = func(*lowered, *args[2:], **(kwargs or {})).shape
            result = torch.empty(shape, dtype=args[0].dtype, device=args[0].device)
        else:
            result = func(*args, **(kwargs or {}))
        self.num_flops += count_flops(func, args, kwargs or {}, result)
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, Tensor):
                self._count(item)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        nbytes = 0 if self._paused else storage.nbytes()
        self._known[key] = self.new_nbytes[key] = nbytes
        weakref.finalize(storage, self._forget, key)
        self.live_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes)

    def _forget(self, key: int) -> None:
        self.live_nbytes -= self._known.pop(key)
        self.new_nbytes.pop(key, None)
