"""What several processes of this machine reach at the same time: memory, drives, GPUs, and what moves between them.

Rates of one process say little of several: they share memory, drives, and often the ports that their GPUs are behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatrain.api import Collectives, World, cores_of_rank, init_by_file, machine
from megatrain.extras.doctor.drives import DriveEffort, Rates, measure_drive
from megatrain.extras.doctor.processors import measure_gpu, measure_processor
from tiered.units import MiB

#: Far more than any of the measurements takes, with a start on a slow file system.
_TIMEOUT_S = 900.0
#: Of each rank in a gather, and to each rank in an exchange: as large as the pieces of a layer.
_SHARE_BYTES = 32 * MiB
_NUM_COLLECTIVES = 5


class ProcessesFailedError(Exception):
    """A process could not measure; the text is why."""


@dataclass(frozen=True, slots=True)
class ProcessesResult:
    """What several processes did at once, in bytes or parameters per second.

    Attributes:
        num_processes: that measured.
        ram_copy: bytes per second that all copy together.
        adamw_params: dtype of the weights -> of all together.
        drives: path -> what their tiers got, all together.
        gather: bytes per second of each one, in either direction.
        exchange: bytes per second of each one, in either direction.
        h2d: bytes per second to the slowest GPU; None: there is none.
        d2h: bytes per second from the slowest GPU; None: there is none.
    """

    num_processes: int
    ram_copy: float
    adamw_params: Mapping[str, float]
    drives: Mapping[str, Rates]
    gather: float
    exchange: float
    h2d: float | None = None
    d2h: float | None = None

    @property
    def peer(self) -> float:
        """What a plan takes for the bytes between ranks: the slower of both ways."""
        return min(self.gather, self.exchange)


def measure_processes(
    num_processes: int, paths: Sequence[Path], effort: DriveEffort, *, span_bytes: int, seconds: float
) -> ProcessesResult:
    """Let processes measure all at once.

    Args:
        num_processes: at least 2; on a machine with GPUs, no more than these.
        paths: folders on drives, which are usable.
        effort: what each process measures, for each path.
        span_bytes: RAM that they work on together.
        seconds: about how long each measurement takes.

    Raises:
        ProcessesFailedError: one of them failed, or did not end.
    """
    command = [sys.executable, "-P", "-c", "from megatrain.extras.doctor import processes; processes.main()"]
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "size": num_processes,
            "meeting": str(Path(folder) / "meeting"),
            "paths": [str(path) for path in paths],
            "effort": asdict(effort),
            "span_bytes": span_bytes,
            "seconds": seconds,
        }
        started: list[subprocess.Popen[bytes]] = []
        logs = [Path(folder) / f"rank{rank}" for rank in range(num_processes)]
        for rank, log in enumerate(logs):
            cores = cores_of_rank(rank, num_processes)
            with log.open("wb") as errors:
                started.append(
                    subprocess.Popen(
                        [*command, json.dumps({**job, "rank": rank, "cores": cores})],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        env={**os.environ, "OMP_NUM_THREADS": str(len(cores)), "PYTHONPATH": os.pathsep.join(sys.path)},
                    )
                )
        try:
            found = [_answer(process, log) for process, log in zip(started, logs, strict=True)]
        finally:
            for process in started:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
    return _together(found)


def _answer(process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    try:
        said, _ = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ProcessesFailedError(f"said nothing for {_TIMEOUT_S:.0f} s") from None
    if process.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise ProcessesFailedError(lines[-1] if lines else f"exit code {process.returncode}")
    answer: dict[str, Any] = json.loads(said)
    return answer


def _together(found: Sequence[Mapping[str, Any]]) -> ProcessesResult:
    def total(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {name: sum(each[name] for each in values) for name in values[0]}

    gpus = [each["gpu"] for each in found if each["gpu"] is not None]
    return ProcessesResult(
        num_processes=len(found),
        ram_copy=sum(each["ram_copy"] for each in found),
        adamw_params=total([each["adamw"] for each in found]),
        drives={path: Rates(**total([each["drives"][path] for each in found])) for path in found[0]["drives"]},
        gather=min(each["gather"] for each in found),
        exchange=min(each["exchange"] for each in found),
        h2d=min((gpu["h2d"] for gpu in gpus), default=None),
        d2h=min((gpu["d2h"] for gpu in gpus), default=None),
    )


def main() -> None:
    """Measure as one of the processes, and print what was found as JSON."""
    job = json.loads(sys.argv[1])
    rank, size = int(job["rank"]), int(job["size"])
    world = World.local(rank, size)
    world.take_gpu()
    kind, bus = machine.resolve_device("auto"), ""
    if kind.type == "cuda":
        kind, bus = torch.device("cuda", 0), machine.bus_of_gpu()
    else:
        os.sched_setaffinity(0, job["cores"])
    init_by_file(world, kind, Path(job["meeting"]), bus)
    ranks = Collectives(tier="gpu" if kind.type == "cuda" else "ram")

    def at_once(work: Callable[[], Any]) -> Any:
        ranks.gather_objects(None)  # all begin when the last one is here
        return work()

    span_bytes, seconds, effort = int(job["span_bytes"]) // size, float(job["seconds"]), DriveEffort(**job["effort"])
    processor = at_once(lambda: measure_processor(span_bytes=span_bytes, seconds=seconds))
    gpu = at_once(lambda: measure_gpu(seconds=seconds))
    drives = {path: at_once(partial(measure_drive, Path(path), effort)) for path in job["paths"]}
    gather, exchange = _collective_rates(ranks, kind)
    found = {
        "ram_copy": processor.ram_copy,
        "adamw": dict(processor.adamw_params),
        "gpu": None if gpu is None else {"h2d": gpu.h2d, "d2h": gpu.d2h},
        "drives": {path: asdict(drive.tier) for path, drive in drives.items()},
        "gather": gather,
        "exchange": exchange,
    }
    ranks.gather_objects(None)
    print(json.dumps(found), flush=True)
    os._exit(0)  # destroying a group of gloo may wait for itself


def _collective_rates(ranks: Collectives, device: torch.device) -> tuple[float, float]:
    """Return the bytes per second that a rank gets in gathers, and in exchanges."""
    full = torch.zeros(ranks.size * _SHARE_BYTES, dtype=torch.uint8, device=device)
    sent = torch.zeros_like(full)
    own = full.view(ranks.size, -1)[ranks.rank]
    lengths = [_SHARE_BYTES] * ranks.size
    ways: tuple[Callable[[], object], ...] = (
        lambda: ranks.gather(full, own),
        lambda: ranks.exchange(full, sent, lengths, lengths),
    )
    rates = []
    for work in ways:
        best_s = float("inf")
        for _ in range(1 + _NUM_COLLECTIVES):  # the first one may make connections
            ranks.gather_objects(None)
            start_s = time.perf_counter()
            work()
            full[0].item()  # waits for a GPU
            best_s = min(best_s, time.perf_counter() - start_s)
        rates.append((ranks.size - 1) * _SHARE_BYTES / best_s)
    return rates[0], rates[1]
