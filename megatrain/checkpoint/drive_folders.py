"""Messages about the NVMe folders that contain parts of checkpoints. Users must not delete these folders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatrain.base.names import COPIES_NAME
from megatrain.checkpoint.locations import bytes_on_drives
from tiered.units import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from megatrain.checkpoint.table import CheckpointSpec

__all__ = ["describe_drives"]


def describe_drives(spec: CheckpointSpec, drive_bytes: int) -> list[str]:
    """Return messages with the folders and bytes of the checkpoint parts that a run stores on drives.

    Args:
        drive_bytes: Planned bytes per checkpoint that stay on drives.
    """
    drives = spec.drives
    found = bytes_on_drives(spec.output_dir, drives)
    lines = []
    if drive_bytes and spec.table.is_on:
        names = _names(drives)
        now = sum(found.get(path, 0) for path in drives)
        share = f"{format_size(drive_bytes)} of each checkpoint stay in {names} (now {format_size(now)})"
        lines.append(f"{share}: deleting that folder destroys them. {_advice(spec)}")
    elif any(path in found for path in drives):
        there = [path for path in drives if path in found]
        nbytes = format_size(sum(found[path] for path in there))
        lines.append(f"{nbytes} of this run's checkpoints are in {_names(there)}: deleting that destroys them")
    others = {path: nbytes for path, nbytes in found.items() if path not in drives}
    lines += [f"{format_size(size)} of this run's earlier checkpoints are in '{path}'" for path, size in others.items()]
    return lines


def _advice(spec: CheckpointSpec) -> str:
    """Return a sentence with the location of the whole copies, or with the key that enables copies."""
    rule = spec.table.save_copy
    if rule is False:
        return "checkpoint.save_copy = true keeps whole copies in output_dir"
    which = {True: "every checkpoint", "last": "the last checkpoint"}.get(rule, f"every {rule}th checkpoint")
    return f"A whole copy of {which} goes to '{spec.output_dir / COPIES_NAME}'"


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(f"'{path}'" for path in paths)
