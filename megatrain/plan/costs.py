"""Seconds that work takes on a machine: each kind at its own rate, measured by doctor, else assumed and said to be.

A GPU computes while the host launches what comes next, so a step takes as long as the slower of both, over the whole
step: the host runs ahead. Without a GPU they are one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatrain.engine.work import Work
    from megatrain.machine.machine import MachineProfile

#: Attention's share of the rate of products where nobody measured it: kernels of flash attention on an H100 reach 0.55
#: of it forward, and 0.4 in a backward whose sums have a fixed order; kernels of a CPU 0.4 to 0.7.
_ATTENTION_SHARE = 0.5
#: Per second, of one thread, where nobody measured it: on a server processor of 2 cores.
_LAUNCHES_PER_S = 25_000.0
#: A launch costs the host so much more for a GPU than what doctor measures on the CPU: streams, its allocator, and the
#: checks of torch's CUDA dispatch. And a lease, with its part of the launches of an update, costs so much of a launch,
#: and so does a transfer. All by the host seconds of steps without kernels (docs/null_gpu.md).
_LAUNCH_FOR_GPU, _LAUNCHES_PER_LEASE, _LAUNCHES_PER_TRANSFER = 1.05, 1.4, 8.0


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """What computing costs on one device.

    Attributes:
        product_flops_per_s: Rate of large matrix products.
        attention_flops_per_s: Rate of fused attention, by the pairs of tokens that are computed.
        moved_bytes_per_s: What all other operators read and write.
        seconds_per_launch: Time that the host takes, with the Python code around it.
        seconds_per_lease: Time that the host takes, with its part of the launches of updates.
        seconds_per_transfer: Time that the host takes to start and to end a transfer over the bus, beside the lease.
        assumed: Which of these rates nobody measured, in words.
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
        """Return the costs on a machine; None: the rate of products is not known.

        Args:
            device: ``cpu`` or ``cuda``.
            dtype: In which the layers compute, such as ``bfloat16``.
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
        """Return how long the device computes."""
        return (
            work.product_flops / self.product_flops_per_s
            + (work.attention_flops - work.skipped_flops) / self.attention_flops_per_s
            + work.moved_nbytes / self.moved_bytes_per_s
        )


def _assumed(machine: MachineProfile, device: str, key: str) -> Iterator[str]:
    """Yield which rates are not known of a machine, and what is taken instead."""
    if key not in machine.attention_flops_per_s:
        yield f"attention at {_ATTENTION_SHARE:.0%} of the rate of products"
    if key not in machine.elementwise_bytes_per_s:
        yield "element-wise operators at the rate of updates in memory"
    if machine.launches_per_s is None:
        factor = _LAUNCH_FOR_GPU if device == "cuda" else 1.0
        yield f"{1e6 * factor / _LAUNCHES_PER_S:.0f} us of the host for each launch"
    elif device == "cuda":
        yield f"launches at {_LAUNCH_FOR_GPU:g} times what they cost on the CPU"
