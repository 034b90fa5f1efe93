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
        "Processes (ranks) of the run on this machine, one per GPU. Leave it out under torchrun and srun, which "
        "start the processes.",
        1,
        ge=1,
    )
    threads: ThreadCount = key(
        "CPU threads of torch per process; auto: the cores divided by the processes. On a CPU, another number "
        "changes last bits.",
        "auto",
        alters="yes",
    )
    numa: Literal["auto", "off"] = key(
        "auto: pin each process to separate cores near its GPU. off: do not pin.", "auto"
    )
    timeout: Duration = key(
        "A process that sends no heartbeat for this long is considered dead and ends the run.",
        10.0,
    )
