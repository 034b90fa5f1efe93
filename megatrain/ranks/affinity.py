"""Cores of a rank: near its GPU, and separate from the cores of other ranks.

Set before libraries start their threads, so that memory first touched by a rank is on its node of the machine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["cores_near", "cores_of_rank", "parse_cores"]

_DEVICES = Path("/sys/bus/pci/devices")


def cores_of_rank(number: int, size: int, cores: Sequence[int] | None = None) -> list[int]:
    """Return a rank's share of some cores: equal slices of neighbours. If cores are fewer than ranks, all share them.

    Args:
        number: Number of the rank, from 0, among the ranks that divide the cores.
        size: Number of these ranks.
        cores: Cores to divide; None for the cores that this process may use.
    """
    cores = sorted(os.sched_getaffinity(0)) if cores is None else sorted(cores)
    if len(cores) < size:
        return cores
    return cores[len(cores) * number // size : len(cores) * (number + 1) // size]


def cores_near(bus_id: str, devices: Path = _DEVICES) -> list[int]:
    """Return the cores on the node of a PCI device; empty if the machine does not report them.

    Args:
        bus_id: PCI bus of the device, ``"0000:3b:00.0"``.
        devices: Folder of sysfs.
    """
    try:
        return parse_cores((devices / bus_id.lower() / "local_cpulist").read_text())
    except (OSError, ValueError):
        return []


def parse_cores(text: str) -> list[int]:
    """Return the cores in a Linux list: ``"0-3,8"`` -> 0, 1, 2, 3, 8."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores
