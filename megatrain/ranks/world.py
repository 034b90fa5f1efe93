"""The processes ("ranks") of a run: which one this is, read from its environment, and the group that they form.

Only joining the group imports torch: the launcher and ``--help`` need none of it.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

__all__ = [
    "CONNECT_TIMEOUT_S",
    "World",
    "WorldError",
    "connect",
    "destroy",
    "groups_of_hosts",
    "init",
    "init_by_file",
    "meeting_point",
]

#: Set by torchrun for each of its processes, and by our launcher.
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
#: Set by srun inside a job step; a batch script has those of the job alone, and is no rank.
_SLURM_NAMES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
#: A rank may pause for hours for a full drive: silence is the watcher's business, not the group's.
_GROUP_TIMEOUT = timedelta(days=1)
#: Until all ranks have started; those of other hosts import from slow file systems.
CONNECT_TIMEOUT_S = 600.0


class WorldError(Exception):
    """The environment or the config describes no usable set of ranks; the text says what to do."""


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a run, seen from one of them.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
        local_rank: number of this process on its host, from 0.
        local_size: number of processes on each host.
        host: name of this one.
        num_hosts: all have ``local_size`` ranks; rank r is on the host with number ``r // local_size``.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    num_hosts: int

    @classmethod
    def single(cls) -> World:
        """Return the world of a process that is alone."""
        return cls(0, 1, 0, 1, socket.gethostname(), 1)

    @classmethod
    def local(cls, rank: int, size: int, num_hosts: int = 1) -> World:
        """Return the world of one of ``size`` processes on this host, or on several that are like it."""
        return cls(rank, size, rank % (size // num_hosts), size // num_hosts, socket.gethostname(), num_hosts)

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> World:
        """Return the world that torchrun, srun or our launcher describes; that of one process without one.

        Raises:
            WorldError: the variables contradict each other, or the hosts have different numbers of ranks.
        """
        if all(name in environment for name in _NAMES):
            rank, size, local_rank, local_size = (_number(environment, name) for name in _NAMES)
        elif all(name in environment for name in _SLURM_NAMES):
            rank, size, local_rank = (_number(environment, name) for name in _SLURM_NAMES[:3])
            counts = _tasks_per_node(environment[_SLURM_NAMES[3]])
            if len(set(counts)) > 1:
                raise WorldError(
                    f"srun starts {', '.join(map(str, counts))} processes on the hosts. Let each have the same number: "
                    "--ntasks-per-node"
                )
            local_size = counts[0]
        else:
            return cls.single()
        world = cls(rank, size, local_rank, local_size, socket.gethostname(), size // max(local_size, 1))
        if not (0 <= rank < size and 0 <= local_rank < local_size and size == local_size * world.num_hosts):
            raise WorldError(
                f"the environment describes rank {rank} of {size}, number {local_rank} of {local_size} on its host. "
                "Start the ranks with megatrain-tier run --processes N, torchrun or srun, the same number on each host"
            )
        return world

    @property
    def is_single(self) -> bool:
        """Whether the process is alone."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone has the run's folder and tells of the run."""
        return self.rank == 0

    @property
    def host_number(self) -> int:
        """The number of this host, from 0."""
        return self.rank // self.local_size

    def folder_in(self, folder: Path) -> Path:
        """Return where in a folder of the run this rank has its own files: the folder itself, if it is alone."""
        return folder if self.is_single else folder / f"rank{self.rank:05d}"

    def name_of(self, rank: int, host: str = "") -> str:
        """Return what messages call a rank: ``rank 3``, with its host where there are several."""
        return f"rank {rank} ({host})" if host and self.num_hosts > 1 else f"rank {rank}"


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise WorldError(f"{name} = {environment[name]!r} in the environment is no number") from None


def _tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each host that srun names: ``"2(x3),1"`` -> 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise WorldError(f"SLURM_STEP_TASKS_PER_NODE = {text!r} in the environment cannot be read")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_host(nodes: str) -> str:
    """Return the first of the hosts that Slurm names: ``"a[03-07,12],b"`` -> ``"a03"``."""
    match = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    if match is None:
        raise WorldError(f"SLURM_STEP_NODELIST = {nodes!r} in the environment cannot be read. Set MASTER_ADDR")
    return match[1] + (match[2] or "")


def meeting_point(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return host and port at which rank 0 is met.

    Raises:
        WorldError: the environment does not say.
    """
    host = environment.get("MASTER_ADDR") or _first_host(environment.get("SLURM_STEP_NODELIST", ""))
    if "MASTER_PORT" in environment:
        return host, _number(environment, "MASTER_PORT")
    if "SLURM_JOB_ID" in environment:
        # Two steps of one job meet at different ports.
        number = 97 * _number(environment, "SLURM_JOB_ID") + int(environment.get("SLURM_STEP_ID", 0))
        return host, _FIRST_PORT + number % _NUM_PORTS
    raise WorldError(
        "there is no MASTER_PORT in the environment. Start the ranks with megatrain-tier run --processes N"
    )


def connect(world: World, host: str, port: int, *, serves: bool = False, timeout_s: float = CONNECT_TIMEOUT_S) -> Store:
    """Return a connection of its own to the store at which ranks meet. Thread-safe, but its calls wait for each other.

    Args:
        world: of this rank.
        host: at which the store is served.
        port: at which the store is served; 0 where this rank serves it: a free one.
        serves: this rank serves it, for as long as the connection exists.
        timeout_s: how long a call waits for a key.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        host, port, world.size, is_master=serves, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )


def init(world: World, device: torch.device, store: Store) -> None:
    """Join the default group of torch.distributed: gloo for host memory, NCCL for that of GPUs.

    Waits for all ranks. The group adds nothing up, so the order of sums is never the library's.

    Args:
        world: of this rank; alone, it joins nothing.
        device: of the computation.
        store: at which the ranks meet; each run has its own keys in it.
    """
    import torch.distributed as dist

    if world.is_single:
        return
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("group", store),  # type: ignore[attr-defined]
        rank=world.rank,
        world_size=world.size,
        timeout=_GROUP_TIMEOUT,
        device_id=device if on_gpu else None,
    )


def init_by_file(world: World, device: torch.device, path: Path) -> None:
    """Join the default group with other processes of this machine.

    Args:
        world: of this rank.
        device: of the computation.
        path: of a new file, the same for all.
    """
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    init(world, device, FileStore(str(path), world.size))


@cache
def groups_of_hosts(per_host: int) -> tuple[ProcessGroup, ProcessGroup]:
    """Return the group of this host's ranks, and that of the ranks with this one's number on their hosts.

    All ranks of the default group call it, once: the groups are kept, as each has connections of its own.

    Args:
        per_host: ranks of each host.
    """
    import torch.distributed as dist

    ranks, own = range(dist.get_world_size()), dist.get_rank()
    hosts = [list(ranks[first : first + per_host]) for first in ranks[::per_host]]
    found: list[ProcessGroup] = []
    for members in (*hosts, *map(list, zip(*hosts, strict=True))):  # every rank makes all of them, in this order
        group = dist.new_group(members, timeout=_GROUP_TIMEOUT)
        if own in members:
            found.append(group)
    on_host, across_hosts = found
    return on_host, across_hosts


def destroy() -> None:
    """Leave the group, where this process joined one.

    For processes that live on, which hold no result of a collective any more: the destructor of a gloo group joins,
    with the GIL held, a thread that may wait for the GIL to free its last work. The ranks of a run end by ``os._exit``.
    """
    import torch.distributed as dist

    groups_of_hosts.cache_clear()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
