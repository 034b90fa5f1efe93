"""Updates of ordinary parameters whose state has its home in RAM: those of a step together, on all threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megatrain.embed.groups import StateGroup, UntieredGroup, Work
from megatrain.optim.base import GRADIENT_DTYPES, Segment, Update
from megatrain.optim.elementwise import Array, ElementwiseOptimizer, flat_block, flat_gradient

if TYPE_CHECKING:
    from megatrain.optim.threads import KernelThreads

__all__ = ["UpdatesInRam"]


@dataclass(slots=True)
class _Place:
    """Where the numbers of one parameter and of its state are: valid as long as all addresses are the same.

    The parameter's memory is kept by its array, so that its address is not given to another; that of the state is not.
    """

    address: int
    arrays: dict[str, Array | None]


class _Memory:
    """What numpy is told of memory that belongs to somebody else."""

    def __init__(self, array: Array) -> None:
        address = (array.__array_interface__["data"][0], False)
        self.__array_interface__ = {"data": address, "shape": array.shape, "typestr": array.dtype.str, "version": 3}


class UpdatesInRam:
    """Makes the updates of a step for which nothing has to be fetched.

    Small parameters then keep all threads busy, and what one costs besides its numbers is little: their places are
    looked up once. The bits are those of ``UntieredGroup.update``.
    """

    def __init__(self, threads: KernelThreads) -> None:
        self._threads = threads
        self._places: dict[UntieredGroup, tuple[tuple[int, ...], dict[str, _Place]]] = {}

    def update(self, works: Mapping[StateGroup, Work]) -> dict[StateGroup, Work]:
        """Make the updates of groups that are in RAM; return the others."""
        found = ((group, work) for group, work in works.items() if isinstance(group, UntieredGroup))
        mine = {group: work for group, work in found if _is_simple(group, work)}
        if mine:
            store = next(iter(mine)).store
            requests: list[Any] = [(key, "ram", "rw") for group in mine for key in group.keys.values()]
            with torch.no_grad(), store.acquire_many(requests) as leases:
                tensors = {lease.key: lease.tensor for lease in leases}
                self._threads.run([call for group, work in mine.items() for call in self._calls(group, work, tensors)])
            increment_version([group.parameters[name] for group, work in mine.items() for name in work.settings])
        return {group: work for group, work in works.items() if group not in mine}

    def _calls(self, group: UntieredGroup, work: Work, tensors: Mapping[str, Tensor]) -> Iterator[Callable[[], None]]:
        places = self._places_of(group, tensors)
        now: Update | None = None
        for name, settings in work.settings.items():
            parameter = group.parameters[name]
            place = places.get(name)
            if place is None or place.address != parameter.data_ptr():
                place = places[name] = _find(group, name, tensors)
            if now is None or (now.step, now.lr) != (settings.step, settings.lr):
                now = Update(settings.step, settings.lr, work.grad_scale)
            gradient = flat_gradient(work.gradients[name].view(-1))
            segment = Segment(0, gradient.size, settings.weight_decay)
            yield from cast("ElementwiseOptimizer", settings.arithmetic).calls(place.arrays, gradient, [segment], now)

    def _places_of(self, group: UntieredGroup, tensors: Mapping[str, Tensor]) -> dict[str, _Place]:
        addresses = tuple([tensors[key].data_ptr() for key in group.keys.values()])
        known, places = self._places.get(group, ((), {}))
        if known != addresses:
            places = {}
            self._places[group] = addresses, places
        return places


def _find(group: UntieredGroup, name: str, tensors: Mapping[str, Tensor]) -> _Place:
    group.check_place(name)
    (entry,) = group.entries({name: None})
    parameter, length = group.parameters[name], entry.numel
    arrays: dict[str, Array | None] = {"low": None}
    for kind, key in group.keys.items():
        part = group.part(kind, tensors[key], entry)
        arrays[kind] = np.asarray(_Memory(flat_block(kind, part, group.kinds[kind].dtype, length)))
    arrays["weight"] = flat_block("weight", parameter.detach().view(-1), parameter.dtype, length)
    return _Place(parameter.data_ptr(), arrays)


def _is_simple(group: UntieredGroup, work: Work) -> bool:
    return group.is_in_ram and all(
        isinstance(settings.arithmetic, ElementwiseOptimizer)
        and group.parameters[name].is_contiguous()
        and _is_flat(work.gradients[name])
        for name, settings in work.settings.items()
    )


def _is_flat(gradient: Tensor) -> bool:
    is_strided = gradient.layout is torch.strided and gradient.is_contiguous()
    return is_strided and not gradient.is_cuda and gradient.dtype in GRADIENT_DTYPES
