"""Search for the number of layers that should save results, to shorten steps in which blocks move.

If no block moves, results use otherwise free memory (kept.py). If blocks move, results also move, or displace blocks.
Results are added in descending order of operations saved per byte, from the last layer backwards, until steps get no
shorter (docs/decisions/0082-searches-for-room-stay-apart.md).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatrain.engine.program.keeping import save_results
from megatrain.engine.program.step_program import StepProgram
from megatrain.plan.kept import operations_per_byte, visits_with_results
from megatrain.plan.plan import Plan

#: The search adds results in steps of 1/24 of all results. Recomputing all results takes about a quarter of a step, so
#: 1/24 of them is worth about a hundredth of a step.
_PARTS = 24


@dataclass(frozen=True, slots=True)
class _Results:
    """Results that a visit can save.

    Attributes:
        more_nbytes: Bytes per micro-batch that this entry adds to earlier entries for the same visit.
        with_products: Whether to save results of matmuls in addition to results of attention.
    """

    visit: int
    more_nbytes: int
    with_products: bool


def with_results(
    plan: Plan, place: Callable[[StepProgram], Plan | None], step_s: Callable[[Plan], float], *, drive_bytes: int
) -> Plan:
    """Choose how many results to save for the shortest steps. Return the new plan, or ``plan`` if saving does not help.

    A binary search first tries the largest number of results that fits. It assumes that each result saves as much time
    as the previous one, until memory is full or a link is the bottleneck.

    Args:
        plan: Plan of a step that moves blocks.
        place: Function that places and estimates a program, or returns None if it does not fit or writes too much.
        step_s: Function that returns a plan's seconds per step.
        drive_bytes: Bytes of results, or of blocks displaced by results, that may go to drives.
    """
    results = _sorted_results(plan)
    room_bytes = _free_bytes(plan) + drive_bytes
    sizes = (plan.run.num_together * entry.more_nbytes for entry in results)
    max_count = bisect.bisect_right(list(accumulate(sizes)), room_bytes)
    if not max_count:
        return plan
    best, best_s = plan, step_s(plan)
    best_count, limit, count = 0, max_count + 1, max_count  # limit: smallest count known to be too large
    while best_count < count < limit:
        candidate = place(_with_saved(plan, results[:count]))
        candidate_s = math.inf if candidate is None else step_s(candidate)
        if candidate is not None and candidate_s < best_s:
            best, best_s, best_count = candidate, candidate_s, count
        else:
            limit = count
        count = (best_count + limit) // 2 if limit - best_count > len(results) // _PARTS else best_count
    return best


def _sorted_results(plan: Plan) -> Sequence[_Results]:
    """Return the results that visits do not save yet. Attention comes first if it saves more operations per byte."""
    recompute, visits = plan.program.recompute, plan.trace.visits
    excluded_visits = recompute.kept_graphs | recompute.saving_visits
    ops_per_byte = operations_per_byte(plan.trace)
    results: list[_Results] = []
    attention_nbytes: dict[int, int] = {}
    if ops_per_byte.get("attention", 0.0) > ops_per_byte.get("results", 0.0):
        for visit in sorted(visits_with_results(plan.trace, attention_alone=True) - excluded_visits, reverse=True):
            attention_nbytes[visit] = visits[visit].attention.nbytes
            results.append(_Results(visit, attention_nbytes[visit], with_products=False))
    results.extend(
        _Results(visit, visits[visit].results.nbytes - attention_nbytes.get(visit, 0), with_products=True)
        for visit in sorted(visits_with_results(plan.trace) - excluded_visits, reverse=True)
    )
    return results


def _free_bytes(plan: Plan) -> float:
    """Return the bytes free for results, or infinity if weights in RAM can move back to a read-only tier."""
    placement, budgets = plan.placement, plan.budgets_by_tier
    if any(budget.is_read_only for budget in budgets.values()):
        return math.inf
    homes, workspace = placement.home_bytes, placement.workspace_bytes
    memory_tiers = [budget for budget in budgets.values() if budget.is_addressable]
    return sum(tier.capacity_bytes - sum(homes[tier.name].values()) - workspace[tier.name] for tier in memory_tiers)


def _with_saved(plan: Plan, selection: Sequence[_Results]) -> StepProgram:
    results = frozenset(entry.visit for entry in selection if entry.with_products)
    attention = frozenset(entry.visit for entry in selection) - results
    program = save_results(plan.program, plan.trace, attention)
    return save_results(program, plan.trace, results, with_products=True)
