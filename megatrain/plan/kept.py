"""Which visits keep their graphs: those whose graphs fit into what is left when everything else has its place.

A kept graph saves one forward of its unit, and its inputs' way out and back in. It takes memory from the unit's forward
to its backward, so the last visits of a forward come first: their graphs live shortest
(docs/decisions/0015-keep-graphs-where-memory-is-left.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from megatrain.engine.program import activations_of, keeping_graphs, layouts_of_unit, uses_of_layouts
from megatrain.plan.placement import DoesNotFitError, Homes, PlacementSolver
from tiered.units import PAGE_BYTES, format_size, round_up

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from megatrain.engine.program import StepProgram, VisitTrace
    from megatrain.models.graph import ModelGraph
    from megatrain.plan.placement import Homes, Placement, TierBudget


@dataclass(frozen=True)
class KeptGraphs:
    """A program with the graphs that it keeps, and its placement.

    Attributes:
        budgets: with the kept graphs in the workspace of the compute tier.
        nbytes: what these take at their fullest.
    """

    program: StepProgram
    budgets: Mapping[str, TierBudget]
    placement: Placement
    nbytes: int


class GraphKeeper:
    """Chooses the visits of one program whose graphs are kept.

    Args:
        program: of a step that keeps none.
        budgets: of a step that keeps none.
        allowed: as for the solver.
        num_together: micro-batches whose graphs are there at once.
    """

    def __init__(
        self,
        graph: ModelGraph,
        trace: VisitTrace,
        program: StepProgram,
        budgets: Mapping[str, TierBudget],
        allowed: Homes,
        num_together: int,
    ) -> None:
        self._graph, self._trace, self._program = graph, trace, program
        self._budgets, self._allowed, self._num_together = budgets, allowed, num_together

    def solve(self, wanted: Literal["auto"] | int) -> KeptGraphs:
        """Return what is kept, and where everything else lives then.

        Args:
            wanted: ``auto``: as many as fit where the compute tier fetches nothing. A number: those of so many of the
                last layers, before anything else gets the room, as far as their weights are at home there even so.

        Raises:
            DoesNotFitError: a tier is too small, for the number that is wanted or whatever is kept.
        """
        if wanted == "auto":
            return self._what_is_left(self._solved(frozenset()))
        visits = frozenset(self._last(wanted))
        while True:
            try:
                found = self._solved(visits)
            except DoesNotFitError as error:
                raise self._with_advice(error, visits) if visits else error from error
            away = {visit for visit in visits if not self._is_at_home(found.placement, visit)}
            if not away:
                return found
            visits -= away

    def _solved(self, visits: frozenset[int]) -> KeptGraphs:
        nbytes = self._nbytes(visits)
        program, budgets = keeping_graphs(self._program, visits), self._with_graphs(nbytes)
        placement = PlacementSolver(program, list(budgets.values()), self._allowed).solve()
        return KeptGraphs(program, budgets, placement, nbytes)

    def _what_is_left(self, without: KeptGraphs) -> KeptGraphs:
        """Keep the graphs of the last visits, as many as fit beside a placement, which stays as it is."""
        tier, placement = self._program.compute_tier, without.placement
        if placement.working_bytes[tier] or not self._trace.exact:
            return without  # room is worth more to copies; or nobody knows how much graphs would take
        budget, activations = self._budgets[tier], activations_of(self._program)
        visits, freed = frozenset[int](), 0
        for visit in reversed(self._candidates()):
            gone = freed + sum(budget.slot_bytes(self._program.blocks[key].nbytes) for key in activations[visit])
            if placement.peak_bytes(tier) - gone + self._nbytes(visits | {visit}) > budget.capacity_bytes:
                break
            visits, freed = visits | {visit}, gone
        return self._beside(placement, visits, freed)

    def _beside(self, placement: Placement, visits: frozenset[int], freed_bytes: int) -> KeptGraphs:
        """Return a placement in which graphs take the room of their activations, and more that is left."""
        program, nbytes = keeping_graphs(self._program, visits), self._nbytes(visits)
        tier, home_bytes = program.compute_tier, dict(placement.home_bytes)
        home_bytes[tier] = {**home_bytes[tier], "activations": home_bytes[tier]["activations"] - freed_bytes}
        budgets = self._with_graphs(nbytes)
        placement = replace(
            placement,
            homes={key: placement.homes[key] for key in program.blocks},
            home_bytes=home_bytes,
            workspace_bytes={name: budget.workspace_bytes for name, budget in budgets.items()},
        )
        return KeptGraphs(program, budgets, placement, nbytes)

    def _with_graphs(self, nbytes: int) -> dict[str, TierBudget]:
        tier = self._program.compute_tier
        budget = self._budgets[tier]
        return {**self._budgets, tier: replace(budget, workspace_bytes=budget.workspace_bytes + nbytes)}

    def _candidates(self) -> list[int]:
        return [n for n, visit in enumerate(self._trace.visits) if visit.has_backward and not visit.is_head]

    def _last(self, num_layers: int) -> Iterator[int]:
        """Yield the visits of so many of the last layers, and of all that comes after the first of them."""
        for visit in reversed(self._candidates()) if num_layers else ():
            num_layers -= self._graph.units[self._trace.visits[visit].unit].is_layer
            if num_layers < 0:
                return
            yield visit

    def _nbytes(self, visits: Collection[int]) -> int:
        each = sum(self._trace.visits[visit].graph_nbytes for visit in visits)
        return round_up(self._num_together * each, PAGE_BYTES)

    def _is_at_home(self, placement: Placement, visit: int) -> bool:
        return _are_at_home(self._graph, self._program, placement.homes, self._trace.visits[visit].unit)

    def _with_advice(self, error: DoesNotFitError, visits: Collection[int]) -> DoesNotFitError:
        advice = f"Graphs that are kept take {format_size(self._nbytes(visits))}: lower advanced.keep_graphs, "
        advice += f'or write "auto", or give tiers.{error.tier} that size.'
        return DoesNotFitError(error.tier, error.need_bytes, error.have_bytes, advice)


def weights_stay(graph: ModelGraph, trace: VisitTrace, program: StepProgram, homes: Mapping[str, str]) -> bool:
    """Return whether the weights of every kept graph are at home in the compute tier.

    The graph has views of their slots. At home nothing moves them, and nothing writes them between a forward and its
    backward: all updates of a layout come before its first use in a step or after its last.
    """
    return all(_are_at_home(graph, program, homes, trace.visits[visit].unit) for visit in program.kept)


def _are_at_home(graph: ModelGraph, program: StepProgram, homes: Mapping[str, str], unit: int) -> bool:
    """Return whether all weights of a unit are at home in the compute tier."""
    layouts = (graph.layouts[name] for name in layouts_of_unit(graph, unit))
    return all(homes[key] == program.compute_tier for layout in layouts for key in program.weight_keys(layout))


def num_layers_kept(graph: ModelGraph, trace: VisitTrace, program: StepProgram) -> tuple[int, int]:
    """Return how many layers are not run again in the backward, and how many there are that could be."""
    visits = enumerate(trace.visits)
    layers = [n for n, visit in visits if visit.has_backward and not visit.is_head and graph.units[visit.unit].is_layer]
    return sum(layer in program.kept for layer in layers), len(layers)


def num_parameters_run_once(graph: ModelGraph, trace: VisitTrace, program: StepProgram) -> int:
    """Return the parameters that are only used where graphs are kept: their forward is not run a second time."""
    once = [
        name for name, visits in uses_of_layouts(graph, trace).items() if visits and program.kept.issuperset(visits)
    ]
    return sum(entry.numel for name in once for entry in graph.layouts[name].entries)
