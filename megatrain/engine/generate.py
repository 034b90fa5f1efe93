"""Generation with streamed weights: transformers' own ``generate``, suspended at every unit of every forward.

All micro-batches generate in lockstep, each in a separate greenlet (``suspend.py``). Each pass over the units generates
one token for every prompt, and fetches each weight only once. Between passes, each layer's cache tensors are stored in
blocks, and the layer's visit loads them into the cache. The tokens are the same as from a plain ``generate``, because
masks, cache and sampling order are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megatrain.base.errors import UnsupportedModelError
from megatrain.engine.forward import move_buffers
from megatrain.engine.lockstep import RepeatedPasses, Stop, run_in_lockstep
from megatrain.engine.program.block_access import MatrixParts, WeightAccess
from megatrain.engine.program.visit_trace import VisitTrace
from megatrain.engine.unit.absent_weights import placeholder
from megatrain.engine.unit.bound_unit import BoundUnit, read_containers, stub_units
from megatrain.engine.unit.idle import RoutedWeights
from megatrain.engine.unit.state import RandomStates
from megatrain.engine.unit.suspend import SuspendedForward

if TYPE_CHECKING:
    from megatrain.models.graph import ModelGraph, Unit


_ALIGNMENT_BYTES = 64


class GenerationAccess(WeightAccess, Protocol):
    """Interface through which the running model requests blocks while it generates."""

    def cache_block(self, visit: int, micro_batch: int) -> AbstractContextManager[Tensor | None]:
        """Lease the cache block of a visit and micro-batch, uint8 [N]. Yield None if the visit caches nothing."""


class GenerationRunner:
    """Runner that executes several functions in lockstep, each of which calls a model's forward repeatedly.

    Args:
        bounds: All units, in order, with slots for their weights; None to create them.
        trace: Planned visits to compare each forward with; None for no comparison.
        num_micro_batches: Planned number of micro-batches. All planned cache blocks are leased, even if fewer run.
        any_rank: See ``RepeatedPasses``.

    Attributes:
        kept_nbytes: Bytes of the first micro-batch's cache at the end of the last run, by visit.
    """

    def __init__(
        self,
        graph: ModelGraph,
        access: GenerationAccess,
        *,
        device: torch.device,
        bounds: Sequence[BoundUnit] | None = None,
        trace: VisitTrace | None = None,
        num_micro_batches: int = 0,
        any_rank: Callable[[bool], bool] | None = None,
    ) -> None:
        self._graph, self._access, self._device = graph, access, device
        self._any_rank = any_rank
        self._num_micro_batches = num_micro_batches
        move_buffers(graph.model, device)
        self._bounds = list(bounds) if bounds is not None else [BoundUnit(unit, device) for unit in graph.units]
        self._trace = trace
        self._random = RandomStates(device)
        self._whole_weights: dict[str, Tensor] = {}
        self.kept_nbytes: dict[int, int] = {}

    def run(
        self,
        functions: Sequence[Callable[[], Any]],
        caches: Sequence[Any],
        seeds: Sequence[int],
        on_pass: Callable[[int], None] = lambda number: None,
    ) -> list[Any]:
        """Run functions to completion in eval mode, and return their results.

        Args:
            functions: Functions that call the graph's model any number of times, for example its ``generate``. There is
                one function per micro-batch.
            caches: Transformers caches that the functions pass to the model.
            seeds: Seed of each function's random stream.
            on_pass: Function called before each pass over the units, with the number of the pass.

        Raises:
            VisitOrderError: If functions reach different units, or units that differ from the plan.
            UnsupportedModelError: If a visit stores tensors in the cache although no block was planned for them.
        """
        model, random_state = self._graph.model, self._random.get()
        model.eval()
        kept_caches = [_KeptCache(cache) for cache in caches]
        forwards: list[SuspendedForward] = []
        passes = RepeatedPasses(self._graph, self._trace, self._any_rank, on_pass)
        try:
            with torch.no_grad(), self._prepare():
                for index, (function, seed) in enumerate(zip(functions, seeds, strict=True)):
                    wrapper = _ignoring_argument(function)
                    forwards.append(SuspendedForward(index, wrapper, self._random, self._device, seed))
                on_pass(0)
                run_in_lockstep(forwards, passes, lambda stop: self._visit(stop, forwards, kept_caches))
        finally:
            model.train()
            self._random.set(random_state)
            self._whole_weights.clear()
        self.kept_nbytes = kept_caches[0].nbytes if kept_caches else {}
        return [forward.result for forward in forwards]

    def _visit(
        self, stop: Stop, forwards: Sequence[SuspendedForward], caches: Sequence[_KeptCache]
    ) -> list[Callable[[], Any]]:
        """Run a unit for every waiting forward. Return one function per call, which returns the call's result."""
        visit, bound = stop.index, self._bounds[stop.unit]
        self._access.begin("forward", visit)
        results: list[Callable[[], Any]] = []
        calls = [forward.call for forward in stop.forwards if forward.call is not None]
        if not calls:  # all prompts of this process have ended, but other processes continue
            with self._access.weights(bound.unit, visit):
                for index in range(max(len(forwards), self._num_micro_batches)):
                    with self._access.cache_block(visit, index):
                        pass
            return []
        routed_weights = RoutedWeights(bound, visit, self._access)
        routed_weights.record_calls(calls)
        with routed_weights.lease() as weights, bound.bind(self._with_whole_head(bound.unit, weights)):
            bound.look_up(calls)
            call_index = 0
            for forward, cache in zip(forwards, caches, strict=True):
                # Also lease the blocks of forwards that have ended, because a pass must take every lease on its tape.
                with self._access.cache_block(visit, forward.micro_batch) as block:
                    if forward.call is None:
                        continue
                    bound.rows.call_index, call_index = call_index, call_index + 1
                    with cache.load(visit, block), forward.modes.apply():
                        self._random.set(forward.random_state)
                        value = bound.call(forward.call)
                        forward.random_state = self._random.get()
                    results.append(_constant_function(value))
            for slot in range(len(forwards), self._num_micro_batches):
                with self._access.cache_block(visit, slot):
                    pass
        return results

    def _with_whole_head(
        self, unit: Unit, weights: Mapping[str, Tensor | MatrixParts]
    ) -> Mapping[str, Tensor | MatrixParts]:
        """Return the weights to bind. Only the head needs whole weights, so its parts are copied into one tensor."""
        if unit.module is not self._graph.model.get_output_embeddings():
            return weights
        return {name: self._whole_weight(name, weight) for name, weight in weights.items()}

    def _whole_weight(self, name: str, weight: Tensor | MatrixParts) -> Tensor:
        if isinstance(weight, Tensor):
            return weight
        buffer = self._whole_weights.get(name)  # all passes share one buffer
        for index, rows in enumerate(weight.rows):
            with weight.part(index) as part:
                if buffer is None:
                    buffer = self._whole_weights[name] = part.new_empty(weight.shape)
                buffer[rows.start : rows.stop].copy_(part)
        assert buffer is not None, name
        return buffer

    @contextmanager
    def _prepare(self) -> Iterator[None]:
        """Install placeholders and stubs within the context. Model forwards first read the containers' parameters."""
        model, units = self._graph.model, self._graph.units
        forward = model.forward

        def load_containers(*args: Any, **kwargs: Any) -> Any:
            for parameters, leaf, value in read_containers(units):
                parameters[leaf] = value
            return forward(*args, **kwargs)

        has_containers = any(unit.is_container for unit in units)
        with stub_units(self._bounds, {model: load_containers} if has_containers else {}):
            yield


def _ignoring_argument(function: Callable[[], Any]) -> Callable[[SuspendedForward], Any]:
    return lambda forward: function()


def _constant_function(value: Any) -> Callable[[], Any]:
    return lambda: value


@dataclass(frozen=True, slots=True)
class _CacheTensor:
    """Cache tensor that is stored in a block. Its place in the cache is ``holder[key]``."""

    holder: Any
    key: Any
    shape: torch.Size
    dtype: torch.dtype
    start: int


class _KeptCache:
    """Transformers cache whose tensors are stored in one block per visit and replaced by placeholders in the cache.

    Args:
        cache: Cache whose layers contain tensors, or lists and dicts of tensors.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._tensors_by_visit: dict[int, list[_CacheTensor]] = {}
        self._placeholder_ids: set[int] = set()  # ids of the placeholders that the cache contains now

    @property
    def nbytes(self) -> dict[int, int]:
        """Bytes that each visit's block currently needs, by visit."""
        last_tensors = {visit: tensors[-1] for visit, tensors in self._tensors_by_visit.items() if tensors}
        return {visit: t.start + align(t.shape.numel() * t.dtype.itemsize) for visit, t in last_tensors.items()}

    @contextmanager
    def load(self, visit: int, block: Tensor | None) -> Iterator[None]:
        """Load a visit's tensors from ``block`` into the cache. On exit, move the cache's tensors back to ``block``."""
        for entry in self._tensors_by_visit.get(visit, ()):
            assert block is not None, visit
            nbytes = entry.shape.numel() * entry.dtype.itemsize
            self._placeholder_ids.discard(id(entry.holder[entry.key]))
            entry.holder[entry.key] = block[entry.start : entry.start + nbytes].view(entry.dtype).view(entry.shape)
        yield
        slots = [slot for slot in _cache_tensors(self._cache) if id(slot[0][slot[1]]) not in self._placeholder_ids]
        if block is None and any(holder[key].numel() for holder, key in slots):
            raise UnsupportedModelError(
                "the model", f"visit {visit} stores a tensor in the cache, which it did not do in other forwards"
            )
        if block is None:
            return
        tensors = [holder[key] for holder, key in slots]
        # An unchanged tensor is still a view of the block. Clone it first, because its place in the block may change.
        tensors = [entry.clone() if _shares_memory(entry, block) else entry for entry in tensors]
        entries, start = [], 0
        for (holder, key), tensor in zip(slots, tensors, strict=True):
            nbytes = tensor.numel() * tensor.element_size()
            assert start + nbytes <= len(block), f"visit {visit}: the cache is larger than planned"
            block[start : start + nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
            entries.append(_CacheTensor(holder, key, tensor.shape, tensor.dtype, start))
            holder[key] = placeholder(tensor.shape, tensor.dtype, tensor.device)
            self._placeholder_ids.add(id(holder[key]))
            start += align(nbytes)
        self._tensors_by_visit[visit] = entries


def align(nbytes: int) -> int:
    """Round a tensor's size up to the alignment of tensors in a block."""
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _shares_memory(tensor: Tensor, block: Tensor) -> bool:
    return bool(tensor.untyped_storage()._cdata == block.untyped_storage()._cdata)


def _cache_tensors(cache: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (holder, key) for every floating-point tensor in a cache. Other tensors are small and stay in the cache."""
    for layer in cache.layers:
        yield from _cache_tensors_in(vars(layer))


def _cache_tensors_in(holder: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        if isinstance(value, Tensor):
            if value.is_floating_point():
                yield holder, key
        elif isinstance(value, dict | list):
            yield from _cache_tensors_in(value)
