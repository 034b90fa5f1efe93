"""Config table [distributed]: the processes of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatrain.base.table import Duration, Table, all_alter, explain, key

ThreadCount = Annotated[
    Literal["auto"] | Annotated[int, Field(ge=1)],
    explain("is not a number of threads", 'Write a whole number of at least 1, or "auto"'),
]


class DistributedConfig(Table, json_schema_extra=all_alter("no")):
    """``[distributed]``: the processes that train one run. Each process has a shard of every block."""

    processes: int = key(
        "Number of processes (ranks) of the run on this machine, one per GPU. Do not set it with torchrun and srun, "
        "which start the processes themselves.",
        1,
        ge=1,
    )
    threads: ThreadCount = key(
        "CPU threads of torch per process. auto: the number of cores divided by the number of processes. On a CPU, a "
        "different number changes rounding.",
        "auto",
        alters="yes",
    )
    numa: Literal["auto", "off"] = key(
        "auto: pin each process to separate cores near its GPU. off: do not pin.", "auto"
    )
    timeout: Duration = key(
        "Time without a heartbeat after which a process is considered dead and the run ends.",
        10.0,
    )
