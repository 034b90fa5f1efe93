"""The forwards of a pass up to the head: those of all micro-batches, stopped at every unit call, one unit at a time."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.activity import Activity
from megatrain.engine.head_plan import accepts_use_cache
from megatrain.engine.suspend import RandomStates, SuspendedForward, UnitCall, micro_batch_seed, suspend
from megatrain.engine.units import installed_stubs
from megatrain.engine.visit import UnitVisit

if TYPE_CHECKING:
    from megatrain.engine.access import BlockAccess
    from megatrain.engine.head_plan import HeadPlan
    from megatrain.engine.mirror import HostMirror
    from megatrain.engine.trace import VisitTrace
    from megatrain.engine.units import BoundUnit
    from megatrain.models.graph import ModelGraph

__all__ = ["SuspendedOutput", "Trunk", "VisitOrderError"]

#: Number of a micro-batch, what its forward returned, and where its random stream stands then.
SuspendedOutput = tuple[int, Any, tuple[Tensor, ...]]


class VisitOrderError(Exception):
    """The model called its units in another order than planned, or than another micro-batch of the step."""


class _TrunkReached(BaseException):
    """Leaves a forward at the cut. Not an `Exception`, so that no model code catches it."""

    def __init__(self, output: Any) -> None:
        self.output = output
        super().__init__()


class Trunk:
    """Runs a model's forward from its input to the cut before the head, or to its end where there is no cut.

    Args:
        graph: The model.
        access: Where weights come from, and where activations go.
        bounds: The runnable form of every unit, by index.
        random: Random state of the compute device.
        device: Compute device.
        head: Where the model is cut; None: its forward runs to the end.
        trace: Expected visits; None checks nothing.
        announce_backward: Called with a visit's number before its backward asks for anything.
        mirror: Answers the model's questions about its inputs; None: it looks for itself.
        kept: Visits whose graphs wait for their backward.
        activity: Told of every micro-batch.

    Attributes:
        visits: Those of the pass that is running.
    """

    def __init__(
        self,
        graph: ModelGraph,
        access: BlockAccess,
        bounds: Sequence[BoundUnit],
        random: RandomStates,
        device: torch.device,
        head: HeadPlan | None,
        trace: VisitTrace | None,
        announce_backward: Callable[[int], None],
        mirror: HostMirror | None = None,
        kept: Container[int] = (),
        activity: Activity | None = None,
    ) -> None:
        self._activity = activity or Activity()
        self._mirror = mirror
        self._graph, self._access, self._bounds = graph, access, bounds
        self._random, self._device = random, device
        self._head, self._trace = head, trace
        self._announce_backward = announce_backward
        self._kept = kept
        self._accepts_use_cache = accepts_use_cache(graph.model)
        self.visits: list[UnitVisit] = []

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Put stand-ins in the place of all weights, and stubs in the place of all units."""
        with ExitStack() as stack:
            for bound in self._bounds:
                stack.enter_context(bound.standing_in())
            stack.enter_context(self._stubbed())
            yield

    def run(self, batches: Mapping[int, dict[str, Any]], num_items: int | None, seed: int) -> list[SuspendedOutput]:
        """Run the forward of every micro-batch, in the current grad mode, inside of `prepared`.

        Args:
            batches: By number of the micro-batch, on the compute device.
            num_items: Trained tokens that a loss behind no cut is the mean over; None: those of each micro-batch.
            seed: Seed of the step.

        Raises:
            VisitOrderError: the model does not call its units as planned.
        """
        self.visits = []
        anchor = torch.zeros((), device=self._device, requires_grad=torch.is_grad_enabled())
        forwards = [
            SuspendedForward(
                number,
                self._forward_of(batch, num_items),
                self._random,
                self._device,
                micro_batch_seed(seed, number),
                self._mirror,
            )
            for number, batch in batches.items()
        ]
        try:
            for forward in forwards:
                forward.start()
            while any(forward.call is not None for forward in forwards):
                visit = self._next_visit(forwards, anchor)
                results = visit.forward(forwards)
                for forward in forwards:
                    forward.resume(results.pop(0))
        finally:
            for forward in forwards:
                forward.close()
        return [(forward.micro_batch, forward.result, forward.random_state) for forward in forwards]

    def check_visit_count(self) -> None:
        """Raise `VisitOrderError` if the forward ended before all planned visits."""
        if self._trace is None:
            return
        planned = sum(not visit.is_head for visit in self._trace.visits)
        if planned != len(self.visits):
            raise VisitOrderError(f"the forward ended after {len(self.visits)} unit calls, planned were {planned}")

    def _next_visit(self, forwards: Sequence[SuspendedForward], anchor: Tensor) -> UnitVisit:
        wanted = {forward.call.unit_index if forward.call else None for forward in forwards}
        number = len(self.visits)
        units = self._graph.units
        if len(wanted) > 1:
            names = sorted("the end" if index is None else units[index].name for index in wanted)
            raise VisitOrderError(
                f"micro-batches reach different units at visit {number}: {', '.join(names)}. Which layers this model "
                'runs depends on the data; train it with order = "micro_batch" and no plan'
            )
        index = wanted.pop()
        assert index is not None
        if self._trace is not None:
            expected = self._trace.visits[number].unit if number < len(self._trace.visits) else None
            if expected != index:
                planned = "the end of the forward" if expected is None else units[expected].name
                raise VisitOrderError(f"visit {number} is {units[index].name}, planned was {planned}")
        bound, is_kept = self._bounds[index], number in self._kept
        visit = UnitVisit(
            number, bound, self._access, self._random, self._announce_backward, anchor, is_kept, self._activity
        )
        self.visits.append(visit)
        return visit

    # -- stubs -------------------------------------------------------------------------------------------------

    def _stubbed(self) -> Any:
        stubs: dict[torch.nn.Module, Callable[..., Any]] = {
            bound.unit.module: _unit_stub(bound.unit.index) for bound in self._bounds if not bound.unit.is_container
        }
        if self._head is not None:
            trunk_forward = self._head.trunk.forward

            def trunk_stub(*args: Any, **kwargs: Any) -> Any:
                raise _TrunkReached(trunk_forward(*args, **kwargs))

            stubs[self._head.trunk] = trunk_stub
        return installed_stubs(stubs)

    def _forward_of(self, batch: dict[str, Any], num_items: int | None) -> Callable[[SuspendedForward], Any]:
        options: dict[str, Any] = {"use_cache": False} if self._accepts_use_cache else {}
        containers = [unit for unit in self._graph.units if unit.is_container]

        def forward(suspended: SuspendedForward) -> Any:
            try:
                for unit in containers:
                    values = suspend(UnitCall(unit.index, (), {}, None))
                    for leaf, value in values.items():
                        suspended.bind(unit.module._parameters, leaf, value)
                return self._graph.model(**batch, num_items_in_batch=num_items, **options)
            except _TrunkReached as reached:
                return reached.output

        return forward


def _unit_stub(index: int) -> Callable[..., Any]:
    from transformers.utils.output_capturing import _active_collector

    def stub(*args: Any, **kwargs: Any) -> Any:
        return suspend(UnitCall(index, args, kwargs, _active_collector.get()))

    return stub
