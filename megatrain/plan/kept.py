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
from megatrain.engine.program.keeping import activation_keys, keep_graphs, save_results
from megatrain.engine.program.step_program import StepProgram
from megatrain.engine.program.visit_trace import VisitTrace, layout_uses, unit_layouts
from megatrain.engine.program.workspace import kept_graphs, peak_bytes, visit_transients
from megatrain.models.graph import ModelGraph
from megatrain.plan.placement import PlacementSolver, TierBudget
from megatrain.plan.plan import PlacedStep, TracedModel
from megatrain.plan.run_spec import RunSpec
from megatrain.plan.shortfall import Shortfall
from tiered.units import PAGE_BYTES, format_size, round_up

KeptKind = Literal["graphs", "results", "attention"]


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
        self._transients = list(visit_transients(self._graph, self.trace, program, run.num_together, run.trace_device))
        self._peak_without_graphs = peak_bytes(self._transients)

    def solve(self, graphs: Literal["auto"] | int, results: Literal["auto"] | int = 0) -> PlacedStep | Shortfall:
        """Return the placement with the chosen graphs and results, or a shortfall if a tier is too small.

        The tier can be too small for the requested numbers of layers, or even without graphs and results.

        Args:
            graphs: ``auto`` keeps graphs of the last layers, as many as fit, if the compute tier fetches nothing. A
                number reserves memory for the graphs of that many last layers before blocks get homes. If this
                displaces a layer's weights from the compute tier, the layer keeps no graph.
            results: ``auto`` saves results of the last layers without graphs, as many as fit, if no block moves. A
                number saves results of matmuls and attention of that many last layers, in any allowed home tier.
        """
        last_visits = () if results == "auto" else self._last_visits(results, self._recomputed_visits())
        saving_visits = visits_with_results(self.trace).intersection(last_visits)
        visits = frozenset[int]() if graphs == "auto" else frozenset(self._last_visits(graphs, self.candidates()))
        step = self._solve_for(visits, saving_visits)
        while not isinstance(step, Shortfall):
            is_at_home = partial(_are_at_home, self._graph, self._program, step.placement.homes)
            displaced_visits = {visit for visit in visits if not is_at_home(self.trace.visits[visit].unit)}
            if not displaced_visits:
                return self._fill_free_memory(step, graphs=graphs == "auto", results=results == "auto")
            visits -= displaced_visits
            step = self._solve_for(visits, saving_visits)
        is_requested = graphs != "auto" and (visits or saving_visits)
        return self._with_advice(step, visits, saving_visits) if is_requested else step

    def _solve_for(self, visits: frozenset[int], saving_visits: frozenset[int]) -> PlacedStep | Shortfall:
        nbytes = self.graph_bytes(visits)
        program, budgets = keep_graphs(self._program, visits), self.with_graphs(nbytes)
        program = save_results(program, self.trace, saving_visits - visits, with_products=True)
        placement = PlacementSolver(program, list(budgets.values()), self._allowed).solve()
        if isinstance(placement, Shortfall):
            return placement
        return PlacedStep(self._run, self._traced, program, placement, budgets, kept_bytes=nbytes)

    def _fill_free_memory(self, step: PlacedStep, *, graphs: bool, results: bool) -> PlacedStep:
        """Keep graphs or results for as many of the last visits as fit without changing the placement.

        The kind that saves more operations per byte comes first.
        """
        tier, placement = self._program.compute_tier, step.placement
        # If blocks move, copies need the memory more. If the trace is not exact, the size of graphs is unknown.
        can_fill = self.trace.exact and not placement.working_bytes[tier]
        graphs &= can_fill
        results &= can_fill and not any(placement.traffic_bytes.values()) and tier in self._allowed["activations"]
        free_memory = _FreeMemory(self, step, tier)
        ops_per_byte = operations_per_byte(self.trace)
        for kind in sorted(ops_per_byte, key=ops_per_byte.__getitem__, reverse=True):
            if graphs if kind == "graphs" else results:
                free_memory.spend(kind)
        return free_memory.filled_step()

    def with_graphs(self, nbytes: int) -> dict[str, TierBudget]:
        """Return the budgets after adding ``nbytes`` for graphs to the compute tier's workspace."""
        tier = self._program.compute_tier
        budget = self._budgets[tier]
        return {**self._budgets, tier: replace(budget, workspace_bytes=budget.workspace_bytes + nbytes)}

    def candidates(self) -> list[int]:
        """Return the visits whose graphs may be kept to avoid a recompute.

        A graph contains views of the weights, so visits that decode their weights are excluded. If such a visit reuses
        an input that an earlier visit saves, the earlier visit is also excluded.
        """
        visits, recomputed_visits = self.trace.visits, self._recomputed_visits()
        encoded_layouts = self._program.encodings.keys()
        units = {index: unit_layouts(self._graph, visits[index].unit) for index in recomputed_visits}
        excluded_visits = {index for index, layouts in units.items() if not encoded_layouts.isdisjoint(layouts)}
        excluded_visits |= {owner for index in excluded_visits for owner, _ in visits[index].aliases.values()}
        return [index for index in recomputed_visits if index not in excluded_visits]

    def _recomputed_visits(self) -> list[int]:
        return [index for index, visit in enumerate(self.trace.visits) if visit.is_recomputed]

    def _last_visits(self, num_layers: int, visits: Sequence[int]) -> Iterator[int]:
        """Yield ``visits``, last visit first, until the last ``num_layers`` layers are complete."""
        previous_layer = ""
        for visit in reversed(visits) if num_layers else ():
            unit = self._graph.units[self.trace.visits[visit].unit]
            if unit.is_layer or unit.layer not in ("", previous_layer):  # consecutive visits of a layer count once
                num_layers -= 1
            if num_layers < 0:
                return
            previous_layer = unit.layer
            yield visit

    def graph_bytes(self, visits: Collection[int]) -> int:
        """Return the bytes that these visits' kept graphs add to the workspace."""
        graphs = kept_graphs(self.trace, self._program, visits, self._run.num_together)
        return round_up(peak_bytes([*self._transients, *graphs]) - self._peak_without_graphs, PAGE_BYTES)

    def _with_advice(self, shortfall: Shortfall, visits: Collection[int], saving_visits: Collection[int]) -> Shortfall:
        clauses = [f"Kept graphs take {format_size(self.graph_bytes(visits))}"] if visits else []
        if result_visits := set(saving_visits) - set(visits):
            nbytes = self._run.num_together * sum(self.trace.visits[visit].results.nbytes for visit in result_visits)
            clauses.append(f"{'s' if clauses else 'S'}aved results take {format_size(nbytes)}")
        advice = f'write training.recompute = "auto" or "full", or give tiers.{shortfall.tier} that size.'
        return replace(shortfall, advice=f"{' and '.join(clauses)}: {advice}")


class _FreeMemory:
    """Free memory of the compute tier, which is spent on kept graphs and saved results."""

    def __init__(self, keeper: GraphKeeper, step: PlacedStep, tier: str) -> None:
        self._keeper, self._step, self._tier = keeper, step, tier
        self._inputs = activation_keys(step.program)
        self._visits_by_kind: Mapping[KeptKind, frozenset[int]] = {
            "graphs": step.program.recompute.kept_graphs,
            "results": frozenset(),  # in addition to results that the program already saves
            "attention": frozenset(),
        }

    def spend(self, kind: KeptKind) -> None:
        """Keep graphs or results of the last visits while memory is left, instead of kinds that save less recompute."""
        if kind == "graphs":
            visits = frozenset(self._keeper.candidates())
        else:
            visits = visits_with_results(self._keeper.trace, attention_alone=kind == "attention")
            visits -= self._visits_by_kind["graphs"] | self._step.program.recompute.saving_visits
            visits -= self._visits_by_kind["results"]
        for visit in sorted(visits - self._visits_by_kind[kind], reverse=True):
            choice = {name: visits - {visit} for name, visits in self._visits_by_kind.items()}
            if not self._try_keeping({**choice, kind: self._visits_by_kind[kind] | {visit}}):
                return

    def _try_keeping(self, visits: Mapping[KeptKind, frozenset[int]]) -> bool:
        budget = self._step.budgets_by_tier[self._tier]
        graph_bytes = self._keeper.graph_bytes(visits["graphs"]) - self._step.kept_bytes
        used_bytes = self._step.placement.peak_bytes(self._tier) + graph_bytes + self._added_bytes(visits)
        if used_bytes > budget.capacity_bytes:
            return False
        self._visits_by_kind = visits
        return True

    def _added_bytes(self, choice: Mapping[KeptKind, frozenset[int]]) -> int:
        """Return the growth of activation blocks in bytes: new results, minus inputs that kept graphs replace."""
        slot_bytes, visits = self._step.budgets_by_tier[self._tier].slot_bytes, self._keeper.trace.visits
        blocks = self._step.program.blocks
        new_graphs = choice["graphs"] - self._step.program.recompute.kept_graphs
        dropped_keys = [key for visit in new_graphs for key in self._inputs[visit]]
        # A visit has one block of results for each block of its first input.
        nbytes = {visit: visits[visit].results.nbytes for visit in choice["results"]}
        nbytes |= {visit: visits[visit].attention.nbytes for visit in choice["attention"]}
        total = sum(self._num_slots(visit) * slot_bytes(size) for visit, size in nbytes.items())
        return total - sum(slot_bytes(blocks[key].nbytes) for key in dropped_keys)

    def _num_slots(self, visit: int) -> int:
        inputs = [key for key in self._inputs[visit] if not key.endswith(".results")]
        return len(inputs) // len(self._keeper.trace.visits[visit].saved_inputs)

    def filled_step(self) -> PlacedStep:
        """Return the step with the graphs and results that have been kept so far."""
        step, tier, trace = self._step, self._tier, self._keeper.trace
        nbytes = self._keeper.graph_bytes(self._visits_by_kind["graphs"])
        program = keep_graphs(step.program, self._visits_by_kind["graphs"] - step.program.recompute.kept_graphs)
        program = save_results(program, trace, self._visits_by_kind["attention"])
        program = save_results(program, trace, self._visits_by_kind["results"], with_products=True)
        home_bytes = step.placement.home_bytes
        activations = home_bytes[tier]["activations"] + self._added_bytes(self._visits_by_kind)
        budgets = self._keeper.with_graphs(nbytes)
        placement = replace(
            step.placement,
            homes={key: step.placement.homes.get(key, tier) for key in program.blocks},
            home_bytes={**home_bytes, tier: {**home_bytes[tier], "activations": activations}},
            workspace_bytes={name: budget.workspace_bytes for name, budget in budgets.items()},
        )
        return replace(step, program=program, placement=placement, budgets_by_tier=budgets, kept_bytes=nbytes)


def visits_with_results(trace: VisitTrace, *, attention_alone: bool = False) -> frozenset[int]:
    """Return the recomputed visits that have results to save: of matmuls and attention, or only of attention."""
    return frozenset(
        index
        for index, visit in enumerate(trace.visits)
        if (visit.attention if attention_alone else visit.results).nbytes and visit.is_recomputed
    )


def operations_per_byte(trace: VisitTrace) -> dict[KeptKind, float]:
    """Return the operations saved per byte, by kind. Kinds without bytes are omitted."""
    visits = [visit for visit in trace.visits if visit.is_recomputed]
    totals_by_kind: dict[KeptKind, tuple[int, int]] = {
        "graphs": (
            sum(visit.recompute.computed_flops for visit in visits),
            sum(visit.memory.graph_nbytes for visit in visits),
        ),
        "results": _flops_and_bytes(visit.results for visit in visits),
        "attention": _flops_and_bytes(visit.attention for visit in visits),
    }
    return {kind: operations / nbytes for kind, (operations, nbytes) in totals_by_kind.items() if nbytes}


def _flops_and_bytes(results: Iterable[SavableResults]) -> tuple[int, int]:
    """Return the total operations that these results save, and their total bytes."""
    result_list = list(results)
    return sum(entry.work.computed_flops for entry in result_list), sum(entry.nbytes for entry in result_list)


def are_weights_resident(graph: ModelGraph, trace: VisitTrace, program: StepProgram, homes: Mapping[str, str]) -> bool:
    """Return whether the compute tier is the home of all weights that kept graphs use.

    A graph contains views of the weights' slots. Weights at home do not move between a forward and its backward. They
    are also not written, because all updates of a layout run before its first use in a step or after its last use.
    """
    return all(_are_at_home(graph, program, homes, trace.visits[visit].unit) for visit in program.recompute.kept_graphs)


def _are_at_home(graph: ModelGraph, program: StepProgram, homes: Mapping[str, str], unit: int) -> bool:
    """Return whether the compute tier is the home of all weights of a unit."""
    layouts = (graph.layouts[name] for name in unit_layouts(graph, unit))
    return all(homes[key] == program.compute_tier for layout in layouts for key in program.weight_keys(layout))


def num_layers_kept(graph: ModelGraph, trace: VisitTrace, program: StepProgram) -> tuple[int, int]:
    """Return the number of layers that keep all their graphs, and the number of layers that could keep graphs."""
    layers: list[list[int]] = []  # visits by layer
    previous_layer = ""
    for index, visit in enumerate(trace.visits):
        unit = graph.units[visit.unit]
        if visit.is_recomputed and unit.layer:
            if unit.is_layer or unit.layer != previous_layer:
                layers.append([])
            layers[-1].append(index)
        previous_layer = unit.layer
    return sum(program.recompute.kept_graphs.issuperset(visits) for visits in layers), len(layers)


def count_layers(graph: ModelGraph, trace: VisitTrace, visits: Iterable[int]) -> int:
    """Return the number of visits that belong to layers."""
    return sum(bool(graph.units[trace.visits[visit].unit].layer) for visit in visits)


def num_parameters_run_once(graph: ModelGraph, trace: VisitTrace, program: StepProgram) -> int:
    """Return the number of parameters whose forward runs only once, because all their uses keep graphs."""
    layout_names = [
        name
        for name, visits in layout_uses(graph, trace).items()
        if visits and program.recompute.kept_graphs.issuperset(visits)
    ]
    return sum(entry.numel for name in layout_names for entry in graph.layouts[name].entries)
