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
_SHAPE_ONLY = frozenset(
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
ProductFunction = Callable[[str, Any, tuple[Any, ...], Mapping[str, Any]], Any]


def without_values(owners: Mapping[int, str]) -> AbstractContextManager[Any]:
    """Return a context in which matmuls with some weights are skipped and return NaN.

    Args:
        owners: Names of the bound weights, by id.
    """

    def fill_nan(owner: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        left, right = args[1:3] if func in _WITH_SUMMAND else args[:2]
        result: Tensor = left.new_full((*left.shape[:-1], right.shape[-1]), torch.nan)
        return result

    return WeightProducts(owners, fill_nan)


class ProductUses:
    """Tracker that finds which matmuls with weights are needed, in one run of a unit on fake tensors.

    Args:
        owners: Names of the bound weights, by id.
        count_flops: Function that returns the FLOPs of a call, given the operator, its arguments and its result.
    """

    def __init__(
        self, owners: Mapping[int, str], count_flops: Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], int]
    ) -> None:
        self._owners, self._count_flops = owners, count_flops
        self._work: dict[str, Work] = {}
        self._needed_owners: set[str] = set()
        self._live_storages: set[int] = set()  # storages that the run created and that still exist
        self._dependencies: dict[int, set[str]] = {}  # storage -> owners whose products it depends on
        self._saved_storages: set[int] = set()

    @contextmanager
    def track(self) -> Iterator[None]:
        """Track all code that runs within the context."""
        with _OperatorHook(self._track_operator), WeightProducts(self._owners, self._record_product):
            yield

    def record_saved(self, tensor: Tensor) -> None:
        """Record a tensor that autograd saves."""
        self._saved_storages.add(_storage_key(tensor))

    def record_launch(self, tensors: Iterable[Tensor]) -> None:
        """Record a kernel launch that is not an operator. After it, any of its tensors may depend on all others."""
        keys = [_storage_key(tensor) for tensor in tensors]
        owners = set[str]().union(*(self._dependencies.get(key, ()) for key in keys))
        for key in keys if owners else ():
            self._dependencies.setdefault(key, set()).update(owners)

    def find_unneeded(self, results: Iterable[Tensor]) -> SkippedProducts:
        """Return the matmuls whose results are needed neither by a gradient nor by code after the run.

        Args:
            results: Results of the run. The rest of the model has separate copies, from the first run.
        """
        result_keys = {_storage_key(tensor) for tensor in results} - self._saved_storages
        needed = self._needed_owners.union(
            *(self._dependencies[key] for key in self._dependencies.keys() - result_keys)
        )
        weights = frozenset(self._work.keys() - needed)
        return SkippedProducts(weights, sum((self._work[name] for name in sorted(weights)), NO_WORK))

    def _record_product(self, owner: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        result: Tensor = func(*args, **kwargs)
        # If the matmul is skipped, a fill replaces it, so the number of launches stays the same.
        filled_nbytes = result.numel() * result.element_size()
        work = Work(product_flops=self._count_flops(func, args, kwargs, result), moved_nbytes=-filled_nbytes)
        self._work[owner] = self._work.get(owner, NO_WORK) + work
        self._dependencies.setdefault(_storage_key(result), set()).add(owner)
        return result

    def _track_operator(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        inputs = _tensors((args, kwargs))
        input_keys = {_storage_key(tensor) for tensor in inputs}
        owners = set[str]().union(*(self._dependencies.get(key, ()) for key in input_keys))
        result = func(*args, **kwargs)
        results = _tensors(result)
        for tensor in results:
            if (key := _storage_key(tensor)) not in input_keys and key not in self._live_storages:
                self._live_storages.add(key)
                weakref.finalize(tensor.untyped_storage(), self._forget_storage, key)
        if not owners or getattr(func, "_overloadpacket", None) in _SHAPE_ONLY:
            return result
        changed_keys = set(map(_storage_key, changed_arguments(func, args, kwargs)))
        if not results or _is_random(func) or not changed_keys <= self._live_storages:
            self._needed_owners |= owners
        for key in changed_keys.union(map(_storage_key, results)):
            self._dependencies.setdefault(key, set()).update(owners)
        return result

    def _forget_storage(self, key: int) -> None:
        self._live_storages.discard(key)
        self._saved_storages.discard(key)  # a new storage can get the same address
        self._dependencies.pop(key, None)


class WeightProducts(TorchFunctionMode):
    """Mode that routes a matmul to ``function`` if it runs within a torch function that is called with a weight.

    Only operators within such functions are dispatched through Python, because each dispatch takes time.
    """

    def __init__(self, owners: Mapping[int, str], function: ProductFunction) -> None:
        super().__init__()
        self._owners, self._function = owners, function

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        owner = next((name for item in (*args, *kwargs.values()) if (name := self._find_owner(item))), None)
        if owner is None:
            return func(*args, **kwargs)
        with _Products(partial(self._function, owner)):
            return func(*args, **kwargs)

    def _find_owner(self, item: Any) -> str | None:
        """Return the weight's name if ``item`` is a weight or a view of one; None for vectors and other values."""
        if not isinstance(item, Tensor):
            return None
        name = self._owners.get(id(item)) or self._owners.get(id(item._base))
        return name if name is not None and item.dim() > 1 else None


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that routes matmuls to ``function``."""

    def __init__(self, function: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._function = function

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        return self._function(func, args, kwargs or {})


class _OperatorHook(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that routes all operators to ``function``."""

    def __init__(self, function: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._function = function

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._function(func, args, kwargs or {})


def changed_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that an operator changes in place."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    arguments = {parameter.name: arg for parameter, arg in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    aliases = {parameter.name: parameter.alias_info for parameter in schema.arguments}
    changed_names = {name for name, alias in aliases.items() if alias is not None and alias.is_write}
    return [tensor for name, arg in arguments.items() if name in changed_names for tensor in _tensors(arg)]


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def _storage_key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
