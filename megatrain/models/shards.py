"""Safetensors files written tensor by tensor: sizes are known up front, so the header goes first."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from megatrain.models.folder import INDEX_FILE, PIECE_BYTES, SINGLE_FILE, ModelFolder, dtype_name, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

__all__ = ["DamagedShardError", "ShardPlan", "ShardWriter", "plan_shards"]


class DamagedShardError(Exception):
    """What was read back is not what was written."""


@dataclass(frozen=True)
class ShardPlan:
    """One file: its bytes before the tensors, and where each tensor goes."""

    file_name: str
    header: bytes
    offsets: dict[str, int]
    nbytes: int


def plan_shards(tensors: Mapping[str, Tensor], max_shard_nbytes: int) -> list[ShardPlan]:
    """Cut tensors (on meta, in writing order) into files of at most ``max_shard_nbytes`` of weights each.

    A tensor that is larger than that gets a file of its own, as in transformers.
    """
    assert max_shard_nbytes > 0, max_shard_nbytes
    groups: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if groups[-1] and filled + tensor.nbytes > max_shard_nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += tensor.nbytes
    if len(groups) == 1:
        return [_plan_file(SINGLE_FILE, groups[0], tensors)]
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    return [_plan_file(name, group, tensors) for name, group in zip(names, groups, strict=True)]


def _plan_file(file_name: str, names: list[str], tensors: Mapping[str, Tensor]) -> ShardPlan:
    # Wide numbers first: then every tensor is aligned to its own element, whatever the mix of dtypes.
    ordered = sorted(names, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name in ordered:
        tensor = tensors[name]
        starts[name] = end
        end += tensor.nbytes
        header[name] = {
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data_start = 8 + len(text)
    offsets = {name: data_start + start for name, start in starts.items()}
    return ShardPlan(file_name, len(text).to_bytes(8, "little") + text, offsets, data_start + end)


class ShardWriter:
    """Writes the planned files of one folder and checks them by reading them back.

    Attributes:
        checksums: tensor name -> xxh3-64 of its bytes in the file, hexadecimal.
    """

    def __init__(self, folder: Path, shards: Sequence[ShardPlan], tensors: Mapping[str, Tensor]) -> None:
        self._folder, self._shards, self._tensors = folder, shards, tensors
        self._shard_of = {name: shard for shard in shards for name in shard.offsets}
        self._started: set[str] = set()
        self.checksums: dict[str, str] = {}

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor (any floating dtype; cast on the way, a small piece at a time)."""
        expected = self._tensors[name]
        assert tensor.shape == expected.shape, (name, tensor.shape, expected.shape)
        flat = tensor.detach().reshape(-1)
        step = max(1, PIECE_BYTES // expected.dtype.itemsize)
        starts = range(0, flat.numel(), step)
        self._write(name, (flat[start : start + step].to(expected.dtype).contiguous() for start in starts))

    def copy(self, name: str, folder: ModelFolder) -> None:
        """Copy the bytes of tensor ``name`` from another folder."""
        self._write(name, (piece for _, piece in folder.pieces(name)))

    def _write(self, name: str, pieces: Iterable[Tensor]) -> None:
        assert name not in self.checksums, name
        shard = self._shard_of[name]
        path = self._folder / shard.file_name
        if shard.file_name not in self._started:
            self._started.add(shard.file_name)
            with path.open("xb") as file:
                file.write(shard.header)
                file.truncate(shard.nbytes)
        digest = xxhash.xxh3_64()
        with path.open("r+b", buffering=0) as file:
            file.seek(shard.offsets[name])
            for piece in pieces:
                memory = tensor_bytes(piece)
                digest.update(memory)
                while memory:
                    memory = memory[file.write(memory) :]
        self.checksums[name] = digest.hexdigest()

    def finish(self) -> None:
        """Write the index of several files, and bring everything to the drive."""
        unwritten = sorted(set(self._tensors) - set(self.checksums))
        assert not unwritten, unwritten[:5]
        if len(self._shards) > 1:
            total = sum(tensor.nbytes for tensor in self._tensors.values())
            metadata = {"total_parameters": sum(t.numel() for t in self._tensors.values()), "total_size": total}
            weight_map = {name: self._shard_of[name].file_name for name in sorted(self._tensors)}
            text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2) + "\n"
            (self._folder / INDEX_FILE).write_text(text, encoding="utf-8")
        for path in sorted(self._folder.iterdir()):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that verify reads the drive

    def verify(self) -> None:
        """Read headers and every tensor back and compare the checksums. Needs ``config.json`` in the folder.

        Raises:
            DamagedShardError: the drive gave back something else; names the tensor.
            ModelFolderError: a header is damaged.
        """
        folder = ModelFolder(self._folder)
        for name, expected in self._tensors.items():
            record = folder.records.get(name)
            if record is None or record.shape != tuple(expected.shape) or record.dtype != expected.dtype:
                raise DamagedShardError(f"{self._folder}: the header of {name} reads back as {record}")
            digest = xxhash.xxh3_64()
            for _, piece in folder.pieces(name):
                digest.update(tensor_bytes(piece))
            if digest.hexdigest() != self.checksums[name]:
                raise DamagedShardError(
                    f"{record.file}: tensor {name} reads back with checksum {digest.hexdigest()}, "
                    f"written was {self.checksums[name]}. The drive or the memory of this machine is faulty"
                )
