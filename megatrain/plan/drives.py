"""What a step means for the NVMe drives: their shares of what is striped, and how long they are busy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatrain.plan.profile import DriveProfile, MachineProfile


@dataclass(frozen=True, slots=True)
class StepShape:
    """What of a config the estimate depends on besides the plan.

    Attributes:
        tokens_per_step: T.
        num_steps: of the run; None where only the data tells.
        paths: NVMe paths.
        weights: the shares of each in what is striped, in any unit.
        has_rates: the config gives the weights.
    """

    tokens_per_step: int
    num_steps: int | None
    paths: Sequence[Path]
    weights: Sequence[float]
    has_rates: bool = False


def nvme_seconds(read_bytes: float, written_bytes: float, drive: DriveProfile) -> float:
    """Return how long one drive is busy with reads and writes.

    Reads and writes share one ceiling, the mixed rate, as far as both go on; what is left of one of them has its own
    rate. A drive that slows under long writes cannot write more than it sustains.
    """
    both = min(read_bytes, written_bytes)
    seconds = 2 * both / drive.mixed_bytes_per_s
    seconds += (read_bytes - both) / drive.read_bytes_per_s + (written_bytes - both) / drive.write_bytes_per_s
    if drive.sustained_write_bytes_per_s is None:
        return seconds
    return max(seconds, written_bytes / drive.sustained_write_bytes_per_s)


def split(nbytes: int, shape: StepShape) -> dict[str, int]:
    """Return the share of each NVMe path; blocks are striped so to within one file."""
    total = sum(shape.weights)
    return {str(path): round(nbytes * weight / total) for path, weight in zip(shape.paths, shape.weights, strict=True)}


def measured_drive_rates(paths: Sequence[Path], machine: MachineProfile | None) -> list[float] | None:
    """Return the mixed rate of each path's drive, in bytes per second; None unless all were measured."""
    drives = [machine.drive_of(path) for path in paths] if machine is not None else []
    rates = [drive.mixed_bytes_per_s for drive in drives if drive is not None]
    return rates if rates and len(rates) == len(paths) else None
