"""Which visits keep their graphs, or attention's results: those that fit into what is left beside everything else.

A kept graph saves one forward of its unit, and its inputs' way out and back in. It takes memory from the unit's forward
to its backward, so the last visits of a forward come first: their graphs live shortest
(docs/decisions/0015-keep-graphs-where-memory-is-left.md). Attention's results alone take a small part of a graph and
save the recompute of attention; they are blocks like a unit's inputs (docs/decisions/0027-saving-attention-alone.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from megatrain.engine.program import (
    activations_of,
    keeping_graphs,
    layouts_of_unit,
    saving_attention,
    uses_of_layouts,
)
from megatrain.plan.placement import DoesNotFitError, Homes, PlacementSolver
from tiered.units import PAGE_BYTES, format_size, round_up

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from megatrain.engine.program import StepProgram, VisitTrace
    from megatrain.models.graph import ModelGraph
    from megatrain.plan.placement import Homes, Placement, TierBudget


@dataclass(frozen=True)
class KeptGraphs:
    """A program with the graphs and attention results that it keeps, and its placement.

    Attributes:
        budgets: with the kept graphs in the workspace of the compute tier.
        nbytes: what these take at their fullest.
    """

    program: StepProgram
    budgets: Mapping[str, TierBudget]
    placement: Placement
    nbytes: int


class GraphKeeper:
    """Chooses the visits of one program whose graphs are kept, and those that save attention's results.

    Args:
        program: A step that keeps none.
        budgets: The tiers of such a step, with its workspace.
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
        self._graph, self.trace, self._program = graph, trace, program
        self._budgets, self._allowed, self._num_together = budgets, allowed, num_together

    def solve(self, wanted: Literal["auto"] | int, attention: Literal["auto"] | int = 0) -> KeptGraphs:
        """Return what is kept, and where everything else lives then.

        Args:
            wanted: ``auto``: as many as fit where the compute tier fetches nothing. A number: those of so many of the
                last layers, before anything else gets the room, as far as their weights are at home there even so.
            attention: ``auto``: attention's results of the last layers without a kept graph, as many as fit where
                nothing moves. A number: of so many of the last layers, wherever there is a home for them.

        Raises:
            DoesNotFitError: a tier is too small, for the number that is wanted or whatever is kept.
        """
        saved = frozenset() if attention == "auto" else self._last_with_attention(attention)
        if wanted == "auto":
            return self._what_is_left(self._solved(frozenset(), saved), graphs=True, attention=attention == "auto")
        visits = frozenset(self._last(wanted))
        while True:
            try:
                found = self._solved(visits, saved)
            except DoesNotFitError as error:
                raise self._with_advice(error, visits) if visits else error from error
            away = {visit for visit in visits if not self._is_at_home(found.placement, visit)}
            if not away:
                return self._what_is_left(found, graphs=False, attention=attention == "auto")
            visits -= away

    def _solved(self, visits: frozenset[int], saved: frozenset[int]) -> KeptGraphs:
        nbytes = self.nbytes(visits)
        program, budgets = keeping_graphs(self._program, visits), self.with_graphs(nbytes)
        program = saving_attention(program, self.trace, saved - visits)
        placement = PlacementSolver(program, list(budgets.values()), self._allowed).solve()
        return KeptGraphs(program, budgets, placement, nbytes)

    def _what_is_left(self, found: KeptGraphs, *, graphs: bool, attention: bool) -> KeptGraphs:
        """Keep graphs, or attention's results, of the last visits, beside a placement which stays as it is.

        As many as fit; first that which saves more operations for its bytes.
        """
        tier, placement = self._program.compute_tier, found.placement
        # Room is worth more to copies; or nobody knows how much graphs would take.
        is_known = self.trace.exact and not placement.working_bytes[tier]
        graphs &= is_known
        attention &= is_known and not any(placement.traffic_bytes.values()) and tier in self._allowed["activations"]
        left = _FreeMemory(self, found, tier)
        if attention and self._attention_is_worth_more():
            left.save_attention()
        if graphs:
            left.keep_graphs()
        if attention:
            left.save_attention()
        return left.kept()

    def _attention_is_worth_more(self) -> bool:
        """Return whether a byte of attention's results saves more operations than one of whole graphs."""
        visits = [self.trace.visits[number] for number in visits_with_attention(self.trace)]
        in_attention = sum(visit.attention.computed_flops for visit in visits)
        in_all = sum(visit.recompute.computed_flops for visit in visits)
        of_graphs = sum(visit.graph_nbytes for visit in visits)
        return in_attention * of_graphs > in_all * sum(visit.attention_nbytes for visit in visits)

    def with_graphs(self, nbytes: int) -> dict[str, TierBudget]:
        """Return the budgets with so many bytes of graphs in the compute tier's workspace."""
        tier = self._program.compute_tier
        budget = self._budgets[tier]
        return {**self._budgets, tier: replace(budget, workspace_bytes=budget.workspace_bytes + nbytes)}

    def candidates(self) -> list[int]:
        """Return the visits that are run again unless their graphs are kept.

        A graph has views of the weights, so not those whose weights are there for one visit only; and an input that
        such a visit has in common with one before it is saved by that one.
        """
        visits = self.trace.visits
        are_run_again = [n for n, visit in enumerate(visits) if visit.has_backward and not visit.is_head]
        left_out = {number for number in are_run_again if self._is_decoded(visits[number].unit)}
        left_out |= {owner for number in left_out for owner, _ in visits[number].reused.values()}
        return [number for number in are_run_again if number not in left_out]

    def _is_decoded(self, unit: int) -> bool:
        return any(name in self._program.encodings for name in layouts_of_unit(self._graph, unit))

    def _last(self, num_layers: int) -> Iterator[int]:
        """Yield the visits of so many of the last layers, and of all that comes after the first of them."""
        above = ""
        for visit in reversed(self.candidates()) if num_layers else ():
            unit = self._graph.units[self.trace.visits[visit].unit]
            if unit.is_layer or unit.layer not in ("", above):  # a layer may be several visits, one after the other
                num_layers -= 1
            if num_layers < 0:
                return
            above = unit.layer
            yield visit

    def _last_with_attention(self, num_layers: int) -> frozenset[int]:
        return visits_with_attention(self.trace).intersection(self._last(num_layers))

    def nbytes(self, visits: Collection[int]) -> int:
        """Return what the graphs of these visits take together."""
        each = sum(self.trace.visits[visit].graph_nbytes for visit in visits)
        return round_up(self._num_together * each, PAGE_BYTES)

    def _is_at_home(self, placement: Placement, visit: int) -> bool:
        return _are_at_home(self._graph, self._program, placement.homes, self.trace.visits[visit].unit)

    def _with_advice(self, error: DoesNotFitError, visits: Collection[int]) -> DoesNotFitError:
        advice = f"Graphs that are kept take {format_size(self.nbytes(visits))}: lower advanced.keep_graphs, "
        advice += f'or write "auto", or give tiers.{error.tier} that size.'
        return DoesNotFitError(error.tier, error.need_bytes, error.have_bytes, advice)


class _FreeMemory:
    """Free memory of the compute tier, being spent on kept graphs and saved attention."""

    def __init__(self, keeper: GraphKeeper, found: KeptGraphs, tier: str) -> None:
        self._keeper, self._found, self._tier = keeper, found, tier
        self._inputs = activations_of(found.program)
        self._graphs = found.program.recompute.kept_graphs
        self._attention = frozenset[int]()  # besides those of the program that was found

    def keep_graphs(self) -> None:
        """Keep the graphs of the last visits, as many as fit; they need no results of attention then."""
        for visit in reversed(self._keeper.candidates()):
            if not self._try(self._graphs | {visit}, self._attention - {visit}):
                return

    def save_attention(self) -> None:
        """Save attention's results of the last visits whose graphs are not kept, as many as fit."""
        saved = self._found.program.recompute.saved_attention
        others = visits_with_attention(self._keeper.trace) - self._graphs - saved
        for visit in sorted(others, reverse=True):
            if not self._try(self._graphs, self._attention | {visit}):
                return

    def _try(self, graphs: frozenset[int], attention: frozenset[int]) -> bool:
        budget = self._found.budgets[self._tier]
        grown = self._keeper.nbytes(graphs) - self._found.nbytes
        used = self._found.placement.peak_bytes(self._tier) + grown + self._grown(graphs, attention)
        if used > budget.capacity_bytes:
            return False
        self._graphs, self._attention = graphs, attention
        return True

    def _grown(self, graphs: frozenset[int], attention: frozenset[int]) -> int:
        """Return how much more the blocks of activations take."""
        slot_bytes, blocks = self._found.budgets[self._tier].slot_bytes, self._found.program.blocks
        dropped = [key for visit in graphs - self._found.program.recompute.kept_graphs for key in self._inputs[visit]]
        # As many blocks as a visit has of its first input.
        added = sum(
            self._num_slots(visit) * slot_bytes(self._keeper.trace.visits[visit].attention_nbytes)
            for visit in attention
        )
        return added - sum(slot_bytes(blocks[key].nbytes) for key in dropped)

    def _num_slots(self, visit: int) -> int:
        return len(self._inputs[visit]) // len(self._keeper.trace.visits[visit].saved)

    def kept(self) -> KeptGraphs:
        """Return the program and placement that result."""
        found, tier, nbytes = self._found, self._tier, self._keeper.nbytes(self._graphs)
        program = keeping_graphs(found.program, self._graphs - found.program.recompute.kept_graphs)
        program = saving_attention(program, self._keeper.trace, self._attention)
        home_bytes = dict(found.placement.home_bytes)
        grown = self._grown(self._graphs, self._attention)
        home_bytes[tier] = {**home_bytes[tier], "activations": home_bytes[tier]["activations"] + grown}
        budgets = self._keeper.with_graphs(nbytes)
        placement = replace(
            found.placement,
            homes={key: found.placement.homes.get(key, tier) for key in program.blocks},
            home_bytes=home_bytes,
            workspace_bytes={name: budget.workspace_bytes for name, budget in budgets.items()},
        )
        return KeptGraphs(program, budgets, placement, nbytes)


def visits_with_attention(trace: VisitTrace) -> frozenset[int]:
    """Return the visits that are run again, and whose attention has results to save."""
    return frozenset(
        number
        for number, visit in enumerate(trace.visits)
        if visit.attention_nbytes and visit.has_backward and not visit.is_head
    )


def weights_stay(graph: ModelGraph, trace: VisitTrace, program: StepProgram, homes: Mapping[str, str]) -> bool:
    """Return whether the weights of every kept graph are at home in the compute tier.

    The graph has views of their slots. At home nothing moves them, and nothing writes them between a forward and its
    backward: all updates of a layout come before its first use in a step or after its last.
    """
    return all(_are_at_home(graph, program, homes, trace.visits[visit].unit) for visit in program.recompute.kept_graphs)


def _are_at_home(graph: ModelGraph, program: StepProgram, homes: Mapping[str, str], unit: int) -> bool:
    """Return whether all weights of a unit are at home in the compute tier."""
    layouts = (graph.layouts[name] for name in layouts_of_unit(graph, unit))
    return all(homes[key] == program.compute_tier for layout in layouts for key in program.weight_keys(layout))


def num_layers_kept(graph: ModelGraph, trace: VisitTrace, program: StepProgram) -> tuple[int, int]:
    """Return how many layers are not run again in the backward, and how many there are that could be."""
    layers: list[list[int]] = []  # visits of each
    above = ""
    for number, visit in enumerate(trace.visits):
        unit = graph.units[visit.unit]
        if visit.has_backward and not visit.is_head and unit.layer:
            if unit.is_layer or unit.layer != above:
                layers.append([])
            layers[-1].append(number)
        above = unit.layer
    return sum(program.recompute.kept_graphs.issuperset(visits) for visits in layers), len(layers)


def num_layers_saving_attention(graph: ModelGraph, trace: VisitTrace, program: StepProgram) -> int:
    """Return how many layers are run again in the backward but for their attention."""
    return sum(bool(graph.units[trace.visits[visit].unit].layer) for visit in program.recompute.saved_attention)


def num_parameters_run_once(graph: ModelGraph, trace: VisitTrace, program: StepProgram) -> int:
    """Return the parameters that are only used where graphs are kept: their forward is not run a second time."""
    once = [
        name
        for name, visits in uses_of_layouts(graph, trace).items()
        if visits and program.recompute.kept_graphs.issuperset(visits)
    ]
    return sum(entry.numel for name in once for entry in graph.layouts[name].entries)
