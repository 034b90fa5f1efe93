"""Parts of a plan's text: headline, table rows, messages, and lines about the estimate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatrain.engine.program.block_plan import KINDS, Kind
from megatrain.engine.program.visit_trace import Recompute
from megatrain.machine.planned_machine import PlannedMachine
from megatrain.plan.flops import flops_per_token
from megatrain.plan.kept import num_layers_kept, num_layers_of, visits_with_results
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
        together = ", one micro-batch at a time" if run.batch.order == "micro_batch" else ""
        tokens += f" ({plan.run.batch.num_micro_batches} x {plan.run.batch.micro_batch_rows} rows{together})"
    trained = sum(layout.num_parameters for layout in plan.graph.layouts.values() if layout.trainable)
    size += " parameters"
    if run.model.is_trained and trained < count:
        size += f" ({trained:,} trained)"
    return f"{name}  {size}, {layers} layers   {task}, {dtype}, {tokens}"


def table_rows(plan: Plan) -> Sequence[tuple[str, Mapping[str, int], str]]:
    """Return (kind, bytes by tier, note) for each row of the table."""
    notes = _notes(plan)
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
        kept, layers = num_layers_kept(plan.graph, plan.trace, plan.program)
        note = f"{kept} of {layers} layers keep their graphs, which the backward need not recompute"
        rows.append(("kept graphs", {name: plan.kept_bytes * (name == tier) for name in plan.tiers}, note))
    rows.append(("workspace", workspace, f"activations inside one unit, logits; {precision}"))
    return rows


def messages(plan: Plan, passthrough: str = "") -> Sequence[str]:
    """Return the messages below a plan's table: blocks that move, the tiers that update weights, and assumptions.

    ``passthrough`` describes the pass-through tensors in the model's folder; "" if there are none.
    """
    estimates = [f"the workspace is estimated: {guess}" for guess in plan.trace.guesses]
    if plan.trace.uncounted:
        estimates.append(f"the FLOPs of a step are unknown: {'; '.join(plan.trace.uncounted)}")
    if plan.trace.dense_masks:
        causes = ", ".join(plan.trace.dense_masks)
        estimates.append(
            f"attention needs masks of [S, S], so memory grows with the square of data.max_length ({causes})"
        )
    machine = plan.run.tiers.machine
    if isinstance(machine, PlannedMachine):
        of_cpu, of_gpu = (
            "counted with this CPU's kernels; another CPU may differ",
            "counted without its GPU, which may differ",
        )
        workspace = of_gpu if plan.run.is_traced_elsewhere else of_cpu
        estimates.append(f"planned for {machine.name}; the workspace is {workspace}")
        estimates += [f"{machine.name}: {machine.file.note}"] if machine.file.note else []
    notes = [*filter(None, [plan.library_memory]), *_recompute_notes(plan)]
    world = plan.run.world
    if not world.is_single:
        on_host = {name: used * (1 if name == "gpu" else world.local_size) for name, used in plan.totals.items()}
        totals = ", ".join(f"{name} {format_size(used)}" for name, used in on_host.items() if name != "gpu")
        where = "on this host" if world.num_hosts == 1 else f"on each of {world.num_hosts} hosts"
        notes.append(
            f"this is one of {world.size} processes; the {world.local_size} {where} together take {totals}, and train "
            f"{plan.run.batch.num_tokens:,} tokens per step"
        )
    return (*_traffic_notes(plan, passthrough), *notes, *estimates)


def process_line(memory: ProcessMemory) -> str:
    """Return a line with the predicted memory of the process, inside and outside of the RAM tier."""
    tier, rest = format_size(memory.tier_bytes), format_size(memory.non_tier_bytes)
    return (
        f"process         about {format_size(memory.total_bytes)} of RAM: {tier} in the tier + {rest} of Python and "
        "libraries, kernels, tokenizer and rows"
    )


def _recompute_notes(plan: Plan) -> Sequence[str]:
    """Return messages about the recomputed layers, their cost, and the memory with which no layer is recomputed."""
    trace, recompute = plan.trace, plan.program.recompute
    kept, layers = num_layers_kept(plan.graph, trace, plan.program)
    if kept == layers or not is_counted(trace):
        return []

    def with_flops(other: Recompute) -> float:
        return flops_per_token(replace(plan.step, program=replace(plan.program, recompute=other)))

    again = frozenset(number for number, visit in enumerate(trace.visits) if visit.is_recomputed)
    least = with_flops(Recompute(again, kept_parts=recompute.kept_parts))
    text = f"the backward recomputes {layers - kept} of {layers} layers"
    text += ", except their saved results" if recompute.saving else ""
    text += f": {1 - least / with_flops(recompute):.0%} of the operations of a step"
    more = visits_with_results(trace) - recompute.kept_graphs - recompute.saved_results
    if more and plan.run.model.table.compiler is None:
        saved = replace(
            recompute,
            saved_attention=recompute.saved_attention - more,
            saved_results=recompute.saved_results | more,
        )
        slot_bytes = plan.budgets_by_tier[plan.program.compute_tier].slot_bytes
        taken = ((trace.visits[number].results, recompute.savable(number, trace.visits[number])) for number in more)
        each = [slot_bytes(wanted.nbytes) - slot_bytes(present.nbytes) for wanted, present in taken]
        size = format_size(plan.run.num_together * sum(each))
        share = f"{1 - least / with_flops(saved):.0%}"
        text += f'; training.recompute = "selective" would reduce this to {share} with {size} more memory'
    return [text]


def _expert_notes(plan: Plan) -> tuple[str, ...]:
    """Return a message about the number of expert parts that a step's tokens will probably reach."""
    parts = [visit for visit in plan.trace.visits if visit.chance_of_no_token]
    if not parts or not plan.run.world.is_single:
        return ()
    tokens = plan.shape.tokens_per_step
    reached = sum(1 - visit.chance_of_no_token**tokens for visit in parts)
    return (
        f"experts are split into {len(parts):,} parts; {tokens:,} tokens are expected to reach {reached:,.0f} of them. "
        "The weights of the others do not move, so the bytes of this plan are an upper bound",
    )


def _traffic_notes(plan: Plan, passthrough: str) -> tuple[str, ...]:
    compute = plan.program.compute_tier
    placement, capacity = plan.placement, plan.budgets_by_tier[compute].capacity_bytes
    updates: tuple[str, ...] = (passthrough,) if passthrough else ()
    updates += () if compute == "ram" or not plan.updates.ticks else (_update_note(plan),)
    if plan.run.checkpoint.table.num_copies and plan.checkpoint.on_drives:
        size = format_size(plan.checkpoint.on_drives)
        count = plan.run.checkpoint.table.num_copies
        updates += (f"save_copy keeps {count} complete copies of checkpoints in output_dir, {size} each",)
    if ("nvme", "gpu") in placement.routes.links:
        updates += ("nvme->gpu, gpu->nvme: copies between drives and GPU memory bypass ram",)
    for tier, nbytes in placement.missing_bytes.items():
        updates += (
            f"{tier}: buffers of copies are replaced by other sizes within a step; {format_size(nbytes)} more "
            "would avoid this",
        )
    if not any(plan.traffic.values()):
        return (f"every block is resident in {compute}: nothing is streamed", *updates)
    held = sum(placement.home_bytes[compute].values()) + placement.workspace_bytes.get(compute, 0)
    updates += _expert_notes(plan)
    return (
        f"{format_size(capacity - held)} of {compute} are prefetch room. Half of the ticks need at most "
        f"{format_size(placement.median_working_bytes[compute])} of it; the rest prefetches",
        *updates,
    )


def _update_note(plan: Plan) -> str:
    if plan.traced.host_updates:
        return f"updates run in ram: {plan.traced.host_updates}"
    streamed = plan.program.updates.streamed
    there = [tick for tick in plan.updates.in_gpu_memory if tick.visit not in streamed]
    share = 100 * plan.updates.num_weights_of(there) // max(1, plan.updates.num_weights_of(plan.updates.ticks))
    which = f"{len(there)} of {len(plan.updates.ticks)} groups of blocks, {share} % of the trained parameters,"
    text = f"{which} have their home in gpu and are updated there"
    return text + (f"; {len(streamed)} others are fetched part by part for their updates" if streamed else "")


def _notes(plan: Plan) -> dict[Kind, str]:
    notes: dict[Kind, str] = {}
    homes = plan.placement.homes
    elsewhere = {access.key for access in plan.program.accesses(homes) if homes[access.key] != access.tier}
    for kind in KINDS:
        blocks = [block for block in plan.program.blocks.values() if block.kind == kind]
        dtypes = ", ".join(dict.fromkeys(str(block.dtype).removeprefix("torch.") for block in blocks))
        away = sum(block.key in elsewhere for block in blocks)
        where = "resident" if not away else "streamed" if away == len(blocks) else ""
        where = where or f"{len(blocks) - away} of {len(blocks)} blocks resident, {away} streamed"
        notes[kind] = f"{dtypes}; {where}" if blocks else "none"
    if plan.program.occupants:
        shared = {key for _, key in plan.program.occupants}
        num_gradients = len({gradient.key for gradient in plan.program.occupants.values()})
        notes["gradients"] += f"; {num_gradients} layers share {len(shared)} of them"
    for what, visits in (
        ("attention", plan.program.recompute.saved_attention),
        ("products and attention", plan.program.recompute.saved_results),
    ):
        if saved := num_layers_of(plan.graph, plan.trace, visits):
            verb = "is" if what == "attention" else "are"
            notes["activations"] += f"; {what} of {saved} layers {verb} not recomputed"
    return notes


def estimate_lines(estimate: Estimate) -> Sequence[str]:
    """Return the lines about an estimate: how long resources are busy, the step time, and writes to drives."""
    lines = []
    if estimate.seconds:
        parts = "  ".join(f"{name} {format_duration(seconds)}" for name, seconds in estimate.seconds.items())
        lines.append(f"busy per step   {parts}")
    if estimate.step_s:
        line = f"predicted step  {format_duration(estimate.step_s)}{'' if estimate.is_timed else ' at best'}, "
        line += f"{estimate.tokens_per_step / estimate.step_s:,.0f} "
        lines.append(f"{line}tokens/s   bound by: {estimate.bound_by}{_crossing_text(estimate)}")
    if estimate.written_bytes and any(estimate.written_bytes.values()):
        lines.append(_wear_line(estimate))
    lines += [line for each in estimate.occasions if (line := _occasion_line(each))]
    return (*lines, *estimate.notes)


def _occasion_line(occasion: OutsideTraffic) -> str:
    """Return a line about an operation outside of steps, or "" if it moves nothing."""
    read, written = format_size(occasion.read_bytes), format_size(occasion.written_bytes)
    parts = {
        "start": [
            f"reads {read} of weights" if occasion.read_bytes else "",
            f"writes {written} to drives" if occasion.written_bytes else "",
        ],
        "checkpoint": [
            f"reads {read} through ram" if occasion.read_bytes else "",
            f"writes {written} to output_dir" if occasion.written_bytes else "",
            f"links {format_size(occasion.linked_bytes)} on drives" if occasion.linked_bytes else "",
        ],
        "export": [
            f"writes {written}",
            "reads it back to check it" if read == written else f"reads {read}, also to check it",
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
    written = estimate.written_bytes or {}
    paths = [f"{path} {format_decimal_size(nbytes)}" for path, nbytes in written.items()]
    each = "  ".join(paths) if len(paths) > 1 else ""
    total = sum(written.values())
    if estimate.run_written_bytes is None:
        run = f"{format_decimal_size(total * _STEPS_OF_WEAR)} in {_STEPS_OF_WEAR:,} steps"
    else:
        run = f"{format_decimal_size(sum(estimate.run_written_bytes.values()))} in this run"
    return f"NVMe writes     {format_decimal_size(total)} per step, {run}   {each}".rstrip()
