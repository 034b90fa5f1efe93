"""From a run to its plan: model graph, program of a step, placement. Touches no data and allocates nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from megatrain.base.errors import ConfigError, Problem, UnsupportedModelError
from megatrain.base.precision import MASTER_ELEMENTS
from megatrain.converters.experts import has_experts_to_cut
from megatrain.converters.fused import find_fused
from megatrain.converters.liger import (
    apply_liger_kernels,
    check_liger_kernels,
    has_liger_kernels,
)
from megatrain.converters.packed_rows import settle_packing
from megatrain.converters.tiled import tile_mlps
from megatrain.data.encoding import load_tokenizer
from megatrain.engine.device_kernels import fakes_standing_for_gpu
from megatrain.engine.environment import deterministic_kernels
from megatrain.engine.flash import FlashKernels, flash_of_gpu, flash_planned, unsupported_flash, why_unusable
from megatrain.engine.program import (
    DURABLE_KINDS,
    FrozenWeights,
    GroupUpdates,
    ProgramBuilder,
    Recompute,
    StepProgram,
    Tick,
    VisitTrace,
    state_key,
    stored_keys,
)
from megatrain.engine.sharing import sharing_gradients
from megatrain.engine.workspace import peak_bytes, step_workspace_bytes, waiting_rows
from megatrain.machine import machine
from megatrain.machine.machine import profile_of
from megatrain.models.folder import ModelFolderError
from megatrain.models.graph import num_learned_positions
from megatrain.models.in_place import buffer_bytes, frozen_blocks, unread_block
from megatrain.models.load import open_loader
from megatrain.optim.average import EMA
from megatrain.optim.base import MatrixOptimizer
from megatrain.optim.factory import check_groups, make_optimizer
from megatrain.optim.matrices import device_bytes, host_bytes, matrix_shapes
from megatrain.optim.on_device import DeviceKernelError, device_optimizer
from megatrain.optim.threads import KernelThreads, num_update_threads
from megatrain.plan.budgets import tier_budgets
from megatrain.plan.estimate import estimate_step, flops_per_token, into_nvme
from megatrain.plan.fill import with_results
from megatrain.plan.kept import GraphKeeper, weights_stay
from megatrain.plan.limits import Objection, find_objections
from megatrain.plan.placement import (
    FOLDER,
    DoesNotFitError,
    Placement,
    PlacementSolver,
    Residency,
    TierBudget,
)
from megatrain.plan.plan import Plan
from megatrain.plan.simulate import measured_rates, replay
from megatrain.plan.ways_out import with_ways_out
from megatrain.ranks.lanes import micro_batches_of_rank
from megatrain.trace.trace import trace_visits
from tiered.units import PAGE_BYTES, round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from megatrain.base.layout import UnitLayout
    from megatrain.converters.spec import ModelSpec
    from megatrain.engine.encoding import Encoding
    from megatrain.machine.machine import LoadedProfile, MachineProfile
    from megatrain.models.graph import ModelGraph
    from megatrain.models.in_place import FrozenBlock
    from megatrain.optim.base import Optimizer
    from megatrain.plan.kept import KeptGraphs
    from megatrain.plan.plan import RunSpec

#: Shares of RAM and GPU memory that may be kept open to copies where not everything is at home, the usual one first
#: (docs/decisions/0008-open-room.md).
OPEN_SHARES = (0.1, 0.0, 0.2, 0.35, 0.5)
#: Share of the open room that copies may take which wait for their next use (docs/decisions/0009-stays.md).
STAY_SHARE = 0.9
_NUM_TRIES = 4
#: How many visits ahead ranks gather weights, where that takes room of nothing else.
MOST_GATHERS_AHEAD = 3
#: A plan must be this much faster than the one before it in the list to be preferred.
WORTHWHILE = 0.99
#: Bytes written to drives that results may cost without being asked for, as a factor.
_MOST_WEAR = 1.1


def plan_run(
    run: RunSpec,
    *,
    padded: bool | None = None,
    names_ways_out: bool = True,
    like: Plan | None = None,
    capacities: Mapping[str, int] | None = None,
    most_ahead: int = MOST_GATHERS_AHEAD,
    passes_parts: bool | None = None,
) -> Plan:
    """Plan a run.

    Args:
        padded: whether rows may have padding or hold several documents; False: each is one document without padding.
            None: as the data comes; a micro-batch of one row that is not packed has none.
        names_ways_out: a refusal names what the run would need with less room for its gradients, which takes a few
            plans more.
        like: a plan of the same model, dtype and objective, with other tiers or another batch: its model is used
            again, and its trace for micro-batches of the same shape on the same kind of device. They take most of the
            time.
        capacities: Tier -> bytes, of tiers that are to have other ones than the run gives them.
        most_ahead: How many visits ahead several ranks may gather weights.
        passes_parts: whether parts of the vocabulary pass one by one, where they can; None: as it suits the run.

    Raises:
        DoesNotFitError: a tier is too small; it names the size that would do.
        ModelFolderError: the model cannot be trained.
        UnsupportedModelError: the model cannot be trained.
        FreezeError: the model cannot be trained.
        AdapterError: it has no place for such adapters.
        OptimizerError: a group of the optimizer names no parameter; a custom optimizer cannot be made.
        ConfigError: several ranks cannot run it so.
    """
    check_ranks(run)
    subject = _look_at(run, padded, like)
    run, device, profile = subject.run, subject.run.device, profile_of(run.tiers)
    try:
        kept = _place(run, subject, profile, capacities, most_ahead, passes_parts)
    except DoesNotFitError as error:
        if not names_ways_out:
            raise
        layers = (unit.module for unit in subject.graph.units if unit.is_layer)
        can_cut_experts = has_experts_to_cut(layers, subject.graph.num_parameters)
        least_bytes = partial(_least_bytes, subject, profile, padded)
        raise with_ways_out(error, run, least_bytes, can_cut_experts=can_cut_experts) from error
    plan = Plan(
        run=run,
        graph=subject.graph,
        trace=subject.trace,
        program=kept.program,
        placement=kept.placement,
        optimizer=subject.optimizer,
        budgets_by_tier=kept.budgets,
        kept_bytes=kept.nbytes,
        device_optimizer=subject.on_device,
        host_updates=subject.host_updates,
        room_beside_tier=machine.gpu_room_beside_tier(
            kept.budgets[subject.compute_tier].capacity_bytes, device, run.tiers.machine
        ),
        packing_warning=subject.packing_warning,
        flash_note=subject.flash_note,
    )
    if run.advanced.stream_updates != "auto":
        streaming = replace(plan, program=_streaming(plan, run.advanced.stream_updates))
        if streaming.program.updates.streamed:
            plan = next(_placed_anew(streaming), plan)

    def estimated(plan: Plan) -> Plan:
        return replace(plan, estimate=estimate_step(plan, plan.shape, profile))

    if not any(plan.traffic.values()):
        plan = estimated(plan)
    else:
        plan = fastest(map(estimated, with_open_room(plan)))
        plan = _with_results(plan, estimated)
        if run.advanced.stream_updates == "auto":
            plan = fastest(chain((plan,), map(estimated, _sharing_updates(plan, profile.machine))))
    if run.one_at_a_time is not None and _may_run_one_at_a_time(plan):
        try:
            other = plan_run(run.one_at_a_time, padded=padded, names_ways_out=False, like=plan, capacities=capacities)
        except DoesNotFitError:
            other = plan
        if not _moves_by_drives(other) and _is_shorter(other, plan):
            return other
    return replace(plan, objections=objections_to(plan))


def _may_run_one_at_a_time(plan: Plan) -> bool:
    """Return whether micro-batches may run one after the other: it changes no bit.

    What is kept for the backward is that of one micro-batch then, so more of it fits. Weights and sums of gradients
    that do not stay in the compute tier would move once for each micro-batch, and drives have one backward instead of
    a step to carry state beside.
    """
    run, recompute = plan.run, plan.program.recompute
    is_open = run.advanced.micro_batch_order == "auto" and run.recompute.mode == "auto"
    run_again = {number for number, visit in enumerate(plan.trace.visits) if visit.is_run_again}
    kept_nbytes = sum(
        layout.num_parameters * (run.dtype.itemsize + (run.grad_dtype.itemsize if layout.trainable else 0))
        for layout in plan.graph.layouts.values()
    )
    can_be = not any(plan.traffic.values()) or kept_nbytes < plan.budgets[plan.program.compute_tier]
    return is_open and can_be and not _needs_drives(plan) and not run_again <= recompute.kept_graphs


def _needs_drives(plan: Plan) -> bool:
    """Return whether weights and state have no room but on drives."""
    state_nbytes = sum(block.nbytes for block in plan.program.blocks.values() if block.kind in DURABLE_KINDS)
    return state_nbytes > sum(nbytes for tier, nbytes in plan.budgets.items() if tier != "nvme")


def _moves_by_drives(plan: Plan) -> bool:
    return any(nbytes for link, nbytes in plan.traffic.items() if "nvme" in link)


def _is_shorter(plan: Plan, other: Plan) -> bool:
    """Return whether a step with one micro-batch at a time takes less time than another.

    By the estimates; without rates, by what is computed, where no more moves.
    """
    step_s, other_s = _step_s(plan), _step_s(other)
    if math.inf in (step_s, other_s):
        moves_more = sum(plan.traffic.values()) > sum(other.traffic.values())
        return not moves_more and flops_per_token(plan) < WORTHWHILE * flops_per_token(other)
    return step_s < WORTHWHILE * other_s


def objections_to(plan: Plan) -> tuple[Objection, ...]:
    """Compare a plan with this machine; those that refuse a run come first."""
    run = plan.run
    return (*_unseen_layers(plan), *find_objections(run.tiers, run.device, plan.totals))


def _unseen_layers(plan: Plan) -> Iterator[Objection]:
    """Refuse to choose the size of a GPU tier where the trace has not seen what layers take beside it.

    The forward of each failed on tensors without values, and was planned as if it computed nothing.
    """
    tiers, device, trace = plan.run.tiers, plan.run.device, plan.trace
    layers = [visit for visit in trace.visits if plan.graph.units[visit.unit].is_layer]
    if device.type != "cuda" or tiers.machine is not None or not tiers.table.gpu.size.is_auto:
        return
    if trace.exact or not layers or any(visit.forward.flops for visit in layers):
        return
    text = (
        f'tiers.gpu.size = "{tiers.table.gpu.size.text}": how much memory the layers of this model need beside their '
        f"blocks is not known, as none of them could be traced ({trace.guesses[0]})"
    )
    advice = 'Write a size that leaves room for them, such as "60%"'
    yield Objection("tiers.gpu.size", text, advice, "place")


def check_ranks(run: RunSpec) -> None:
    """Refuse what several ranks cannot do.

    Raises:
        ConfigError: names the keys.
    """
    world, num_micro_batches = run.world, run.batch.num_micro_batches
    if world.is_single:
        return
    several = f"with {world.size} processes"
    if run.num_lanes < world.size:
        message = (
            f"training.gradient_lanes = {run.num_lanes}: {several} there must be as many lanes at least. The number "
            "of lanes decides about the last bits of a run, which keeps it"
        )
        advice = f"Start at most {_processes(run.num_lanes)}, or begin a new run with more lanes"
        raise ConfigError("the config", [Problem("training.gradient_lanes", message, advice)])
    problems: list[Problem] = []
    if 1 < world.num_hosts < world.size:
        message = (
            f"{world.num_hosts} hosts with {world.local_size} processes each: a world with several hosts and several "
            "processes on each is refused until two real hosts have trained in it"
        )
        advice = "Start one process on each host, or all processes on one host"
        problems.append(Problem("distributed.processes", message, advice))
    if not _has_work_for_all(world.size, run.num_lanes, num_micro_batches):
        problems.append(_too_few_micro_batches(run))
    if run.batch.order != "layer":
        message = (
            f'advanced.micro_batch_order = "{run.batch.order}": {several} all micro-batches of a layer run before the '
            "next layer"
        )
        problems.append(Problem("advanced.micro_batch_order", message, 'Write "layer"'))
    optimizer = make_optimizer(run.optimizer)
    kinds = optimizer.state_kinds(run.dtype.itemsize == 2)
    needs_whole = any(kind.elements_of is not None or kind.needs_whole for kind in kinds)
    if needs_whole or isinstance(optimizer, MatrixOptimizer):
        what = f'optimizer.optim = "{run.optimizer.optim}" needs whole matrices'
        message = f"{what}, and {several} each has a part of every one"
        advice = "Start one process, which also continues a checkpoint of several, or write an optimizer such as adamw"
        problems.append(Problem("optimizer.optim", message, advice))
    if problems:
        raise ConfigError("the config", problems)


def _has_work_for_all(num_ranks: int, num_lanes: int, num_micro_batches: int) -> bool:
    """Return whether each of some ranks has a micro-batch of a step."""
    return all(micro_batches_of_rank(rank, num_ranks, num_lanes, num_micro_batches) for rank in range(num_ranks))


def _too_few_micro_batches(run: RunSpec) -> Problem:
    """Return the problem of a step that has no micro-batch for some rank, with values that would do."""
    size, lanes, batch = run.world.size, run.num_lanes, run.batch
    count, together = batch.num_micro_batches, batch.rows_per_example
    # A new run adds in as many lanes as it has processes, if the config names no other number.
    most = max(n for n in range(1, size) if _has_work_for_all(n, n if lanes == size else lanes, count))
    enough = next(n for n in range(size, lanes + 1) if _has_work_for_all(size, lanes, n))
    fewer = f"or start at most {_processes(most)}"
    if batch.given_rows is None:
        what = "rows" if together == 1 else "examples of two rows"
        message = (
            f"training.train_batch_tokens = {batch.num_tokens}: with {size} processes each needs a micro-batch, and a "
            f"step has {batch.num_rows // together} {what} of data.max_length = {batch.max_length}"
        )
        advice = f"Write train_batch_tokens = {enough * together * batch.max_length}, {fewer}"
        return Problem("training.train_batch_tokens", message, advice)
    if size < lanes and _has_work_for_all(size, size, count):
        fewer = f"for a new run gradient_lanes = {size}, with which each has one; {fewer}"
    examples = batch.num_rows // together
    message = (
        f"training.gradient_accumulation_steps = {count}: with {size} processes each needs a micro-batch, and that is "
        "how many a step has"
    )
    # A step of as many rows, in smaller micro-batches; else a larger step.
    finer = (n for n in range(enough, examples + 1) if examples % n == 0 and _has_work_for_all(size, lanes, n))
    same = next(finer, None)
    if same is not None:
        advice = f"Write per_device_train_batch_size = {examples // same} and gradient_accumulation_steps = {same}, "
        advice += f"which is the same step in smaller micro-batches, {fewer}"
    else:
        advice = f"Write gradient_accumulation_steps = {enough}, {fewer}"
    return Problem("training.gradient_accumulation_steps", message, advice)


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


_Count = Literal["auto"] | int
_ALL = 1 << 20  # layers


def _layers_kept(run: RunSpec) -> tuple[_Count, _Count]:
    """Return the layers, from the last one, whose graphs are kept, and those that save results, as the config asks for.

    Compiled layers save no results. Of several ranks no graphs are kept: a full copy of a weight is nobody's home, and
    cannot wait for the backward.
    """
    choice, count = run.recompute, run.recompute.num_layers or _ALL
    of_graphs: dict[str, _Count] = {"auto": "auto", "full": 0, "selective": 0, "none": count}
    of_results: dict[str, _Count] = {"auto": "auto", "full": 0, "selective": count, "none": count}
    graphs = of_graphs[choice.mode] if run.world.is_single else 0
    return graphs, of_results[choice.mode] if run.model.table.compiler is None else 0


def _with_results(plan: Plan, estimated: Callable[[Plan], Plan]) -> Plan:
    """Return the plan in which layers save results, if that makes a step shorter that moves blocks.

    The results move as well then, so only rates can tell: those of this machine by the replay, those of another by
    the estimate.
    """
    run, is_elsewhere = plan.run, plan.run.tiers.machine is not None
    is_open = run.recompute.mode == "auto" and run.model.table.compiler is None
    if not is_open or measured_rates(plan) is None:
        return plan

    def placed(other: Plan) -> Plan | None:
        found = next(_placed_anew(other), None)
        return estimated(found) if found is not None and _spares_drives(found, plan) else None

    seconds = _step_s if is_elsewhere else _replayed_s
    found = with_results(plan, placed, seconds, on_drives_bytes=int((_MOST_WEAR - 1) * into_nvme(plan.traffic)))
    if is_elsewhere:
        return found if _step_s(found) < WORTHWHILE * _step_s(plan) else plan
    if found is plan:
        return plan
    # Of the shares of open room that `found` is tried with, it has the first itself.
    others = (other for other in islice(_placed_anew(found), 1, None) if _spares_drives(other, plan))
    return fastest(chain((plan, found), map(estimated, others)))


def _spares_drives(plan: Plan, other: Plan) -> bool:
    """Return whether drives are written little more than by another plan: nobody asked for speed that wears them.

    Results of a step are many times its gradients and state. Where they may go to a drive is for the config to say.
    """
    return into_nvme(plan.traffic) <= _MOST_WEAR * into_nvme(other.traffic)


def _step_s(plan: Plan) -> float:
    """Return the estimate of a step; infinite where a rate is unknown."""
    step_s = plan.estimate.step_s if plan.estimate is not None else None
    return math.inf if step_s is None else step_s


def _replayed_s(plan: Plan) -> float:
    """Return how long a step takes where it is replayed; infinite where a rate is unknown."""
    replayed = replay(plan)
    return math.inf if replayed is None else replayed.step_s


def _streaming(plan: Plan, count: int) -> StepProgram:
    """Return the program that updates so many of the groups in RAM in the compute tier, spread over the step.

    Between two that the processor updates, one that is streamed leaves the bus time to fetch it.
    """
    program, homes = plan.program, plan.placement.homes
    if not program.updates.in_compute_tier or program.compute_tier == "ram":
        return program
    in_ram = [tick.visit for tick in plan.updates if _is_updated_from_ram(program, tick, homes)]
    count = min(count, len(in_ram))
    chosen = frozenset(in_ram[(2 * number + 1) * len(in_ram) // (2 * count)] for number in range(count))
    return replace(program, updates=replace(program.updates, streamed=chosen))


def _is_updated_from_ram(program: StepProgram, tick: Tick, homes: Mapping[str, str]) -> bool:
    """Return whether a group is updated in RAM, where its weight and state live."""
    own = (key for key, _ in tick.uses if key not in tick.spent)
    return program.tier_of(tick, homes) == "ram" and all(homes[key] == "ram" for key in own)


def _sharing_updates(plan: Plan, machine: MachineProfile | None) -> Iterator[Plan]:
    """Yield plans in which a GPU updates some of the groups in RAM, as many as it needs the time for of the processor.

    And half as many, as the bus has other things to carry.
    """
    seconds = plan.estimate.seconds if plan.estimate is not None else {}
    host_s, gpu = seconds.get("optimizer", 0.0), machine.gpu if machine is not None else None
    if gpu is None or not gpu.update_bytes_per_s or not host_s or plan.run.tiers.machine is not None:
        return
    program, homes, blocks = plan.program, plan.placement.homes, plan.program.blocks
    ticks = [tick for tick in plan.updates if _is_updated_from_ram(program, tick, homes)]
    uses = [(blocks[key].nbytes, mode) for tick in ticks for key, mode in tick.uses if homes[key] == "ram"]
    down_s = sum(nbytes for nbytes, _ in uses) / gpu.h2d_bytes_per_s
    up_s = sum(nbytes for nbytes, mode in uses if mode != "r") / gpu.d2h_bytes_per_s
    balanced = round(len(ticks) * host_s / (host_s + max(down_s, up_s)))
    for count in sorted({balanced, balanced // 2} - {0}, reverse=True):
        yield from _placed_anew(replace(plan, program=_streaming(plan, count)))


def _placed_anew(plan: Plan) -> Iterator[Plan]:
    """Return the plans with open room for a program that is another than the one that was placed."""
    return (other for other in with_open_room(plan) if other.placement is not plan.placement)


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is known of a run before anything is placed; sizes of tiers and formats of gradients do not change it.

    Attributes:
        run: with the packing that suits the model.
        graph: Units and layouts of the model.
        trace: What its visits take for one micro-batch.
        optimizer: makes the updates in RAM.
        on_device: makes updates in GPU memory, if any are made there.
        host_updates: why none are made there although there is a GPU tier, or "".
        packing_warning: as in ``Plan``.
        flash_note: as in ``Plan``.
        in_place: the frozen layouts that may stay in the model's folder, by name.
        encodings: as in ``StepProgram``.
    """

    run: RunSpec
    graph: ModelGraph
    trace: VisitTrace
    optimizer: Optimizer
    on_device: Optimizer | None
    host_updates: str
    compute_tier: str
    packing_warning: str
    flash_note: str
    in_place: Mapping[str, FrozenBlock]
    encodings: Mapping[str, Encoding]


def _look_at(run: RunSpec, padded: bool | None, like: Plan | None) -> _Subject:
    """Build the model, trace a step of it, and make its optimizer."""
    run, graph = _settle_kernels(run, like)
    run, packing_warning = settle_rows(run, graph)
    packing = run.data.table.packing
    check_groups(run.optimizer, (e for layout in graph.layouts.values() if layout.trainable for e in layout.entries))
    if padded is None:
        padded = bool(packing) or run.batch.micro_batch_rows > 1
    run, trace, flash_note = _trace_with_flash(run, graph, padded, like)
    threads = KernelThreads(num_update_threads(run.device.type))
    fused = find_fused(graph)[0] if run.optimizer.optim == "muon" else None
    optimizer = make_optimizer(run.optimizer, threads, vocabulary=_vocabulary(graph), seed=run.seed, fused=fused)
    compute_tier = machine.compute_tier(run.tiers, run.device)
    on_device, host_updates = _on_device(optimizer, run.traced_on, compute_tier)
    in_place, encodings = find_frozen(run, graph)
    return _Subject(
        run,
        graph,
        trace,
        optimizer,
        on_device,
        host_updates,
        compute_tier,
        packing_warning,
        flash_note,
        in_place,
        encodings,
    )


def _settle_kernels(run: RunSpec, like: Plan | None) -> tuple[RunSpec, ModelGraph]:
    """Return a run with its choice of liger's kernels, and its model; that of a plan like it where they agree."""
    if run.model.table.use_liger_kernel == "auto":
        if like is not None and like.run.device.type == run.device.type:
            run = run.with_liger(uses_liger=like.run.uses_liger)
        elif takes_liger_kernels(run):
            wanted = run.with_liger(uses_liger=True)
            try:
                return wanted, make_graph(wanted)
            except UnsupportedModelError:  # of its kernels, or else the model without them is refused as well
                run = run.with_liger(uses_liger=False)
        else:
            run = run.with_liger(uses_liger=False)
    if like is not None and like.run.uses_liger == run.uses_liger:
        return run, like.graph
    return run, make_graph(run)


def takes_liger_kernels(run: RunSpec) -> bool:
    """Return whether a run that leaves the choice open computes with liger's kernels, if they suit its model."""
    is_open = run.model.table.compiler is None and run.task != "distill"
    return is_open and run.device.type == "cuda" and has_liger_kernels()


def _trace_with_flash(
    run: RunSpec, graph: ModelGraph, padded: bool, like: Plan | None
) -> tuple[RunSpec, VisitTrace, str]:
    """Return a run with its choice of flash attention, its trace, and why it has torch's kernels, or ""."""
    is_open, note = run.model.table.flash_attention == "auto", ""
    if is_open and like is not None and like.run.device.type == run.device.type:
        run = run.with_flash(like.run.flash)
    elif is_open:
        kernels, note = choose_flash(run)
        run = run.with_flash(kernels)
    elif run.flash != "FA2":
        check_flash(run)
    if like is not None and graph is like.graph and _traced_on(like.run) == _traced_on(run):
        return run, like.trace, note
    try:
        return run, trace_run(run, graph, padded=padded), note
    except UnsupportedModelError as error:
        if not is_open or run.flash == "FA2":
            raise
        note = _flash_note(error.problem.partition(". Write")[0])
        run = run.with_flash("FA2")
    return run, trace_run(run, graph, padded=padded), note


def choose_flash(run: RunSpec) -> tuple[FlashKernels, str]:
    """Return the kernels of a run that leaves the choice open, and why they are torch's, or ""."""
    if run.device.type != "cuda":
        return "FA2", ""
    if run.model.table.compiler is not None:
        return "FA2", _flash_note("model.compile makes its own graphs")
    planned_gpu = _planned_gpu(run)
    kernels = flash_of_gpu(run.device, planned_gpu)
    if kernels == "FA2":
        return "FA2", _flash_note("FA3 and FA4 have no kernels for this GPU")
    reason = why_unusable(kernels, run.device, planned_gpu)
    return ("FA2", _flash_note(reason)) if reason else (kernels, "")


def check_flash(run: RunSpec) -> None:
    """See whether the GPU and the packages allow the kernels that a config or a checkpoint names.

    Raises:
        UnsupportedModelError: they do not.
    """
    if run.device.type != "cuda":
        reason = "it needs a GPU"
    else:
        reason = why_unusable(run.flash, run.device, _planned_gpu(run))
    if reason:
        raise unsupported_flash(run.flash, reason)


def _planned_gpu(run: RunSpec) -> str | None:
    """Return the name of the GPU of another machine; None for a run on this one."""
    planned = run.tiers.machine
    if planned is None:
        return None
    return "" if planned.profile.gpu is None else planned.profile.gpu.name


def _flash_note(reason: str) -> str:
    return f"model.flash_attention: FA2, torch's own kernels: {reason}"


def _traced_on(run: RunSpec) -> tuple[str, int, int, str]:
    """Return what a trace of a model depends on: a GPU has other kernels than a CPU."""
    return run.device.type, run.batch.micro_batch_rows, run.batch.max_length, run.flash


def settle_rows(run: RunSpec, graph: ModelGraph) -> tuple[RunSpec, str]:
    """Return the run with the packing that suits its model, and why it is not the default, or ""."""
    packing, warning = settle_packing(run.model, graph, run.data.table.packing, is_default=run.data.has_default_packing)
    return run.with_packing(packing), warning


def _place(
    run: RunSpec,
    subject: _Subject,
    profile: LoadedProfile,
    capacities: Mapping[str, int] | None = None,
    most_ahead: int = MOST_GATHERS_AHEAD,
    passes_parts: bool | None = None,
) -> KeptGraphs:
    """Return the program of a run, and where its blocks live.

    Args:
        run: the subject's, or one that differs in gradients and tiers.
        capacities: Tier -> bytes, of tiers that are to have other ones than the run gives them.
        most_ahead: see ``plan_run``.
        passes_parts: see ``plan_run``.

    Raises:
        DoesNotFitError: a tier is too small.
    """
    graph, trace = subject.graph, subject.trace
    is_cuda = run.device.type == "cuda"

    def budgets_with(program: StepProgram) -> dict[str, TierBudget]:
        workspace = step_workspace_bytes(graph, trace, program, run.num_together, run.traced_on)
        budgets = tier_budgets(run, workspace)
        budgets = with_workspace(budgets, teacher_bytes(run), subject.compute_tier)
        for tier, nbytes in _update_workspace_bytes(subject, program).items():
            budgets[tier] = replace(budgets[tier], workspace_bytes=budgets[tier].workspace_bytes + nbytes)
        for tier, capacity in (capacities or {}).items():
            budgets[tier] = replace(budgets[tier], capacity_bytes=capacity)
        return budgets

    def solved(program: StepProgram) -> KeptGraphs:
        readers = buffer_bytes(subject.in_place.values(), graph.dtype)
        known = with_folder(budgets_with(program), program, readers)
        known = with_residents(known, run, program, profile.machine if is_cuda else None)
        keeper = GraphKeeper(graph, trace, program, known, run.placement.homes, run.num_together, run.traced_on)
        return keeper.solve(*_layers_kept(run))

    def placed(*, updates_beside_device: bool) -> KeptGraphs:
        if run.world.is_single or run.advanced.prefetch_bytes == 0 or most_ahead == 0:
            return placed_with(0, updates_beside_device=updates_beside_device)
        try:
            found = placed_with(1, updates_beside_device=updates_beside_device)
        except DoesNotFitError:  # a second full copy of the largest layer
            return placed_with(0, updates_beside_device=updates_beside_device)
        for gathers_ahead in range(2, most_ahead + 1):
            try:
                deeper = placed_with(gathers_ahead, updates_beside_device=updates_beside_device)
            except DoesNotFitError:
                break
            if not _deeper_gather_is_free(deeper, found, subject.compute_tier):
                break
            found = deeper
        return found

    def placed_with(gathers_ahead: int, *, updates_beside_device: bool) -> KeptGraphs:
        builder = _builder(run, subject, updates_beside_device=updates_beside_device, gathers_ahead=gathers_ahead)
        held = sharing_gradients(builder.build())
        # A loss that compares rows looks at all of them before it makes the logits of any again: none are kept.
        keeps_parts = not run.objective.loss.compares_rows
        held = _keeping_parts(held, trace.head_parts if keeps_parts else 1)
        if not passes_parts and _holds_everything(budgets_with(held)[subject.compute_tier], held):
            return solved(held)
        held = _keeping_parts(held, parts_without_room(trace) if keeps_parts else 1)
        if passes_parts is False:
            return solved(held)
        passing = sharing_gradients(builder.build(passing_parts=True))
        if not passing.cuts.passing:
            return solved(held)
        in_head = any(trace.visits[visit].is_head for visit, _ in passing.cuts.passing)
        passing = _keeping_parts(passing, 1 if in_head else held.recompute.kept_parts)
        if passes_parts:
            return solved(passing)
        waiting = peak_bytes(waiting_rows(graph, trace, passing, run.num_together))
        # Twice, since the head makes logits once more where parts pass.
        best, other = (passing, held) if 2 * waiting < spared_bytes(graph, passing) else (held, passing)
        try:
            return solved(best)
        except DoesNotFitError as error:
            try:
                return solved(other)
            except DoesNotFitError as second:
                needs_less = second.tier == error.tier and second.need_bytes < error.need_bytes
                raise (second if needs_less else error) from None

    try:
        return placed(updates_beside_device=True)
    except DoesNotFitError:
        if subject.compute_tier == "ram" or run.optimizer.defers_updates:
            raise
    return placed(updates_beside_device=False)


def _deeper_gather_is_free(deeper: KeptGraphs, found: KeptGraphs, tier: str) -> bool:
    """Return whether gathering further ahead leaves all blocks where they are, and room to fetch those of a tick ahead.

    It hides a gather that takes longer than one layer computes: not worth a block's home, or late copies.
    """
    placement, capacity = deeper.placement, deeper.budgets[tier].capacity_bytes
    has_room = placement.peak_bytes(tier) + placement.working_bytes[tier] <= capacity
    return has_room and placement.traffic_bytes == found.placement.traffic_bytes


def _least_bytes(subject: _Subject, profile: LoadedProfile, padded: bool | None, run: RunSpec, tier: str) -> int | None:
    """Return the least that a tier needs for a run, the others as they are; None: another tier is too small then."""
    capacity = 0
    if run.model.table.split_experts != subject.run.model.table.split_experts:
        subject = _look_at(run, padded, None)
    while True:
        # Once more with what is said to do: blocks are placed greedily, and with more room may be placed otherwise.
        try:
            _place(run, subject, profile, {tier: capacity})
        except DoesNotFitError as error:
            if error.tier != tier:
                return None
            capacity = error.need_bytes
        else:
            return capacity


def check_positions(model: ModelSpec, max_length: int, graph: ModelGraph) -> None:
    """Refuse rows that are longer than the positions which the model has learned.

    Raises:
        ConfigError: names data.max_length.
    """
    positions = num_learned_positions(graph)
    if positions is not None and max_length > positions:
        message = f"data.max_length = {max_length}, but this model has {positions} positions"
        problem = Problem("data.max_length", message, f"Write at most {positions}")
        raise ConfigError(model.name, [problem])


def trace_run(run: RunSpec, graph: ModelGraph, *, padded: bool, top_k: int | None = None) -> VisitTrace:
    """Return the trace of a micro-batch of a run; of a forward alone that scores ``top_k`` words, if that is given.

    Raises:
        ConfigError: as ``check_positions``.
    """
    check_positions(run.model, run.batch.max_length, graph)
    # As the run will be: which kernels there are to choose from, and what they take, depends on it.
    with (
        deterministic_kernels(run.traced_on, type(graph.model).__name__, enabled=run.is_deterministic),
        fakes_standing_for_gpu(enabled=run.is_traced_elsewhere),
        flash_planned(run.flash),
    ):
        return trace_visits(
            graph,
            run.batch.micro_batch_rows,
            run.batch.max_length,
            run.dtype,
            device=run.traced_on,
            objective=run.objective,
            padded=padded,
            is_compiled=run.model.table.compiler is not None,
            example=_example(run),
            top_k=top_k,
        )


def _example(run: RunSpec) -> Mapping[str, Tensor] | None:
    """Return a micro-batch that is as full of images as the run's may be; None: they have none."""
    if run.data.images_folder is None:
        return None
    tokenizer = load_tokenizer(run.model.tokenizer_folder)
    processor = run.data.image_processor(tokenizer)
    assert processor is not None
    return processor.example(run.batch.micro_batch_rows)


def make_graph(run: RunSpec) -> ModelGraph:
    """Return the model of a run, without weights."""
    graph = run.model.build(run.dtype)
    if run.model.table.mlp_rows:
        tile_mlps(graph, run.model.table.mlp_rows)
    if run.uses_liger:
        check_liger_kernels(graph.model, run.device)
        apply_liger_kernels(graph.model, with_mlps=not run.model.table.mlp_rows)
    return graph


def find_frozen(run: RunSpec, graph: ModelGraph) -> tuple[Mapping[str, FrozenBlock], Mapping[str, Encoding]]:
    """Return the frozen layouts that may stay in the model's folder, and how the blocks of others hold them."""
    frozen = _frozen_blocks(run, graph)
    encodings: dict[str, Encoding] = {
        name: block.packing for name, block in frozen.items() if block.packing is not None
    }
    return frozen if FOLDER in run.placement.homes["in place"] else {}, encodings


def _frozen_blocks(run: RunSpec, graph: ModelGraph) -> Mapping[str, FrozenBlock]:
    """Return the frozen layouts that can be read from the model's folder as they are, or packed."""
    frozen = [layout for layout in graph.layouts.values() if not layout.trainable]
    if run.model.table.train_from_scratch or not frozen:
        return {}
    if not run.world.is_single:  # the folder has tensors, not shares of them
        return {}
    try:
        return frozen_blocks(open_loader(run.model.folder, graph), frozen, graph.dtype)
    except (ModelFolderError, OSError):  # a plan needs no weights; a run says what is wrong with them
        return {layout.name: unread_block(layout, graph.dtype) for layout in frozen}


def with_folder(budgets: Mapping[str, TierBudget], program: StepProgram, reader_bytes: int) -> dict[str, TierBudget]:
    """Return the budgets with the model's folder as a tier after RAM, if blocks may live there.

    Args:
        reader_bytes: RAM of those that read it.
    """
    nbytes = sum(block.nbytes for block in program.blocks.values() if block.in_place)
    if not nbytes:
        return dict(budgets)
    ram = budgets["ram"]
    ram = replace(ram, workspace_bytes=ram.workspace_bytes + reader_bytes)
    folder = TierBudget(FOLDER, nbytes, lambda n: n)
    order = [name for name in budgets if name != "nvme"]
    found = {**{name: budgets[name] for name in order}, "ram": ram, FOLDER: folder}
    return found | {name: budget for name, budget in budgets.items() if name == "nvme"}


def _builder(run: RunSpec, subject: _Subject, *, updates_beside_device: bool, gathers_ahead: int) -> ProgramBuilder:
    return ProgramBuilder(
        subject.graph,
        subject.trace,
        num_micro_batches=len(run.own_micro_batches),
        order=run.batch.order,
        compute_tier=subject.compute_tier,
        optimizer=subject.optimizer,
        grad_dtype=run.grad_dtype,
        updates=GroupUpdates(
            are_deferred=run.optimizer.defers_updates,
            in_compute_tier=subject.on_device is not None,
            beside_device=updates_beside_device,
        ),
        frozen=FrozenWeights(not run.model.table.train_from_scratch, subject.in_place, subject.encodings),
        sharding=run.sharding(gathers_ahead),
    )


def _keeping_parts(program: StepProgram, count: int) -> StepProgram:
    """Return the program whose head keeps the logits of so many parts of the vocabulary."""
    return replace(program, recompute=replace(program.recompute, kept_parts=count))


def _vocabulary(graph: ModelGraph) -> frozenset[str]:
    """Return the names of the parameters of embeddings and of the output head."""
    modules = {name: module for name, module in graph.model.named_modules() if isinstance(module, nn.Embedding)}
    head = graph.model.get_output_embeddings()
    modules |= {name: module for name, module in graph.model.named_modules() if module is head}
    names = (f"{path}.{own}" for path, module in modules.items() for own, _ in module.named_parameters())
    return frozenset(graph.owner_of.get(name, name) for name in names)


def _update_workspace_bytes(subject: _Subject, program: StepProgram) -> dict[str, int]:
    """Return the bytes that updates take beside their blocks, by tier, where the optimizer reports some."""
    optimizer, layouts = subject.optimizer, [each for each in subject.graph.layouts.values() if each.trainable]
    taken: dict[str, int] = {}
    if isinstance(optimizer, MatrixOptimizer) and subject.compute_tier != "ram":
        shapes = matrix_shapes(optimizer, layouts)
        nbytes = device_bytes(optimizer, subject.run.traced_on, shapes)
        taken = {"ram": host_bytes(shapes) + optimizer.piece_bytes, subject.compute_tier: round_up(nbytes, PAGE_BYTES)}
    bytes_of = getattr(optimizer, "workspace_bytes", None)
    if taken or bytes_of is None:
        return taken
    return {"ram": max((bytes_of(entry) for layout in layouts for entry in layout.entries), default=0)}


def _on_device(optimizer: Optimizer, device: torch.device, compute_tier: str) -> tuple[Optimizer | None, str]:
    """Return what updates blocks in GPU memory; or None, and why there is nothing although there is such memory."""
    if compute_tier == "ram":
        return None, ""
    try:
        return device_optimizer(optimizer, device), ""
    except DeviceKernelError as error:
        return None, str(error)


def with_open_room(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with more and more of RAM and GPU memory kept open to copies, the usual share first.

    Homes save traffic; open room lets copies be fetched further ahead. Neither changes a number of the run. In a run on
    a GPU copies of each size get buffers of their own, if there can be room for these beside the homes
    (docs/decisions/0025-buffers-made-before-the-first-step.md).
    """
    budgets = list(plan.budgets_by_tier.values())
    solver = PlacementSolver(plan.program, budgets, plan.run.placement.homes, None, STAY_SHARE)
    for share in OPEN_SHARES:
        room = {tier: int(share * plan.budgets[tier]) for tier in {"ram", plan.program.compute_tier}}
        try:
            placement = _with_buffers(solver, room)
        except DoesNotFitError:  # the drive has no room for what RAM keeps open
            continue
        if weights_stay(plan.graph, plan.trace, plan.program, placement.homes):
            yield replace(plan, placement=placement)
    if plan.program.recompute.kept_graphs:
        yield plan


def _with_buffers(solver: PlacementSolver, room: Mapping[str, int]) -> Placement:
    """Return the placement that keeps at least so much room open; more where buffers of each size need it."""
    first = settled = solver.settle(room)
    for _ in range(_NUM_TRIES):  # what moves away from one tier may bring copies of another size into it
        if not settled.missing_bytes:
            break
        room = {tier: nbytes + settled.missing_bytes.get(tier, 0) for tier, nbytes in room.items()}
        try:
            settled = solver.settle(room)
        except DoesNotFitError:
            break
    return solver.describe(first if settled.missing_bytes else settled)


def fastest(plans: Iterable[Plan]) -> Plan:
    """Return the plan whose replayed step is the shortest; the first where this machine was not measured.

    The first as well for another machine: its rates are too rough to choose by, and a replay of a large model is long.
    """
    best, best_s = None, math.inf
    seen: list[tuple[Mapping[str, str], frozenset[int], Recompute]] = []
    for plan in plans:
        if measured_rates(plan) is None or plan.run.tiers.machine is not None:
            return plan
        what = plan.placement.homes, plan.program.updates.streamed, plan.program.recompute
        if what in seen:
            continue
        seen.append(what)
        step_s = _replayed_s(plan)
        if step_s < WORTHWHILE * best_s:
            best, best_s = plan, step_s
    assert best is not None
    return best


def parts_without_room(trace: VisitTrace) -> int:
    """Return how many parts of the vocabulary keep their logits in what the head leaves of the workspace of layers."""
    if trace.head_parts == 1:
        return 1
    trunk = (visit for visit in trace.visits if not visit.is_head)
    fullest = max((max(visit.memory.forward_nbytes, visit.memory.backward_nbytes) for visit in trunk), default=0)
    free = max(0, fullest - trace.head_nbytes)
    return min(trace.head_parts, 1 + free // trace.head_part_nbytes)


def _holds_everything(budget: TierBudget, program: StepProgram) -> bool:
    """Return whether a tier has room for all blocks of a step beside the workspace."""
    blocks = sum(budget.slot_bytes(block.nbytes) for block in program.blocks.values())
    return blocks + budget.workspace_bytes <= budget.capacity_bytes


def teacher_bytes(run: RunSpec) -> int:
    """Return what a step's rows hold for the loss beside their tokens: in distillation, what the teacher says."""
    return run.batch.num_tokens * run.objective.loss.token_nbytes


def with_workspace(budgets: Mapping[str, TierBudget], nbytes: int, compute_tier: str) -> dict[str, TierBudget]:
    """Return the budgets with so much more workspace in RAM, and once more where layers run: it is copied there."""
    found = dict(budgets)
    for tier in dict.fromkeys(("ram", compute_tier)):
        found[tier] = replace(found[tier], workspace_bytes=found[tier].workspace_bytes + round_up(nbytes, PAGE_BYTES))
    return found


def spared_bytes(graph: ModelGraph, program: StepProgram) -> int:
    """Return what the working set shrinks by where the parts of a gradient, and of a weight that is cut, pass."""

    def spared(layout: UnitLayout) -> int:
        nbytes = 4 * program.sharding.own_lanes.most_open_sums
        nbytes += graph.dtype.itemsize if layout.name in program.cuts.weights else 0
        return nbytes * (layout.num_elements - max(map(len, layout.parts)))

    return max((spared(graph.layouts[layout]) for _, layout in program.cuts.passing), default=0)


def with_residents(
    budgets: Mapping[str, TierBudget], run: RunSpec, program: StepProgram, profile: MachineProfile | None
) -> dict[str, TierBudget]:
    """Return the budgets with what decides about homes in GPU memory, and what weights take in RAM on their way in.

    Args:
        profile: Rates of this machine, if its GPU is the compute device; where one is lacking, bytes decide.
    """
    budgets = {**budgets, "ram": replace(budgets["ram"], filling_bytes=filling_bytes(program))}
    if program.compute_tier == "ram":
        return budgets
    kinds = set(run.placement.residents)
    if not program.updates.in_compute_tier:
        kinds.discard("optimizer")  # state is worth nothing where nobody can use it
    gpu = profile.gpu if profile is not None else None
    rate = profile.adamw_params_per_s.get(_master(program)) if profile is not None else None
    residency = Residency(frozenset(kinds))
    if gpu is not None:
        residency = Residency(
            frozenset(kinds),
            bus_s_per_byte=0.5 / gpu.h2d_bytes_per_s + 0.5 / gpu.d2h_bytes_per_s,
            host_update_s_per_element=1 / rate if rate and run.optimizer.optim == "adamw" else 0.0,
        )
    compute = program.compute_tier
    return {**budgets, compute: replace(budgets[compute], residency=residency)}


def _master(program: StepProgram) -> str:
    """Return the name of the weights' dtype, by which rates of updates are kept."""
    dtype = next(block.dtype for block in program.blocks.values() if block.kind == "weights" and not block.num_packed)
    return str(dtype).removeprefix("torch.")


def filling_bytes(program: StepProgram) -> int:
    """Return what the weights of the largest layout take in RAM on their way in or out, with their fp32 master."""
    most = 0
    for key, block in program.blocks.items():
        if block.kind == "weights":
            parts = [block.nbytes]
            if block.dtype.itemsize == 2:
                low = stored_keys(state_key(key.rsplit("/", 1)[0], "low"), program.blocks)
                parts += [
                    4 * min(block.num_elements, MASTER_ELEMENTS),
                    max((program.blocks[part].nbytes for part in low), default=0),
                ]
            averages = stored_keys(state_key(key.rsplit("/", 1)[0], EMA.name), program.blocks)
            parts.append(max((program.blocks[part].nbytes for part in averages), default=0))
            most = max(most, sum(round_up(nbytes, PAGE_BYTES) for nbytes in parts))
    return most
