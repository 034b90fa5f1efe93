"""The engine's view of the store: weights, gradient accumulators and activations of one visit at a time.

Copies away from home are dropped as soon as their tick is over (and written back where they changed), so
what crosses each link is exactly what the program of the step says, whatever the timing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch

from megatrain.activity import Activity
from megatrain.engine.copies import Copies
from megatrain.engine.program import (
    Stays,
    StepProgram,
    Tick,
    Turn,
    activation_key,
    gradient_key,
    layouts_of_unit,
    uses_of_layouts,
    weight_key,
)
from megatrain.models.layout import UnitLayout, views
from megatrain.optim.clip import device_squared_norm, squared_norm, sum_gradients
from megatrain.optim.threads import KernelThreads
from tiered.lease import Lease

if TYPE_CHECKING:
    from megatrain.engine.trace import VisitTrace
    from megatrain.models.graph import ModelGraph, Unit
    from megatrain.timeline import Timeline
    from tiered.schedule import Mode
    from tiered.store import TieredStore


class GradientAccumulator:
    """fp32 accumulators of one use site, open for one visit. ``add`` copies at first, then adds."""

    def __init__(self, targets: Mapping[str, torch.Tensor], added: set[str]) -> None:
        self._targets = targets
        self._added = added

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Add the gradient of one micro-batch (any float dtype, same shape) to the parameter's accumulator."""
        if name in self._added:
            self._targets[name].add_(gradient)
        else:
            self._targets[name].copy_(gradient)
            self._added.add(name)


class StoreAccess:
    """``BlockAccess`` over a ``TieredStore``. Used by one thread, the one that runs the step.

    Args:
        homes: block key -> tier, as planned and registered. stays: copies that wait for their next use, as planned.
        update: called with the index of a layout at the tick of its update.
        timeline, activity: told of every tick.
    """

    def __init__(
        self,
        store: TieredStore,
        graph: ModelGraph,
        trace: VisitTrace,
        program: StepProgram,
        homes: Mapping[str, str],
        stays: Stays,
        threads: KernelThreads,
        update: Callable[[int], None],
        timeline: Timeline | None = None,
        activity: Activity | None = None,
    ) -> None:
        self._store, self._graph, self._program, self._stays = store, graph, program, stays
        self._homes, self._copies = homes, Copies(store, homes)
        self._uses = uses_of_layouts(graph, trace)
        self._tier = program.compute_tier
        self._threads = threads
        self._update, self._timeline = update, timeline
        self._activity = activity or Activity()
        layouts = tuple(graph.layouts)
        self._unit_names = {
            (tick.phase, tick.visit): layouts[tick.visit]
            if tick.phase == "update"
            else graph.units[trace.visits[tick.visit].unit].name
            for tick in program.ticks
        }
        self._first_tick = 0
        self._turns: Iterator[Turn] = iter(())
        self._turn: Turn | None = None
        self._merges: dict[str, dict[int, set[str]]] = {}
        self._shapes: dict[str, torch.Size] = {}
        #: By layout; on a device as a scalar there: reading it would make the host wait in the middle of the step.
        self.squared_norms: dict[str, float | torch.Tensor] = {}
        self.with_gradient: dict[str, set[str]] = {}

    # -- the program counter -----------------------------------------------------------------------------------

    def start_step(self, step: int, *, updates: bool) -> None:
        """Begin a step: ``step`` counts from 0 and numbers the ticks that the schedule speaks of.

        Args:
            updates: whether the step before left updates to be made on the way.
        """
        if self._program.defers_updates and not updates:
            self._copies.send_home()  # what waits for them: the plan of this step does not count its room
        self._start(step, updates=updates, passes=True)
        self._merges = {name: {use: set() for use in range(len(uses))} for name, uses in self._uses.items()}
        self.squared_norms, self.with_gradient = {}, {}

    def run_updates(self, step: int) -> None:
        """Make the updates that the step before ``step`` left, without beginning another one."""
        self._start(step, updates=True, passes=False)
        while self._move_on():
            self._update(self._tick.visit)

    def finish(self) -> None:
        """Let go of everything that waits for another step."""
        self._copies.send_home()

    def end_step(self) -> None:
        """Make the updates that come last, and note that the step is over: all its ticks must have come."""
        while self._move_on():
            assert self._tick.phase == "update", f"the step ended before {self._turn}"
            self._update(self._tick.visit)

    def _start(self, step: int, *, updates: bool, passes: bool) -> None:
        self._first_tick = step * len(self._program.ticks)
        self._turns = iter(self._program.turns(self._stays, updates=updates, passes=passes))

    def begin(self, phase: Literal["forward", "head", "backward"], visit: int) -> None:
        """Move to the next pass tick of the program, making the updates that come before it."""
        while self._move_on() and self._tick.phase == "update":
            self._update(self._tick.visit)
        tick = self._tick
        assert (tick.phase, tick.visit) == (phase, visit), f"planned {tick.phase} {tick.visit}, not {phase} {visit}"

    def _move_on(self) -> bool:
        """Move to the next tick, and tell the prefetcher; False after the last one."""
        self._turn = next(self._turns, None)
        if self._turn is not None:
            number, tick = self._turn.number, self._turn.tick
            self._store.advance(self._first_tick + number)
            self._activity.come_to(number, tick.phase, self._unit_names[tick.phase, tick.visit])
        if self._timeline is not None:
            self._timeline.on_turn(None if self._turn is None else self._turn.tick)
        return self._turn is not None

    # -- weights -----------------------------------------------------------------------------------------------

    @contextmanager
    def weights(self, unit: Unit, visit: int) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yield the unit's parameters by full name: views of the slots, in the compute dtype, on the compute device."""
        names = layouts_of_unit(self._graph, unit.index)
        with self.leases([(weight_key(name), "r") for name in names], self._tier) as leases:
            tensors: dict[str, torch.Tensor] = {}
            for name, lease in zip(names, leases, strict=True):
                tensors.update(views(lease.tensor, self._graph.layouts[name]))
            yield tensors

    @contextmanager
    def leases(self, requests: list[tuple[str, Mode]], tier: str) -> Iterator[list[Lease]]:
        """Lease blocks together; afterwards drop the copies that are away from home (changed ones are written back)."""
        with self._store.acquire_many([(key, tier, mode) for key, mode in requests]) as group:
            self._copies.arrived(key for key, _ in requests)
            yield list(group)
        for key, _ in requests:
            self._leave(key, tier)

    @property
    def tier(self) -> str:
        """Return the tier that the present tick uses blocks in."""
        return self._program.tier_of(self._tick, self._homes)

    @property
    def _tick(self) -> Tick:
        assert self._turn is not None, "no tick has begun, or the step is over"
        return self._turn.tick

    def _leave(self, key: str, tier: str) -> None:
        assert self._turn is not None
        self._copies.leave(self._turn, key, tier)

    # -- gradients ---------------------------------------------------------------------------------------------

    @contextmanager
    def gradients(self, unit: Unit, visit: int) -> Iterator[GradientAccumulator]:
        """Yield the accumulators of this use site. The last use site to be filled takes up the others' sums."""
        names = [n for n in layouts_of_unit(self._graph, unit.index) if self._graph.layouts[n].trainable]
        modes: dict[str, Mode] = dict(self._tick.held)
        own = {name: gradient_key(name, self._uses[name].index(visit)) for name in names}
        others = {
            name: [
                key
                for use in range(len(self._uses[name]))
                if (key := gradient_key(name, use)) in modes and key != own[name]
            ]
            for name in names
        }
        requests: list[tuple[str, Mode]] = [(key, modes[key]) for key in own.values()]
        requests += [(key, modes[key]) for keys in others.values() for key in keys]
        with self._store.acquire_many([(key, self._tier, mode) for key, mode in requests]) as group:
            self._copies.arrived(key for key, _ in requests)
            tensors = {lease.key: lease.tensor for lease in group}
            sums = {name: _fp32_sum(tensors[own[name]], modes[own[name]]) for name in names}
            targets: dict[str, torch.Tensor] = {}
            added: set[str] = set()
            for name in names:
                targets.update(views(sums[name], self._graph.layouts[name]))
                added |= self._added(name, visit)
            yield GradientAccumulator(targets, added)
            for name in names:
                self._close_use(name, visit, sums.pop(name), tensors, own[name], added, modes[own[name]])
        for key, _ in requests:
            self._leave(key, self._tier)

    def _added(self, name: str, visit: int) -> set[str]:
        return self._merges[name][self._uses[name].index(visit)]

    def _close_use(
        self,
        name: str,
        visit: int,
        total: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        key: str,
        added: set[str],
        mode: Mode,
    ) -> None:
        layout = self._graph.layouts[name]
        self._added(name, visit).update(entry.name for entry in layout.entries if entry.name in added)
        if mode == "w":
            zero_gaps(total, layout, self._added(name, visit))
        if total is not tensors[key]:
            tensors[key].copy_(total)
        # Only the first use site, which backward reaches last, is followed by no other use of the layout.
        if visit == self._uses[name][0]:
            self._merge(name, tensors, key, layout)

    def _merge(self, name: str, tensors: Mapping[str, torch.Tensor], key: str, layout: UnitLayout) -> None:
        """Add the other use sites' sums in use order, and take the norm while the bytes are here."""
        total = set(self._merges[name][0])
        for use in range(1, len(self._uses[name])):
            other = gradient_key(name, use)
            if other not in tensors:
                return  # micro-batch-major order: more micro-batches follow
            if tensors[key].is_cuda:
                tensors[key].add_(tensors[other])
            else:
                sum_gradients(tensors[key], tensors[other], self._threads)
            total |= self._merges[name][use]
        self.with_gradient[name] = total
        self.squared_norms[name] = self._squared_norm(tensors[key])

    def _squared_norm(self, gradient: torch.Tensor) -> float | torch.Tensor:
        return device_squared_norm(gradient) if gradient.is_cuda else squared_norm(gradient, self._threads)

    # -- activations -------------------------------------------------------------------------------------------

    def put_activation(self, visit: int, micro_batch: int, index: int, tensor: torch.Tensor) -> None:
        """Copy a unit's input into its block; the block may go to a slower tier until the backward."""
        key = self._activation(visit, micro_batch, index, tensor.numel())
        with self._store.acquire(key, self._tier, "w") as lease:
            self._copies.arrived([key])
            flat = lease.tensor[: tensor.numel()]
            flat.copy_(tensor.detach().reshape(-1))
            self._shapes[key] = tensor.shape
        self._leave(key, self._tier)

    @contextmanager
    def get_activation(self, visit: int, micro_batch: int, index: int) -> Iterator[torch.Tensor]:
        """Yield what was put there, same shape and bits; the contents are dead afterwards."""
        key = self._activation(visit, micro_batch, index, 0)
        shape = self._shapes[key]
        with self._store.acquire(key, self._tier, "r") as lease:
            self._copies.arrived([key])
            yield lease.tensor[: shape.numel()].view(shape)
        self._store.discard(key)

    def _activation(self, visit: int, micro_batch: int, index: int, num_elements: int) -> str:
        key = activation_key(visit, micro_batch, index)
        block = self._program.blocks.get(key) or self._program.blocks[activation_key(visit, 0, index)]
        assert num_elements <= block.num_elements, f"{key}: {num_elements} elements, planned {block.num_elements}"
        return block.key


def _fp32_sum(gradient: torch.Tensor, mode: Mode) -> torch.Tensor:
    """Return what a use site's gradients are summed in: the block itself if it is fp32, else room of its own."""
    if gradient.dtype == torch.float32:
        return gradient
    assert mode == "w", "a sum that was rounded cannot go on"
    return torch.empty(gradient.shape, dtype=torch.float32, device=gradient.device)


def zero_gaps(flat: torch.Tensor, layout: UnitLayout, filled: set[str]) -> None:
    """Zero what no gradient was copied into: padding between entries, and entries without a gradient."""
    position = 0
    for entry in layout.entries:
        if entry.name not in filled:
            continue
        flat[position : entry.offset].zero_()
        position = entry.offset + entry.numel
    flat[position:].zero_()
