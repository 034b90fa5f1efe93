"""Estimates for a step and a run: busy seconds of processors, links and drives, and bytes written to drives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatrain.converters.adapters import adapters_of
from megatrain.engine.program import DURABLE_KINDS, Phase, Tick, layouts_of_unit
from megatrain.engine.work import NO_WORK, Work
from megatrain.machine.file_systems import file_system_of
from megatrain.machine.profiles import STALE_DAYS, DriveProfile, LoadedProfile, MachineProfile, age_days
from megatrain.models.export import export_dtype
from megatrain.models.folder import weight_file_bytes
from megatrain.optim.average import WeightAverage
from megatrain.optim.base import MatrixOptimizer, bytes_per_parameter
from megatrain.optim.elementwise import AdamW, ElementwiseOptimizer
from megatrain.optim.muon import Muon
from megatrain.plan.budgets import FOLDER
from megatrain.plan.costs import DeviceCosts
from megatrain.plan.kept import num_parameters_run_once
from megatrain.plan.plan import Estimate, Occasion, Plan, StepShape
from megatrain.plan.traffic import Traffic
from megatrain.ranks.shards import NETWORK, PEER
from megatrain.trace.counting import is_counted


def nvme_seconds(read_bytes: float, written_bytes: float, drive: DriveProfile) -> float:
    """Return how long one drive is busy with reads and writes.

    Simultaneous reads and writes share the mixed rate. The remaining reads or writes run at their own rate. If a drive
    slows down under long writes, its sustained rate is the limit.
    """
    both = min(read_bytes, written_bytes)
    seconds = 2 * both / drive.mixed_bytes_per_s
    seconds += (read_bytes - both) / drive.read_bytes_per_s + (written_bytes - both) / drive.write_bytes_per_s
    if drive.sustained_write_bytes_per_s is None:
        return seconds
    return max(seconds, written_bytes / drive.sustained_write_bytes_per_s)


def nvme_written_bytes(traffic: Mapping[str, int]) -> int:
    """Return the total bytes written to drives."""
    return sum(nbytes for link, nbytes in traffic.items() if link.endswith("->nvme"))


def _slowest_drive_s(moved: Iterable[tuple[str, float, float]], drives: Mapping[str, DriveProfile]) -> float | None:
    """Return the seconds of the busiest drive, or None if a drive was not measured.

    Args:
        moved: Tuples of drive key, bytes read and bytes written. Paths on the same file system have the same key.
        drives: Rates of drives, by key.
    """
    by_drive: dict[str, tuple[float, float]] = {}
    for key, read, written in moved:
        before = by_drive.get(key, (0.0, 0.0))
        by_drive[key] = before[0] + read, before[1] + written
    if any(key not in drives for key in by_drive):
        return None
    return max((nvme_seconds(r, w, drives[key]) for key, (r, w) in by_drive.items()), default=0.0)


def split(nbytes: int, shape: StepShape) -> dict[str, int]:
    """Split bytes over the NVMe paths by weight. Each share is exact to within one file of the striped blocks."""
    total = sum(shape.weights)
    return {str(path): round(nbytes * weight / total) for path, weight in zip(shape.paths, shape.weights, strict=True)}


#: FLOPs per parameter and token if the trace could not count them: forward 2, recompute 2, backward 4.
FLOPS_PER_PARAM_TOKEN = 8
_FORWARD_FLOPS, _RECOMPUTE_FLOPS, _BACKWARD_FLOPS, _HEAD_FLOPS = 2, 2, 4, 6

_ADVICE = "run `megatrain-tier doctor --config CONFIG` for times"
_COUNTED = "computing       products, attention and other operators at their rates"
_UNCOUNTED = (
    "computing       at least 8 FLOPs per parameter and token in large products, because layers could not be traced"
)
_PROCESSORS = ("compute", "host", "optimizer", "gpu optimizer")
_ADAMW_BYTES = 12  # bytes of master, m and v in the kernels that doctor times
_ADAMW_TOUCHED = 28  # these kernels read the 12 bytes and an fp32 gradient, and write back the 12 bytes
_SUM_NBYTES = 8  # per gradient element and micro-batch: a matmul reads and writes the fp32 sum


def estimate_step(plan: Plan, shape: StepShape, loaded: LoadedProfile) -> Estimate:
    """Return the estimate for a step of a plan on this machine.

    If the plan has timed steps, they provide the compute time. Otherwise it is the step's work at the machine's rates
    (``DeviceCosts``).
    """
    written = split(nvme_written_bytes(plan.traffic), shape)
    run = None
    if shape.num_steps is not None:
        run = split(nvme_written_bytes(plan.placement.run_traffic_bytes(shape.num_steps)), shape)
    is_timed = plan.ticks is not None
    wear = Estimate(
        shape.tokens_per_step,
        {},
        written_bytes=written,
        run_written_bytes=run,
        is_timed=is_timed,
        occasions=tuple(_occasions(plan, shape, loaded.machine if plan.run.tiers.machine.is_here else None)),
    )
    if loaded.machine is None:
        notes = [f"times           not measured: {_ADVICE}", *_striping(shape), *loaded.ranks]
        return replace(wear, notes=(*notes, *([f"profile         {loaded.note}"] if loaded.note else [])))
    costs = _Costs(plan, shape, loaded.machine)
    seconds, unmeasured = costs.seconds()
    result = replace(
        wear,
        seconds=seconds,
        unmeasured=unmeasured,
        computing_s_per_nvme_byte=costs.computing_s_per_nvme_byte,
        seconds_per_nvme_copy=max((drive.seconds_per_copy or 0.0 for drive in costs.drives), default=0.0),
        notes=_notes(loaded, costs, unmeasured),
    )
    if unmeasured:
        return result
    step_s, bound_by = costs.step(seconds)
    return replace(result, step_s=step_s, bound_by=bound_by, crossing_tokens=costs.crossing_tokens(seconds))


def _occasions(plan: Plan, shape: StepShape, machine: MachineProfile | None) -> Iterator[Occasion]:
    """Yield the drive traffic of a run at its start, at its first checkpoint and at its end."""
    run, homes = plan.run, plan.placement.homes
    durable = [block for block in plan.program.blocks.values() if block.kind in DURABLE_KINDS]
    on_drives = sum(block.nbytes for block in durable if homes[block.key] == "nvme")
    masters = [block for block in durable if block.kind == "weights" or block.key.endswith("/low")]
    masters_on_drives = sum(block.nbytes for block in masters if homes[block.key] == "nvme")
    weights = [block for block in durable if block.kind == "weights"]
    in_place = sum(block.nbytes for block in weights if plan.budgets_by_tier[homes[block.key]].is_read_only)
    loaded = 1 - in_place / max(1, sum(block.nbytes for block in weights))  # weights in place are read at each use
    folder_bytes = 0 if run.model.table.train_from_scratch else int(loaded * weight_file_bytes(run.model.folder))
    layouts = plan.graph.layouts.values()
    is_adapter = adapters_of(plan.graph) is not None and not run.export.merge
    num_exported = sum(layout.num_parameters for layout in layouts if layout.trainable or not is_adapter)
    exported = num_exported * export_dtype(run.export, run.dtype).itemsize

    def seconds(read: Mapping[Path, float], written: Mapping[Path, float]) -> float | None:
        if machine is None:
            return None
        moved = ((path, read.get(path, 0.0), written.get(path, 0.0)) for path in {*read, *written})
        keyed = ((file_system_of(path).key, r, w) for path, r, w in moved if r or w)
        return _slowest_drive_s(keyed, machine.drives)

    drives = dict(zip(shape.paths, shape.weights, strict=True))
    share = {path: weight / sum(drives.values()) for path, weight in drives.items()}
    to_drives = {path: on_drives * part for path, part in share.items()}
    from_drives = {path: masters_on_drives * part for path, part in share.items()}
    folder = {Path(run.model.folder): float(folder_bytes)}
    yield Occasion("start", folder_bytes, on_drives, seconds=seconds(folder, to_drives))
    if run.checkpoint.table.is_on:
        written = plan.checkpoint_bytes_in_output_dir
        cost = seconds({}, {run.output_dir: float(written)})
        yield Occasion("checkpoint", sum(plan.checkpoint_traffic.values()), written, on_drives, cost)
    from_drives[run.output_dir] = from_drives.get(run.output_dir, 0.0) + exported
    cost = seconds(from_drives, {run.output_dir: float(exported)})
    yield Occasion("export", masters_on_drives + exported, exported, seconds=cost)


def flops_per_token(plan: Plan) -> float:
    """Return the FLOPs of a step per token, including recomputed layers.

    The count excludes work that causal attention kernels skip, and experts that a token does not use. Without counts in
    the trace, the result is ``8 N`` for N parameters, minus ``2 N`` for the parameters of layers that are not
    recomputed.
    """
    if is_counted(plan.trace):
        return sum(work.computed_flops for work in _visits_work(plan).values()) / plan.trace.num_tokens
    once = num_parameters_run_once(plan.graph, plan.trace, plan.program)
    return FLOPS_PER_PARAM_TOKEN * plan.graph.num_parameters - _FORWARD_FLOPS * once


def tick_flops(plan: Plan) -> list[float]:
    """Return the FLOPs per token of each tick of the program, 0 for updates. Their sum is ``flops_per_token``."""
    ticks, blocks = plan.program.ticks, plan.program.blocks
    counted = _visits_work(plan) if is_counted(plan.trace) else None
    same = Counter((tick.phase, tick.visit) for tick in ticks)
    found: list[float] = []
    for tick in ticks:
        flops: float = 0.0
        if tick.phase in ("forward", "head", "backward") and counted is not None:
            flops = counted[tick.phase, tick.visit].computed_flops
        elif tick.phase in ("forward", "head", "backward"):
            again = 0 if tick.visit in plan.program.recompute.kept_graphs else _RECOMPUTE_FLOPS
            factor = {"forward": _FORWARD_FLOPS, "head": _HEAD_FLOPS, "backward": again + _BACKWARD_FLOPS}[tick.phase]
            flops = factor * sum(blocks[key].num_values for key, _ in tick.uses if blocks[key].kind == "weights")
        # If micro-batches run one at a time, each micro-batch has separate ticks.
        found.append(flops / same[tick.phase, tick.visit])
    total = sum(found)
    return [flops * flops_per_token(plan) / total if total else 0.0 for flops in found]


def work_of_phases(plan: Plan) -> dict[Phase, Work]:
    """Return the work of the traced micro-batch by phase."""
    found: dict[Phase, Work] = {}
    for (phase, _), work in _visits_work(plan).items():
        found[phase] = found.get(phase, NO_WORK) + work
    return found


def _visits_work(plan: Plan) -> dict[tuple[Phase, int], Work]:
    """Return the traced micro-batch's work by phase and visit. The first head visit has the work of the whole head."""
    trace, program = plan.trace, plan.program
    found: dict[tuple[Phase, int], Work] = {}
    for number, visit in enumerate(trace.visits):
        if visit.is_head:
            continue
        backward = visit.backward
        saved = program.recompute.savable(number, visit)
        if number in program.recompute.kept_graphs:
            backward -= visit.recompute
        found["forward", number], found["backward", number] = visit.forward + saved.copying, backward - saved.work
    again = trace.logits_flops * max(0, trace.head_parts - program.recompute.kept_parts) // trace.head_parts
    first_head = next((number for number, visit in enumerate(trace.visits) if visit.is_head), len(trace.visits))
    found["head", first_head] = trace.head + Work(product_flops=again)
    return found


def _sums_of_phases(plan: Plan) -> dict[Phase, Work]:
    """Return the memory traffic for adding a micro-batch's gradients to their sums on a GPU, by phase.

    On a CPU, the measured matmul rate already includes this traffic.
    """
    found: dict[Phase, Work] = {}
    for visit in plan.trace.visits if plan.device.type == "cuda" else ():
        layouts = [plan.graph.layouts[name] for name in layouts_of_unit(plan.graph, visit.unit)]
        num_trained = sum(layout.num_parameters for layout in layouts if layout.trainable)
        if visit.is_head or visit.backward.product_flops:
            phase: Phase = "head" if visit.is_head else "backward"
            found[phase] = found.get(phase, NO_WORK) + Work(moved_nbytes=_SUM_NBYTES * num_trained)
    return found


def matrix_flops(plan: Plan) -> dict[int, int]:
    """Return the FLOPs of this rank's orthogonalization in a step, by layout index."""
    optimizer, layouts = plan.optimizer, list(plan.graph.layouts.values())
    if not isinstance(optimizer, MatrixOptimizer):
        return {}
    found: dict[int, int] = {}
    for index in {tick.visit for tick in plan.updates}:
        entries = [entry for entry in layouts[index].entries if optimizer.is_matrix_of(entry)]
        shapes = [(e.shape[-2], e.shape[-1], math.prod(e.shape[:-2]), e.name) for e in entries]
        found[index] = sum(optimizer.orthogonalize_flops(r, c, name) * count for r, c, count, name in shapes)
    return found


def _touched_bytes(plan: Plan, updates: Iterable[Tick]) -> int:
    """Return the bytes that updates read and write."""
    blocks = plan.program.blocks
    return sum(blocks[key].nbytes * (2 if mode == "rw" else 1) for tick in updates for key, mode in tick.uses)


class _Costs:
    """Busy seconds of each resource in a step of one plan."""

    def __init__(self, plan: Plan, shape: StepShape, machine: MachineProfile) -> None:
        self._plan, self.shape, self._machine = plan, shape, machine
        self._on_gpu = plan.device.type == "cuda"
        keys = plan.run.tiers.machine.drive_keys(shape.paths)
        self._keys = dict(zip(map(str, shape.paths), keys, strict=True))
        self._drives = {path: machine.drives.get(key) for path, key in self._keys.items()}
        dtype = str(plan.graph.dtype).removeprefix("torch.")
        self._costs = DeviceCosts.of(machine, plan.device.type, dtype)
        self._phases: dict[Phase, Work] | None = None
        if is_counted(plan.trace):
            sums = _sums_of_phases(plan)
            self._phases = {phase: work + sums.get(phase, NO_WORK) for phase, work in work_of_phases(plan).items()}

    def seconds(self) -> tuple[dict[str, float], tuple[str, ...]]:
        """Return the busy seconds of a step by resource, and the used resources that were not measured."""
        found = {
            "compute": self.computing_s(),
            "host": self._launching_s + self._leasing_s + self._transfers_s(),
            "optimizer": self._optimizer_s(),
            "gpu optimizer": self._gpu_optimizer_s(),
            **self._links_s(self._plan.traffic),
        }
        measured = {name: seconds for name, seconds in found.items() if seconds}
        return measured, tuple(name for name, seconds in found.items() if seconds is None)

    def step(self, seconds: Mapping[str, float]) -> tuple[float, str]:
        """Return the seconds of a step and the resource that limits it."""
        compute, optimizer = seconds.get("compute", 0.0), seconds.get("optimizer", 0.0)
        busy = self._busy_s(compute, optimizer) + seconds.get("gpu optimizer", 0.0)
        overlapping = {name: value for name, value in seconds.items() if name not in _PROCESSORS}
        if self._on_gpu:
            overlapping["host"] = seconds.get("host", 0.0)
        else:
            busy += seconds.get("host", 0.0)
        slowest = max(overlapping, key=overlapping.__getitem__, default="")
        if slowest and overlapping[slowest] > busy:
            return overlapping[slowest], slowest
        sequential = [name for name in _PROCESSORS if name in seconds and name not in overlapping]
        return busy, max(sequential, key=seconds.__getitem__)

    def crossing_tokens(self, seconds: Mapping[str, float]) -> float | None:
        """Return T*: the number of tokens above which computing takes longer than the slowest link and a GPU's host.

        Micro-batches keep their length, so activation bytes and kernel launches grow with the tokens. All other bytes
        and launches are constant.
        """
        tokens, optimizer = self.shape.tokens_per_step, seconds.get("optimizer", 0.0)
        on_gpu = seconds.get("gpu optimizer", 0.0)
        per_token = seconds.get("compute", 0.0) / tokens
        fixed = self._links_s(self._traffic.of_step(self._has_constant_size))
        if self._on_gpu:
            fixed["host"] = self._leasing_s + self._transfers_s(self._has_constant_size)
        else:  # a CPU launches, computes and leases sequentially
            per_token, optimizer = per_token + self._launching_s / tokens, optimizer + self._leasing_s
        # If micro-batches run one at a time, only one of them hides updates, regardless of the number of tokens.
        hiding_s = self._hiding_share * seconds.get("compute", 0.0)
        hiding_per_token, hiding_s = (hiding_s / tokens, 0.0) if self._runs_together else (0.0, hiding_s)
        crossing = 0.0
        for link, fixed_s in fixed.items():
            moved_per_token = (seconds.get(link, 0.0) - (fixed_s or 0.0)) / tokens
            # Computing takes longer than the link as soon as either term of ``_busy_s`` does.
            terms = [(per_token, optimizer)]
            if self._on_gpu:
                terms = [(per_token, 0.0), (per_token - hiding_per_token, optimizer - hiding_s)]
            starts = [
                max(0.0, (fixed_s or 0.0) - offset - on_gpu) / (slope - moved_per_token)
                for slope, offset in terms
                if slope > moved_per_token
            ]
            if not starts:
                return None
            crossing = max(crossing, min(starts))
        if self._on_gpu and per_token:  # on a CPU, updates never overlap computing
            crossing = max(crossing, (optimizer - hiding_s) / (hiding_per_token or per_token))
        return crossing

    def _busy_s(self, compute: float, optimizer: float) -> float:
        """Return the processors' busy seconds. CPU times add up, but a GPU computes layers during host updates."""
        if not self._on_gpu:
            return compute + optimizer
        hiding = compute * self._hiding_share
        return compute - hiding + max(hiding, optimizer)

    @property
    def _runs_together(self) -> bool:
        """Whether all micro-batches of a step pass through a layer before the next layer."""
        return self._plan.run.batch.order == "layer"

    @cached_property
    def _hiding_share(self) -> float:
        """The share of compute time that overlaps with host updates: one phase of the micro-batches that run together.

        Updates that wait for the global norm overlap with the forward of the next step. Other updates overlap with the
        backward.
        """
        phase: Phase = "forward" if self._plan.program.updates.are_deferred else "backward"
        num_apart = 1 if self._runs_together else max(1, len(self._plan.run.own_micro_batches))
        if self._phases is None or self._costs is None:
            ticks = zip(self._plan.program.ticks, tick_flops(self._plan), strict=True)
            share = sum(flops for tick, flops in ticks if tick.phase == phase) / flops_per_token(self._plan)
        else:
            share = self._costs.computing_s(self._phases[phase]) / self._costs.computing_s(self._work)
        return share / num_apart

    def _timed_s(self, *, updates: bool) -> float:
        """Return the measured seconds of a step's updates if ``updates`` is True, else of the rest of the step."""
        plan = self._plan
        assert plan.ticks is not None
        timed = zip(plan.program.ticks, plan.ticks.seconds, strict=True)
        seconds = sum(seconds for tick, seconds in timed if (tick.phase == "update") == updates)
        return seconds if updates else seconds + plan.ticks.between_s

    def computing_s(self) -> float | None:
        """Return the compute seconds. If only FLOPs are known, the matmul rate is assumed."""
        if self._plan.ticks is not None:
            return self._timed_s(updates=False)
        if self._costs is None:
            return None
        if self._phases is None:
            return flops_per_token(self._plan) * self.shape.tokens_per_step / self._costs.product_flops_per_s
        return self._costs.computing_s(self._work) * self._num_micro_batches

    @cached_property
    def _work(self) -> Work:
        """The work of a micro-batch."""
        return sum((self._phases or {}).values(), NO_WORK)

    @property
    def _num_micro_batches(self) -> float:
        return self.shape.tokens_per_step / self._plan.trace.num_tokens

    @property
    def _host_costs(self) -> DeviceCosts | None:
        """Costs that determine the host's seconds. None if steps were timed or a rate is unknown."""
        return None if self._plan.ticks is not None or self._phases is None else self._costs

    @property
    def _launching_s(self) -> float:
        """Host seconds to launch all micro-batches' kernels."""
        costs = self._host_costs
        return 0.0 if costs is None else self._work.launches * self._num_micro_batches * costs.seconds_per_launch

    @property
    def _leasing_s(self) -> float:
        """Host seconds for a step's leases."""
        costs = self._host_costs
        num_leases = sum(len(tick.uses) for tick in self._plan.program.ticks)
        return 0.0 if costs is None else num_leases * costs.seconds_per_lease

    def _transfers_s(self, counts: Callable[[str], bool] | None = None) -> float:
        """Return the host seconds to start and end GPU transfers.

        Args:
            counts: Filter of blocks by key. All blocks count by default.
        """
        costs = self._host_costs if self._on_gpu else None
        return 0.0 if costs is None else self._traffic.num_transfers("gpu", counts) * costs.seconds_per_transfer

    def _optimizer_s(self) -> float | None:
        """Return the seconds of the update kernels, or None if doctor does not measure this optimizer or format."""
        if self._plan.ticks is not None:
            return self._timed_s(updates=True)
        plan, is_split = self._plan, self._plan.graph.dtype.itemsize == 2
        num_updated = plan.num_updated(on_gpu=False) * plan.run.world.local_size  # of all ranks of this host
        rate = self._machine.adamw_params_per_s.get("bfloat16" if is_split else "float32")
        if not num_updated:
            return 0.0
        if rate is None or not self._is_bound_by_ram:
            return None
        if self.is_timed_optimizer:
            return num_updated / rate
        there = plan.device_updates if self._on_gpu else ()
        touched = _touched_bytes(plan, (tick for tick in plan.updates if tick not in there))
        products = 0.0 if self._on_gpu else self._products_s()
        return None if products is None else plan.run.world.local_size * touched / (rate * _ADAMW_TOUCHED) + products

    @property
    def is_timed_optimizer(self) -> bool:
        """Whether doctor measures the kernel of this optimizer."""
        kinds = self._plan.optimizer.state_kinds(self._plan.graph.dtype.itemsize == 2)
        return type(self._plan.optimizer) is AdamW and bytes_per_parameter(kinds) == _ADAMW_BYTES

    @property
    def _is_bound_by_ram(self) -> bool:
        """Whether memory bandwidth limits updates. False for bf16 or int8 moments and for custom optimizers.

        On two cores, Lion, SGD and averages reach AdamW's bytes per second within 12 %. Updates take longer than their
        bytes predict for bf16 moments (1.4 to 2.5 times) and for int8 moments in blocks of 256 (nine times).
        """
        optimizer = self._plan.optimizer
        inner = optimizer.inner if isinstance(optimizer, WeightAverage) else optimizer
        is_fp32 = isinstance(inner, ElementwiseOptimizer) and inner.state_dtype == "float32"
        return is_fp32 or isinstance(inner, Muon)

    def _products_s(self) -> float | None:
        """Return the seconds of the orthogonalization, or None if its matmul rate is unknown."""
        flops = sum(matrix_flops(self._plan).values())
        rate = self._machine.matmul_flops_per_s.get(f"{self._plan.device.type}/bfloat16")
        return 0.0 if not flops else None if rate is None else flops / rate

    def _gpu_optimizer_s(self) -> float | None:
        """Return the GPU's seconds for updates in GPU memory, from their bytes and the GPU's rate.

        The result includes the GPU's orthogonalization for updates that otherwise run on the host.
        """
        plan, gpu = self._plan, self._machine.gpu
        products = self._products_s() if self._on_gpu else 0.0
        if not plan.num_updated(on_gpu=True):
            return products
        rate = gpu.update_bytes_per_s if gpu else None
        if rate is None or products is None:
            return None
        return _touched_bytes(plan, plan.device_updates) / rate + products

    def _links_s(self, traffic: Mapping[str, int]) -> dict[str, float | None]:
        """Return the seconds of each link that moves bytes, or None for a link that was not measured."""
        seconds: dict[str, float | None] = {}
        for name, budget in self._plan.budgets_by_tier.items():
            if not budget.is_addressable:
                read = sum(nbytes for link, nbytes in traffic.items() if link.startswith(f"{name}->"))
                written = sum(nbytes for link, nbytes in traffic.items() if link.endswith(f"->{name}"))
                if read or written:
                    seconds[name] = self._storage_s(name, read, written)
        gpu = self._machine.gpu if self._on_gpu else None  # an emulated GPU has no bus
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

    def _storage_s(self, tier: str, read: int, written: int) -> float | None:
        """Return the seconds of the links of a storage tier, or None if they were not measured."""
        if tier == "nvme":
            num_ranks = self._plan.run.world.local_size  # all ranks of a host share its drives
            return self._nvme_s(num_ranks * read, num_ranks * written)
        if tier != FOLDER:
            return None
        run = self._plan.run
        (key,) = run.tiers.machine.drive_keys([Path(run.model.folder)])
        drive = self._machine.drives.get(key)
        return None if drive is None else nvme_seconds(read, 0, drive)

    def _nvme_s(self, read: int, written: int) -> float | None:
        """Return the seconds of the busiest drive."""
        reads, writes = split(read, self.shape), split(written, self.shape)
        return _slowest_drive_s(
            ((key, reads[path], writes[path]) for path, key in self._keys.items()), self._machine.drives
        )

    @cached_property
    def _traffic(self) -> Traffic:
        placement = self._plan.placement
        return Traffic(self._plan.program, placement.routes, placement.homes, placement.stays)

    def _has_constant_size(self, key: str) -> bool:
        """Return whether a block's size does not depend on the number of tokens."""
        return self._plan.program.blocks[key].kind != "activations"

    @property
    def computing_note(self) -> str:
        """Text with the source of the compute time and the assumed rates."""
        if self._plan.ticks is not None:
            return self._plan.ticks.note
        if self._phases is None or self._costs is None:
            return _UNCOUNTED
        return "; ".join((_COUNTED, *(f"assumed: {', '.join(found)}" for found in [self._costs.assumed] if found)))

    @property
    def is_timed(self) -> bool:
        """Whether steps of the model were timed."""
        return self._plan.ticks is not None

    @property
    def computing_s_per_nvme_byte(self) -> float:
        """Compute slowdown per moved byte, as the mean over the paths weighted by their shares of the bytes."""
        shares = zip(self.shape.weights, self._drives.values(), strict=True)
        lost = sum(weight * (drive.computing_s_per_byte or 0.0) for weight, drive in shares if drive is not None)
        return lost / sum(self.shape.weights) if lost else 0.0

    @property
    def drives(self) -> Sequence[DriveProfile]:
        """Profiles of the paths' drives, as far as they were measured."""
        return [drive for drive in self._drives.values() if drive is not None]

    @property
    def unmeasured_paths(self) -> Sequence[str]:
        """Paths whose drives were not measured."""
        return [path for path, drive in self._drives.items() if drive is None]


def _notes(loaded: LoadedProfile, costs: _Costs, unmeasured: Sequence[str]) -> tuple[str, ...]:
    machine = loaded.machine
    assert machine is not None
    advice = "" if costs.is_timed or loaded.origin else "; `plan --measure` times steps of this model"
    notes = [costs.computing_note + advice]
    if "nvme" in unmeasured:
        paths = ", ".join(costs.unmeasured_paths)
        notes.append(f"times           drive of {paths} not measured: {_ADVICE}")
        notes.extend(_striping(costs.shape))
    if FOLDER in unmeasured:
        notes.append(f"times           drive of the model's folder not measured: {_ADVICE}")
    if not (unmeasured or costs.is_timed_optimizer or costs.is_timed):
        notes.append("updates         at AdamW's bytes per second, because this optimizer was not timed")
    others = [name for name in unmeasured if name not in ("nvme", FOLDER)]
    if others:
        notes.append(f"times           not measured: {', '.join(others)}. The step is not predicted")
    if loaded.origin:
        return (*notes, loaded.origin)
    measured = [machine.measured_at, *(drive.measured_at for drive in costs.drives)]
    age = age_days(min(measured))
    quick = ", quick" if machine.is_quick or any(drive.is_quick for drive in costs.drives) else ""
    line = f"rates           measured by doctor {_days_ago(age)}{quick}"
    if age > STALE_DAYS:
        line += f". They are older than {STALE_DAYS} days: measure again"
    return (*notes, line, *loaded.ranks)


def _striping(shape: StepShape) -> Sequence[str]:
    """Return a note that the NVMe paths are assumed to be equally fast, if no rates are known or configured."""
    if len(shape.paths) < 2 or shape.has_rates:
        return ()
    return (
        f"striping        the {len(shape.paths)} NVMe paths are assumed to be equally fast: run doctor, or set rates",
    )


def _days_ago(days: float) -> str:
    return "today" if days < 1 else f"{int(days)} day{'s' if int(days) > 1 else ''} ago"


@dataclass(frozen=True, slots=True)
class RunLength:
    """Length and traffic of a whole run. Evaluations are not counted. Only ``saved_bytes`` counts saves.

    Attributes:
        num_steps: Number of steps, or None if only the data determines it.
        num_tokens: Number of tokens; 0 if only the data determines it.
        seconds: Seconds of all steps, or None if a rate was not measured.
        moved_bytes: Bytes by link, including the updates after the last step.
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

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def run_length(plan: Plan, num_steps: int | None, step_s: float | None) -> RunLength:
    """Return the length and traffic of a whole run.

    Args:
        num_steps: Number of steps according to the data, or None to use the config's ``max_steps``.
        step_s: Seconds of a step, or None if a rate was not measured.
    """
    if num_steps is None:
        num_steps = plan.run.max_steps
    if num_steps is None:
        return RunLength(None)
    moved = plan.placement.run_traffic_bytes(num_steps)
    written = nvme_written_bytes(moved)
    limits = [drive.max_written for drive in plan.run.tiers.table.nvme]
    table = plan.run.checkpoint.table
    saves = 0 if table.save_strategy == "no" else 1
    if table.save_strategy == "steps":
        saves = -(-num_steps // table.save_steps)
    return RunLength(
        num_steps=num_steps,
        num_tokens=num_steps * plan.run.batch.num_tokens,
        seconds=None if step_s is None else num_steps * step_s,
        moved_bytes=moved,
        written_bytes=written,
        share_of_limit=written / sum(limit for limit in limits if limit) if limits and all(limits) else None,
        num_saves=saves,
        saved_bytes=saves * plan.checkpoint_bytes_in_output_dir,
    )
