"""Seconds of work on a machine. Each kind of work has a rate, measured by doctor or assumed and labeled as such.

A GPU computes while the host launches later kernels, so the slower of the two decides the time of a step. Without a
GPU, their times add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatrain.engine.work import Work
    from megatrain.machine.machine import MachineProfile

#: Assumed attention rate if not measured, as a share of the rate of products. Flash attention on an H100 reaches 0.55
#: forward, and 0.4 in a backward with a fixed order of sums; CPU kernels reach 0.4 to 0.7.
_ATTENTION_SHARE = 0.5
#: Assumed launches per second of one thread if not measured, from a server processor with 2 cores.
_LAUNCHES_PER_S = 25_000.0
#: Factor from a launch on the CPU, as doctor measures it, to a launch for a GPU: streams, allocator, and torch's CUDA
#: dispatch. Then the cost of a lease, with its part of an update's launches, and of a transfer, in launches. All are
#: from the host seconds of steps without kernels (docs/null_gpu.md).
_LAUNCH_FOR_GPU, _LAUNCHES_PER_LEASE, _LAUNCHES_PER_TRANSFER = 1.05, 1.4, 8.0


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Rates and costs of computing on one device.

    Attributes:
        product_flops_per_s: Rate of large matrix products.
        attention_flops_per_s: Rate of fused attention, counting only computed pairs of tokens.
        moved_bytes_per_s: Bytes that all other operators read and write per second.
        seconds_per_launch: Host time of a launch, including the Python code around it.
        seconds_per_lease: Host time of a lease, including its part of the launches of updates.
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
        """Return the costs on a machine, or None if the rate of products is unknown.

        Args:
            device: ``cpu`` or ``cuda``.
            dtype: Compute dtype of the layers, such as ``bfloat16``.
        """
        key = f"{device}/{dtype}"
        products = machine.matmul_flops_per_s.get(key)
        if products is None:
            return None
        in_memory = machine.ram_update_bytes_per_s
        if device == "cuda":
            in_memory = (machine.gpu and machine.gpu.update_bytes_per_s) or in_memory
        per_launch = (_LAUNCH_FOR_GPU if device == "cuda" else 1.0) / (machine.launches_per_s or _LAUNCHES_PER_S)
        return cls(
            product_flops_per_s=products,
            attention_flops_per_s=machine.attention_flops_per_s.get(key, _ATTENTION_SHARE * products),
            moved_bytes_per_s=machine.elementwise_bytes_per_s.get(key, in_memory),
            seconds_per_launch=per_launch,
            seconds_per_lease=_LAUNCHES_PER_LEASE * per_launch,
            seconds_per_transfer=_LAUNCHES_PER_TRANSFER * per_launch,
            assumed=tuple(_assumed(machine, device, key)),
        )

    def computing_s(self, work: Work) -> float:
        """Return the seconds that the device computes."""
        return (
            work.product_flops / self.product_flops_per_s
            + (work.attention_flops - work.skipped_flops) / self.attention_flops_per_s
            + work.moved_nbytes / self.moved_bytes_per_s
        )


def _assumed(machine: MachineProfile, device: str, key: str) -> Iterator[str]:
    """Yield the unknown rates of a machine, with the assumption used instead."""
    if key not in machine.attention_flops_per_s:
        yield f"attention at {_ATTENTION_SHARE:.0%} of the rate of products"
    if key not in machine.elementwise_bytes_per_s:
        yield "element-wise operators at the rate of updates in memory"
    if machine.launches_per_s is None:
        factor = _LAUNCH_FOR_GPU if device == "cuda" else 1.0
        yield f"{1e6 * factor / _LAUNCHES_PER_S:.0f} us of the host for each launch"
    elif device == "cuda":
        yield f"launches at {_LAUNCH_FOR_GPU:g} times what they cost on the CPU"
