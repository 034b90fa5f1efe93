"""Updates of ordinary parameters whose state has its home in RAM: those of a step together, in a few calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

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


class _Kind(NamedTuple):
    """What parameters have in common that one kernel can update.

    Attributes:
        settings: in this step, one object. split_master: there is a low half. weight, gradient: dtypes.
    """

    settings: int
    split_master: bool
    weight: torch.dtype
    gradient: torch.dtype


@dataclass(slots=True)
class _Alike:
    """Parameters of one kind, one entry of each list for each."""

    settings: Settings
    names: list[tuple[UntieredGroup, str]] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class _Table:
    """Rows of a kernel, as long as everything lies where it lay.

    Attributes:
        places: all that the rows were made of. rows: for the kernel, but the addresses of gradients.
        of, offsets: of each row, the number of its parameter and how many elements of that come before.
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
        found = ((group, work) for group, work in works.items() if isinstance(group, UntieredGroup))
        mine = {group: work for group, work in found if _is_simple(group, work)}
        if mine:
            store = next(iter(mine)).store
            requests: list[Any] = [(key, "ram", "rw") for group in mine for key in group.keys.values()]
            with torch.no_grad(), store.acquire_many(requests) as leases:
                addresses = {lease.key: lease.tensor.data_ptr() for lease in leases}
                alike = _sorted_by_kind(mine)
                self._threads.run(list(self._calls(mine, alike, addresses)))
            increment_version([parameter for each in alike.values() for parameter in each.parameters])
        return {group: work for group, work in works.items() if group not in mine}

    def _calls(
        self, works: Mapping[UntieredGroup, Work], alike: Mapping[_Kind, _Alike], addresses: Mapping[str, int]
    ) -> Iterator[Callable[[], None]]:
        grad_scale = next(iter(works.values())).grad_scale
        blocks = tuple(addresses.values())
        for number, (kind, each) in enumerate(alike.items()):
            settings, num_threads = each.settings, self._threads.num_threads
            arithmetic = cast("ElementwiseOptimizer", settings.arithmetic)
            own = [(id(p), p.data_ptr(), p.numel()) for p in each.parameters]
            places = (kind[1:], type(arithmetic), num_threads, own, blocks)
            table = self._tables.get(number)
            if table is None or table.places != places:
                table = self._tables[number] = _make_table(places, each, arithmetic, addresses, num_threads)
            assert [gradient.numel() for gradient in each.gradients] == [size for _, _, size in own]
            starts = np.array([gradient.data_ptr() for gradient in each.gradients], np.int64)
            table.rows[:, -2] = starts[table.of] + table.offsets * kind.gradient.itemsize
            update = Update(settings.step, settings.lr, grad_scale)
            call = arithmetic.rows_call(kind.split_master, kind.gradient, Segment(0, 0, settings.weight_decay), update)
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


def _sorted_by_kind(works: Mapping[UntieredGroup, Work]) -> dict[_Kind, _Alike]:
    found: dict[_Kind, _Alike] = {}
    for group, work in works.items():
        split_master = "low" in group.kinds
        for name, settings in work.settings.items():
            parameter, gradient = group.parameters[name], work.gradients[name]
            kind = _Kind(id(settings), split_master, parameter.dtype, gradient.dtype)
            each = found.get(kind)
            if each is None:
                each = found[kind] = _Alike(settings)
            each.names.append((group, name))
            each.parameters.append(parameter)
            each.gradients.append(gradient)
    return found


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


def _is_simple(group: UntieredGroup, work: Work) -> bool:
    if not group.is_in_ram:
        return False
    dtype, parameters = group.dtype, group.parameters
    return all(
        isinstance(settings.arithmetic, ElementwiseOptimizer)
        and (parameter := parameters[name]).is_contiguous()
        and parameter.dtype == dtype
        and _is_flat(work.gradients[name])
        for name, settings in work.settings.items()
    )


def _is_flat(gradient: Tensor) -> bool:
    is_strided = gradient.layout is torch.strided and gradient.is_contiguous()
    return is_strided and not gradient.is_cuda and gradient.dtype in GRADIENT_DTYPES
