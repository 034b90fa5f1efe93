"""The interface for copying checkpoints during training, and a null implementation for runs without copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from megatrain.checkpoint.local_copier import LocalCopier
from megatrain.checkpoint.remote_copier import RemoteCopier

if TYPE_CHECKING:
    from megatrain.checkpoint.document import Checkpoint
    from megatrain.checkpoint.table import CheckpointSpec
    from megatrain.checkpoint.writer import Gather

__all__ = ["Copier", "NoCopier", "open_copier"]


class Copier(Protocol):
    """Interface for copying a run's checkpoints during training. The training thread calls it.

    All ranks must call the same methods in the same order, because each rank copies its own part.
    """

    @property
    def remote_save_number(self) -> int:
        """Largest save number among the copies that were at the URL when the run started, or 0 if there were none."""

    def offer(self, checkpoint: Checkpoint, *, is_last: bool = False) -> None:
        """Copy a new checkpoint, if a copy is due.

        Args:
            checkpoint: Checkpoint in the stores of this run's ranks.
            is_last: Whether this is the last checkpoint of the process, which is always copied.
        """

    def poll(self) -> None:
        """Report a finished copy, and start the next one. Raises ``CheckpointError`` if another run uses the URL."""

    def wait_until_prunable(self, checkpoints: Sequence[Checkpoint], should_stop: Callable[[], bool]) -> None:
        """Wait until the next commit may prune these checkpoints.

        Args:
            should_stop: Function that returns whether a stop was requested. It is called during the wait.
        """

    def finish(self) -> None:
        """Wait for all copies that are due, without throttling.

        Raises:
            CheckpointError: A copy cannot be sent to its URL.
        """

    def close(self) -> None:
        """Cancel the copy in progress. Idempotent."""


class NoCopier:
    """Copier that does nothing, for runs without copies or with complete checkpoints in ``output_dir``."""

    remote_save_number = 0

    def offer(self, checkpoint: Checkpoint, *, is_last: bool = False) -> None: ...

    def poll(self) -> None: ...

    def wait_until_prunable(self, checkpoints: Sequence[Checkpoint], should_stop: Callable[[], bool]) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


def open_copier(
    spec: CheckpointSpec,
    drive_bytes: int,
    on_message: Callable[[str], None],
    rank: int = 0,
    gather: Gather = lambda item: [item],
) -> Copier:
    """Return the copier that ``[checkpoint]`` configures.

    Args:
        drive_bytes: Bytes of one checkpoint that are on drives and must be copied, summed over ranks. 0 if
            ``output_dir`` contains complete checkpoints.

    Raises:
        CheckpointError: The URL of the copies cannot be read.
    """
    if spec.table.copy_url is not None:
        return RemoteCopier(spec, on_message, rank, gather)
    if spec.table.num_copies > 0 and drive_bytes > 0:
        return LocalCopier(spec, drive_bytes, on_message, rank, gather)
    return NoCopier()
