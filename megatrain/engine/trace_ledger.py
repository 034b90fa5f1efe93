"""What operations on fake tensors would take: FLOPs, and bytes of live storages."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.engine.attention import AttentionCall
from megatrain.flops import count_flops

__all__ = ["Ledger", "LedgerError"]

_RAISES = 2  # mode of torch in which an operation without a deterministic kernel raises


class LedgerError(RuntimeError):
    """The trace failed at counting. Not the model's fault: a plan from here on would be wrong."""


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs and the bytes of live storages, and answers the questions about values that fake tensors cannot."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_nbytes = 0
        self.peak_nbytes = 0
        self.num_flops = 0
        self.uncounted: list[str] = []  # operators whose FLOPs nobody knows, and why
        self.where = "the model"  # the unit that runs
        self._guesses: dict[str, list[str]] = {}
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

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Note guesses as those of a unit."""
        before, self.where = self.where, name
        try:
            yield
        finally:
            self.where = before

    def guess(self, what: str) -> None:
        """Note that something is not as it will be, and why; said once, however many units it is in."""
        names = self._guesses.setdefault(what, [])
        if self.where not in names:
            names.append(self.where)

    @property
    def guesses(self) -> tuple[str, ...]:
        """What was guessed and why, with where: a sentence each."""
        return tuple(
            f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {what}"
            for what, names in self._guesses.items()
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = self._result(func, args, kwargs)
        try:
            self._book(func, args, kwargs, result)
        except Exception as error:
            raise LedgerError(f"{func} cannot be accounted for: {type(error).__name__}: {error}") from error
        return result

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator returns: fake tensors, or a number that is made up."""
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default:
            if (known := getattr(args[0], "constant", None)) is not None:
                return known.item()
            self.guess("a number that it looks at is not known before it runs; taken as 0, a yes or no as yes")
            if args[0].dtype == torch.bool:
                return True  # validity checks pass
            return 0.0 if args[0].is_floating_point() else 0
        if func is aten.nonzero.default:
            self.guess("how many elements it finds is not known before it runs; taken as the longest side")
            found = max(args[0].shape, default=1)
            return torch.zeros(found, args[0].dim(), dtype=torch.long, device=args[0].device)
        if func is aten.rand.default and not args[0]:
            # One number, drawn to leave out a layer by chance where it is below a rate. The plan is for all layers.
            return torch.tensor(1.0, dtype=kwargs.get("dtype"), device=kwargs.get("device"))
        if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # torch knows the shape of the result for bf16 alone; the kernel itself takes fp32 too.
            with self.paused():
                lowered = [arg.to(torch.bfloat16) for arg in args[:2]]
                shape = func(*lowered, *args[2:], **kwargs).shape
            return torch.empty(shape, dtype=args[0].dtype, device=args[0].device)
        return func(*args, **kwargs)

    def _book(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        self._count_flops(func, args, kwargs, result)
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, Tensor):
                self._count(item)
        attention = None if self._paused else AttentionCall.of(func, args, kwargs)
        if attention is not None:
            is_deterministic = torch.get_deterministic_debug_mode() == _RAISES
            hidden = attention.hidden_nbytes(args[0].device, is_deterministic=is_deterministic)
            self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes + hidden)

    def _count_flops(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Add the FLOPs of a call. A formula of torch's that fails costs figures of speed, and no plan."""
        try:
            self.num_flops += count_flops(func, args, kwargs, result)
        except Exception as error:
            reason = f"{func}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if reason not in self.uncounted:
                self.uncounted.append(reason)

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
