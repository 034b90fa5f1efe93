"""Reads a checkpoint's blocks as if a single process had written them.

The ranks store a block as consecutive shards of equal length, zero-padded at the end (`megatrain/ranks/shards.py`). The
reader joins the shards. A different number of ranks, a single process, or an export therefore reads the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from megatrain.checkpoint.document import Checkpoint
from megatrain.checkpoint.listing import read_manifests, whole_blocks
from megatrain.checkpoint.locations import drives_of_config
from tiered import BlockRecord, BlockSpec, GenerationReader
from tiered.errors import BlockNotFoundError
from tiered.ext import dtype_from_name

__all__ = ["CheckpointReader"]


class CheckpointReader:
    """Reader for the blocks of a checkpoint.

    The reader takes no lock. It reads and verifies each rank's shard in fixed-size pieces. If parts have
    moved, the reader searches the drives in the run's last config.

    Attributes:
        blocks: Records by key, with the shape of the whole block and the checksums of its shards.

    Raises:
        GenerationError: A generation is missing, does not match its checksum, or lacks a block. With several ranks, the
            message contains the rank.
    """

    piece_bytes = GenerationReader.piece_bytes

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        search = drives_of_config(checkpoint.folder.parent)
        self.blocks: dict[str, BlockRecord] = whole_blocks(checkpoint, read_manifests(checkpoint))
        self._readers: list[GenerationReader] = []
        for rank, part in enumerate(checkpoint.ranks):
            paths = [path / part.path for path in search]
            with checkpoint.add_rank_to_errors(rank):
                self._readers.append(GenerationReader(checkpoint.folder / part.path, part.generation, paths))

    def spec(self, key: str) -> BlockSpec:
        """Return the spec of a whole block."""
        if key not in self.blocks:
            raise BlockNotFoundError(key, f"the checkpoint has {len(self.blocks)} blocks")
        record = self.blocks[key]
        return BlockSpec(key, record.shape, dtype_from_name(record.dtype), record.home)

    def read(self, key: str, out: torch.Tensor) -> None:
        """Read a whole block into ``out`` and verify it; see ``GenerationReader.read``."""
        spec = self.spec(key)
        if out.dtype != spec.dtype or out.numel() != spec.num_elements or not out.is_contiguous():
            raise ValueError(f"block '{key}' is {spec.shape} of {spec.dtype}, not {tuple(out.shape)} of {out.dtype}")
        if len(self._readers) == 1 and self._shard_bytes(key) == spec.nbytes:
            self._readers[0].read(key, out)  # reading into ``out`` avoids a copy
            return
        memory = out.reshape(-1).view(torch.uint8)
        for start in range(0, spec.nbytes, self.piece_bytes):
            stop = min(start + self.piece_bytes, spec.nbytes)
            memory[start:stop] = self.read_range(key, start, stop)

    def read_range(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Read and verify bytes ``start`` to ``stop`` of a block from the ranks that store them.

        Returns:
            1-D uint8 tensor in host memory.

        Raises:
            CorruptBlockError: The block is damaged. With several ranks, the message contains the rank.
            GenerationError: A part is missing. With several ranks, the message contains the rank.
            TransferError: The drive returned an error.
        """
        spec = self.spec(key)
        if not 0 <= start <= stop <= spec.nbytes:
            raise ValueError(f"block '{key}' has {spec.nbytes} bytes, not {start} to {stop}")
        length = self._shard_bytes(key)
        parts: list[torch.Tensor] = []
        for rank, reader in enumerate(self._readers):
            begin, end = max(start, rank * length), min(stop, (rank + 1) * length)
            if begin < end:
                with self.checkpoint.add_rank_to_errors(rank):
                    parts.append(reader.read_range(key, begin - rank * length, end - rank * length))
        return parts[0] if len(parts) == 1 else torch.cat(parts or [torch.empty(0, dtype=torch.uint8)])

    def _shard_bytes(self, key: str) -> int:
        return self._readers[0].blocks[key].nbytes

    def problems(self, on_block: Callable[[str], None] = lambda key: None) -> Iterator[str]:
        """Read all blocks. Yield a sentence about each problem, with the rank if there are several ranks.

        Args:
            on_block: Called with the key of each block that was read.
        """
        for rank, reader in enumerate(self._readers):
            for problem in reader.problems(lambda record: on_block(record.key), with_top=False):
                yield f"rank {rank}: {problem}" if self.checkpoint.is_listed else problem
