"""Work of Triton kernels that other packages launch, counted in a trace, which has no device to run them on.

A kernel reads a tensor if its source loads through the argument, and writes it if it stores through it, once each.
Repeated reads by several programs of a launch, such as the weight of a norm, hit a cache.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

from torch import Tensor

from megatrain.engine.work import Work

#: Functions of Triton's language -> number of accesses to the memory behind their pointer.
_ACCESSES = {"load": 1, "store": 1, "atomic_add": 2, "atomic_max": 2, "atomic_min": 2, "atomic_cas": 2}


@contextmanager
def kernels_counted(book: Callable[[Work, str, Sequence[Tensor]], None]) -> Iterator[None]:
    """Report the work of each launch of a Triton kernel on fake tensors to `book`, and launch nothing.

    `book` also gets a note about uncounted work, or "", because the size of a kernel's products is unknown. And it gets
    the tensors among the arguments, some of which may depend on the others afterwards.

    The setting is process-wide: launches on real tensors continue. The output of a counted kernel stays without values,
    like all fake tensors.
    """
    if "triton" not in sys.modules:  # then no kernel exists
        yield
        return
    from torch._subclasses.fake_tensor import FakeTensor
    from triton.runtime.jit import KernelInterface

    launching = KernelInterface.__getitem__

    def counting(kernel: Any, grid: Any) -> Callable[..., Any]:
        launch = launching(kernel, grid)

        def count(*args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(value, FakeTensor) for value in (*args, *kwargs.values())):
                return launch(*args, **kwargs)
            function = _function_of(kernel)
            name = f"kernel {function.__name__}: its products are not counted"
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            book(_work_of(function, args, kwargs), name if has_products(function) else "", tensors)
            return None

        return count

    KernelInterface.__getitem__ = counting
    try:
        yield
    finally:
        KernelInterface.__getitem__ = launching


def _function_of(kernel: Any) -> FunctionType:
    function = kernel
    while not inspect.isfunction(function):  # autotuners and heuristics wrap a kernel, and each other
        function = function.fn
    return function


def _work_of(function: FunctionType, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work:
    parameters = inspect.signature(function).parameters
    given = dict(zip(parameters, args, strict=False)) | {name: kwargs[name] for name in kwargs.keys() & parameters}
    times = accesses(function)
    nbytes = sum(
        max(1, times.get(name, 0)) * value.numel() * value.itemsize
        for name, value in given.items()
        if isinstance(value, Tensor)
    )
    return Work(moved_nbytes=nbytes, launches=1)


def _tree_of(function: Callable[..., Any]) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return None


@cache
def has_products(function: Callable[..., Any]) -> bool:
    """Return whether a kernel itself multiplies matrices, by its source."""
    tree = _tree_of(function)
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} if tree is not None else set()
    return bool(names & {"dot", "dot_scaled"})


@cache
def accesses(function: Callable[..., Any]) -> Mapping[str, int]:
    """Return a kernel's accesses to the memory behind each argument: 1 for reading or writing it, 2 for both.

    Pointers are followed through sums and assignments in the kernel itself. Accesses by functions that it calls do not
    count. Without source, the result is empty.
    """
    tree = _tree_of(function)
    if tree is None:
        return {}
    sources: dict[str, set[str]] = {name: {name} for name in inspect.signature(function).parameters}
    found: dict[str, set[str]] = {}

    def behind(node: ast.AST) -> set[str]:
        """Return the arguments that an address is made of, without arguments that it was loaded from."""
        if isinstance(node, ast.Call):
            return set()
        own = sources.get(node.id, set()) if isinstance(node, ast.Name) else set()
        return own.union(*(behind(child) for child in ast.iter_child_nodes(node)))

    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AugAssign | ast.Call)]
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            for argument in behind(node.args[0]) if name in _ACCESSES and node.args else ():
                found.setdefault(argument, set()).add(name)
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                sources[target.id] = behind(node.value) | (
                    sources.get(target.id, set()) if isinstance(node, ast.AugAssign) else set()
                )
    return {name: min(2, sum(_ACCESSES[one] for one in names)) for name, names in found.items()}
