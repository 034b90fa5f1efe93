"""[distributed]: the processes of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatrain.base.table import Duration, Table, all_alter, is_not, key

ThreadCount = Annotated[
    Literal["auto"] | Annotated[int, Field(ge=1)],
    is_not("is no number of threads", 'Write a whole number at least 1, or "auto"'),
]


class DistributedConfig(Table, json_schema_extra=all_alter("no")):
    """Several processes on one run, each with its shard of every block."""

    processes: int = key(
        "Processes (ranks) of the run on this machine, one for each GPU. torchrun and srun start them themselves.",
        1,
        ge=1,
    )
    threads: ThreadCount = key(
        "Threads of each process for what torch computes on the CPU; auto: its part of the cores. On a CPU another "
        "number gives other last bits.",
        "auto",
        alters="yes",
    )
    numa: Literal["auto", "off"] = key(
        "auto: each process computes on cores of its own, near its GPU. off: where the system puts it.", "auto"
    )
    timeout: Duration = key(
        "A process that has not been heard of for so long is taken for dead, and ends the run.",
        10.0,
    )
