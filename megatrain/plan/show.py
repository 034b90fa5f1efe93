"""Parts of a plan's text: headline, table rows, messages, and lines about the estimate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatrain.engine.program.block_plan import KINDS, Kind
from megatrain.engine.program.visit_trace import Recompute
from megatrain.machine.planned_machine import PlannedMachine
from megatrain.plan.flops import flops_per_token
from megatrain.plan.kept import count_layers, num_layers_kept, visits_with_results
from megatrain.plan.plan import Plan
from megatrain.plan.process import ProcessMemory
from megatrain.plan.times import Estimate, OutsideTraffic
from megatrain.trace.counting import is_counted
from tiered.units import format_decimal_size, format_duration, format_size

#: Number of steps whose writes are reported if the length of the run is unknown.
_STEPS_OF_WEAR = 1000


def headline(plan: Plan) -> str:
    """Return one line with the model, its dtype and the tokens per step."""
    run, count = plan.run, plan.graph.num_parameters
    name = run.model.name.rstrip("/").split("/")[-1]
    size = f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
    layers = len({unit.layer for unit in plan.graph.units if unit.layer})
    dtype, task = str(run.dtype).removeprefix("torch."), run.task if run.model.is_trained else "forward only"
    tokens = f"{run.batch.num_tokens:,} tokens/step"
    if plan.run.batch.num_micro_batches > 1:
        order_note = ", one micro-batch at a time" if run.batch.order == "micro_batch" else ""
        tokens += f" ({plan.run.batch.num_micro_batches} x {plan.run.batch.micro_batch_rows} rows{order_note})"
    num_trained = sum(layout.num_parameters for layout in plan.graph.layouts.values() if layout.trainable)
    size += " parameters"
    if run.model.is_trained and num_trained < count:
        size += f" ({num_trained:,} trained)"
    return f"{name}  {size}, {layers} layers   {task}, {dtype}, {tokens}"


def table_rows(plan: Plan) -> Sequence[tuple[str, Mapping[str, int], str]]:
    """Return (kind, bytes by tier, note) for each row of the table."""
    notes = _kind_notes(plan)
    rows: list[tuple[str, Mapping[str, int], str]] = [
        (kind, {tier: plan.placement.home_bytes[tier][kind] for tier in plan.tiers}, notes[kind]) for kind in KINDS
    ]
    rows.append(
        (
            "working set",
            plan.placement.working_bytes,
            "minimum for streamed blocks: the largest need of one part of a step",
        )
    )
    precision = "exact" if plan.trace.exact else "estimated"
    if any(plan.placement.generation_bytes.values()):
        count = max(budget.generations for budget in plan.budgets_by_tier.values())
        note = f"at most {count} in addition to the live blocks; other parts are in output_dir"
        rows.append(("checkpoints", plan.placement.generation_bytes, note))
    workspace = dict(plan.placement.workspace_bytes)
    if plan.program.recompute.kept_graphs:
        tier = plan.program.compute_tier
        workspace[tier] -= plan.kept_bytes
        num_kept, num_layers = num_layers_kept(plan.graph, plan.trace, plan.program)
        note = f"{num_kept} of {num_layers} layers keep their graphs, which the backward need not recompute"
        rows.append(("kept graphs", {name: plan.kept_bytes * (name == tier) for name in plan.tiers}, note))
    rows.append(("workspace", workspace, f"activations inside one unit, logits; {precision}"))
    return rows


def messages(plan: Plan, passthrough: str = "") -> Sequence[str]:
    """Return the messages below a plan's table: blocks that move, the tiers that update weights, and assumptions.

    ``passthrough`` describes the pass-through tensors in the model's folder; "" if there are none.
    """
    estimates = [f"the workspace is estimated: {guess}" for guess in plan.trace.guesses]
    if plan.trace.uncounted_ops:
        estimates.append(f"the FLOPs of a step are unknown: {'; '.join(plan.trace.uncounted_ops)}")
    if plan.trace.dense_masks:
        causes = ", ".join(plan.trace.dense_masks)
        estimates.append(
            f"attention needs masks of [S, S], so memory grows with the square of data.max_length ({causes})"
        )
    machine = plan.run.tiers.machine
    if isinstance(machine, PlannedMachine):
        cpu_note, gpu_note = (
            "counted with this CPU's kernels; another CPU may differ",
            "counted without its GPU, which may differ",
        )
        workspace = gpu_note if plan.run.has_fake_gpu else cpu_note
        estimates.append(f"planned for {machine.name}; the workspace is {workspace}")
        estimates += [f"{machine.name}: {machine.file.note}"] if machine.file.note else []
    notes = [*filter(None, [plan.library_memory]), *_recompute_notes(plan)]
    world = plan.run.world
    if not world.is_single:
        host_bytes = {name: nbytes * (1 if name == "gpu" else world.local_size) for name, nbytes in plan.totals.items()}
        sizes = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in host_bytes.items() if name != "gpu")
        hosts = "on this host" if world.num_hosts == 1 else f"on each of {world.num_hosts} hosts"
        notes.append(
            f"this is one of {world.size} processes; the {world.local_size} {hosts} together take {sizes}, and train "
            f"{plan.run.batch.num_tokens:,} tokens per step"
        )
    return (*_traffic_notes(plan, passthrough), *notes, *estimates)


def process_line(memory: ProcessMemory) -> str:
    """Return a line with the predicted memory of the process, inside and outside of the RAM tier."""
    tier, extra = format_size(memory.tier_bytes), format_size(memory.non_tier_bytes)
    return (
        f"process         about {format_size(memory.total_bytes)} of RAM: {tier} in the tier + {extra} of Python and "
        "libraries, kernels, tokenizer and rows"
    )


def _recompute_notes(plan: Plan) -> Sequence[str]:
    """Return a message about the recomputed layers: their number, their cost, and a config change that lowers it."""
    trace, recompute = plan.trace, plan.program.recompute
    num_kept, num_layers = num_layers_kept(plan.graph, trace, plan.program)
    if num_kept == num_layers or not is_counted(trace):
        return []

    def with_flops(choice: Recompute) -> float:
        return flops_per_token(replace(plan.step, program=replace(plan.program, recompute=choice)))

    recomputed_visits = frozenset(index for index, visit in enumerate(trace.visits) if visit.is_recomputed)
    min_flops = with_flops(Recompute(recomputed_visits, kept_parts=recompute.kept_parts))
    text = f"the backward recomputes {num_layers - num_kept} of {num_layers} layers"
    text += ", except their saved results" if recompute.saving_visits else ""
    text += f": {1 - min_flops / with_flops(recompute):.0%} of the operations of a step"
    savable = visits_with_results(trace) - recompute.kept_graphs - recompute.saved_results
    if savable and plan.run.model.table.compiler is None:
        choice = replace(
            recompute,
            saved_attention=recompute.saved_attention - savable,
            saved_results=recompute.saved_results | savable,
        )
        slot_bytes = plan.budgets_by_tier[plan.program.compute_tier].slot_bytes
        visits = ((trace.visits[index], recompute.savable_results(index, trace.visits[index])) for index in savable)
        added_bytes = sum(slot_bytes(visit.results.nbytes) - slot_bytes(saved.nbytes) for visit, saved in visits)
        size = format_size(plan.run.num_together * added_bytes)
        share = f"{1 - min_flops / with_flops(choice):.0%}"
        text += f'; training.recompute = "selective" would reduce this to {share} with {size} more memory'
    return [text]


def _expert_notes(plan: Plan) -> tuple[str, ...]:
    """Return a message about the number of expert parts that a step's tokens will probably reach."""
    parts = [visit for visit in plan.trace.visits if visit.no_token_probability]
    if not parts or not plan.run.world.is_single:
        return ()
    tokens = plan.shape.tokens_per_step
    count = sum(1 - visit.no_token_probability**tokens for visit in parts)
    return (
        f"experts are split into {len(parts):,} parts; {tokens:,} tokens are expected to reach {count:,.0f} of them. "
        "The weights of the others do not move, so the bytes of this plan are an upper bound",
    )


def _traffic_notes(plan: Plan, passthrough: str) -> tuple[str, ...]:
    compute_tier = plan.program.compute_tier
    placement, capacity = plan.placement, plan.budgets_by_tier[compute_tier].capacity_bytes
    notes: tuple[str, ...] = (passthrough,) if passthrough else ()
    notes += () if compute_tier == "ram" or not plan.updates.ticks else (_update_note(plan),)
    if plan.run.checkpoint.table.num_copies and plan.checkpoint.drive_bytes:
        size = format_size(plan.checkpoint.drive_bytes)
        count = plan.run.checkpoint.table.num_copies
        notes += (f"save_copy keeps {count} complete copies of checkpoints in output_dir, {size} each",)
    if ("nvme", "gpu") in placement.routes.links:
        notes += ("nvme->gpu, gpu->nvme: copies between drives and GPU memory bypass ram",)
    for tier, nbytes in placement.missing_bytes.items():
        notes += (
            f"{tier}: buffers of copies are replaced by other sizes within a step; {format_size(nbytes)} more "
            "would avoid this",
        )
    if not any(plan.traffic.values()):
        return (f"every block is resident in {compute_tier}: nothing is streamed", *notes)
    used_bytes = sum(placement.home_bytes[compute_tier].values()) + placement.workspace_bytes.get(compute_tier, 0)
    notes += _expert_notes(plan)
    return (
        f"{format_size(capacity - used_bytes)} of {compute_tier} are prefetch room. Half of the ticks need at most "
        f"{format_size(placement.median_working_bytes[compute_tier])} of it; the rest prefetches",
        *notes,
    )


def _update_note(plan: Plan) -> str:
    if plan.traced.host_updates:
        return f"updates run in ram: {plan.traced.host_updates}"
    streamed = plan.program.updates.streamed
    ticks = [tick for tick in plan.updates.gpu_memory_ticks if tick.visit not in streamed]
    share = 100 * plan.updates.count_weights(ticks) // max(1, plan.updates.count_weights(plan.updates.ticks))
    counts = f"{len(ticks)} of {len(plan.updates.ticks)} groups of blocks, {share} % of the trained parameters,"
    text = f"{counts} have their home in gpu and are updated there"
    return text + (f"; {len(streamed)} others are fetched part by part for their updates" if streamed else "")


def _kind_notes(plan: Plan) -> dict[Kind, str]:
    notes: dict[Kind, str] = {}
    homes = plan.placement.homes
    streamed_keys = {access.key for access in plan.program.accesses(homes) if homes[access.key] != access.tier}
    for kind in KINDS:
        blocks = [block for block in plan.program.blocks.values() if block.kind == kind]
        dtypes = ", ".join(dict.fromkeys(str(block.dtype).removeprefix("torch.") for block in blocks))
        count = sum(block.key in streamed_keys for block in blocks)
        residence = "resident" if not count else "streamed" if count == len(blocks) else ""
        residence = residence or f"{len(blocks) - count} of {len(blocks)} blocks resident, {count} streamed"
        notes[kind] = f"{dtypes}; {residence}" if blocks else "none"
    if plan.program.occupants:
        shared_keys = {key for _, key in plan.program.occupants}
        num_gradients = len({gradient.key for gradient in plan.program.occupants.values()})
        notes["gradients"] += f"; {num_gradients} layers share {len(shared_keys)} of them"
    for subject, visits in (
        ("attention", plan.program.recompute.saved_attention),
        ("products and attention", plan.program.recompute.saved_results),
    ):
        if num_layers := count_layers(plan.graph, plan.trace, visits):
            verb = "is" if subject == "attention" else "are"
            notes["activations"] += f"; {subject} of {num_layers} layers {verb} not recomputed"
    return notes


def estimate_lines(estimate: Estimate) -> Sequence[str]:
    """Return the lines about an estimate: how long resources are busy, the step time, and writes to drives."""
    lines = []
    if estimate.seconds:
        times = "  ".join(f"{name} {format_duration(seconds)}" for name, seconds in estimate.seconds.items())
        lines.append(f"busy per step   {times}")
    if estimate.step_s:
        line = f"predicted step  {format_duration(estimate.step_s)}{'' if estimate.is_timed else ' at best'}, "
        line += f"{estimate.tokens_per_step / estimate.step_s:,.0f} "
        lines.append(f"{line}tokens/s   bound by: {estimate.bound_by}{_crossing_text(estimate)}")
    if estimate.written_bytes and any(estimate.written_bytes.values()):
        lines.append(_wear_line(estimate))
    lines += [line for occasion in estimate.occasions if (line := _occasion_line(occasion))]
    return (*lines, *estimate.notes)


def _occasion_line(occasion: OutsideTraffic) -> str:
    """Return a line about an operation outside of steps, or "" if it moves nothing."""
    read_size, written_size = format_size(occasion.read_bytes), format_size(occasion.written_bytes)
    parts = {
        "start": [
            f"reads {read_size} of weights" if occasion.read_bytes else "",
            f"writes {written_size} to drives" if occasion.written_bytes else "",
        ],
        "checkpoint": [
            f"reads {read_size} through ram" if occasion.read_bytes else "",
            f"writes {written_size} to output_dir" if occasion.written_bytes else "",
            f"links {format_size(occasion.linked_bytes)} on drives" if occasion.linked_bytes else "",
        ],
        "export": [
            f"writes {written_size}",
            "reads it back to check it" if read_size == written_size else f"reads {read_size}, also to check it",
        ],
    }[occasion.name]
    text = ", ".join(part for part in parts if part)
    if text and occasion.seconds is not None:
        text += f": {format_duration(occasion.seconds)} of the drive at best"
    return f"{occasion.name:<16}{text}" if text else ""


def _crossing_text(estimate: Estimate) -> str:
    if not estimate.crossing_tokens:
        return ""
    return f"   T* = {estimate.crossing_tokens:,.0f} tokens/step (here {estimate.tokens_per_step:,})"


def _wear_line(estimate: Estimate) -> str:
    written_bytes = estimate.written_bytes or {}
    paths = [f"{path} {format_decimal_size(nbytes)}" for path, nbytes in written_bytes.items()]
    path_text = "  ".join(paths) if len(paths) > 1 else ""
    total = sum(written_bytes.values())
    if estimate.run_written_bytes is None:
        run_text = f"{format_decimal_size(total * _STEPS_OF_WEAR)} in {_STEPS_OF_WEAR:,} steps"
    else:
        run_text = f"{format_decimal_size(sum(estimate.run_written_bytes.values()))} in this run"
    return f"NVMe writes     {format_decimal_size(total)} per step, {run_text}   {path_text}".rstrip()
