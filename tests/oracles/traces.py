"""Traces that are kept for plans of the same: most plans of the tests differ in anything but what the model computes.

A trace is most of a tiny run's time. What is kept is told apart by all that it depends on: the model's modules, their
code, its config and layouts, what the trace is given, the state of torch, and the globals of the engine, which tests
change. Tests of the trace itself call it; see ``TRACED_ANEW`` in ``conftest.py`` for those that plan.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_map_only

from megatrain.engine.program import VisitTrace
from megatrain.models.graph import ModelGraph
from megatrain.plan import planner

#: Key -> trace, and the globals that the key has addresses of: while they live, nothing else is there.
_KEPT: dict[Any, tuple[VisitTrace, Sequence[Any]]] = {}
#: Packages whose globals decide what is traced.
_CODE = ("megatrain.base.", "megatrain.converters.", "megatrain.engine.", "megatrain.models.")


@contextmanager
def traces_kept() -> Iterator[None]:
    """Have plans take the trace of an earlier one where the model, its rows and all that computes them are the same."""
    with mock.patch.object(planner, "trace_visits", keeping(planner.trace_visits)):
        yield


def keeping(trace: Callable[..., VisitTrace]) -> Callable[..., VisitTrace]:
    """Return what gives the traces of ``trace``, each made once."""
    return trace if is_keeping(trace) else functools.partial(_kept, trace)


def is_keeping(trace: Callable[..., VisitTrace]) -> bool:
    """Return whether this came from ``keeping``."""
    return isinstance(trace, functools.partial) and trace.func is _kept


def _kept(trace: Callable[..., VisitTrace], graph: ModelGraph, *args: Any, **options: Any) -> VisitTrace:
    names_and_globals = list(_globals())
    key = (
        trace,
        _text((args, sorted(options.items()))),
        _of_model(graph),
        tuple(
            (name, value if isinstance(value, int | float | str) else id(value)) for name, value in names_and_globals
        ),
        *_of_forwards(graph),
        *_of_torch(),
    )
    if key not in _KEPT:
        _KEPT[key] = trace(graph, *args, **options), [value for _, value in names_and_globals]
    return _KEPT[key][0]


def _text(given: Any) -> str:
    """Write arguments out; tensors in full, which ``repr`` shortens."""
    text = repr(tree_map_only(torch.Tensor, lambda tensor: (tensor.shape, tensor.dtype, tensor.tolist()), given))
    assert " at 0x" not in text, f"something else may be at an address later: {text}"
    return text


def _of_model(graph: ModelGraph) -> str:
    config = graph.model.config
    built = (config._attn_implementation, getattr(config, "_experts_implementation", None), graph.dtype)
    converters = [(type(converter), vars(converter)) for converter in graph.converters]
    parts = (graph.model, dict(graph.layouts), graph.units, graph.owner_of, converters, graph.optional_units)
    return f"{type(graph.model)} {config.to_json_string()} {_text((built, parts))}"


def _of_forwards(graph: ModelGraph) -> Iterator[Any]:
    """Yield the functions that compute the model, which tests replace."""
    yield frozenset(type(module).forward for module in graph.model.modules())
    yield frozenset(module.__dict__["forward"] for module in graph.model.modules() if "forward" in module.__dict__)


def _globals() -> Iterator[tuple[str, Any]]:
    """Yield what the modules of the engine hold, by name; tests replace it."""
    for name, module in sorted(sys.modules.items()):
        if name.startswith(_CODE):
            yield from vars(module).items()


def _of_torch() -> Iterator[Any]:
    yield torch.get_deterministic_debug_mode()
    yield torch.get_default_dtype()
    cuda: Any = torch.backends.cuda
    yield cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    yield torch.cuda.is_available  # tests replace it
