"""Work estimates for other packages' Triton kernels, which a trace cannot launch.

If a kernel's source loads through a pointer argument, the kernel counts as reading the tensor once. If the source
stores through the argument, it counts as writing the tensor once. Repeated reads are not counted, because they hit a
cache. An example is a norm's weight, which several programs read.
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

from megatrain.engine.device.work import Work

#: Number of accesses through a pointer, by function of Triton's language.
_ACCESSES = {"load": 1, "store": 1, "atomic_add": 2, "atomic_max": 2, "atomic_min": 2, "atomic_cas": 2}


@contextmanager
def count_kernel_launches(record: Callable[[Work, str, Sequence[Tensor]], None]) -> Iterator[None]:
    """Within the context, call `record` instead of launching Triton kernels on fake tensors.

    `record` gets the work, a note about uncounted work or "", and the tensors among the arguments. Any of these tensors
    can depend on the others after the launch. Matmuls in a kernel are not counted, because their size is unknown.

    The setting is process-wide. Launches on real tensors are unaffected.
    """
    if "triton" not in sys.modules:  # no kernel can exist before triton is imported
        yield
        return
    from torch._subclasses.fake_tensor import FakeTensor
    from triton.runtime.jit import KernelInterface

    get_launcher = KernelInterface.__getitem__

    def get_counting_launcher(kernel: Any, grid: Any) -> Callable[..., Any]:
        launch = get_launcher(kernel, grid)

        def launch_or_count(*args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(value, FakeTensor) for value in (*args, *kwargs.values())):
                return launch(*args, **kwargs)
            function = _unwrap_kernel(kernel)
            name = f"kernel {function.__name__}: its products are not counted"
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            record(_estimate_work(function, args, kwargs), name if has_products(function) else "", tensors)
            return None

        return launch_or_count

    KernelInterface.__getitem__ = get_counting_launcher
    try:
        yield
    finally:
        KernelInterface.__getitem__ = get_launcher


def _unwrap_kernel(kernel: Any) -> FunctionType:
    function = kernel
    while not inspect.isfunction(function):  # autotuners and heuristics wrap a kernel
        function = function.fn
    return function


def _estimate_work(function: FunctionType, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work:
    parameters = inspect.signature(function).parameters
    arguments = dict(zip(parameters, args, strict=False)) | {name: kwargs[name] for name in kwargs.keys() & parameters}
    num_accesses = count_accesses(function)
    nbytes = sum(
        max(1, num_accesses.get(name, 0)) * value.numel() * value.itemsize
        for name, value in arguments.items()
        if isinstance(value, Tensor)
    )
    return Work(moved_nbytes=nbytes, launches=1)


def _parse_source(function: Callable[..., Any]) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return None


@cache
def has_products(function: Callable[..., Any]) -> bool:
    """Return whether a kernel's source contains matmuls."""
    tree = _parse_source(function)
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} if tree is not None else set()
    return bool(names & {"dot", "dot_scaled"})


@cache
def count_accesses(function: Callable[..., Any]) -> Mapping[str, int]:
    """Return how often a kernel accesses the tensor behind each argument: 1 for a read or a write, 2 for both.

    Pointers are tracked through sums and assignments in the kernel, but not into functions that the kernel calls. The
    result is empty if the source is not available.
    """
    tree = _parse_source(function)
    if tree is None:
        return {}
    sources: dict[str, set[str]] = {name: {name} for name in inspect.signature(function).parameters}
    kinds: dict[str, set[str]] = {}

    def base_arguments(node: ast.AST) -> set[str]:
        """Return the arguments from which an address is computed, not counting addresses that are loaded."""
        if isinstance(node, ast.Call):
            return set()
        arguments = sources.get(node.id, set()) if isinstance(node, ast.Name) else set()
        return arguments.union(*(base_arguments(child) for child in ast.iter_child_nodes(node)))

    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AugAssign | ast.Call)]
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            for argument in base_arguments(node.args[0]) if name in _ACCESSES and node.args else ():
                kinds.setdefault(argument, set()).add(name)
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                sources[target.id] = base_arguments(node.value) | (
                    sources.get(target.id, set()) if isinstance(node, ast.AugAssign) else set()
                )
    return {name: min(2, sum(_ACCESSES[access] for access in names)) for name, names in kinds.items()}
