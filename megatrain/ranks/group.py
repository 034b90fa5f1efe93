"""Group of a run's ranks, with which a rank connects to the others, exchanges data, sends reports, and ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar

from megatrain.ranks.affinity import gpu_bus_id, nearby_cores, rank_cores
from megatrain.ranks.table import DistributedConfig
from megatrain.ranks.watch import Failure, LauncherConnection, Watcher
from megatrain.ranks.world import CONNECT_TIMEOUT_S, LOOPBACK, World, WorldError, connect, init, rendezvous_address

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["RankGroup"]

T = TypeVar("T")


class RankGroup:
    """Group of a run's ranks, seen from one rank. A single process forms a group of one.

    Args:
        world: Position of this rank among all ranks.
        launcher: Connection to the launcher that started this rank, or None if torchrun or srun started it.
    """

    def __init__(self, world: World, launcher: LauncherConnection | None = None) -> None:
        self.world, self._launcher = world, launcher
        self._watcher: Watcher | None = None
        self._store: Store
        self._on_failure: Callable[[Failure], None] = lambda failure: None

    @classmethod
    def single(cls) -> RankGroup:
        """Return the group of a single process."""
        return cls(World.single())

    @classmethod
    def from_environment(cls) -> RankGroup:
        """Return the group that the environment describes, and select this rank's GPU. Do not connect the ranks yet.

        Raises:
            WorldError: The environment does not describe a valid group.
        """
        launcher, world = LauncherConnection.from_environment(), World.from_environment()
        if not world.is_single:
            # Suppress torch's warnings about broken connections, because the ranks end at slightly different times.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            world.select_gpu()
        return cls(world, launcher)

    def rendezvous(self) -> None:
        """Connect to the other ranks and start to watch them. From then on, if any rank fails, all ranks end.

        Raises:
            WorldError: The rendezvous address is unknown, or not all ranks connected in time.
        """
        if self.world.is_single:
            return
        from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]

        # If torchrun's agent serves the store, the store outlives rank 0.
        has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_server = self.world.is_first and not has_agent_store
        # Use new keys after torchrun restarts the run, so that ranks do not read keys of the previous attempt.
        attempt = f"megatrain-tier/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        try:
            if self._launcher is None:
                host, port = rendezvous_address()
                if self.world.num_hosts == 1 and not has_agent_store:
                    host = LOOPBACK
                store = connect(self.world, host, port, serve=is_server)
            elif is_server:
                store = connect(self.world, host := LOOPBACK, 0, serve=True)
                self._launcher.send(port=(port := store.port))  # type: ignore[attr-defined]
            else:
                host, port = LOOPBACK, _port(self._launcher)
                store = connect(self.world, host, port)
            self._store = PrefixStore(attempt, store)  # rank 0 must keep this object, which serves all ranks
            watcher_store = PrefixStore(attempt, connect(self.world, host, port))
            watcher_store.set(f"host/{self.world.rank}", self.world.host)
            self._watcher = Watcher(
                self.world,
                watcher_store,
                timeout_s=DistributedConfig().timeout,
                launcher=self._launcher,
                on_failure=lambda why: self._on_failure(why),
            )
            self._watcher.start()
            for rank in range(self.world.size):
                self._store.get(f"host/{rank}")  # waits until the rank has connected
        except DistError as error:
            raise WorldError(
                f"not all {self.world.size} ranks met within {CONNECT_TIMEOUT_S:.0f} s: {str(error).splitlines()[0]}"
            ) from error

    def join(self, device: str, table: DistributedConfig) -> None:
        """Pin this rank to its cores, and join the process group in which ranks exchange tensors.

        Raises:
            WorldError: The number of processes differs from the config, or two ranks have the same GPU.
            ConfigError: The config requires a GPU, but the machine does not have one.
        """
        import torch

        from megatrain.machine.this_machine import THIS_MACHINE

        if self.world.is_single:
            return
        assert self._watcher is not None, "the ranks have not met"
        self._watcher.set_timeout(table.timeout)
        if table.processes not in (1, self.world.local_size):
            raise WorldError(
                f"distributed.processes = {table.processes}, but {self.world.local_size} processes were started on "
                "this machine. Remove the key with torchrun and srun, which start the processes themselves"
            )
        if table.threads != "auto":
            torch.set_num_threads(table.threads)
        # Do not raise an error for a missing GPU here, because `init` reports it on all ranks.
        kind, bus = THIS_MACHINE.resolve_device("auto" if device == "cuda" else device), ""
        if kind.type == "cuda":
            kind, bus = torch.device("cuda", 0), gpu_bus_id()
        is_pinned = table.numa == "auto" and self._launcher is not None  # torchrun has its own option for pinning
        if is_pinned and kind.type == "cpu":
            os.sched_setaffinity(0, rank_cores(self.world.local_rank, self.world.local_size))
        init(self.world, kind, self._store, bus)
        THIS_MACHINE.resolve_device(device)
        if is_pinned and kind.type == "cuda":
            self._pin_near_gpu(bus)

    def _pin_near_gpu(self, bus_id: str) -> None:
        """Pin this rank to its share of the cores near its GPU. Ranks with GPUs on one NUMA node divide its cores."""
        cores = sorted(set(nearby_cores(bus_id)) & os.sched_getaffinity(0))
        all_cores = self.gather((self.world.host_index, cores))
        neighbours = [rank for rank, entry in enumerate(all_cores) if entry == (self.world.host_index, cores)]
        if cores:
            os.sched_setaffinity(0, rank_cores(neighbours.index(self.world.rank), len(neighbours), cores))

    # -- communication between ranks -----------------------------------------------------------------------------

    def gather(self, item: T) -> list[T]:
        """Return every rank's item, by rank. This is a collective: all ranks must call it in the same order."""
        if self.world.is_single:
            return [item]
        from megatrain.ranks.messages import gather_messages

        return gather_messages(item)

    def broadcast(self, item: T) -> T:
        """Return rank 0's item on all ranks. Other ranks' items are ignored. This is a collective."""
        if self.world.is_single:
            return item
        from megatrain.ranks.messages import broadcast_message

        message: T = broadcast_message(item)
        return message

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a host tensor to a rank. The other rank must call ``receive``."""
        import torch.distributed as dist

        dist.send(tensor, rank)

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        """Receive a tensor from a rank, and write it to ``tensor``, which must be in host memory."""
        import torch.distributed as dist

        dist.recv(tensor, rank)

    def wait_for_all(self) -> None:
        """Wait until all ranks have called this method."""
        self.gather(None)

    def run_host_leaders_first(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the first rank of each host, then on all other ranks, which can reuse the results."""
        if self.world.is_single:
            return work()
        result: T
        for is_turn in (self.world.local_rank == 0, self.world.local_rank > 0):
            if is_turn:
                result = work()
            self.wait_for_all()
        return result

    def notify(self, text: str) -> None:
        """Show a message to the user through rank 0, with this rank's number unless it is 0. Thread-safe."""
        if self._watcher is not None:
            self._watcher.notify(text)

    def listen(
        self, *, on_notice: Callable[[str], None] | None = None, on_failure: Callable[[Failure], None] | None = None
    ) -> None:
        """Set callbacks for notices from other ranks, and for a failure that is about to end this process.

        Both callbacks are called on one of the watcher's threads.
        """
        if on_failure is not None:
            self._on_failure = on_failure
        if self._watcher is not None and on_notice is not None:
            self._watcher.on_notice = on_notice

    def send_to_launcher(self, **message: object) -> None:
        """Send a message to the launcher, if the run has one."""
        if self._launcher is not None:
            self._launcher.send(**message)

    # -- end of the process --------------------------------------------------------------------------------------

    def fail(self, message: str, exit_code: int, *, is_own: bool) -> NoReturn:
        """End all ranks because this rank failed. Never returns.

        Args:
            exit_code: Exit code of all processes.
            is_own: See ``Watcher.fail``.
        """
        _flush()
        if self._watcher is not None:
            self._watcher.fail(message, exit_code, is_own=is_own)
        failure = Failure(self.world.rank, self.world.host, exit_code, message)
        if self._launcher is not None:
            self._launcher.send(failed=failure.to_json())
        else:
            os.write(2, f"error: {failure}\n".encode(errors="replace"))
        os._exit(exit_code)

    def end(self, exit_code: int) -> NoReturn:
        """End this process after a run with several ranks. Never returns.

        This skips the interpreter's shutdown, which can deadlock. When a gloo group is destroyed, it holds
        the GIL and joins a thread. That thread can be waiting for the GIL.
        """
        if self._watcher is not None:
            self._watcher.finish()
        _flush()
        self.send_to_launcher(done=exit_code)
        os._exit(exit_code)


def _port(launcher: LauncherConnection) -> int:
    """Wait until the launcher has received the rendezvous port from rank 0, and return the port."""
    messages: Sequence[dict[str, object]] | None = []
    while messages is not None:
        for message in messages:
            if "port" in message:
                return int(str(message["port"]))
            if "failed" in message:
                os._exit(Failure.from_json(str(message["failed"])).exit_code)
        messages = launcher.receive(CONNECT_TIMEOUT_S)
    os._exit(1)  # the launcher has ended


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # raised if the stream is closed
            continue
