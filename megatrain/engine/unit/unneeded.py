"""Matmuls that a unit's recompute skips, because no gradient needs their results.

A unit runs again in its backward to restore the tensors that autograd saves. The result of a layer's last matmul is
rarely among these tensors. It is added to the residual stream, and the gradient of an addition needs no values. The
next unit has saved a copy of the sum. If a norm follows, however, the result is needed. Whether it is needed therefore
depends on the graph, not on the model family.

The trace finds unneeded matmuls. `ProductUses` tracks which tensors depend on each matmul with a bound weight, in a run
on fake tensors. A matmul is needed if autograd saves a dependent tensor. It is also needed if a dependent tensor
outlives the run, changes an earlier tensor, affects random numbers or is read on the host. `without_values` runs a unit
with NaN instead of the results of unneeded matmuls. A mistake then makes every gradient NaN and stops the run, instead
of changing results slightly.

docs/decisions/0080-products-that-nobody-needs.md
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatrain.engine.device.work import NO_WORK, SkippedProducts, Work

_ATEN = torch.ops.aten
_WITH_SUMMAND = frozenset({_ATEN.addmm.default, _ATEN.baddbmm.default})
_PRODUCTS = frozenset({_ATEN.mm.default, _ATEN.bmm.default, _ATEN._grouped_mm.default}) | _WITH_SUMMAND
#: Operators that read only the shape of their input.
_SHAPE_ALONE = frozenset(
    {
        _ATEN.empty_like,
        _ATEN.new_empty,
        _ATEN.new_empty_strided,
        _ATEN.zeros_like,
        _ATEN.ones_like,
        _ATEN.full_like,
        _ATEN.new_zeros,
        _ATEN.new_ones,
        _ATEN.new_full,
        torch.ops.prim.device,
    }
)


#: Function that returns the result of a call, given the weight's name, the operator and the operator's arguments.
Answer = Callable[[str, Any, tuple[Any, ...], Mapping[str, Any]], Any]


def without_values(owners: Mapping[int, str]) -> AbstractContextManager[Any]:
    """Return a context in which matmuls with some weights are skipped and return NaN.

    Args:
        owners: Names of the bound weights, by id.
    """

    def answer(owner: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        left, right = args[1:3] if func in _WITH_SUMMAND else args[:2]
        result: Tensor = left.new_full((*left.shape[:-1], right.shape[-1]), torch.nan)
        return result

    return WeightProducts(owners, answer)


class ProductUses:
    """Tracker that finds which matmuls with weights are needed, in one run of a unit on fake tensors.

    Args:
        owners: Names of the bound weights, by id.
        flops_of: Function that returns the FLOPs of a call, given the operator, its arguments and its result.
    """

    def __init__(
        self,
        owners: Mapping[int, str],
        flops_of: Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], int],
    ) -> None:
        self._owners, self._flops_of = owners, flops_of
        self._work: dict[str, Work] = {}
        self._needed: set[str] = set()
        self._made: set[int] = set()  # live storages of the run
        self._depends: dict[int, set[str]] = {}  # storage -> owners whose products it depends on
        self._saved: set[int] = set()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Track all code that runs within the context."""
        with _OperatorHook(self._follow), WeightProducts(self._owners, self._product):
            yield

    def record_saved(self, tensor: Tensor) -> None:
        """Record a tensor that autograd saves."""
        self._saved.add(_storage(tensor))

    def record_launch(self, tensors: Iterable[Tensor]) -> None:
        """Record a kernel launch that is not an operator. After it, any of its tensors may depend on all others."""
        keys = [_storage(tensor) for tensor in tensors]
        owners = set[str]().union(*(self._depends.get(key, ()) for key in keys))
        for key in keys if owners else ():
            self._depends.setdefault(key, set()).update(owners)

    def unneeded(self, results: Iterable[Tensor]) -> SkippedProducts:
        """Return the matmuls whose results are needed neither by a gradient nor by code after the run.

        Args:
            results: Results of the run. The rest of the model has separate copies, from the first run.
        """
        returned = {_storage(tensor) for tensor in results} - self._saved
        needed = self._needed.union(*(owners for key, owners in self._depends.items() if key not in returned))
        weights = frozenset(self._work.keys() - needed)
        return SkippedProducts(weights, sum((self._work[name] for name in sorted(weights)), NO_WORK))

    def _product(self, owner: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        result: Tensor = func(*args, **kwargs)
        # A fill replaces the matmul, so the number of launches stays the same.
        filled_nbytes = result.numel() * result.element_size()
        work = Work(product_flops=self._flops_of(func, args, kwargs, result), moved_nbytes=-filled_nbytes)
        self._work[owner] = self._work.get(owner, NO_WORK) + work
        self._depends.setdefault(_storage(result), set()).add(owner)
        return result

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        inputs = _tensors((args, kwargs))
        before = {_storage(tensor) for tensor in inputs}
        owners = set[str]().union(*(self._depends.get(key, ()) for key in before))
        result = func(*args, **kwargs)
        results = _tensors(result)
        for tensor in results:
            if (key := _storage(tensor)) not in before and key not in self._made:
                self._made.add(key)
                weakref.finalize(tensor.untyped_storage(), self._forget, key)
        if not owners or getattr(func, "_overloadpacket", None) in _SHAPE_ALONE:
            return result
        changed = changed_arguments(func, args, kwargs)
        if not results or _draws_random_numbers(func) or any(_storage(tensor) not in self._made for tensor in changed):
            self._needed |= owners
        for tensor in (*results, *changed):
            self._depends.setdefault(_storage(tensor), set()).update(owners)
        return result

    def _forget(self, key: int) -> None:
        self._made.discard(key)
        self._saved.discard(key)  # the next storage at this address is a different one
        self._depends.pop(key, None)


class WeightProducts(TorchFunctionMode):
    """Mode that routes a matmul to ``answer`` if it runs within a torch function that is called with a weight.

    Only operators within such functions are dispatched through Python, because each dispatch takes time.
    """

    def __init__(self, owners: Mapping[int, str], answer: Answer) -> None:
        super().__init__()
        self._owners, self._answer = owners, answer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        owner = next((name for item in (*args, *kwargs.values()) if (name := self._owner_of(item))), None)
        if owner is None:
            return func(*args, **kwargs)
        with _Products(partial(self._answer, owner)):
            return func(*args, **kwargs)

    def _owner_of(self, item: Any) -> str | None:
        """Return the weight's name if ``item`` is a weight or a view of one; None for vectors and other values."""
        if not isinstance(item, Tensor):
            return None
        name = self._owners.get(id(item)) or self._owners.get(id(item._base))
        return name if name is not None and item.dim() > 1 else None


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that routes matmuls to ``answer``."""

    def __init__(self, answer: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answer = answer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        return self._answer(func, args, kwargs or {})


class _OperatorHook(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that routes all operators to ``follow``."""

    def __init__(self, follow: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._follow = follow

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._follow(func, args, kwargs or {})


def changed_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that an operator changes in place."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = {of.name: arg for of, arg in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    written = {of.name for of in schema.arguments if of.alias_info is not None and of.alias_info.is_write}
    return [tensor for name, arg in given.items() if name in written for tensor in _tensors(arg)]


def _draws_random_numbers(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def _storage(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
