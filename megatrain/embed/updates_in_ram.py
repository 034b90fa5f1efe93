"""Updates and gradient norms of ordinary parameters. One kernel call processes many small parameters in RAM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from megatrain.embed.groups import GroupUpdate, Settings, StateGroup
from megatrain.embed.ordinary_groups import OrdinaryGradients, OrdinaryGroup
from megatrain.optim.average import WeightAverage
from megatrain.optim.base import GRADIENT_DTYPES, Segment, Update
from megatrain.optim.clip import squared_norms
from megatrain.optim.elementwise import ElementwiseOptimizer
from megatrain.optim.threads import KernelThreads, elements_per_call, group_calls


@dataclass(slots=True)
class _Batch:
    """Parameters that one kernel call can update. The lists have one entry per parameter.

    Attributes:
        split_master: Whether masters have a low half.
    """

    settings: Settings
    split_master: bool
    gradient_dtype: torch.dtype
    names: list[tuple[OrdinaryGroup, str]] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class _KernelTable:
    """Kernel arguments of a batch, one row of addresses per range. They are valid while no tensor moves.

    Attributes:
        cache_key: All values on which the rows depend, to detect changes.
        rows: Kernel arguments: one column per address, and one for the size. Each step fills in gradient addresses.
        parameter_index: Index of each row's parameter.
        offsets: Index of each row's first element in its parameter.
        calls: Rows (first, stop) of each kernel call.
    """

    cache_key: tuple[object, ...]
    rows: npt.NDArray[np.int64]
    parameter_index: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    calls: list[tuple[int, int]]


class OrdinaryUpdates:
    """Updater for ordinary groups, which batches the updates of groups whose tensors are all in RAM.

    One kernel call updates many small parameters, which keeps all threads busy at little cost per parameter. Addresses
    are collected again only after a tensor has moved. Results are bit-identical to ``OrdinaryGroup.update``.
    """

    def __init__(self, threads: KernelThreads) -> None:
        self._threads = threads
        self._tables: dict[int, _KernelTable] = {}

    def apply(self, updates: Mapping[OrdinaryGroup, GroupUpdate]) -> None:
        """Apply batched updates, then all others one group at a time. Each time, prefetch the next group's state."""
        groups, batches = _batch_updates(updates)
        if groups:
            store, grad_scale = groups[0].store, updates[groups[0]].grad_scale
            requests: list[Any] = [(key, "ram", "rw") for group in groups for key in group.state.keys.values()]
            with torch.no_grad(), store.acquire_many(requests) as leases:
                tensors = {lease.key: lease.tensor for lease in leases}
                addresses = {key: tensor.data_ptr() for key, tensor in tensors.items()}
                calls = list(self._make_calls(batches, grad_scale, addresses))
                for group in groups:
                    settings = updates[group].settings
                    group.begin_averages({name: one for name, one in settings.items() if one.step == 1}, tensors)
                self._threads.run(calls)
            increment_version([parameter for batch in batches for parameter in batch.parameters])
            pairs = [(g, name) for g in groups for name in g.first_elements.keys() & updates[g].settings.keys()]
            increment_version([group.parameters[name] for group, name in pairs])
        other_groups = [group for group in updates if group not in groups]
        for group, next_group in zip_longest(other_groups, other_groups[1:]):
            if next_group is not None:
                next_group.state.prefetch()
            group.update(updates[group])

    def _make_calls(
        self, batches: Sequence[_Batch], grad_scale: float, addresses: Mapping[str, int]
    ) -> Iterator[Callable[[], None]]:
        blocks = tuple(addresses.values())
        for index, batch in enumerate(batches):
            settings, num_threads = batch.settings, self._threads.num_threads
            arithmetic = cast("ElementwiseOptimizer | WeightAverage", settings.rule)
            sizes = [parameter.numel() for parameter in batch.parameters]
            assert [gradient.numel() for gradient in batch.gradients] == sizes
            parameter_key = (batch.names, [parameter.data_ptr() for parameter in batch.parameters], sizes)
            cache_key = (batch.split_master, arithmetic.row_kinds, num_threads, *parameter_key, blocks)
            table = self._tables.get(index)
            if table is None or table.cache_key != cache_key:
                table = self._tables[index] = _make_table(cache_key, batch, arithmetic, addresses, num_threads)
            starts = np.array([gradient.data_ptr() for gradient in batch.gradients], np.int64)
            table.rows[:, -2] = starts[table.parameter_index] + table.offsets * batch.gradient_dtype.itemsize
            update = Update(settings.step, settings.lr, grad_scale)
            segment = Segment(0, 0, settings.weight_decay)
            call = arithmetic.make_row_update(batch.split_master, batch.gradient_dtype, segment, update)
            for start, stop in table.calls:
                yield partial(call, table.rows[start:stop])


def squares_in_ram(groups: Sequence[StateGroup], threads: KernelThreads) -> dict[nn.Parameter, float]:
    """Return sums of squares by parameter, for gradients that kernels can read in place, in only a few calls.

    Groups are skipped if their gradients are in a block, or if kernels cannot read one of them in place.
    """
    by_parameter: dict[nn.Parameter, Tensor] = {}
    for group in groups:
        gradients = group.gradients.tensors() if isinstance(group.gradients, OrdinaryGradients) else {}
        if all(map(_is_readable, gradients.values())):
            by_parameter.update((group.parameters[name], gradient) for name, gradient in gradients.items())
    return dict(zip(by_parameter, squared_norms(list(by_parameter.values()), threads), strict=True))


def _batch_updates(updates: Mapping[OrdinaryGroup, GroupUpdate]) -> tuple[list[OrdinaryGroup], list[_Batch]]:
    """Return the groups that kernels can update in place, and their parameters, batched by settings and dtypes."""
    groups: list[OrdinaryGroup] = []
    batches: dict[tuple[object, ...], _Batch] = {}
    for group, update in updates.items():
        if not (group.is_in_ram and isinstance(group.gradients, OrdinaryGradients)):
            continue
        gradients, dtype, split_master = group.gradients.tensors(), group.dtype, "low" in group.state.keys
        entries: list[tuple[tuple[object, ...], str, Settings, Tensor, Tensor]] = []
        for name, settings in update.settings.items():
            parameter, gradient = group.local_values(name), gradients[name]
            arithmetic = settings.rule
            has_kernel = isinstance(arithmetic, ElementwiseOptimizer | WeightAverage) and arithmetic.supports_rows
            if not (has_kernel and parameter.dtype == dtype and parameter.is_contiguous() and _is_readable(gradient)):
                break
            entries.append(((id(settings), dtype, gradient.dtype), name, settings, parameter, gradient))
        else:
            groups.append(group)
            for kind, name, settings, parameter, gradient in entries:
                batch = batches.get(kind)
                if batch is None:
                    batch = batches[kind] = _Batch(settings, split_master, gradient.dtype)
                batch.names.append((group, name))
                batch.parameters.append(parameter)
                batch.gradients.append(gradient)
    return groups, list(batches.values())


def _make_table(
    cache_key: tuple[object, ...],
    batch: _Batch,
    arithmetic: ElementwiseOptimizer | WeightAverage,
    addresses: Mapping[str, int],
    num_threads: int,
) -> _KernelTable:
    call_elements = elements_per_call(sum(parameter.numel() for parameter in batch.parameters), num_threads)
    kinds = arithmetic.row_kinds
    rows: list[list[int]] = []
    parameter_index: list[int] = []
    offsets: list[int] = []
    for index, ((group, name), parameter) in enumerate(zip(batch.names, batch.parameters, strict=True)):
        group.check_dtype_and_device(name)
        starts = [_find_address(group, kind, name, parameter, addresses) for kind in kinds]
        for start in range(0, parameter.numel(), call_elements):
            size = min(call_elements, parameter.numel() - start)
            rows.append([*(address + start * itemsize for address, itemsize in starts), 0, size])
            parameter_index.append(index)
            offsets.append(start)
    table = np.array(rows, np.int64).reshape(len(rows), len(kinds) + 2)
    calls = group_calls([row[-1] for row in rows], call_elements)
    return _KernelTable(cache_key, table, np.array(parameter_index, np.int64), np.array(offsets, np.int64), calls)


def _find_address(
    group: OrdinaryGroup, kind: str, name: str, parameter: Tensor, addresses: Mapping[str, int]
) -> tuple[int, int]:
    """Return (address, element size) of a parameter's state of the given kind, or zeros if it is not stored."""
    if kind == "weight":
        return parameter.data_ptr(), parameter.dtype.itemsize
    if kind not in group.state.keys:
        return 0, 0
    itemsize = group.state.kinds[kind].dtype.itemsize
    return addresses[group.state.keys[kind]] + group.state.starts[kind][name] * itemsize, itemsize


def _is_readable(gradient: Tensor) -> bool:
    is_strided = gradient.layout is torch.strided and gradient.is_contiguous()
    return is_strided and not gradient.is_cuda and gradient.dtype in GRADIENT_DTYPES
