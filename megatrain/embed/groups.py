"""Parameters that are updated together, and the blocks that hold their optimizer state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from megatrain.embed.gradients import GradientBlock
from megatrain.embed.stores import ledger_of, num_ranks
from megatrain.embed.weights import WeightInUseError
from megatrain.engine.program import gradient_key, state_key, weight_key
from megatrain.models.layout import UnitLayout
from megatrain.optim.base import GRADIENT_DTYPES, Optimizer, Segment, StateKind, Update
from megatrain.optim.clip import squared_norm

if TYPE_CHECKING:
    from megatrain.embed.device_copies import DeviceCopies
    from megatrain.embed.weights import WeightBlock
    from megatrain.models.layout import TensorEntry
    from megatrain.optim.threads import KernelThreads
    from tiered.schedule import Mode
    from tiered.store import TieredStore

__all__ = ["Settings", "StateGroup", "TieredGroup", "UntieredGroup", "Work", "take_gradients", "update_in_order"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How one parameter is updated in one step.

    Attributes:
        arithmetic: of its group's settings.
        step: updates of it with this one.
        lr: of its group.
        weight_decay: of its group.
    """

    arithmetic: Optimizer
    step: int
    lr: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class Work:
    """An update of a group that is due.

    Attributes:
        settings: by name, of the parameters that have a gradient.
        grad_scale: factor on all gradients.
        gradients: by name, where they are ordinary tensors.
    """

    settings: Mapping[str, Settings]
    grad_scale: float
    gradients: Mapping[str, Tensor]


class StateGroup(ABC):
    """A layout of parameters with one block per kind of state. Blocks are registered, and zeroed, when it is made.

    Args:
        root: of the keys of its blocks.
        parameters: by the name that the layout has for them.
        kinds: what the store keeps of them.
        homes: tiers that state may live in, most wanted first.
    """

    def __init__(
        self,
        store: TieredStore,
        root: str,
        layout: UnitLayout,
        parameters: Mapping[str, nn.Parameter],
        kinds: Sequence[StateKind],
        homes: Sequence[str],
    ) -> None:
        self.store, self.layout, self.parameters = store, layout, dict(parameters)
        self.kinds = {kind.name: kind for kind in kinds}
        self.keys = {kind.name: state_key(root, kind.name) for kind in kinds}
        self.starts = {kind.name: kind.starts(layout) for kind in kinds}
        self._elsewhere: list[str] = []  # keys of blocks that RAM only has copies of
        for kind in kinds:
            key = self.keys[kind.name]
            home = ledger_of(store).register(store, key, kind.num_elements(layout), kind.dtype, homes, durable=True)
            with store.acquire(key, "ram", "w") as lease:
                lease.tensor.zero_()
            if home != "ram":
                self._elsewhere.append(key)
        self._leave()

    @property
    @abstractmethod
    def gradients(self) -> GradientBlock | None:
        """Where gradients are while autograd runs; None: with the parameters."""

    @abstractmethod
    def take_gradients(self) -> Mapping[str, Tensor | None]:
        """Take the gradients of a step away: by name, the tensor, or None for one in ``gradients``."""

    @abstractmethod
    def squared_norms(self, threads: KernelThreads) -> Mapping[str, float]:
        """Return the sum of squares of each gradient that there is, by name, in the order of the layout."""

    @abstractmethod
    def update(self, work: Work) -> None:
        """Make an update and return when it is done."""

    def keys_at_once(self) -> list[str]:
        """Return the keys of the blocks that an update needs in RAM together."""
        gradients = self.gradients
        return [*self.keys.values(), *([] if gradients is None else [gradients.key])]

    @abstractmethod
    def gradients_now(self) -> object:
        """Return what is equal as long as no gradient came, changed or went."""

    def prefetch(self) -> None:
        """Start fetching what the next update needs, as far as there is room."""
        for key in self._elsewhere:
            self.store.prefetch(key, "ram")

    def _leave(self) -> None:
        """Let state go home as soon as it is not needed before the next step: it is written while others compute."""
        for key in self._elsewhere:
            self.store.evict(key, "ram")

    def segment(self, entry: TensorEntry, settings: Settings, start: int) -> Segment:
        """Return the range of a block that one parameter has there, and how it is updated."""
        own = {name: starts[entry.name] for name, starts in self.starts.items() if self.kinds[name].elements_of}
        return Segment(start, start + entry.numel, settings.weight_decay, shape=entry.shape, state_starts=own)

    def part(self, kind: str, flat: Tensor, entry: TensorEntry) -> Tensor:
        """Return what a block of a kind holds of one parameter, flat."""
        elements_of = self.kinds[kind].elements_of
        length = entry.numel if elements_of is None else elements_of(entry)
        return flat.narrow(0, self.starts[kind][entry.name], length)

    def entries(self, names: Mapping[str, object]) -> Iterator[TensorEntry]:
        """Return the entries of these names, in the order of the layout."""
        return (entry for entry in self.layout.entries if entry.name in names)


class TieredGroup(StateGroup):
    """The parameters of a tiered module that share a block of weights."""

    def __init__(self, weights: WeightBlock, kinds: Sequence[StateKind], homes: Sequence[str]) -> None:
        root = weights.key.removesuffix("/weight")
        assert weight_key(root) == weights.key, weights.key
        own = [kind for kind in kinds if kind.name != "weight"]
        super().__init__(weights.store, root, weights.layout, weights.parameters, own, homes)
        self.weights = weights

    def keys_at_once(self) -> list[str]:
        """Return the keys of the blocks that an update needs in RAM together, weights too."""
        return [self.weights.key, *super().keys_at_once()]

    def gradients_now(self) -> object:
        assert self.weights.gradients is not None, self.layout.name
        return self.weights.gradients.num_changes

    @property
    def gradients(self) -> GradientBlock | None:
        return self.weights.gradients

    def take_gradients(self) -> Mapping[str, Tensor | None]:
        assert self.weights.gradients is not None, self.layout.name
        return dict.fromkeys(self.weights.gradients.consume())

    def squared_norms(self, threads: KernelThreads) -> Mapping[str, float]:
        assert self.weights.gradients is not None, self.layout.name
        return self.weights.gradients.squared_norms(threads)

    @property
    def has_gradients(self) -> bool:
        """Whether some parameter has a gradient now."""
        return self.weights.gradients is not None and bool(self.weights.gradients.filled)

    def update(self, work: Work) -> None:
        assert self.weights.gradients is not None, self.layout.name
        self.weights.prepare_update()
        keys = {"weight": self.weights.key, **self.keys}
        requests: list[tuple[str, str, Mode]] = [(key, "ram", "rw") for key in keys.values()]
        with self.store.acquire_many([*requests, (self.weights.gradients.key, "ram", "r")]) as group:
            tensors = {lease.key: lease.tensor for lease in group}
            blocks = {kind: tensors[key] for kind, key in keys.items()}
            alike: dict[tuple[int, int, float], list[tuple[Segment, Settings]]] = {}
            for entry in self.entries(work.settings):
                settings = work.settings[entry.name]
                like = (id(settings.arithmetic), settings.step, settings.lr)
                alike.setdefault(like, []).append((self.segment(entry, settings, entry.offset), settings))
            for parts in alike.values():
                settings = parts[0][1]
                now = Update(settings.step, settings.lr, work.grad_scale)
                gradient = tensors[self.weights.gradients.key]
                settings.arithmetic.update(blocks, gradient, [segment for segment, _ in parts], now)
        self.store.discard(self.weights.gradients.key)
        self._leave()

    def reset_low(self, names: frozenset[str]) -> None:
        """Forget what the master had below the precision of weights that somebody replaced."""
        if "low" not in self.keys:
            return
        with self.store.acquire(self.keys["low"], "ram", "rw") as lease:
            for entry in self.layout.entries:
                if entry.name in names:
                    self.part("low", lease.tensor, entry).zero_()


class UntieredGroup(StateGroup):
    """Ordinary parameters, in RAM or on a CUDA device; only their state is in the store.

    In RAM the parameter is the upper part of its own master: nothing is kept twice. A parameter on a device has its
    whole master in the store, and is a copy of it.

    Args:
        offload_gradients: gradients leave for the store as soon as autograd has made them.
        copies: between devices and RAM.
    """

    def __init__(
        self,
        store: TieredStore,
        root: str,
        layout: UnitLayout,
        parameters: Mapping[str, nn.Parameter],
        kinds: Sequence[StateKind],
        homes: Sequence[str],
        *,
        offload_gradients: bool,
        copies: DeviceCopies,
    ) -> None:
        if offload_gradients and num_ranks() > 1:
            raise ValueError(
                "offload_gradients=True with several ranks: gradients would leave before they are averaged"
            )
        self._on_device = any(parameter.is_cuda for parameter in parameters.values())
        self._copies = copies
        self._places = {name: (parameter.dtype, parameter.device) for name, parameter in parameters.items()}
        self._versions: dict[str, int] = {}  # of those on a device, as of when they were equal to their masters
        own = [kind for kind in kinds if self._on_device or kind.name != "weight"]
        super().__init__(store, root, layout, parameters, own, homes)
        self._gradients: GradientBlock | None = None
        if offload_gradients:
            self._gradients = GradientBlock(store, gradient_key(root, 0), layout, parameters, homes)
        if self._on_device:
            self.copy_masters()

    @property
    def gradients(self) -> GradientBlock | None:
        return self._gradients

    def gradients_now(self) -> object:
        if self._gradients is not None:
            return self._gradients.num_changes
        found = (parameter.grad for parameter in self.parameters.values())
        return [None if gradient is None else (id(gradient), gradient._version) for gradient in found]

    def copy_masters(self) -> None:
        """Take the masters of parameters on a device from them."""
        with torch.no_grad(), self.store.acquire(self.keys["weight"], "ram", "w") as lease:
            lease.tensor.zero_()
            for entry in self.layout.entries:
                self.part("weight", lease.tensor, entry).copy_(self.parameters[entry.name].reshape(-1))
                self._versions[entry.name] = self.parameters[entry.name]._version

    def doubt_masters(self) -> None:
        """Compare masters with their parameters before the next update: they were loaded apart from each other."""
        self._versions.clear()

    def take_gradients(self) -> Mapping[str, Tensor | None]:
        for device in {parameter.device for parameter in self.parameters.values() if parameter.is_cuda}:
            self._copies.mark(device)
        if self._gradients is not None:
            return dict.fromkeys(self._gradients.consume())
        found: dict[str, Tensor | None] = {}
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if gradient is not None:
                found[name] = gradient
        return found

    def squared_norms(self, threads: KernelThreads) -> Mapping[str, float]:
        if self._gradients is not None:
            return self._gradients.squared_norms(threads)
        return {
            name: squared_norm(self._flat(gradient), threads)
            for name, gradient in self.take_gradients().items()
            if gradient is not None
        }

    def update(self, work: Work) -> None:
        requests: list[tuple[str, str, Mode]] = [(key, "ram", "rw") for key in self.keys.values()]
        if self._gradients is not None:
            requests.append((self._gradients.key, "ram", "r"))
        with torch.no_grad(), self.store.acquire_many(requests) as group:
            tensors = {lease.key: lease.tensor for lease in group}
            for entry in self.entries(work.settings):
                if self._gradients is not None:
                    gradient = self._gradients.view(tensors[self._gradients.key], entry)
                else:
                    gradient = self._flat(work.gradients[entry.name])
                self._update_one(entry, work.settings[entry.name], gradient, tensors, work.grad_scale)
        if self._gradients is not None:
            self.store.discard(self._gradients.key)
        self._leave()

    @property
    def dtype(self) -> torch.dtype:
        """What the parameters were when their state was made."""
        return next(iter(self._places.values()))[0]

    @property
    def is_in_ram(self) -> bool:
        """Whether parameters, gradients and state are all in RAM, so that an update fetches nothing."""
        return not self._on_device and self._gradients is None and not self._elsewhere

    def check_place(self, name: str) -> None:
        """Refuse a parameter that is no longer what its state was made for.

        Raises:
            RuntimeError: it was moved or converted.
        """
        parameter, place = self.parameters[name], self._places[name]
        if (parameter.dtype, parameter.device) != place:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} was {place[0]} on {place[1]} when its optimizer was "
                f"made, and is {parameter.dtype} on {parameter.device} now: move and convert the module before"
            )

    def _update_one(
        self,
        entry: TensorEntry,
        settings: Settings,
        gradient: Tensor,
        tensors: Mapping[str, Tensor],
        grad_scale: float,
    ) -> None:
        parameter = self.parameters[entry.name]
        own_length = {name for name, kind in self.kinds.items() if kind.elements_of is not None}
        blocks = {
            kind: tensors[key] if kind in own_length else self.part(kind, tensors[key], entry)
            for kind, key in self.keys.items()
        }
        self.check_place(entry.name)
        if not self._on_device:
            blocks["weight"] = parameter.detach().reshape(-1)
        elif self._versions.get(entry.name) != parameter._version:
            # On the stream of the copies: this thread's own may have no order with the kernels that replaced it.
            _follow(blocks, self._copies.to_new_ram(parameter.detach()))
        now = Update(settings.step, settings.lr, grad_scale)
        settings.arithmetic.update(blocks, gradient, [self.segment(entry, settings, 0)], now)
        if parameter.is_cuda:
            self._copies.to_device(parameter, blocks["weight"])
            self._versions[entry.name] = parameter._version
        elif blocks["weight"].data_ptr() != parameter.data_ptr():
            parameter.copy_(blocks["weight"].view(entry.shape))
            self._versions[entry.name] = parameter._version
        else:
            increment_version(parameter)  # a graph that saved it is out of date, and autograd says so

    def _flat(self, gradient: Tensor) -> Tensor:
        """Return a gradient as the kernels take it, flat, fp32 or bf16, in RAM: one of a device until the next call."""
        gradient = gradient.detach()
        if gradient.is_cuda:
            flat = self._copies.to_ram(gradient)
        else:
            flat = (gradient if gradient.layout is torch.strided else gradient.to_dense()).reshape(-1)
        return flat if flat.dtype in GRADIENT_DTYPES else flat.float()


def _follow(blocks: Mapping[str, Tensor], numbers: Tensor) -> None:
    """Let a master follow a parameter that somebody replaced; where it is the same the master keeps all its bits."""
    if "low" in blocks:
        blocks["low"].masked_fill_(blocks["weight"] != numbers, 0)
    blocks["weight"].copy_(numbers)


def take_gradients(groups: Sequence[StateGroup]) -> list[tuple[StateGroup, Mapping[str, Tensor | None]]]:
    """Take the gradients of a step away from all groups, or from none.

    Raises:
        WeightInUseError: weights that are to be updated are held, by ``gathered`` or a forward that still runs: whoever
            holds them would go on with those of before the step.
    """
    for group in groups:
        if isinstance(group, TieredGroup) and group.weights.is_held and group.has_gradients:
            raise WeightInUseError(
                f"optimizer.step() while {group.layout.name} is held: leave `with megatrain.gathered(...)` before, and "
                "step after the forward has ended"
            )
    return [(group, group.take_gradients()) for group in groups]


def update_in_order(works: Mapping[StateGroup, Work]) -> None:
    """Make updates one after the other, fetching the state of the next one meanwhile."""
    for group, following in zip_longest(works, list(works)[1:]):
        if following is not None:
            following.prefetch()
        group.update(works[group])
