"""Estimates for a step and a run: how long processors, links and drives are busy, and bytes written to drives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from megatrain.converters.adapters import adapters_of
from megatrain.engine.program.block_plan import DURABLE_KINDS
from megatrain.engine.program.step_program import Phase
from megatrain.engine.tape.updates import has_split_weights
from megatrain.machine.file_systems import file_system_of
from megatrain.machine.profiles import STALE_DAYS, DriveProfile, LoadedProfile, MachineProfile, age_days
from megatrain.models.export import export_dtype
from megatrain.models.folder import weight_file_bytes
from megatrain.optim.factory import has_measured_kernel
from megatrain.plan.budgets import FOLDER
from megatrain.plan.costs import StepCosts, gpu_updates_s, step_costs
from megatrain.plan.plan import PlacedStep, Plan
from megatrain.plan.times import Estimate, OutsideTraffic, StepShape
from megatrain.plan.traffic import Traffic
from megatrain.ranks.shards import NETWORK, PEER

_ADVICE = "run `megatrain-tier doctor --config CONFIG` for times"
_PROCESSORS = ("compute", "host", "optimizer", "gpu optimizer")


def nvme_seconds(read_bytes: float, written_bytes: float, drive: DriveProfile) -> float:
    """Return the seconds that one drive needs for reads and writes.

    Simultaneous reads and writes share the mixed rate. The remaining reads or writes run at their own rate. If a drive
    slows down under long writes, its sustained rate is the limit.
    """
    overlap = min(read_bytes, written_bytes)
    seconds = 2 * overlap / drive.mixed_bytes_per_s
    seconds += (read_bytes - overlap) / drive.read_bytes_per_s + (written_bytes - overlap) / drive.write_bytes_per_s
    if drive.sustained_write_bytes_per_s is None:
        return seconds
    return max(seconds, written_bytes / drive.sustained_write_bytes_per_s)


def nvme_written_bytes(traffic: Mapping[str, int]) -> int:
    """Return the total bytes written to drives."""
    return sum(nbytes for link, nbytes in traffic.items() if link.endswith("->nvme"))


def _slowest_drive_s(transfers: Iterable[tuple[str, float, float]], drives: Mapping[str, DriveProfile]) -> float | None:
    """Return the busy seconds of the slowest drive, or None if a drive was not measured.

    Args:
        transfers: Tuples of drive key, bytes read and bytes written. Paths on the same file system have the same key.
        drives: Rates of drives, by key.
    """
    by_drive: dict[str, tuple[float, float]] = {}
    for key, read, written in transfers:
        total_read, total_written = by_drive.get(key, (0.0, 0.0))
        by_drive[key] = total_read + read, total_written + written
    if any(key not in drives for key in by_drive):
        return None
    return max((nvme_seconds(r, w, drives[key]) for key, (r, w) in by_drive.items()), default=0.0)


def split(nbytes: int, shape: StepShape) -> dict[str, int]:
    """Split bytes over the NVMe paths by weight. Each share is exact to within one file of the striped blocks."""
    total = sum(shape.weights)
    return {str(path): round(nbytes * weight / total) for path, weight in zip(shape.paths, shape.weights, strict=True)}


def estimate_step(step: PlacedStep, shape: StepShape, loaded: LoadedProfile) -> Estimate:
    """Estimate a step's times at the rates of a profile, and the step's writes to drives."""
    written_bytes = split(nvme_written_bytes(step.traffic), shape)
    run_written_bytes = None
    if shape.num_steps is not None:
        run_written_bytes = split(nvme_written_bytes(step.placement.run_traffic_bytes(shape.num_steps)), shape)
    estimate = Estimate(
        shape.tokens_per_step,
        {},
        written_bytes=written_bytes,
        run_written_bytes=run_written_bytes,
        is_timed=step.ticks is not None,
        occasions=tuple(_occasions(step, shape, loaded.machine if step.run.tiers.machine.is_here else None)),
    )
    if loaded.machine is None:
        notes = [f"times           not measured: {_ADVICE}", *_striping_notes(shape), *loaded.ranks]
        return replace(estimate, notes=(*notes, *([f"profile         {loaded.note}"] if loaded.note else [])))
    costs, links = step_costs(step, shape.tokens_per_step, loaded.machine), _LinkTimes(step, shape, loaded.machine)
    step_time = _StepTime(costs, links)
    result = replace(
        estimate,
        seconds=step_time.seconds,
        unmeasured=step_time.unmeasured,
        computing_s_per_nvme_byte=links.computing_s_per_nvme_byte,
        seconds_per_nvme_copy=max((drive.seconds_per_copy or 0.0 for drive in links.drives), default=0.0),
        notes=_notes(loaded, costs, links, shape, step_time.unmeasured),
    )
    if step_time.unmeasured:
        return result
    step_s, bound_by = step_time.bound()
    return replace(result, step_s=step_s, bound_by=bound_by, crossing_tokens=step_time.crossing_tokens())


def _occasions(step: PlacedStep, shape: StepShape, machine: MachineProfile | None) -> Iterator[OutsideTraffic]:
    """Yield a training run's drive traffic outside steps: at its start, at its first checkpoint, and at its end."""
    if not step.updates.ticks:
        return
    run, homes = step.run, step.placement.homes
    durable_blocks = [block for block in step.program.blocks.values() if block.kind in DURABLE_KINDS]
    drive_bytes = sum(block.nbytes for block in durable_blocks if homes[block.key] == "nvme")
    master_blocks = [block for block in durable_blocks if block.kind == "weights" or block.key.endswith("/low")]
    master_drive_bytes = sum(block.nbytes for block in master_blocks if homes[block.key] == "nvme")
    weights = [block for block in durable_blocks if block.kind == "weights"]
    in_place_bytes = sum(block.nbytes for block in weights if step.budgets_by_tier[homes[block.key]].is_read_only)
    loaded_share = 1 - in_place_bytes / max(1, sum(block.nbytes for block in weights))  # the rest is used in place
    folder_bytes = 0 if run.model.table.train_from_scratch else int(loaded_share * weight_file_bytes(run.model.folder))
    layouts = step.graph.layouts.values()
    is_adapter = adapters_of(step.graph) is not None and not run.export.merge
    num_exported = sum(layout.num_parameters for layout in layouts if layout.trainable or not is_adapter)
    exported_bytes = num_exported * export_dtype(run.export, run.dtype).itemsize

    def drive_seconds(reads: Mapping[Path, float], writes: Mapping[Path, float]) -> float | None:
        if machine is None:
            return None
        transfers = ((path, reads.get(path, 0.0), writes.get(path, 0.0)) for path in {*reads, *writes})
        keyed_transfers = ((file_system_of(path).key, r, w) for path, r, w in transfers if r or w)
        return _slowest_drive_s(keyed_transfers, machine.drives)

    drives = dict(zip(shape.paths, shape.weights, strict=True))
    shares = {path: weight / sum(drives.values()) for path, weight in drives.items()}
    drive_writes = {path: drive_bytes * part for path, part in shares.items()}
    drive_reads = {path: master_drive_bytes * part for path, part in shares.items()}
    folder_reads = {Path(run.model.folder): float(folder_bytes)}
    yield OutsideTraffic("start", folder_bytes, drive_bytes, seconds=drive_seconds(folder_reads, drive_writes))
    if run.checkpoint.table.is_on:
        saved_bytes = step.checkpoint.output_dir_bytes
        seconds = drive_seconds({}, {run.output_dir: float(saved_bytes)})
        yield OutsideTraffic("checkpoint", sum(step.checkpoint.traffic.values()), saved_bytes, drive_bytes, seconds)
    drive_reads[run.output_dir] = drive_reads.get(run.output_dir, 0.0) + exported_bytes
    seconds = drive_seconds(drive_reads, {run.output_dir: float(exported_bytes)})
    yield OutsideTraffic("export", master_drive_bytes + exported_bytes, exported_bytes, seconds=seconds)


class _LinkTimes:
    """Transfer times of the links of one step.

    Attributes:
        drives: Profiles of the NVMe paths' drives that were measured.
        unmeasured_paths: NVMe paths whose drives were not measured.
    """

    def __init__(self, step: PlacedStep, shape: StepShape, machine: MachineProfile) -> None:
        self._step, self._shape, self._machine = step, shape, machine
        keys = step.run.tiers.machine.drive_keys(shape.paths)
        self._keys = dict(zip(map(str, shape.paths), keys, strict=True))
        self._drives = {path: machine.drives.get(key) for path, key in self._keys.items()}
        self.drives = [drive for drive in self._drives.values() if drive is not None]
        self.unmeasured_paths = [path for path, drive in self._drives.items() if drive is None]

    def constant_block_seconds(self) -> dict[str, float | None]:
        """Return the seconds per step to move the blocks whose sizes do not depend on the number of tokens."""
        return self.seconds(self._traffic.step_bytes(self._has_constant_size))

    def num_gpu_transfers(self, *, constant_only: bool = False) -> int:
        """Return how many blocks a step moves to and from a GPU, optionally counting only blocks of constant size."""
        return self._traffic.num_transfers("gpu", self._has_constant_size if constant_only else None)

    def seconds(self, traffic: Mapping[str, int]) -> dict[str, float | None]:
        """Return the busy seconds of each link that moves bytes, or None for a link that was not measured."""
        seconds: dict[str, float | None] = {}
        for name, budget in self._step.budgets_by_tier.items():
            if not budget.is_addressable:
                read_bytes = sum(nbytes for link, nbytes in traffic.items() if link.startswith(f"{name}->"))
                written_bytes = sum(nbytes for link, nbytes in traffic.items() if link.endswith(f"->{name}"))
                if read_bytes or written_bytes:
                    seconds[name] = self._storage_s(name, read_bytes, written_bytes)
        gpu = self._machine.gpu if self._step.device.type == "cuda" else None  # an emulated GPU has no bus
        for link, rate in (
            ("ram->gpu", gpu.h2d_bytes_per_s if gpu else None),
            ("gpu->ram", gpu.d2h_bytes_per_s if gpu else None),
            (f"gpu->{PEER}", gpu.peer_bytes_per_s if gpu else None),
            (f"{PEER}->gpu", gpu.peer_bytes_per_s if gpu else None),
            (f"gpu->{NETWORK}", gpu.network_bytes_per_s if gpu else None),
            (f"{NETWORK}->gpu", gpu.network_bytes_per_s if gpu else None),
        ):
            if traffic.get(link):
                seconds[link] = None if rate is None else traffic[link] / rate
        return seconds

    def _storage_s(self, tier: str, read_bytes: int, written_bytes: int) -> float | None:
        """Return the busy seconds of a storage tier's links, or None if they were not measured."""
        run, drives = self._step.run, self._machine.drives
        if tier == "nvme":
            num_ranks = run.world.local_size  # all ranks of a host share its drives
            reads, writes = split(num_ranks * read_bytes, self._shape), split(num_ranks * written_bytes, self._shape)
            return _slowest_drive_s(((key, reads[path], writes[path]) for path, key in self._keys.items()), drives)
        if tier != FOLDER:
            return None
        (key,) = run.tiers.machine.drive_keys([Path(run.model.folder)])
        return nvme_seconds(read_bytes, 0, drives[key]) if key in drives else None

    @cached_property
    def _traffic(self) -> Traffic:
        placement = self._step.placement
        return Traffic(self._step.program, placement.routes, placement.homes, placement.stays)

    def _has_constant_size(self, key: str) -> bool:
        """Return whether a block's size does not depend on the number of tokens."""
        return self._step.program.blocks[key].kind != "activations"

    @property
    def computing_s_per_nvme_byte(self) -> float:
        """Seconds by which each byte moved to or from a drive delays computing: mean over paths, weighted by bytes."""
        shares = zip(self._shape.weights, self._drives.values(), strict=True)
        delay = sum(weight * (drive.computing_s_per_byte or 0.0) for weight, drive in shares if drive is not None)
        return delay / sum(self._shape.weights) if delay else 0.0


class _StepTime:
    """Time of a step, given how long each resource is busy and which resources overlap.

    While a GPU computes, the host updates other layers and launches later kernels. A CPU does all of this sequentially.
    Links and drives overlap with all processors.

    Attributes:
        seconds: Busy seconds by resource, as in ``Estimate.seconds``.
        unmeasured: Used resources without a rate.
    """

    def __init__(self, costs: StepCosts, links: _LinkTimes) -> None:
        self._costs, self._links, self._tokens = costs, links, costs.num_tokens
        self._is_gpu = costs.step.device.type == "cuda"
        # Whether all micro-batches of a step pass through one layer before any of them reaches the next layer.
        self._runs_together = costs.step.run.batch.order == "layer"
        resource_s = {
            "compute": costs.computing_s,
            "host": costs.host.launching_s + costs.host.leasing_s + self._transfers_s(),
            "optimizer": costs.updates_s,
            "gpu optimizer": gpu_updates_s(costs.step, costs.machine),
            **links.seconds(costs.step.traffic),
        }
        self.seconds: Mapping[str, float] = {name: seconds for name, seconds in resource_s.items() if seconds}
        self.unmeasured = tuple(name for name, seconds in resource_s.items() if seconds is None)

    def bound(self) -> tuple[float, str]:
        """Return the seconds per step, and the resource that determines them."""
        processors = [name for name in _PROCESSORS if name in self.seconds and not (self._is_gpu and name == "host")]
        compute_s, hiding_s = self._busy_s("compute"), self._busy_s("compute") * self._hiding_share
        busy_s = compute_s - hiding_s + max(hiding_s, self._busy_s("optimizer")) + self._busy_s("gpu optimizer")
        busy_s += 0.0 if self._is_gpu else self._busy_s("host")
        overlapping_s = {name: seconds for name, seconds in self.seconds.items() if name not in processors}
        bottleneck = max(overlapping_s, key=overlapping_s.__getitem__, default="")
        if bottleneck and overlapping_s[bottleneck] > busy_s:
            return overlapping_s[bottleneck], bottleneck
        return busy_s, max(processors, key=self.seconds.__getitem__)

    def crossing_tokens(self) -> float | None:
        """Return T*, the number of tokens above which computing takes longer than links and a GPU's host, or None.

        Micro-batches keep their length, so activation bytes and kernel launches grow with the tokens. All other bytes
        and launches are constant.
        """
        host, gpu_optimizer_s, optimizer_s = self._costs.host, self._busy_s("gpu optimizer"), self._busy_s("optimizer")
        per_token, constant_seconds = self._busy_s("compute") / self._tokens, self._links.constant_block_seconds()
        if self._is_gpu:
            constant_seconds["host"] = host.leasing_s + self._transfers_s(constant_only=True)
        else:  # a CPU launches, computes and leases sequentially
            per_token, optimizer_s = per_token + host.launching_s / self._tokens, optimizer_s + host.leasing_s
        # If micro-batches run one at a time, only one of them hides updates, regardless of the number of tokens.
        hiding_s = self._hiding_share * self._busy_s("compute")
        hiding_per_token, hiding_s = (hiding_s / self._tokens, 0.0) if self._runs_together else (0.0, hiding_s)
        # (slope, offset) of the busy time by tokens: computing alone, or updates plus computing that hides no updates.
        lines = [(per_token, 0.0), (per_token - hiding_per_token, optimizer_s - hiding_s)]
        crossing = 0.0
        for name, constant_s in constant_seconds.items():
            moved_per_token = (self._busy_s(name) - (constant_s or 0.0)) / self._tokens
            starts = [
                max(0.0, (constant_s or 0.0) - offset - gpu_optimizer_s) / (slope - moved_per_token)
                for slope, offset in lines
                if slope > moved_per_token
            ]
            if not starts:
                return None
            crossing = max(crossing, min(starts))
        if self._hiding_share and per_token:
            crossing = max(crossing, (optimizer_s - hiding_s) / (hiding_per_token or per_token))
        return crossing

    def _busy_s(self, name: str) -> float:
        return self.seconds.get(name, 0.0)

    def _transfers_s(self, *, constant_only: bool = False) -> float:
        """Return the host's seconds to start and end GPU transfers, optionally only for blocks of constant size."""
        per_transfer_s = self._costs.host.per_transfer_s if self._is_gpu else 0.0
        return per_transfer_s and self._links.num_gpu_transfers(constant_only=constant_only) * per_transfer_s

    @cached_property
    def _hiding_share(self) -> float:
        """Share of the compute time that can hide host updates: one phase of the micro-batches that run together.

        Updates that wait for the global norm overlap with the forward of the next step. Other updates overlap with the
        backward. On a CPU, no updates overlap.
        """
        if not self._is_gpu:
            return 0.0
        step = self._costs.step
        phase: Phase = "forward" if step.program.updates.are_deferred else "backward"
        return self._costs.phase_share(phase) / (1 if self._runs_together else max(1, len(step.run.own_micro_batches)))


def _notes(
    loaded: LoadedProfile, costs: StepCosts, links: _LinkTimes, shape: StepShape, unmeasured: Sequence[str]
) -> tuple[str, ...]:
    machine = loaded.machine
    assert machine is not None
    advice = "" if costs.is_timed or loaded.origin else "; `plan --measure` times steps of this model"
    notes = [costs.note + advice]
    if "nvme" in unmeasured:
        paths = ", ".join(links.unmeasured_paths)
        notes.append(f"times           drive of {paths} not measured: {_ADVICE}")
        notes.extend(_striping_notes(shape))
    if FOLDER in unmeasured:
        notes.append(f"times           drive of the model's folder not measured: {_ADVICE}")
    is_timed = costs.is_timed or has_measured_kernel(
        costs.step.traced.optimizer, split_master=has_split_weights(costs.step.graph)
    )
    if not (unmeasured or is_timed):
        notes.append("updates         at AdamW's bytes per second, because this optimizer was not timed")
    other_names = [name for name in unmeasured if name not in ("nvme", FOLDER)]
    if other_names:
        notes.append(f"times           not measured: {', '.join(other_names)}. The step is not predicted")
    if loaded.origin:
        return (*notes, loaded.origin)
    dates = [machine.measured_at, *(drive.measured_at for drive in links.drives)]
    age = age_days(min(dates))
    quick_note = ", quick" if machine.is_quick or any(drive.is_quick for drive in links.drives) else ""
    line = f"rates           measured by doctor {_format_age(age)}{quick_note}"
    if age > STALE_DAYS:
        line += f". They are older than {STALE_DAYS} days: measure again"
    return (*notes, line, *loaded.ranks)


def _striping_notes(shape: StepShape) -> Sequence[str]:
    """Return the note that NVMe paths are assumed to be equally fast, if no rates are known or configured."""
    if len(shape.paths) < 2 or shape.has_rates:
        return ()
    return (
        f"striping        the {len(shape.paths)} NVMe paths are assumed to be equally fast: run doctor, or set rates",
    )


def _format_age(days: float) -> str:
    return "today" if days < 1 else f"{int(days)} day{'s' if int(days) > 1 else ''} ago"


@dataclass(frozen=True, slots=True)
class RunLength:
    """Length and traffic of a whole run. Evaluations are not counted. Only the last two fields count checkpoints.

    Attributes:
        num_steps: Number of steps, or None if only the data determines it.
        num_tokens: Number of tokens; 0 if only the data determines it.
        seconds: Duration of all steps in seconds, or None if a rate was not measured.
        moved_bytes: Bytes moved over each link, including the updates after the last step.
        written_bytes: Bytes written to all drives of ``[[tiers.nvme]]``.
        share_of_limit: Written bytes as a fraction of the drives' write limits, or None if a drive has no limit.
        saved_bytes: Bytes that checkpoints write to ``output_dir``.
    """

    num_steps: int | None
    num_tokens: int = 0
    seconds: float | None = None
    moved_bytes: Mapping[str, int] = field(default_factory=dict)
    written_bytes: int = 0
    share_of_limit: float | None = None
    num_saves: int = 0
    saved_bytes: int = 0


def run_length(plan: Plan, num_steps: int | None, step_s: float | None) -> RunLength:
    """Return the length and traffic of a whole run.

    Args:
        num_steps: Number of steps according to the data, or None to use the config's ``max_steps``.
        step_s: Seconds per step, or None if a rate was not measured.
    """
    if num_steps is None:
        num_steps = plan.run.max_steps
    if num_steps is None:
        return RunLength(None)
    moved_bytes = plan.placement.run_traffic_bytes(num_steps)
    written_bytes = nvme_written_bytes(moved_bytes)
    limits = [drive.max_written for drive in plan.run.tiers.table.nvme]
    table = plan.run.checkpoint.table
    num_saves = 0 if table.save_strategy == "no" else 1
    if table.save_strategy == "steps":
        num_saves = -(-num_steps // table.save_steps)
    return RunLength(
        num_steps=num_steps,
        num_tokens=num_steps * plan.run.batch.num_tokens,
        seconds=None if step_s is None else num_steps * step_s,
        moved_bytes=moved_bytes,
        written_bytes=written_bytes,
        share_of_limit=written_bytes / sum(limit for limit in limits if limit) if limits and all(limits) else None,
        num_saves=num_saves,
        saved_bytes=num_saves * plan.checkpoint.output_dir_bytes,
    )
