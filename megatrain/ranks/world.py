"""The processes ("ranks") of a run: which one this is, read from its environment, and the group that they form.

Only joining the group imports torch: the launcher and ``--help`` need none of it.
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
    "World",
    "WorldError",
    "connect",
    "init",
    "meeting_point",
]

#: Set by torchrun for each of its processes, and by our launcher.
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
#: Set by srun inside a job step; a batch script has those of the job alone, and is no rank.
_SLURM_NAMES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
#: The GPUs that a process sees, by number or name.
_VISIBLE = "CUDA_VISIBLE_DEVICES"
#: A rank may pause for hours for a full drive: silence is the watcher's business, not the group's.
_GROUP_TIMEOUT = timedelta(days=1)
#: Until all ranks have started; those of other hosts import from slow file systems.
CONNECT_TIMEOUT_S = 600.0
#: Where ranks of one host meet: nobody on the network can reach it.
LOOPBACK = "127.0.0.1"
#: The interface that gloo and NCCL listen on where all ranks are on one host.
_LOOPBACK_INTERFACE = "lo"


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

    def take_gpu(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Make one GPU the only one that this process sees, so that all of its threads compute there.

        To be called before anything asks for GPUs, even whether there are any: CUDA reads the variable when it is first
        asked, and never again. So the GPUs are not counted; a rank beyond the last one sees none. Where every process
        sees one of its own already, as Slurm may arrange it, that stays.
        """
        if self.is_single:
            return
        visible = environment.get(_VISIBLE)
        if visible is None:
            environment[_VISIBLE] = str(self.local_rank)
            return
        names = [name.strip() for name in visible.split(",") if name.strip()]
        if len(names) > 1:
            environment[_VISIBLE] = names[self.local_rank] if self.local_rank < len(names) else ""

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
    """Return host and port at which rank 0 is met, as torchrun or srun have it.

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

    A store that is served on ``LOOPBACK`` listens there alone. On any other host torch's store listens on all
    interfaces of the machine, whatever it is told, and answers whoever asks: that is for networks closed to others.

    Args:
        world: Place of this rank among all.
        host: at which the store is served.
        port: at which the store is served; 0 where this rank serves it: a free one.
        serves: this rank serves it, for as long as the connection exists.
        timeout_s: how long a call waits for a key.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    options: dict[str, Any] = {}
    if serves and host == LOOPBACK:
        listener = socket.create_server((LOOPBACK, port))
        port = listener.getsockname()[1]
        options["master_listen_fd"] = listener.detach()  # the store closes it
    return TCPStore(
        host,
        port,
        world.size,
        is_master=serves,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        **options,
    )


def init(world: World, device: torch.device, store: Store, bus: str = "") -> None:
    """Join the default group of torch.distributed: gloo for host memory, NCCL for that of GPUs.

    Waits for all ranks. The group adds nothing up, so the order of sums is never the library's.

    Args:
        world: Place of this rank among all; alone, it joins nothing.
        device: Where layers run; a GPU is the only one that this process sees.
        store: at which the ranks meet; each run has its own keys in it.
        bus: address of the GPU; "" where it is not known.

    Raises:
        WorldError: some ranks have a GPU and others none, or two of a host compute on the same one.
    """
    import torch.distributed as dist

    if world.is_single:
        return
    if world.num_hosts == 1:
        # Before the group is made: both listen on the interface that this names, else on one that others can reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK_INTERFACE)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK_INTERFACE)
    on_gpu = device.type == "cuda"
    _check_gpus(world, store, bus if on_gpu else None)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("group", store),  # type: ignore[attr-defined]
        rank=world.rank,
        world_size=world.size,
        timeout=_GROUP_TIMEOUT,
        device_id=device if on_gpu else None,
    )


def _check_gpus(world: World, store: Store, bus: str | None) -> None:
    """Make sure that each rank has a GPU of its own, or none has one. All ranks call it.

    NCCL would say no more than "invalid usage"; and where one rank has no GPU, the others would wait for it for ever.

    Args:
        world: Place of this rank among all.
        store: at which the ranks meet.
        bus: address of this rank's GPU, "" where it is not known; None: it has none.
    """
    store.set(f"gpu/{world.rank}", f"{world.host} {'none' if bus is None else bus}")
    found = [store.get(f"gpu/{rank}").decode().rpartition(" ")[::2] for rank in range(world.size)]
    if all(bus == "none" for _, bus in found):
        return
    for rank, (host, bus) in enumerate(found):
        on_host = [each for each in range(world.size) if each // world.local_size == rank // world.local_size]
        if bus == "none":
            count = sum(found[each][1] != "none" for each in on_host)
            raise WorldError(
                f"{world.local_size} processes on {host}, of which {count} found a GPU. Start one for each GPU at "
                'most, or write device = "cpu"'
            )
        same = next((each for each in on_host if each < rank and found[each][1] == bus != ""), None)
        if same is not None:
            raise WorldError(
                f"rank {same} and rank {rank} would compute on the same GPU of {host}, {bus}. Start one process for "
                "each GPU, and let each see all of them or one of its own (CUDA_VISIBLE_DEVICES)"
            )
