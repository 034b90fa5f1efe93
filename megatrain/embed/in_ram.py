"""Updates of ordinary parameters whose state has its home in RAM: those of a step together, in a few calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from megatrain.embed.groups import Settings, StateGroup, UntieredGroup, Work
from megatrain.optim.base import GRADIENT_DTYPES, Segment, Update
from megatrain.optim.clip import squared_norms
from megatrain.optim.elementwise import ElementwiseOptimizer
from megatrain.optim.threads import elements_per_call, share_out

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatrain.optim.threads import KernelThreads

__all__ = ["UpdatesInRam", "norms_in_ram"]


@dataclass(slots=True)
class _Alike:
    """Parameters that one call of a kernel can update, one entry of each list for each.

    Attributes:
        settings: of all of them.
        split_master: there is a low half.
        gradient_dtype: of the gradients.
    """

    settings: Settings
    split_master: bool
    gradient_dtype: torch.dtype
    names: list[tuple[UntieredGroup, str]] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class _Table:
    """Rows of a kernel, as long as everything lies where it lay.

    Attributes:
        places: all that the rows were made of.
        rows: for the kernel, but the addresses of gradients.
        of: of each row, the number of its parameter and how many elements of that come before.
        offsets: of each row, the number of its parameter and how many elements of that come before.
        calls: first row and one past the last row of each call.
    """

    places: tuple[object, ...]
    rows: NDArray[np.int64]
    of: NDArray[np.int64]
    offsets: NDArray[np.int64]
    calls: list[tuple[int, int]]


class UpdatesInRam:
    """Makes the updates of a step for which nothing has to be fetched.

    Small parameters then keep all threads busy, and what one costs besides its numbers is little: a kernel is called
    for many at once, and where their numbers are is looked up again only when something has moved. The bits are those
    of ``UntieredGroup.update``.
    """

    def __init__(self, threads: KernelThreads) -> None:
        self._threads = threads
        self._tables: dict[int, _Table] = {}

    def update(self, works: Mapping[StateGroup, Work]) -> dict[StateGroup, Work]:
        """Make the updates of groups that are in RAM; return the others."""
        mine, alike = _sorted_by_kind(works)
        if mine:
            store, grad_scale = mine[0].store, works[mine[0]].grad_scale
            requests: list[Any] = [(key, "ram", "rw") for group in mine for key in group.keys.values()]
            with torch.no_grad(), store.acquire_many(requests) as leases:
                addresses = {lease.key: lease.tensor.data_ptr() for lease in leases}
                self._threads.run(list(self._calls(alike, grad_scale, addresses)))
            increment_version([parameter for each in alike for parameter in each.parameters])
        return {group: work for group, work in works.items() if group not in mine}

    def _calls(
        self, alike: Sequence[_Alike], grad_scale: float, addresses: Mapping[str, int]
    ) -> Iterator[Callable[[], None]]:
        blocks = tuple(addresses.values())
        for number, each in enumerate(alike):
            settings, num_threads = each.settings, self._threads.num_threads
            arithmetic = cast("ElementwiseOptimizer", settings.arithmetic)
            sizes = [parameter.numel() for parameter in each.parameters]
            assert [gradient.numel() for gradient in each.gradients] == sizes
            own = (list(map(id, each.parameters)), [parameter.data_ptr() for parameter in each.parameters], sizes)
            places = (each.split_master, type(arithmetic), num_threads, *own, blocks)
            table = self._tables.get(number)
            if table is None or table.places != places:
                table = self._tables[number] = _make_table(places, each, arithmetic, addresses, num_threads)
            starts = np.array([gradient.data_ptr() for gradient in each.gradients], np.int64)
            table.rows[:, -2] = starts[table.of] + table.offsets * each.gradient_dtype.itemsize
            update = Update(settings.step, settings.lr, grad_scale)
            segment = Segment(0, 0, settings.weight_decay)
            call = arithmetic.rows_call(each.split_master, each.gradient_dtype, segment, update)
            for first, last in table.calls:
                yield partial(call, table.rows[first:last])


def norms_in_ram(groups: list[UntieredGroup], threads: KernelThreads) -> dict[nn.Parameter, float]:
    """Return the sums of squares of gradients that the kernels can read where they are, in a few calls.

    Of groups with another gradient there is none: those are not read here.
    """
    found: dict[nn.Parameter, Tensor] = {}
    for group in groups:
        if group.gradients is not None:
            continue
        own = {group.parameters[name]: gradient for name, gradient in group.take_gradients().items()}
        flat = {parameter: gradient for parameter, gradient in own.items() if gradient is not None}
        if all(map(_is_flat, flat.values())):
            found.update(flat)
    return dict(zip(found, squared_norms(list(found.values()), threads), strict=True))


def _sorted_by_kind(works: Mapping[StateGroup, Work]) -> tuple[list[UntieredGroup], list[_Alike]]:
    """Return the groups of which every number is where the kernels can take it, and their parameters by kind."""
    groups: list[UntieredGroup] = []
    alike: dict[tuple[object, ...], _Alike] = {}
    for group, work in works.items():
        if not isinstance(group, UntieredGroup) or not group.is_in_ram:
            continue
        dtype, split_master = group.dtype, "low" in group.kinds
        entries: list[tuple[tuple[object, ...], str, Settings, nn.Parameter, Tensor]] = []
        for name, settings in work.settings.items():
            parameter, gradient = group.parameters[name], work.gradients[name]
            has_kernel = isinstance(settings.arithmetic, ElementwiseOptimizer)
            if not (has_kernel and parameter.dtype == dtype and parameter.is_contiguous() and _is_flat(gradient)):
                break
            entries.append(((id(settings), dtype, gradient.dtype), name, settings, parameter, gradient))
        else:
            groups.append(group)
            for kind, name, settings, parameter, gradient in entries:
                each = alike.get(kind)
                if each is None:
                    each = alike[kind] = _Alike(settings, split_master, gradient.dtype)
                each.names.append((group, name))
                each.parameters.append(parameter)
                each.gradients.append(gradient)
    return groups, list(alike.values())


def _make_table(
    places: tuple[object, ...],
    each: _Alike,
    arithmetic: ElementwiseOptimizer,
    addresses: Mapping[str, int],
    num_threads: int,
) -> _Table:
    at_once = elements_per_call(sum(parameter.numel() for parameter in each.parameters), num_threads)
    kinds = arithmetic.rows_kinds
    rows: list[list[int]] = []
    of: list[int] = []
    offsets: list[int] = []
    for number, ((group, name), parameter) in enumerate(zip(each.names, each.parameters, strict=True)):
        group.check_place(name)
        begins = [_place(group, kind, name, parameter, addresses) for kind in kinds]
        for start in range(0, parameter.numel(), at_once):
            size = min(at_once, parameter.numel() - start)
            rows.append([*(address + start * itemsize for address, itemsize in begins), 0, size])
            of.append(number)
            offsets.append(start)
    shaped = np.array(rows, np.int64).reshape(len(rows), len(kinds) + 2)
    calls = share_out([row[-1] for row in rows], at_once)
    return _Table(places, shaped, np.array(of, np.int64), np.array(offsets, np.int64), calls)


def _place(
    group: UntieredGroup, kind: str | None, name: str, parameter: nn.Parameter, addresses: Mapping[str, int]
) -> tuple[int, int]:
    """Return where a parameter's numbers of a kind begin, and the bytes of each; nowhere for what is not kept."""
    if kind == "weight":
        return parameter.data_ptr(), parameter.dtype.itemsize
    if kind is None or kind not in group.keys:
        return 0, 0
    itemsize = group.kinds[kind].dtype.itemsize
    return addresses[group.keys[kind]] + group.starts[kind][name] * itemsize, itemsize


def _is_flat(gradient: Tensor) -> bool:
    is_strided = gradient.layout is torch.strided and gradient.is_contiguous()
    return is_strided and not gradient.is_cuda and gradient.dtype in GRADIENT_DTYPES
