"""What a drive gives to plain reads and writes, and what the tier gets of it, in turns within one run."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatrain.doctor.probes import BareFile, SustainedWrite, TierProbe
from megatrain.doctor.scratch import MIN_FREE_BYTES, check_path, scratch_folder
from megatrain.plan.machine import available_ram_bytes
from megatrain.plan.profile import FileSystem, file_system_of
from tiered.units import GiB, KiB, MiB


@dataclass(frozen=True, slots=True)
class DriveEffort:
    """How much is spent on one drive.

    Attributes:
        span_bytes: bytes of each of the two sets of files.
        turn_s: seconds of reads and writes in turns.
        mixed_s: seconds of both at once.
        beside_s: of both at once while the processor computes.
        sustained_s: end of the long write, whatever comes first.
        sustained_bytes: end of the long write, whatever comes first.
    """

    span_bytes: int
    turn_s: float
    mixed_s: float
    sustained_s: float = 0.0
    sustained_bytes: int = 0
    beside_s: float = 0.0


QUICK = DriveEffort(span_bytes=256 * MiB, turn_s=2.0, mixed_s=1.0, beside_s=1.0)
FULL = DriveEffort(
    span_bytes=512 * MiB, turn_s=8.0, mixed_s=4.0, sustained_s=30.0, sustained_bytes=32 * GiB, beside_s=4.0
)
_NUM_SMALL, _SMALL_BYTES = 64, 64 * KiB
_PRODUCT_SIZE = 768  # of matrices: some milliseconds, in the processor's caches


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second: medians of several turns. ``mixed``: reads and writes at once, both counted."""

    read: float
    write: float
    mixed: float


@dataclass(frozen=True, slots=True)
class DriveResult:
    """What was measured on one path.

    Attributes:
        free_bytes: before.
        is_direct: O_DIRECT worked.
        is_rotational: a disk with a motor; None where unknown.
        tier: what the tier got.
        bare: what plain I/O with as many threads got.
        span_bytes: what either went over.
        sustained: None in a quick run.
        computing_s_per_byte: what computing on all cores loses while a byte goes through the tier; None: not measured.
        seconds_per_copy: what a copy of a block, however small, costs the thread that asks for it.
    """

    path: Path
    file_system: FileSystem
    free_bytes: int
    is_direct: bool
    is_rotational: bool | None
    span_bytes: int
    tier: Rates
    bare: Rates
    sustained: SustainedWrite | None = None
    computing_s_per_byte: float | None = None
    seconds_per_copy: float | None = None


def measure_drive(path: Path, effort: DriveEffort) -> DriveResult:
    """Measure the drive of a folder, in a scratch folder inside it.

    Takes at most twice ``effort.span_bytes`` of disk, and a quarter of what is free; fewer on a slow drive.

    Raises:
        UnusablePathError: the folder cannot be used.
        TieredError: the drive failed.
        OSError: the drive failed.
    """
    free_bytes = check_path(path)
    file_system = file_system_of(path)
    room = min(effort.span_bytes, free_bytes // 4, available_ram_bytes() // 4)
    with scratch_folder(path) as folder, BareFile(folder / "bare", max(room, MIN_FREE_BYTES // 4)) as bare:
        with TierProbe(folder / "tier", bare.nbytes) as tier:
            turns = _Turns()
            deadline = time.perf_counter() + effort.turn_s
            while turns.is_empty or time.perf_counter() < deadline:
                turns.add(tier, bare)
            tier_mixed = tier.mixed(effort.mixed_s)
            lost = computing_lost(tier, effort.beside_s) if effort.beside_s else None
            bare_mixed = bare.mixed(effort.mixed_s)
            sustained = tier.sustained_write(effort.sustained_s, effort.sustained_bytes) if effort.sustained_s else None
            is_direct = tier.is_direct
        with TierProbe(folder / "small", _NUM_SMALL * _SMALL_BYTES, _SMALL_BYTES) as small:
            small.seconds_per_copy()
            seconds_per_copy = small.seconds_per_copy()
        return DriveResult(
            path=path,
            file_system=file_system,
            free_bytes=free_bytes,
            is_direct=is_direct,
            is_rotational=is_rotational(file_system.device),
            span_bytes=bare.nbytes,
            tier=Rates(statistics.median(turns.tier_read), statistics.median(turns.tier_write), tier_mixed),
            bare=Rates(statistics.median(turns.bare_read), statistics.median(turns.bare_write), bare_mixed),
            sustained=sustained,
            computing_s_per_byte=lost,
            seconds_per_copy=seconds_per_copy,
        )


def computing_lost(tier: TierProbe, seconds: float) -> float:
    """Return the seconds of computing that a byte costs which is read or written meanwhile.

    Checksums, system calls and the drive's own driver take processors and memory away from it. Matrix products are
    timed alone, and beside a tier that reads and writes.
    """
    left, right = torch.ones(2, _PRODUCT_SIZE, _PRODUCT_SIZE).unbind()
    product = torch.empty_like(left)
    torch.mm(left, right, out=product)
    times: list[float] = []
    with ThreadPoolExecutor(1) as thread:
        for is_alone in (True, False):
            start_s, count = time.perf_counter(), 0
            rate = None if is_alone else thread.submit(tier.mixed, seconds)
            while time.perf_counter() < start_s + seconds if rate is None else not rate.done():
                torch.mm(left, right, out=product)
                count += 1
            elapsed_s = time.perf_counter() - start_s
            times.append(elapsed_s / max(1, count))
    assert rate is not None
    share_lost = max(0.0, 1 - times[0] / times[1])
    return share_lost / rate.result()


def is_rotational(device: str, root: Path = Path("/sys/dev/block")) -> bool | None:
    """Return whether a device ``major:minor`` is a disk with a motor; None where the kernel does not say."""
    for folder in (root / device, (root / device).resolve().parent):  # a partition's queue is its disk's
        try:
            return (folder / "queue" / "rotational").read_text().strip() == "1"
        except OSError:
            continue
    return None


@dataclass
class _Turns:
    """Rates of reads and writes, ours and bare ones in turns, so that both meet the same drive."""

    tier_read: list[float] = field(default_factory=list)
    tier_write: list[float] = field(default_factory=list)
    bare_read: list[float] = field(default_factory=list)
    bare_write: list[float] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.tier_read

    def add(self, tier: TierProbe, bare: BareFile) -> None:
        self.tier_read.append(tier.read())
        self.bare_read.append(bare.run(lambda number: False))
        self.tier_write.append(tier.write())
        self.bare_write.append(bare.run(lambda number: True))
