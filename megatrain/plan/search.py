"""Variants of a plan with other programs or placements, their estimates, and the choice of the fastest variant."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from megatrain.engine.program.step_program import StepProgram
from megatrain.engine.program.visit_trace import Recompute
from megatrain.machine.profiles import LoadedProfile
from megatrain.plan.estimate import estimate_step
from megatrain.plan.kept import are_weights_resident
from megatrain.plan.placement import HomeAssignment, PlacementSolver
from megatrain.plan.plan import PlacedStep, Plan
from megatrain.plan.shortfall import Shortfall
from megatrain.plan.simulate import measured_rates, step_seconds

#: Shares of RAM and GPU memory that the planner tries to leave free for copies if some blocks are streamed
#: (docs/decisions/0008-open-room.md). The first share is the default.
OPEN_SHARES = (0.1, 0.0, 0.2, 0.35)
#: Share of that free memory that copies may occupy until their next use (docs/decisions/0009-stays.md).
STAY_SHARE = 0.9
_NUM_TRIES = 4
#: A later plan is preferred only if its step takes less than this fraction of the shortest step so far.
WORTHWHILE = 0.99


def price_step(step: PlacedStep, profile: LoadedProfile, num_tokens: int | None = None) -> Plan:
    """Return the plan of a step: the step with an estimate of its times at the rates of a profile.

    If given, ``num_tokens`` replaces the number of tokens that this rank computes in a step.
    """
    shape = step.shape if num_tokens is None else replace(step.shape, tokens_per_step=num_tokens)
    return Plan.of(step, estimate_step(step, shape, profile))


def with_open_room(plan: Plan, profile: LoadedProfile, program: StepProgram | None = None) -> Iterator[Plan]:
    """Yield plans with different shares of RAM and GPU memory left free for copies, the default share first.

    Homes save traffic, while free memory lets the prefetcher work further ahead. All plans give the same results. On a
    GPU, copies of each size get separate buffers if these buffers fit in addition to the homes
    (docs/decisions/0025-buffers-made-before-the-first-step.md).

    If ``program`` is given, it replaces the plan's program.
    """
    program = program or plan.program
    solver = PlacementSolver(program, list(plan.budgets_by_tier.values()), plan.run.placement.homes, None, STAY_SHARE)
    tiers = {"ram", program.compute_tier}
    for share in OPEN_SHARES:
        assignment = _with_buffers(solver, {tier: int(share * plan.budgets[tier]) for tier in tiers})
        if isinstance(assignment, Shortfall):  # the drive cannot hold the blocks displaced from RAM
            continue
        placement = solver.describe(assignment)
        if are_weights_resident(plan.graph, plan.trace, program, placement.homes):
            yield price_step(replace(plan.step, program=program, placement=placement), profile)


def _with_buffers(solver: PlacementSolver, free_bytes: Mapping[str, int]) -> HomeAssignment | Shortfall:
    """Return homes that leave ``free_bytes`` free, or more if separate buffers for each block size need more."""
    first_assignment = assignment = solver.assign(free_bytes)
    for _ in range(_NUM_TRIES):  # moved blocks may need buffers of different sizes
        if isinstance(assignment, Shortfall) or not assignment.missing_bytes:
            break
        free_bytes = {tier: nbytes + assignment.missing_bytes.get(tier, 0) for tier, nbytes in free_bytes.items()}
        assignment = solver.assign(free_bytes)
    return first_assignment if isinstance(assignment, Shortfall) or assignment.missing_bytes else assignment


def choose_fastest(plans: Iterable[Plan]) -> Plan:
    """Return the plan with the shortest replayed step, or the first plan if this machine was not measured.

    For a planned machine, also return the first plan, because its rates are imprecise and a large model takes long to
    replay.
    """
    best, best_s = None, math.inf
    signatures: list[tuple[Mapping[str, str], frozenset[int], Recompute]] = []
    for plan in plans:
        if measured_rates(plan) is None or not plan.run.tiers.machine.is_here:
            return plan
        signature = plan.placement.homes, plan.program.updates.streamed, plan.program.recompute
        if signature in signatures:
            continue
        signatures.append(signature)
        seconds = step_s(plan)
        if seconds < WORTHWHILE * best_s:
            best, best_s = plan, seconds
    assert best is not None
    return best


def step_s(plan: Plan) -> float:
    """Return the seconds of a step as in ``step_seconds``, or infinity if a rate is unknown."""
    seconds = step_seconds(plan)
    return math.inf if seconds is None else seconds
