"""Position of this process among a run's processes ("ranks"), read from the environment. Also connects the ranks.

Only functions that connect ranks import torch, because the launcher and ``--help`` do not need it.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = [
    "CONNECT_TIMEOUT_S",
    "LOOPBACK",
    "RANK_FOLDERS",
    "World",
    "WorldError",
    "connect",
    "init",
    "rank_folder_name",
    "rendezvous_address",
    "store_paths",
]

#: Environment variables that torchrun and this project's launcher set for each process.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
#: Environment variables that srun sets in a job step. A batch script is not a rank and has only the job's variables.
_SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
#: Environment variable that limits which GPUs a process sees, by number or name.
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
#: Timeout of the process group. It is long because a rank waits while its drive is full, which can take hours. The
#: watcher detects silent ranks much sooner.
_GROUP_TIMEOUT = timedelta(days=1)
#: Maximum time for all ranks to start. It is long because imports are slow on some file systems.
CONNECT_TIMEOUT_S = 600.0
#: Rendezvous address for ranks on one host. Other hosts cannot reach it.
LOOPBACK = "127.0.0.1"
#: Pattern of the names that ``rank_folder_name`` returns.
RANK_FOLDERS = "rank?????"
#: Interface on which gloo and NCCL listen if all ranks are on one host.
_LOOPBACK_INTERFACE = "lo"


class WorldError(Exception):
    """Error for an environment or config that does not describe a valid set of ranks. The message states the remedy."""


def rank_folder_name(rank: int) -> str:
    """Return the name of a rank's folder in a folder of checkpoints or on a drive, e.g. ``rank00003``."""
    return f"rank{rank:05d}"


def store_paths(size: int) -> list[str]:
    """Return the paths of ``size`` stores in a folder of checkpoints. A single process uses the folder itself."""
    return [""] if size == 1 else [rank_folder_name(rank) for rank in range(size)]


@dataclass(frozen=True, slots=True)
class World:
    """Position of one rank among a run's ranks.

    Attributes:
        rank: Number of this process, counted from 0.
        size: Number of processes.
        local_rank: Number of this process on its host, counted from 0.
        local_size: Number of processes on each host.
        num_hosts: Number of hosts. Each has ``local_size`` ranks. Rank r is on host number ``r // local_size``.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    num_hosts: int

    @classmethod
    def single(cls) -> World:
        """Return the world of a single process."""
        return cls(0, 1, 0, 1, socket.gethostname(), 1)

    @classmethod
    def local(cls, rank: int, size: int, num_hosts: int = 1) -> World:
        """Return the world of one of ``size`` processes on this host, or on hosts with equal numbers of ranks."""
        return cls(rank, size, rank % (size // num_hosts), size // num_hosts, socket.gethostname(), num_hosts)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> World:
        """Return the world that torchrun, srun or this project's launcher describes, else a world of one process.

        Raises:
            WorldError: The variables contradict each other, or the hosts have different numbers of ranks.
        """
        if all(name in environment for name in _RANK_VARIABLES):
            rank, size, local_rank, local_size = (_number(environment, name) for name in _RANK_VARIABLES)
        elif all(name in environment for name in _SLURM_VARIABLES):
            rank, size, local_rank = (_number(environment, name) for name in _SLURM_VARIABLES[:3])
            counts = _tasks_per_node(environment[_SLURM_VARIABLES[3]])
            if len(set(counts)) > 1:
                raise WorldError(
                    f"srun starts {', '.join(map(str, counts))} processes on the hosts. Start the same number on each: "
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
        """Whether this is the only process."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0. Only rank 0 owns the run's folder and reports on the run."""
        return self.rank == 0

    @property
    def host_index(self) -> int:
        """Number of this host, counted from 0."""
        return self.rank // self.local_size

    def select_gpu(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Make this rank's GPU the only GPU that the process sees, so that all of its threads use this GPU.

        Call this before any query about GPUs, because CUDA reads the environment variable only at the first query. For
        the same reason, the method does not count the GPUs, and a rank beyond the last GPU sees none. If the process
        already sees only one GPU, as under Slurm, nothing changes.
        """
        if self.is_single:
            return
        visible = environment.get(_VISIBLE_GPUS)
        if visible is None:
            environment[_VISIBLE_GPUS] = str(self.local_rank)
            return
        names = [name.strip() for name in visible.split(",") if name.strip()]
        if len(names) > 1:
            environment[_VISIBLE_GPUS] = names[self.local_rank] if self.local_rank < len(names) else ""

    def rank_folder(self, folder: Path) -> Path:
        """Return this rank's subfolder of a run's folder. For a single process, return the folder itself."""
        return folder if self.is_single else folder / rank_folder_name(self.rank)

    def name_of(self, rank: int, host: str = "") -> str:
        """Return a rank's name for messages, such as ``rank 3``. Include its host if there are several hosts."""
        return f"rank {rank} ({host})" if host and self.num_hosts > 1 else f"rank {rank}"


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise WorldError(f"{name} = {environment[name]!r} in the environment is not a number") from None


def _tasks_per_node(text: str) -> list[int]:
    """Parse srun's list of task counts per host. For example, ``"2(x3),1"`` becomes ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise WorldError(f"SLURM_STEP_TASKS_PER_NODE = {text!r} in the environment cannot be read")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_host(nodes: str) -> str:
    """Return the first host in Slurm's list, which is ``"a03"`` for both ``"a03"`` and ``"a[03-07,12],b"``."""
    match = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    if match is None:
        raise WorldError(f"SLURM_STEP_NODELIST = {nodes!r} in the environment cannot be read. Set MASTER_ADDR")
    return match[1] + (match[2] or "")


def rendezvous_address(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the host and port for the rendezvous, as set by torchrun or srun.

    Raises:
        WorldError: The environment does not contain the host or the port.
    """
    host = environment.get("MASTER_ADDR") or _first_host(environment.get("SLURM_STEP_NODELIST", ""))
    if "MASTER_PORT" in environment:
        return host, _number(environment, "MASTER_PORT")
    if "SLURM_JOB_ID" in environment:
        # Use a different port for each step of a Slurm job, because steps can run concurrently.
        offset = 97 * _number(environment, "SLURM_JOB_ID") + int(environment.get("SLURM_STEP_ID", 0))
        return host, _FIRST_PORT + offset % _NUM_PORTS
    raise WorldError(
        "there is no MASTER_PORT in the environment. Start the ranks with megatrain-tier run --processes N"
    )


def connect(world: World, host: str, port: int, *, serve: bool = False, timeout_s: float = CONNECT_TIMEOUT_S) -> Store:
    """Return a new connection to the store at which the ranks meet. Thread-safe, but only one call runs at a time.

    A store on ``LOOPBACK`` can be reached only from this host. With any other ``host``, torch's store listens on all
    interfaces and answers any client. Use it only in private networks.

    Args:
        host: Host that serves the store.
        port: Port of the store. If this rank serves the store, 0 selects any free port.
        serve: Whether this rank serves the store. The store exists as long as this connection.
        timeout_s: Maximum time that a call waits for a key.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    options: dict[str, Any] = {}
    if serve and host == LOOPBACK:
        listener = socket.create_server((LOOPBACK, port))
        port = listener.getsockname()[1]
        options["master_listen_fd"] = listener.detach()  # the store closes this socket
    return TCPStore(
        host,
        port,
        world.size,
        is_master=serve,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        **options,
    )


def init(world: World, device: torch.device, store: Store, bus: str = "") -> None:
    """Join torch.distributed's default process group, with gloo for host memory and NCCL for GPU memory.

    The call waits for all ranks. A single process does not join a group.

    Args:
        device: Device of the layers. If it is a GPU, this process must not see any other GPU.
        store: Store at which the ranks meet.
        bus: PCI address of the GPU, or "" if it is unknown.

    Raises:
        WorldError: Only some ranks have a GPU, or two ranks on one host have the same GPU.
    """
    import torch.distributed as dist

    if world.is_single:
        return
    if world.num_hosts == 1:
        # Set these variables before the group is created. Otherwise gloo and NCCL use a network interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK_INTERFACE)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK_INTERFACE)
    is_gpu = device.type == "cuda"
    _check_gpus(world, store, bus if is_gpu else None)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_gpu else "gloo",
        store=dist.PrefixStore("group", store),  # type: ignore[attr-defined]
        rank=world.rank,
        world_size=world.size,
        timeout=_GROUP_TIMEOUT,
        device_id=device if is_gpu else None,
    )


def _check_gpus(world: World, store: Store, bus: str | None) -> None:
    """Check that each rank has a separate GPU or that no rank has a GPU. All ranks must call this function.

    Without this check, NCCL would only report "invalid usage", or ranks would wait forever for a rank without a GPU.

    Args:
        store: Store at which the ranks meet.
        bus: PCI address of this rank's GPU, "" if it is unknown, or None if this rank has no GPU.
    """
    store.set(f"gpu/{world.rank}", f"{world.host} {'none' if bus is None else bus}")
    gpus = [store.get(f"gpu/{rank}").decode().rpartition(" ")[::2] for rank in range(world.size)]
    if all(bus == "none" for _, bus in gpus):
        return
    for rank, (host, bus) in enumerate(gpus):
        host_ranks = [other for other in range(world.size) if other // world.local_size == rank // world.local_size]
        if bus == "none":
            count = sum(gpus[other][1] != "none" for other in host_ranks)
            raise WorldError(
                f"{world.local_size} processes on {host}, of which {count} found a GPU. Start at most one for "
                'each GPU, or set device = "cpu"'
            )
        duplicate = next((other for other in host_ranks if other < rank and gpus[other][1] == bus != ""), None)
        if duplicate is not None:
            raise WorldError(
                f"rank {duplicate} and rank {rank} would compute on the same GPU of {host}, {bus}. Start one process "
                "per GPU, and make all GPUs or only its own GPU visible to each process (CUDA_VISIBLE_DEVICES)"
            )
