"""How many layers save results where blocks move: as many as make a step shorter.

Where nothing moves, results take memory that nobody else wants (kept.py). Elsewhere a byte of them takes the room of
a block that then moves, or it moves itself. So they are admitted from the last layer on, first those that save more
operations for a byte, up to where a step gets no shorter by it (docs/decisions/0082-searches-for-room-stay-apart.md).
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from megatrain.engine.program import saving_results
from megatrain.plan.kept import operations_per_byte, visits_with_results

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatrain.plan.plan import Plan

#: Parts of all results that are told apart: one is worth about a hundredth of a step, as layers compute for a quarter
#: of it only to have their results again.
_PARTS = 24


@dataclass(frozen=True, slots=True)
class _Results:
    """Results of a visit that may be saved.

    Attributes:
        more_nbytes: What they take of a micro-batch, beyond those of the visit that come before them in the order.
        with_products: Results of products as well as attention's.
    """

    visit: int
    more_nbytes: int
    with_products: bool


def with_results(
    plan: Plan, placed: Callable[[Plan], Plan | None], seconds: Callable[[Plan], float], *, on_drives_bytes: int
) -> Plan:
    """Return the plan in which as many layers save results as make a step shorter; itself where none do.

    The search halves what is open, and takes it that each result is worth as much as the one before it, up to where
    the room ends or a link binds. As many as there is room for are tried first.

    Args:
        plan: A step that moves blocks.
        placed: Places a program, with its estimate; None: it has no place, or costs what nobody asked for.
        seconds: How long a step takes.
        on_drives_bytes: Bytes of results that may go to drives, or of what they displace.
    """
    order = _admitted_in_order(plan)
    room = _room_bytes(plan) + on_drives_bytes
    most = bisect.bisect_right(list(accumulate(plan.run.num_together * each.more_nbytes for each in order)), room)
    if not most:
        return plan
    best, best_s = plan, seconds(plan)
    low, high, count = 0, most + 1, most  # so many are the best so far; so many are too many
    while low < count < high:
        other = placed(_saving(plan, order[:count]))
        other_s = math.inf if other is None else seconds(other)
        if other is not None and other_s < best_s:
            best, best_s, low = other, other_s, count
        else:
            high = count
        count = (low + high) // 2 if high - low > len(order) // _PARTS else low
    return best


def _admitted_in_order(plan: Plan) -> Sequence[_Results]:
    """Return the results of visits that save none yet: of attention alone first, if a byte of these saves more."""
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


def _room_bytes(plan: Plan) -> float:
    """Return what may come to live beside the homes of a plan; blocks that nobody writes may make way for more."""
    placement, budgets = plan.placement, plan.budgets_by_tier
    if any(budget.is_read_only for budget in budgets.values()):
        return math.inf
    taken = {tier: sum(each.values()) + placement.workspace_bytes[tier] for tier, each in placement.home_bytes.items()}
    return sum(budgets[tier].capacity_bytes - nbytes for tier, nbytes in taken.items() if budgets[tier].is_addressable)


def _saving(plan: Plan, admitted: Sequence[_Results]) -> Plan:
    results = frozenset(each.visit for each in admitted if each.with_products)
    attention = frozenset(each.visit for each in admitted) - results
    program = saving_results(plan.program, plan.trace, attention)
    return replace(plan, program=saving_results(program, plan.trace, results, with_products=True))
