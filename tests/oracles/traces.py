"""Cache of traces. Most plans in tests trace the same model with the same arguments.

Tracing takes most of a tiny run's time. The cache key contains all inputs of a trace: the model's modules, code, config
and layouts, the arguments, torch's state, and the engine's globals. Tests of tracing itself trace directly, without the
cache. ``TRACED_ANEW`` in ``conftest.py`` lists tests that plan without the cache.

Unless a test has replaced code, names identify these inputs, and the processes of a pytest run share traces as files.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import operator
import os
import pickle
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_map_only

import megatrain.base
import megatrain.converters
import megatrain.engine
import megatrain.models
from megatrain.engine.program.visit_trace import VisitTrace
from megatrain.models.graph import ModelGraph
from megatrain.plan import traced

#: Environment variable with the folder of shared traces, which ``conftest.py`` creates and removes.
FOLDER = "KEPT_TRACES"
#: Trace by key, with the globals whose addresses are in the key. Holding the globals keeps the addresses unique.
_KEPT: dict[Any, tuple[VisitTrace, Sequence[Any]]] = {}
#: Packages whose globals affect traces, except a module with large tables for the import of other tools' configs.
_CODE = (megatrain.base, megatrain.converters, megatrain.engine, megatrain.models)
_OTHER = "megatrain.base.other_tools"


@contextmanager
def cached_traces() -> Iterator[None]:
    """Make plans reuse a trace if the model, the arguments and all relevant code are the same."""
    with mock.patch.object(traced, "trace_visits", keeping(traced.trace_visits)):
        yield


def keeping(trace: Callable[..., VisitTrace]) -> Callable[..., VisitTrace]:
    """Return a caching version of ``trace``."""
    return trace if is_keeping(trace) else functools.partial(_kept, trace)


def is_keeping(trace: Callable[..., VisitTrace]) -> bool:
    """Return whether a function is a result of ``keeping``."""
    return isinstance(trace, functools.partial) and trace.func is _kept


def _kept(trace: Callable[..., VisitTrace], graph: ModelGraph, *args: Any, **options: Any) -> VisitTrace:
    names_and_globals = list(_globals())
    given = (_text((args, sorted(options.items()))), _of_model(graph))
    key = (
        trace,
        *given,
        tuple(
            (name, value if isinstance(value, int | float | str) else id(value)) for name, value in names_and_globals
        ),
        *_of_forwards(graph),
        *_of_torch(),
    )
    if key not in _KEPT:
        make = functools.partial(trace, graph, *args, **options)
        try:
            named = [item for item in names_and_globals if not _is_state(*item)]
            text = _written((given, trace, tuple(_of_forwards(graph)), *_of_torch(), named))
        except _ReplacedError:
            made = make()
        else:
            made = _shared(text, make)
        _KEPT[key] = made, [value for _, value in names_and_globals]
    return _KEPT[key][0]


def _shared(text: str, make: Callable[[], VisitTrace]) -> VisitTrace:
    """Return the trace with this key text. If no process has stored it yet, make and store it."""
    if not os.environ.get(FOLDER):
        return make()
    path = Path(os.environ[FOLDER], hashlib.sha256(text.encode()).hexdigest())
    if path.exists():
        found: VisitTrace = pickle.loads(path.read_bytes())
        return found
    made = make()
    own = path.with_name(f"{path.name}.{os.getpid()}")
    own.write_bytes(pickle.dumps(made))
    own.replace(path)
    return made


def _is_state(name: str, value: Any) -> bool:
    """Return whether a global is independent of the code: the interpreter's state, or a cache."""
    return name.startswith("__") or (isinstance(value, dict) and name.islower())


class _ReplacedError(Exception):
    """Error for an object that has no stable name, because a test has replaced it."""


def _written(value: Any) -> str:
    """Return a string that identifies a value in every process. Raise ``_ReplacedError`` if that is impossible."""
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(map(_written, value.items())))}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_written, value))})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_written, value)))}}}"
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, types.BuiltinFunctionType):
        return value.__qualname__
    if isinstance(value, type | types.FunctionType | types.MethodType | functools._lru_cache_wrapper):
        return _name_of(value)
    if isinstance(value, functools.partial):
        return _written((value.func, value.args, value.keywords))
    text = repr(value)
    return text if " at 0x" not in text else f"a {_name_of(type(value))}"


def _name_of(value: Any) -> str:
    """Return the import path of a function or class. Raise ``_ReplacedError`` if the path leads to another object."""
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is not value and value.__module__ != "builtins":
        raise _ReplacedError
    return f"{value.__module__}:{value.__qualname__}"


def _text(given: Any) -> str:
    """Return arguments as text. A digest replaces the values of tensors, because ``repr`` would shorten them."""
    text = repr(tree_map_only(torch.Tensor, lambda tensor: (tensor.shape, tensor.dtype, _digest(tensor)), given))
    assert " at 0x" not in text, f"something else may be at an address later: {text}"
    return text


def _digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy()).hexdigest()


def _of_model(graph: ModelGraph) -> str:
    config = graph.model.config
    built = (config._attn_implementation, getattr(config, "_experts_implementation", None), graph.dtype)
    converters = [(type(converter), vars(converter)) for converter in graph.converters]
    parts = (graph.model, dict(graph.layouts), graph.units, graph.owner_names, converters, graph.optional_units)
    return f"{type(graph.model)} {config.to_json_string()} {_text((built, parts))}"


def _of_forwards(graph: ModelGraph) -> Iterator[Any]:
    """Yield the forward functions of the model's modules, because tests may replace them."""
    yield frozenset(type(module).forward for module in graph.model.modules())
    yield frozenset(module.__dict__["forward"] for module in graph.model.modules() if "forward" in module.__dict__)


def _globals() -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each global that affects traces, because tests may replace globals."""
    for name in _modules():
        yield from sorted(vars(sys.modules[name]).items(), key=operator.itemgetter(0))  # the order of imports varies


@functools.cache
def _modules() -> Sequence[str]:
    """Import all modules that affect traces, so that all processes see the same ones, and return their names."""
    names = [
        found.name for package in _CODE for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return sorted(set(names) & sys.modules.keys() - {_OTHER})


def _of_torch() -> Iterator[Any]:
    yield torch.get_deterministic_debug_mode()
    yield torch.get_default_dtype()
    cuda: Any = torch.backends.cuda
    yield cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    yield torch.cuda.is_available  # tests may replace it
