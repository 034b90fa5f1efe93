"""Compute and host seconds of a step on a machine, from rates that are measured by doctor or marked as assumed.

While a GPU computes, the host launches later kernels, so the slower of the two determines the time of a step. Without a
GPU, the two times add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatrain.engine.work import Work
from megatrain.machine.profiles import MachineProfile

#: Attention rate as a fraction of the matmul rate, assumed if not measured. On an H100, flash attention reaches 0.55 in
#: the forward and 0.4 in a deterministic backward. CPU kernels reach 0.4 to 0.7.
_ATTENTION_SHARE = 0.5
#: Kernel launches per second of one thread, assumed if not measured. The value is from a server CPU with 2 cores.
_LAUNCHES_PER_S = 25_000.0
#: Cost of a GPU launch in CPU launches: it is higher because of streams, the allocator and torch's CUDA dispatch. The
#: other numbers are the cost of a lease (with its share of an update's launches) and of a transfer, in launches. All
#: three are from host seconds of steps without kernels (docs/null_gpu.md).
_LAUNCH_FOR_GPU, _LAUNCHES_PER_LEASE, _LAUNCHES_PER_TRANSFER = 1.05, 1.4, 8.0


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Rates and costs of computing on one device.

    Attributes:
        product_flops_per_s: Rate of large matmuls.
        attention_flops_per_s: Rate of fused attention. Only computed pairs of tokens count.
        moved_bytes_per_s: Bytes per second that all other operators read and write.
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
        """Return the device's compute seconds."""
        return (
            work.product_flops / self.product_flops_per_s
            + (work.attention_flops - work.skipped_flops) / self.attention_flops_per_s
            + work.moved_nbytes / self.moved_bytes_per_s
        )


def _assumed(machine: MachineProfile, device: str, key: str) -> Iterator[str]:
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
