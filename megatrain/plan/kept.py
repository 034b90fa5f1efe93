"""Choice of the visits that keep their graphs, or save results, in free memory of the compute tier.

A kept graph avoids a second forward of its unit and the transfers of the unit's inputs. It takes memory from the unit's
forward to its backward. The last visits keep their graphs for the shortest time, so they come first
(docs/decisions/0015-keep-graphs-where-memory-is-left.md). Saved results of attention or of all matmuls take less memory
than a graph and avoid most of the recompute. They are stored in blocks, like a unit's inputs
(docs/decisions/0027-saving-attention-alone.md, docs/decisions/0081-results-of-products.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from megatrain.engine.device.work import SavableResults
from megatrain.engine.program.keeping import activations_of, keeping_graphs, saving_results
from megatrain.engine.program.step_program import StepProgram
from megatrain.engine.program.visit_trace import VisitTrace, layouts_of_unit, uses_of_layouts
from megatrain.engine.program.workspace import kept_graphs, peak_bytes, visit_transients
from megatrain.models.graph import ModelGraph
from megatrain.plan.placement import PlacementSolver, TierBudget
from megatrain.plan.plan import PlacedStep, TracedModel
from megatrain.plan.run_spec import RunSpec
from megatrain.plan.shortfall import Shortfall
from tiered.units import PAGE_BYTES, format_size, round_up

What = Literal["graphs", "results", "attention"]


class GraphKeeper:
    """Search for a program's visits that should keep graphs, and for those that should save results.

    Args:
        run: Run of the traced model, or a variant with a different order of micro-batches.
        program: Program of a step that keeps no graphs.
        budgets: Tier budgets of that step, including its workspace.
    """

    def __init__(
        self, run: RunSpec, traced: TracedModel, program: StepProgram, budgets: Mapping[str, TierBudget]
    ) -> None:
        self._run, self._traced, self._program, self._budgets = run, traced, program, budgets
        self._graph, self.trace, self._allowed = traced.graph, traced.trace, run.placement.homes
        self._in_visits = list(visit_transients(self._graph, self.trace, program, run.num_together, run.traced_on))
        self._without_graphs = peak_bytes(self._in_visits)

    def solve(self, graphs: Literal["auto"] | int, results: Literal["auto"] | int = 0) -> PlacedStep | Shortfall:
        """Return the placement with the chosen graphs and results, or a shortfall if a tier is too small.

        The tier can be too small for the requested numbers of layers, or even without graphs and results.

        Args:
            graphs: ``auto`` keeps graphs of all last layers that fit, if the compute tier fetches nothing. A number
                reserves memory for the graphs of this many last layers before other blocks. If this displaces a layer's
                weights from the compute tier, the layer keeps no graph.
            results: ``auto`` saves results of all last layers that fit and keep no graph, if no block moves. A number
                saves results of matmuls and attention of this many last layers, in any allowed home tier.
        """
        last = () if results == "auto" else self._last_visits(results, self._recomputed_visits())
        saved = visits_with_results(self.trace).intersection(last)
        visits = frozenset[int]() if graphs == "auto" else frozenset(self._last_visits(graphs, self.candidates()))
        found = self._solve_for(visits, saved)
        while not isinstance(found, Shortfall):
            at_home = partial(_are_at_home, self._graph, self._program, found.placement.homes)
            away = {visit for visit in visits if not at_home(self.trace.visits[visit].unit)}
            if not away:
                return self._fill_free_memory(found, graphs=graphs == "auto", results=results == "auto")
            visits -= away
            found = self._solve_for(visits, saved)
        is_asked_for = graphs != "auto" and (visits or saved)
        return self._with_advice(found, visits, saved) if is_asked_for else found

    def _solve_for(self, visits: frozenset[int], saved: frozenset[int]) -> PlacedStep | Shortfall:
        nbytes = self.nbytes(visits)
        program, budgets = keeping_graphs(self._program, visits), self.with_graphs(nbytes)
        program = saving_results(program, self.trace, saved - visits, with_products=True)
        placement = PlacementSolver(program, list(budgets.values()), self._allowed).solve()
        if isinstance(placement, Shortfall):
            return placement
        return PlacedStep(self._run, self._traced, program, placement, budgets, kept_bytes=nbytes)

    def _fill_free_memory(self, found: PlacedStep, *, graphs: bool, results: bool) -> PlacedStep:
        """Keep graphs or results for all of the last visits that fit without changing the placement.

        The kind that saves more operations per byte comes first.
        """
        tier, placement = self._program.compute_tier, found.placement
        # If blocks move, copies need the memory more. If the trace is not exact, the size of graphs is unknown.
        is_known = self.trace.exact and not placement.working_bytes[tier]
        graphs &= is_known
        results &= is_known and not any(placement.traffic_bytes.values()) and tier in self._allowed["activations"]
        left = _FreeMemory(self, found, tier)
        worth = operations_per_byte(self.trace)
        for what in sorted(worth, key=worth.__getitem__, reverse=True):
            if graphs if what == "graphs" else results:
                left.spend(what)
        return left.kept()

    def with_graphs(self, nbytes: int) -> dict[str, TierBudget]:
        """Return the budgets after adding ``nbytes`` for graphs to the compute tier's workspace."""
        tier = self._program.compute_tier
        budget = self._budgets[tier]
        return {**self._budgets, tier: replace(budget, workspace_bytes=budget.workspace_bytes + nbytes)}

    def candidates(self) -> list[int]:
        """Return the visits whose graphs may be kept, which avoids a recompute.

        A graph contains views of the weights, so visits that decode their weights are excluded. If such a visit reuses
        an input that an earlier visit saves, the earlier visit is also excluded.
        """
        visits, are_run_again = self.trace.visits, self._recomputed_visits()
        encoded = self._program.encodings.keys()
        units = {number: layouts_of_unit(self._graph, visits[number].unit) for number in are_run_again}
        left_out = {number for number, layouts in units.items() if not encoded.isdisjoint(layouts)}
        left_out |= {owner for number in left_out for owner, _ in visits[number].reused.values()}
        return [number for number in are_run_again if number not in left_out]

    def _recomputed_visits(self) -> list[int]:
        return [number for number, visit in enumerate(self.trace.visits) if visit.is_recomputed]

    def _last_visits(self, num_layers: int, visits: Sequence[int]) -> Iterator[int]:
        """Yield ``visits``, last visit first, until the last ``num_layers`` layers are complete."""
        above = ""
        for visit in reversed(visits) if num_layers else ():
            unit = self._graph.units[self.trace.visits[visit].unit]
            if unit.is_layer or unit.layer not in ("", above):  # consecutive visits of a layer count once
                num_layers -= 1
            if num_layers < 0:
                return
            above = unit.layer
            yield visit

    def nbytes(self, visits: Collection[int]) -> int:
        """Return the bytes that these visits' kept graphs add to the workspace."""
        graphs = kept_graphs(self.trace, self._program, visits, self._run.num_together)
        return round_up(peak_bytes([*self._in_visits, *graphs]) - self._without_graphs, PAGE_BYTES)

    def _with_advice(self, found: Shortfall, visits: Collection[int], saved: Collection[int]) -> Shortfall:
        taken = [f"Kept graphs take {format_size(self.nbytes(visits))}"] if visits else []
        if set(saved) - set(visits):
            each = sum(self.trace.visits[visit].results.nbytes for visit in saved if visit not in visits)
            taken.append(f"{'s' if taken else 'S'}aved results take {format_size(self._run.num_together * each)}")
        advice = f'{" and ".join(taken)}: write training.recompute = "auto" or "full", or give tiers.{found.tier} '
        return replace(found, advice=f"{advice}that size.")


class _FreeMemory:
    """Free memory of the compute tier, which is spent on kept graphs and saved results."""

    def __init__(self, keeper: GraphKeeper, found: PlacedStep, tier: str) -> None:
        self._keeper, self._found, self._tier = keeper, found, tier
        self._inputs = activations_of(found.program)
        self._kept: Mapping[What, frozenset[int]] = {
            "graphs": found.program.recompute.kept_graphs,
            "results": frozenset(),  # in addition to results that the program already saves
            "attention": frozenset(),
        }

    def spend(self, what: What) -> None:
        """Keep graphs or results for the last visits while memory is left. Drop kinds that save less recompute."""
        if what == "graphs":
            visits = frozenset(self._keeper.candidates())
        else:
            visits = visits_with_results(self._keeper.trace, attention_alone=what == "attention")
            visits -= self._kept["graphs"] | self._found.program.recompute.saving
            visits -= self._kept["results"]
        for visit in sorted(visits - self._kept[what], reverse=True):
            others = {kind: kept - {visit} for kind, kept in self._kept.items()}
            if not self._try_keeping({**others, what: self._kept[what] | {visit}}):
                return

    def _try_keeping(self, kept: Mapping[What, frozenset[int]]) -> bool:
        budget = self._found.budgets_by_tier[self._tier]
        grown = self._keeper.nbytes(kept["graphs"]) - self._found.kept_bytes
        used = self._found.placement.peak_bytes(self._tier) + grown + self._added_bytes(kept)
        if used > budget.capacity_bytes:
            return False
        self._kept = kept
        return True

    def _added_bytes(self, kept: Mapping[What, frozenset[int]]) -> int:
        """Return by how many bytes activation blocks grow: new results, minus inputs that kept graphs replace."""
        slot_bytes, visits = self._found.budgets_by_tier[self._tier].slot_bytes, self._keeper.trace.visits
        blocks = self._found.program.blocks
        new_graphs = kept["graphs"] - self._found.program.recompute.kept_graphs
        dropped = [key for visit in new_graphs for key in self._inputs[visit]]
        # A visit has one block of results for each block of its first input.
        added = sum(self._num_slots(visit) * slot_bytes(visits[visit].results.nbytes) for visit in kept["results"])
        added += sum(self._num_slots(visit) * slot_bytes(visits[visit].attention.nbytes) for visit in kept["attention"])
        return added - sum(slot_bytes(blocks[key].nbytes) for key in dropped)

    def _num_slots(self, visit: int) -> int:
        inputs = [key for key in self._inputs[visit] if not key.endswith(".results")]
        return len(inputs) // len(self._keeper.trace.visits[visit].saved)

    def kept(self) -> PlacedStep:
        """Return the step with the graphs and results that have been kept so far."""
        found, tier, trace = self._found, self._tier, self._keeper.trace
        nbytes = self._keeper.nbytes(self._kept["graphs"])
        program = keeping_graphs(found.program, self._kept["graphs"] - found.program.recompute.kept_graphs)
        program = saving_results(program, trace, self._kept["attention"])
        program = saving_results(program, trace, self._kept["results"], with_products=True)
        home_bytes = found.placement.home_bytes
        activations = home_bytes[tier]["activations"] + self._added_bytes(self._kept)
        budgets = self._keeper.with_graphs(nbytes)
        placement = replace(
            found.placement,
            homes={key: found.placement.homes.get(key, tier) for key in program.blocks},
            home_bytes={**home_bytes, tier: {**home_bytes[tier], "activations": activations}},
            workspace_bytes={name: budget.workspace_bytes for name, budget in budgets.items()},
        )
        return replace(found, program=program, placement=placement, budgets_by_tier=budgets, kept_bytes=nbytes)


def visits_with_results(trace: VisitTrace, *, attention_alone: bool = False) -> frozenset[int]:
    """Return the recomputed visits that have results to save: of matmuls and attention, or only of attention."""
    return frozenset(
        number
        for number, visit in enumerate(trace.visits)
        if (visit.attention if attention_alone else visit.results).nbytes and visit.is_recomputed
    )


def operations_per_byte(trace: VisitTrace) -> dict[What, float]:
    """Return the operations saved per byte, by kind. Kinds without bytes are omitted."""
    visits = [visit for visit in trace.visits if visit.is_recomputed]
    found: dict[What, tuple[int, int]] = {
        "graphs": (
            sum(visit.recompute.computed_flops for visit in visits),
            sum(visit.memory.graph_nbytes for visit in visits),
        ),
        "results": _flops_and_bytes(visit.results for visit in visits),
        "attention": _flops_and_bytes(visit.attention for visit in visits),
    }
    return {what: operations / nbytes for what, (operations, nbytes) in found.items() if nbytes}


def _flops_and_bytes(results: Iterable[SavableResults]) -> tuple[int, int]:
    """Return the total operations that these results save, and their total bytes."""
    found = list(results)
    return sum(each.work.computed_flops for each in found), sum(each.nbytes for each in found)


def weights_stay(graph: ModelGraph, trace: VisitTrace, program: StepProgram, homes: Mapping[str, str]) -> bool:
    """Return whether the compute tier is the home of all weights that kept graphs use.

    A graph contains views of the weights' slots. Weights at home do not move between a forward and its backward. They
    are also not written, because all updates of a layout run before its first use in a step or after its last use.
    """
    return all(_are_at_home(graph, program, homes, trace.visits[visit].unit) for visit in program.recompute.kept_graphs)


def _are_at_home(graph: ModelGraph, program: StepProgram, homes: Mapping[str, str], unit: int) -> bool:
    """Return whether the compute tier is the home of all weights of a unit."""
    layouts = (graph.layouts[name] for name in layouts_of_unit(graph, unit))
    return all(homes[key] == program.compute_tier for layout in layouts for key in program.weight_keys(layout))


def num_layers_kept(graph: ModelGraph, trace: VisitTrace, program: StepProgram) -> tuple[int, int]:
    """Return the number of layers that keep all their graphs, and the number of layers that could keep graphs."""
    layers: list[list[int]] = []  # visits by layer
    above = ""
    for number, visit in enumerate(trace.visits):
        unit = graph.units[visit.unit]
        if visit.is_recomputed and unit.layer:
            if unit.is_layer or unit.layer != above:
                layers.append([])
            layers[-1].append(number)
        above = unit.layer
    return sum(program.recompute.kept_graphs.issuperset(visits) for visits in layers), len(layers)


def num_layers_of(graph: ModelGraph, trace: VisitTrace, visits: Iterable[int]) -> int:
    """Return the number of visits that belong to layers."""
    return sum(bool(graph.units[trace.visits[visit].unit].layer) for visit in visits)


def num_parameters_run_once(graph: ModelGraph, trace: VisitTrace, program: StepProgram) -> int:
    """Return the number of parameters whose forward runs only once, because all their uses keep graphs."""
    once = [
        name
        for name, visits in uses_of_layouts(graph, trace).items()
        if visits and program.recompute.kept_graphs.issuperset(visits)
    ]
    return sum(entry.numel for name in once for entry in graph.layouts[name].entries)
