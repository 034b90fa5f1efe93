"""Search for how many layers should save results, to shorten steps in which blocks move.

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

from megatrain.engine.program.keeping import saving_results
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
    plan: Plan, placed: Callable[[StepProgram], Plan | None], seconds: Callable[[Plan], float], *, on_drives_bytes: int
) -> Plan:
    """Return the plan that saves the number of results with the shortest steps, or ``plan`` if saving does not help.

    A binary search first tries the largest number of results that fits. It assumes that each result saves as much time
    as the previous one, until memory is full or a link is the bottleneck.

    Args:
        plan: Plan of a step that moves blocks.
        placed: Function that places and estimates a program, or returns None if it does not fit or writes too much.
        seconds: Function that returns a plan's seconds per step.
        on_drives_bytes: Bytes of results, or of blocks displaced by results, that may go to drives.
    """
    order = _results_in_order(plan)
    room = _free_bytes(plan) + on_drives_bytes
    most = bisect.bisect_right(list(accumulate(plan.run.num_together * each.more_nbytes for each in order)), room)
    if not most:
        return plan
    best, best_s = plan, seconds(plan)
    low, high, count = 0, most + 1, most  # best number so far, smallest number known as too large, next number
    while low < count < high:
        other = placed(_with_saved(plan, order[:count]))
        other_s = math.inf if other is None else seconds(other)
        if other is not None and other_s < best_s:
            best, best_s, low = other, other_s, count
        else:
            high = count
        count = (low + high) // 2 if high - low > len(order) // _PARTS else low
    return best


def _results_in_order(plan: Plan) -> Sequence[_Results]:
    """Return the results that visits do not save yet. Attention comes first if it saves more operations per byte."""
    recompute, visits = plan.program.recompute, plan.trace.visits
    taken = recompute.kept_graphs | recompute.saving
    worth = operations_per_byte(plan.trace)
    order: list[_Results] = []
    of_attention: dict[int, int] = {}
    if worth.get("attention", 0.0) > worth.get("results", 0.0):
        for visit in sorted(visits_with_results(plan.trace, attention_alone=True) - taken, reverse=True):
            of_attention[visit] = visits[visit].attention.nbytes
            order.append(_Results(visit, of_attention[visit], with_products=False))
    order.extend(
        _Results(visit, visits[visit].results.nbytes - of_attention.get(visit, 0), with_products=True)
        for visit in sorted(visits_with_results(plan.trace) - taken, reverse=True)
    )
    return order


def _free_bytes(plan: Plan) -> float:
    """Return the bytes free for results, or infinity if a tier is read-only, because its blocks can be evicted."""
    placement, budgets = plan.placement, plan.budgets_by_tier
    if any(budget.is_read_only for budget in budgets.values()):
        return math.inf
    taken = {tier: sum(each.values()) + placement.workspace_bytes[tier] for tier, each in placement.home_bytes.items()}
    return sum(budgets[tier].capacity_bytes - nbytes for tier, nbytes in taken.items() if budgets[tier].is_addressable)


def _with_saved(plan: Plan, admitted: Sequence[_Results]) -> StepProgram:
    results = frozenset(each.visit for each in admitted if each.with_products)
    attention = frozenset(each.visit for each in admitted) - results
    program = saving_results(plan.program, plan.trace, attention)
    return saving_results(program, plan.trace, results, with_products=True)
