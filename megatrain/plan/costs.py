"""Busy seconds of the processors in a step: timed, derived from the trace, or assumed from the parameter count.

Rates are measured by doctor or marked as assumed. While a GPU computes, the host launches later kernels, so the slower
of the two determines the time of a step. Without a GPU, the two times add up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatrain.engine.device.work import NO_WORK, Work
from megatrain.engine.program.step_program import Phase, Tick
from megatrain.machine.profiles import MachineProfile
from megatrain.optim.factory import has_measured_kernel, is_memory_bound
from megatrain.plan.flops import flops_per_token, gradient_sum_work, matrix_flops, tick_flops, work_of_phases
from megatrain.plan.plan import PlacedStep
from megatrain.plan.times import MeasuredTicks
from megatrain.trace.counting import is_counted

#: Attention rate as a fraction of the matmul rate, assumed if not measured. On an H100, flash attention reaches 0.55 in
#: the forward and 0.4 in a deterministic backward. CPU kernels reach 0.4 to 0.7.
_ATTENTION_SHARE = 0.5
#: Kernel launches per second of one thread, assumed if not measured. The value comes from a 2-core server CPU.
_LAUNCHES_PER_S = 25_000.0
#: Costs relative to a CPU launch: a GPU launch (streams, allocator, torch's CUDA dispatch), a lease with its share of
#: update launches, and a transfer. Measured in steps without kernels (docs/null_gpu.md).
_LAUNCH_FOR_GPU, _LAUNCHES_PER_LEASE, _LAUNCHES_PER_TRANSFER = 1.05, 1.4, 8.0
_ADAMW_TOUCHED = 28  # doctor's kernels read master, m, v and an fp32 gradient, and write back the first three
_COUNTED = "computing       products, attention and other operators at their rates"
_UNCOUNTED = (
    "computing       at least 8 FLOPs per parameter and token in large products, because layers could not be traced"
)


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Compute rates of one device, and the host's cost per operation on it.

    Attributes:
        product_flops_per_s: Rate of large matmuls.
        attention_flops_per_s: Rate of fused attention. Masked pairs of tokens that the kernel skips do not count.
        moved_bytes_per_s: Memory rate of all other operators: bytes read and written per second.
        seconds_per_launch: Host time of a launch, including the surrounding Python code.
        seconds_per_lease: Host time of a lease, including its share of the update launches.
        seconds_per_transfer: Host time to start and end a transfer over the bus, without the lease.
        assumed: Descriptions of the rates that were not measured.
    """

    product_flops_per_s: float
    attention_flops_per_s: float
    moved_bytes_per_s: float
    seconds_per_launch: float
    seconds_per_lease: float
    seconds_per_transfer: float
    assumed: tuple[str, ...]

    @classmethod
    def of(cls, machine: MachineProfile, device: str, dtype: str) -> DeviceCosts | None:
        """Return the costs on a machine, or None if its matmul rate is unknown.

        Args:
            device: ``cpu`` or ``cuda``.
            dtype: Compute dtype of the layers, such as ``bfloat16``.
        """
        key = f"{device}/{dtype}"
        matmul_rate = machine.matmul_flops_per_s.get(key)
        if matmul_rate is None:
            return None
        update_rate = machine.ram_update_bytes_per_s
        if device == "cuda":
            update_rate = (machine.gpu and machine.gpu.update_bytes_per_s) or update_rate
        launch_s = (_LAUNCH_FOR_GPU if device == "cuda" else 1.0) / (machine.launches_per_s or _LAUNCHES_PER_S)
        return cls(
            product_flops_per_s=matmul_rate,
            attention_flops_per_s=machine.attention_flops_per_s.get(key, _ATTENTION_SHARE * matmul_rate),
            moved_bytes_per_s=machine.elementwise_bytes_per_s.get(key, update_rate),
            seconds_per_launch=launch_s,
            seconds_per_lease=_LAUNCHES_PER_LEASE * launch_s,
            seconds_per_transfer=_LAUNCHES_PER_TRANSFER * launch_s,
            assumed=tuple(_describe_assumed_rates(machine, device, key)),
        )

    def computing_s(self, work: Work) -> float:
        """Return the seconds that the device needs for ``work``."""
        return (
            work.product_flops / self.product_flops_per_s
            + (work.attention_flops - work.skipped_flops) / self.attention_flops_per_s
            + work.moved_nbytes / self.moved_bytes_per_s
        )


def _describe_assumed_rates(machine: MachineProfile, device: str, key: str) -> Iterator[str]:
    """Yield a description of each rate that is assumed because the machine's profile does not contain it."""
    if key not in machine.attention_flops_per_s:
        yield f"attention at {_ATTENTION_SHARE:.0%} of the rate of products"
    if key not in machine.elementwise_bytes_per_s:
        yield "element-wise operators at the rate of updates in memory"
    if machine.launches_per_s is None:
        factor = _LAUNCH_FOR_GPU if device == "cuda" else 1.0
        yield f"{1e6 * factor / _LAUNCHES_PER_S:.0f} us of the host for each launch"
    elif device == "cuda":
        yield f"launches at {_LAUNCH_FOR_GPU:g} times what they cost on the CPU"


class HostSeconds(NamedTuple):
    """Seconds in the host's Python code: per step (launches, leases) and per transfer. 0 if unknown or timed."""

    launching_s: float = 0.0
    leasing_s: float = 0.0
    per_transfer_s: float = 0.0


@dataclass(frozen=True)
class StepCosts(ABC):
    """Busy seconds of the processors in a step of ``num_tokens`` tokens."""

    step: PlacedStep
    num_tokens: int
    machine: MachineProfile

    is_timed = False

    @property
    @abstractmethod
    def note(self) -> str:
        """Line that states where the compute seconds come from."""

    @property
    @abstractmethod
    def computing_s(self) -> float | None:
        """Compute seconds, or None if a rate is unknown."""

    @property
    def updates_s(self) -> float | None:
        """Seconds of updates on the host, or None if a rate is unknown."""
        return _host_updates_s(self.step, self.machine)

    @property
    def host(self) -> HostSeconds:
        """Seconds that a step spends in the host's Python code."""
        return HostSeconds()

    def phase_share(self, phase: Phase) -> float:
        """Return a phase's share of the compute seconds."""
        ticks = zip(self.step.program.ticks, tick_flops(self.step), strict=True)
        return sum(flops for tick, flops in ticks if tick.phase == phase) / flops_per_token(self.step)


@dataclass(frozen=True)
class TimedCosts(StepCosts):
    """Costs taken from timed steps on a CPU. Their seconds include the host's Python code."""

    ticks: MeasuredTicks

    is_timed = True

    @property
    def note(self) -> str:
        return self.ticks.note

    @property
    def computing_s(self) -> float:
        return self._seconds(updates=False) + self.ticks.between_s

    @property
    def updates_s(self) -> float:
        return self._seconds(updates=True)

    def _seconds(self, *, updates: bool) -> float:
        """Return the seconds of updates if ``updates`` is True, else of all other ticks."""
        tick_seconds = zip(self.step.program.ticks, self.ticks.seconds, strict=True)
        return sum(seconds for tick, seconds in tick_seconds if (tick.phase == "update") == updates)


@dataclass(frozen=True)
class CountedCosts(StepCosts):
    """Costs of the work that the trace counted, at the device's rates."""

    device: DeviceCosts

    @property
    def note(self) -> str:
        return _COUNTED + (f"; assumed: {', '.join(self.device.assumed)}" if self.device.assumed else "")

    @property
    def computing_s(self) -> float:
        return self.device.computing_s(self._work) * (self.num_tokens / self.step.trace.num_tokens)

    @property
    def host(self) -> HostSeconds:
        device, num_micro_batches = self.device, self.num_tokens / self.step.trace.num_tokens
        return HostSeconds(
            self._work.launches * num_micro_batches * device.seconds_per_launch,
            sum(len(tick.uses) for tick in self.step.program.ticks) * device.seconds_per_lease,
            device.seconds_per_transfer,
        )

    def phase_share(self, phase: Phase) -> float:
        return self.device.computing_s(self._phases[phase]) / self.device.computing_s(self._work)

    @cached_property
    def _phases(self) -> dict[Phase, Work]:
        """Work to compute one micro-batch, by phase."""
        sum_work = gradient_sum_work(self.step)
        return {phase: work + sum_work.get(phase, NO_WORK) for phase, work in work_of_phases(self.step).items()}

    @cached_property
    def _work(self) -> Work:
        """Work to compute one micro-batch, summed over all phases."""
        return sum(self._phases.values(), NO_WORK)


@dataclass(frozen=True)
class AssumedCosts(StepCosts):
    """Costs assumed from the number of parameters, at the rate of large matrix products. The rate may be unknown."""

    flops_per_s: float | None

    note = _UNCOUNTED

    @property
    def computing_s(self) -> float | None:
        flops = flops_per_token(self.step) * self.num_tokens
        return None if self.flops_per_s is None else flops / self.flops_per_s


def step_costs(step: PlacedStep, num_tokens: int, machine: MachineProfile) -> StepCosts:
    """Return the most precise costs that are known: timed steps, else counted work, else assumed FLOPs."""
    if step.ticks is not None:
        return TimedCosts(step, num_tokens, machine, step.ticks)
    device = DeviceCosts.of(machine, step.device.type, str(step.graph.dtype).removeprefix("torch."))
    if device is not None and is_counted(step.trace):
        return CountedCosts(step, num_tokens, machine, device)
    return AssumedCosts(step, num_tokens, machine, None if device is None else device.product_flops_per_s)


def _host_updates_s(step: PlacedStep, machine: MachineProfile) -> float | None:
    """Return the seconds of the host's update kernels, or None if the measured rates do not determine them."""
    num_processes, is_split = step.run.world.local_size, step.graph.dtype.itemsize == 2
    num_updated = step.updates.num_weights(on_gpu=False) * num_processes
    rate = machine.adamw_params_per_s.get("bfloat16" if is_split else "float32")
    if not num_updated:
        return 0.0
    if rate is None or not is_memory_bound(step.traced.optimizer):
        return None
    if has_measured_kernel(step.traced.optimizer, split_master=is_split):
        return num_updated / rate
    is_gpu = step.device.type == "cuda"
    gpu_ticks = step.updates.gpu_memory_ticks if is_gpu else ()
    touched_bytes = _touched_bytes(step, (tick for tick in step.updates.ticks if tick not in gpu_ticks))
    products_s = 0.0 if is_gpu else _orthogonalization_s(step, machine)
    return None if products_s is None else num_processes * touched_bytes / (rate * _ADAMW_TOUCHED) + products_s


def gpu_updates_s(step: PlacedStep, machine: MachineProfile) -> float | None:
    """Return the GPU's seconds for updates in GPU memory (touched bytes / memory rate), or None if a rate is unknown.

    The result includes orthogonalization on the GPU for updates whose other parts run on the host.
    """
    products_s = _orthogonalization_s(step, machine) if step.device.type == "cuda" else 0.0
    if not step.updates.num_weights(on_gpu=True):
        return products_s
    rate = machine.gpu.update_bytes_per_s if machine.gpu else None
    if rate is None or products_s is None:
        return None
    return _touched_bytes(step, step.updates.gpu_memory_ticks) / rate + products_s


def _orthogonalization_s(step: PlacedStep, machine: MachineProfile) -> float | None:
    """Return the seconds of the orthogonalization, or None if its matmul rate is unknown."""
    flops = sum(matrix_flops(step).values())
    rate = machine.matmul_flops_per_s.get(f"{step.device.type}/bfloat16")
    return 0.0 if not flops else None if rate is None else flops / rate


def _touched_bytes(step: PlacedStep, updates: Iterable[Tick]) -> int:
    """Return the bytes that updates read and write."""
    blocks = step.program.blocks
    return sum(blocks[key].nbytes * (2 if mode == "rw" else 1) for tick in updates for key, mode in tick.uses)
