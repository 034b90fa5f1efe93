"""Planning of a run: trace the model, place a step, estimate its time, and search for faster variants of the step.

Planning reads no data and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, islice

from megatrain.converters.experts import has_experts_to_cut
from megatrain.engine.program.block_plan import DURABLE_KINDS
from megatrain.engine.program.step_program import StepProgram, Tick
from megatrain.machine.profiles import LoadedProfile
from megatrain.machine.resources import describe_library_memory
from megatrain.plan.attempts import MAX_GATHERS_AHEAD, Attempts
from megatrain.plan.estimate import nvme_written_bytes
from megatrain.plan.fill import with_results
from megatrain.plan.flops import flops_per_token
from megatrain.plan.limits import Objection, find_objections
from megatrain.plan.plan import Plan
from megatrain.plan.rank_checks import check_ranks
from megatrain.plan.remedies import add_remedies
from megatrain.plan.run_spec import RunSpec
from megatrain.plan.search import WORTHWHILE, choose_fastest, price_step, step_s, with_open_room
from megatrain.plan.shortfall import DoesNotFitError, Shortfall
from megatrain.plan.simulate import measured_rates
from megatrain.plan.traced import trace_model

#: Unless the config requests results of layers, saving them may increase writes to drives at most by this factor.
_MAX_WEAR_FACTOR = 1.1


def plan_run(
    run: RunSpec,
    *,
    padded: bool | None = None,
    with_remedies: bool = True,
    like: Plan | None = None,
    capacities: Mapping[str, int] | None = None,
    max_ahead: int = MAX_GATHERS_AHEAD,
    passes_parts: bool | None = None,
) -> Plan:
    """Plan a run.

    Args:
        padded: Whether rows may have padding or hold several documents. None derives it from the data: False for
            micro-batches of one row with one document.
        with_remedies: Whether an error lists config changes that reduce the needed bytes, which takes a few more plans.
        like: Plan of the same model, dtype and objective with different tiers or a different batch. Planning reuses its
            model, and its trace if micro-batches have the same shape on the same kind of device. This saves most of the
            time.
        capacities: Capacities in bytes, by tier. They override the run's capacities.
        max_ahead: Maximum gather distance in visits, for runs with several processes.
        passes_parts: Whether to process the vocabulary one part at a time if possible. None lets the planner choose.

    Raises:
        DoesNotFitError: If a tier is too small. The error contains a sufficient size.
        ModelFolderError: If the model cannot be trained.
        UnsupportedModelError: If the model cannot be trained.
        FreezeError: If the model cannot be trained.
        AdapterError: If the model has no modules for these adapters.
        OptimizerError: If a parameter group matches no parameter, or a custom optimizer cannot be created.
        ConfigError: If the config does not support several processes.
    """
    check_ranks(run)
    model = trace_model(run, padded, None if like is None else like.traced)
    attempts = Attempts(model.run, model, model.run.tiers.machine.rates(), capacities or {}, max_ahead, passes_parts)
    plan = _plan_first_fit(attempts)
    if isinstance(plan, Shortfall):
        raise DoesNotFitError(_add_remedies(plan, attempts) if with_remedies else plan)
    if model.run.sequential_run is not None and _may_run_one_at_a_time(plan):
        alternative = _plan_first_fit(replace(attempts, run=model.run.sequential_run))
        if not isinstance(alternative, Shortfall) and not _uses_drives(alternative) and _is_shorter(alternative, plan):
            plan = alternative
    return with_objections(plan)


def _plan_first_fit(attempts: Attempts) -> Plan | Shortfall:
    """Plan the shortest step with the first program that fits. If none fits, return the smallest shortfall."""
    step, profile = attempts.first_fit(), attempts.profile
    if isinstance(step, Shortfall):
        return step
    plan = _with_configured_streaming(price_step(step, profile), profile)
    return _with_shortest_step(plan, profile)


def _with_configured_streaming(plan: Plan, profile: LoadedProfile) -> Plan:
    """If the config sets how many groups in RAM the GPU updates, return a plan with that many, else ``plan``."""
    count = plan.run.advanced.stream_updates
    if count == "auto":
        return plan
    program = _with_streamed_updates(plan, count)
    if not program.updates.streamed:
        return plan
    return next(with_open_room(plan, profile, program), plan)


def _with_shortest_step(plan: Plan, profile: LoadedProfile) -> Plan:
    """If blocks move, shorten the step: leave memory free for copies, save results of layers, and stream updates."""
    if not any(plan.traffic.values()):
        return plan
    keeps_graphs = bool(plan.program.recompute.kept_graphs)  # new homes can displace their weights; also try ``plan``
    candidates = chain(with_open_room(plan, profile), (plan,) if keeps_graphs else ())
    plan = _with_results(choose_fastest(candidates), profile)
    if plan.run.advanced.stream_updates != "auto":
        return plan
    return choose_fastest(chain((plan,), _plans_with_streamed_updates(plan, profile)))


def _may_run_one_at_a_time(plan: Plan) -> bool:
    """Return whether running one micro-batch at a time is allowed and may shorten a step.

    Results are bit-identical. A step then keeps activations of only one micro-batch, so a larger share of them fits.
    But weights and gradient sums outside the compute tier would move for each micro-batch. Drives would have only one
    backward, instead of a whole step, to transfer state.
    """
    run, recompute = plan.run, plan.program.recompute
    is_allowed = run.advanced.has_open_order and run.recompute.mode == "auto"
    recomputed_visits = {index for index, visit in enumerate(plan.trace.visits) if visit.is_recomputed}
    kept_nbytes = sum(
        layout.num_parameters * (run.dtype.itemsize + (run.grad_dtype.itemsize if layout.trainable else 0))
        for layout in plan.graph.layouts.values()
    )
    can_fit = not any(plan.traffic.values()) or kept_nbytes < plan.budgets[plan.program.compute_tier]
    return is_allowed and can_fit and not _needs_drives(plan) and not recomputed_visits <= recompute.kept_graphs


def _needs_drives(plan: Plan) -> bool:
    """Return whether weights and state fit only with drives."""
    state_nbytes = sum(block.nbytes for block in plan.program.blocks.values() if block.kind in DURABLE_KINDS)
    memory_tiers = (tier for tier in plan.budgets_by_tier.values() if tier.is_addressable or tier.is_read_only)
    return state_nbytes > sum(tier.capacity_bytes for tier in memory_tiers)


def _uses_drives(plan: Plan) -> bool:
    storage = {tier.name for tier in plan.budgets_by_tier.values() if not (tier.is_addressable or tier.is_read_only)}
    return any(nbytes and not storage.isdisjoint(link.split("->")) for link, nbytes in plan.traffic.items())


def _is_shorter(plan: Plan, other: Plan) -> bool:
    """Return whether a step of ``plan``, with one micro-batch at a time, takes less time than a step of ``other``.

    Estimated times decide. Without rates, ``plan`` must compute less and must not move more bytes than ``other``.
    """
    seconds, other_s = plan.estimate.step_s, other.estimate.step_s
    if seconds is None or other_s is None:
        moves_more = sum(plan.traffic.values()) > sum(other.traffic.values())
        return not moves_more and flops_per_token(plan) < WORTHWHILE * flops_per_token(other)
    return seconds < WORTHWHILE * other_s


def with_objections(plan: Plan) -> Plan:
    """Return the plan with the objections to running it here, and with the GPU memory that it leaves to libraries."""
    capacity = plan.budgets[plan.program.compute_tier]
    library_memory = describe_library_memory(plan.run.tiers.machine, capacity, plan.device)
    return replace(plan, objections=objections_to(plan), library_memory=library_memory)


def objections_to(plan: Plan) -> tuple[Objection, ...]:
    """Compare a plan with this machine. Return the objections, with notes last."""
    return (*_object_to_untraced_layers(plan), *find_objections(plan.run.tiers, plan.device, plan.totals))


def _object_to_untraced_layers(plan: Plan) -> Iterator[Objection]:
    """Object to an automatic GPU tier size if every layer's forward failed on fake tensors.

    The plan then assumes that layers compute nothing, so their memory outside of the tier is unknown.
    """
    tiers, device, trace = plan.run.tiers, plan.run.device, plan.trace
    layers = [visit for visit in trace.visits if plan.graph.units[visit.unit].is_layer]
    if device.type != "cuda" or not tiers.machine.is_here or not tiers.table.gpu.size.is_auto:
        return
    if trace.exact or not layers or any(visit.forward.flops for visit in layers):
        return
    text = (
        f'tiers.gpu.size = "{tiers.table.gpu.size.text}": the memory of this model\'s layers outside the tier is '
        f"unknown, because none of them could be traced ({trace.guesses[0]})"
    )
    advice = 'Write a size that leaves memory for them, such as "60%"'
    yield Objection("tiers.gpu.size", text, advice, "place")


def _with_results(plan: Plan, profile: LoadedProfile) -> Plan:
    """Save results of layers if that shortens a step that moves blocks. Return the new plan, or the plan itself.

    The results also move, so the decision needs rates. It uses a replay with the rates of this machine, or the estimate
    for a planned machine.
    """
    run, is_planned_machine = plan.run, not plan.run.tiers.machine.is_here
    is_allowed = run.recompute.mode == "auto" and run.model.table.compiler is None
    if not is_allowed or measured_rates(plan) is None:
        return plan

    def place(program: StepProgram) -> Plan | None:
        result = next(with_open_room(plan, profile, program), None)
        return result if result is not None and _has_similar_wear(result, plan) else None

    drive_bytes = int((_MAX_WEAR_FACTOR - 1) * nvme_written_bytes(plan.traffic))
    candidate = with_results(plan, place, step_s, drive_bytes=drive_bytes)
    if is_planned_machine:
        return candidate if step_s(candidate) < WORTHWHILE * step_s(plan) else plan
    if candidate is plan:
        return plan
    # ``candidate`` already uses the first of ``OPEN_SHARES``, so try only the other shares.
    alternatives = islice(with_open_room(candidate, profile), 1, None)
    return choose_fastest(chain((plan, candidate), (other for other in alternatives if _has_similar_wear(other, plan))))


def _has_similar_wear(plan: Plan, other: Plan) -> bool:
    """Return whether ``plan`` writes little more to drives than ``other``. More wear needs the user's consent.

    Results of layers are many times larger than gradients and state, so only the config can move many to drives.
    """
    return nvme_written_bytes(plan.traffic) <= _MAX_WEAR_FACTOR * nvme_written_bytes(other.traffic)


def _with_streamed_updates(plan: Plan, count: int) -> StepProgram:
    """Return a program in which the compute tier updates ``count`` groups from RAM, spread over the step.

    The groups in between are updated on the CPU, which gives the bus time to fetch the next streamed group.
    """
    program, homes = plan.program, plan.placement.homes
    if not program.updates.in_compute_tier or program.compute_tier == "ram":
        return program
    visits = [tick.visit for tick in plan.updates.ticks if _is_updated_from_ram(program, tick, homes)]
    count = min(count, len(visits))
    streamed_visits = frozenset(visits[(2 * index + 1) * len(visits) // (2 * count)] for index in range(count))
    return replace(program, updates=replace(program.updates, streamed=streamed_visits))


def _is_updated_from_ram(program: StepProgram, tick: Tick, homes: Mapping[str, str]) -> bool:
    """Return whether a group is updated in RAM and RAM is the home of its weight and state."""
    stored_keys = (key for key, _ in tick.uses if key not in tick.spent)
    return program.tick_tier(tick, homes) == "ram" and all(homes[key] == "ram" for key in stored_keys)


def _plans_with_streamed_updates(plan: Plan, profile: LoadedProfile) -> Iterator[Plan]:
    """Yield plans in which a GPU updates some groups from RAM, so that its bus and the CPU are equally busy.

    Plans with half the number of groups follow, because the bus also carries other bytes.
    """
    host_s, machine = plan.estimate.seconds.get("optimizer", 0.0), profile.machine
    gpu = machine.gpu if machine is not None else None
    if gpu is None or not gpu.update_bytes_per_s or not host_s or not plan.run.tiers.machine.is_here:
        return
    program, homes, blocks = plan.program, plan.placement.homes, plan.program.blocks
    ticks = [tick for tick in plan.updates.ticks if _is_updated_from_ram(program, tick, homes)]
    uses = [(blocks[key].nbytes, mode) for tick in ticks for key, mode in tick.uses if homes[key] == "ram"]
    down_s = sum(nbytes for nbytes, _ in uses) / gpu.h2d_bytes_per_s
    up_s = sum(nbytes for nbytes, mode in uses if mode != "r") / gpu.d2h_bytes_per_s
    balanced = round(len(ticks) * host_s / (host_s + max(down_s, up_s)))
    for count in sorted({balanced, balanced // 2} - {0}, reverse=True):
        yield from with_open_room(plan, profile, _with_streamed_updates(plan, count))


def _add_remedies(shortfall: Shortfall, attempts: Attempts) -> Shortfall:
    """Return a shortfall that also lists the config changes that reduce the needed memory."""
    graph = attempts.model.graph
    layers = (unit.module for unit in graph.units if unit.is_layer)
    can_cut_experts = has_experts_to_cut(layers, graph.num_parameters)
    return add_remedies(shortfall, attempts.run, partial(_least_bytes, attempts), can_cut_experts=can_cut_experts)


def _least_bytes(attempts: Attempts, run: RunSpec, tier: str) -> int | None:
    """Return the smallest sufficient capacity of a tier, or None if another tier is too small."""
    model = attempts.model
    if run.model.table.split_experts != model.run.model.table.split_experts:
        model = trace_model(run, model.padded, None)
    capacity = 0
    while True:
        # Try again with the reported capacity, because greedy placement may choose different homes with more memory.
        step = Attempts(run, model, attempts.profile, {tier: capacity}).first_fit()
        if not isinstance(step, Shortfall):
            return capacity
        if step.tier != tier:
            return None
        capacity = step.need_bytes
