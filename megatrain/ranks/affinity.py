"""Selection of CPU cores for a rank. The cores are near its GPU and are not shared with other ranks.

Pin a rank before any library starts threads. Memory that the rank touches first is then on its NUMA node.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["nearby_cores", "parse_cores", "rank_cores"]

_DEVICES = Path("/sys/bus/pci/devices")


def rank_cores(rank: int, size: int, cores: Sequence[int] | None = None) -> list[int]:
    """Return a rank's contiguous share of the cores, or all cores if there are more ranks than cores.

    Args:
        rank: Number of the rank, counted from 0 among the ranks that divide the cores.
        size: Number of ranks that divide the cores.
        cores: Cores to divide. None for all cores that this process can use.
    """
    cores = sorted(os.sched_getaffinity(0)) if cores is None else sorted(cores)
    if len(cores) < size:
        return cores
    return cores[len(cores) * rank // size : len(cores) * (rank + 1) // size]


def nearby_cores(bus_id: str, devices: Path = _DEVICES) -> list[int]:
    """Return the cores on a PCI device's NUMA node, or no cores if the machine does not report them.

    Args:
        bus_id: PCI address of the device, such as ``"0000:3b:00.0"``.
        devices: Folder of PCI devices in sysfs.
    """
    try:
        return parse_cores((devices / bus_id.lower() / "local_cpulist").read_text())
    except (OSError, ValueError):
        return []


def parse_cores(text: str) -> list[int]:
    """Parse a Linux list of cores. For example, ``"0-3,8"`` becomes ``[0, 1, 2, 3, 8]``."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def gpu_bus_id() -> str:
    """Return the current GPU's PCI address as sysfs writes it, or "" if this version of torch does not provide it."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    domain, bus, device = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    if domain is None or bus is None or device is None:
        return ""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"
