"""Sides in `links.py` that use kvikio, zarr, safetensors or DeepSpeed, each with its fastest settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.peers.base import (
    MIXED,
    READ,
    WRITE,
    Sample,
    Side,
    SkippedError,
    Work,
    drop_cached,
    fill_randomly,
    require,
    sync_files,
    timed,
)
from tiered.ext import HostSlab
from tiered.units import PAGE_BYTES, MiB

#: Limit for compiling DeepSpeed's operator at its first use, which takes minutes.
COMPILE_TIMEOUT_S = 1200.0
#: Limit for code that hangs, such as cuFile's driver.
START_TIMEOUT_S = 60.0
#: kvikio's futures keep neither the file nor the memory alive, so the code must hold references to both.
_KVIKIO_READS = """
import kvikio, mmap, sys
file, memory = kvikio.CuFile(sys.executable), mmap.mmap(-1, 4096)
assert file.pread(memory).get() == 4096
"""
_DEEPSPEED_LOADS = "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load(verbose=False)"


class KvikioSide(Side):
    """kvikio with 4 threads, 16 MiB tasks, O_DIRECT both ways, and the same kind of host memory as our slots."""

    name = "kvikio"

    def __init__(self, work: Work, path: Path) -> None:
        # Without its driver module, cuFile hangs at startup. Compat mode uses POSIX I/O, which suits host memory.
        if not (os.path.exists("/proc/modules") and os.path.exists("/run/udev")):
            os.environ["KVIKIO_COMPAT_MODE"] = "ON"
        require(_KVIKIO_READS, START_TIMEOUT_S)
        import kvikio
        import kvikio.defaults

        kvikio.defaults.set(
            {"num_threads": 4, "task_size": 16 * MiB, "auto_direct_io_read": True, "auto_direct_io_write": True}
        )
        self._work, self._path = work, path
        self._file = kvikio.CuFile(str(path), "r+")
        self._slabs = [HostSlab(work.block_nbytes) for _ in range(work.num_blocks)]
        for slab in self._slabs:
            fill_randomly(slab.tensor)

    def measure(self, operation: str) -> Sample:
        """Start all requests, then wait until each is complete."""
        reads, writes = _blocks(self._work, operation)
        with timed() as sample:
            futures = [self._start(self._file.pread, i) for i in reads] + [
                self._start(self._file.pwrite, i) for i in writes
            ]
            for future in futures:
                future.get()
            if writes:
                sync_files([self._path])
        return sample

    def _start(self, call: Any, number: int) -> Any:
        size = self._work.block_nbytes
        return call(self._slabs[number].tensor.numpy(), size=size, file_offset=number * size)

    def close(self) -> None:
        """Close the file and free the memory."""
        self._file.close()
        for slab in self._slabs:
            slab.close()


class ZarrSide(Side):
    """zarr with one uncompressed array and a chunk per block. Each write creates new files."""

    name = "zarr"
    operations = (READ, WRITE)

    def __init__(self, work: Work) -> None:
        import zarr

        self._folder = work.folder / self.name
        self._array = zarr.create_array(
            str(self._folder),
            shape=(work.nbytes,),
            chunks=(work.block_nbytes,),
            dtype="uint8",
            compressors=None,
            filters=None,
            config={"write_empty_chunks": True},  # False would scan every chunk for nonzero values
        )
        self._tensor = torch.empty(work.nbytes, dtype=torch.uint8)
        fill_randomly(self._tensor)
        self._write()

    def _chunks(self) -> list[Path]:
        return sorted((self._folder / "c").iterdir())

    def _write(self) -> None:
        self._array[:] = self._tensor.numpy()
        sync_files(self._chunks())

    def measure(self, operation: str) -> Sample:
        """Read the array into a new tensor, or write it and sync."""
        if operation == READ:
            drop_cached(self._chunks())
        with timed() as sample:
            if operation == READ:
                loaded = torch.from_numpy(np.asarray(self._array[:]))
            else:
                self._write()
        assert operation == WRITE or loaded.numel() == self._tensor.numel()
        return sample

    def close(self) -> None:
        """Do nothing, because this side keeps no file open."""


class SafetensorsSide(Side):
    """safetensors: a file per block, ``load_file`` with every page touched, and ``save_file``."""

    name = "safetensors"
    operations = (READ, WRITE)

    def __init__(self, work: Work) -> None:
        folder = work.folder / self.name
        folder.mkdir()
        self._paths = [folder / f"{number}.safetensors" for number in range(work.num_blocks)]
        self._tensor = torch.empty(work.block_nbytes, dtype=torch.uint8)
        fill_randomly(self._tensor)
        self._write()

    def _write(self) -> None:
        from safetensors.torch import save_file

        for path in self._paths:
            save_file({"block": self._tensor}, path)
        sync_files(self._paths)

    def measure(self, operation: str) -> Sample:
        """Load all files into memory, or save and sync all files."""
        from safetensors.torch import load_file

        if operation == READ:
            drop_cached(self._paths)
        with timed() as sample:
            if operation == READ:
                for path in self._paths:
                    load_file(path)["block"][::PAGE_BYTES].sum()  # touching every page reads the bytes from the drive
            else:
                self._write()
        return sample

    def close(self) -> None:
        """Do nothing, because this side keeps no file open."""


class DeepSpeedSide(Side):
    """DeepSpeed's async_io with its own page-locked tensors, and one wait for all requests of a measurement."""

    def __init__(self, work: Work, path: Path, *, request_mib: int, depth: int, num_threads: int) -> None:
        self.name = f"deepspeed_aio_{request_mib}M_qd{depth}_x{num_threads}"
        os.environ.setdefault("DS_ACCELERATOR", "cpu" if not torch.cuda.is_available() else "cuda")
        # Put this interpreter's ninja first, because DeepSpeed recompiles the operator for a different ninja.
        os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
        require(_DEEPSPEED_LOADS, COMPILE_TIMEOUT_S)
        from deepspeed.ops.op_builder import AsyncIOBuilder

        self._work, self._path = work, path
        self._handle = (
            AsyncIOBuilder()
            .load(verbose=False)
            .aio_handle(
                block_size=request_mib * MiB,
                queue_depth=depth,
                single_submit=False,
                overlap_events=True,
                intra_op_parallelism=num_threads,
            )
        )
        example = torch.empty(0, dtype=torch.uint8)
        self._tensors = [self._handle.new_cpu_locked_tensor(work.block_nbytes, example) for _ in range(work.num_blocks)]
        for tensor in self._tensors:
            fill_randomly(tensor)

    def measure(self, operation: str) -> Sample:
        """Start all requests, then wait once for all of them."""
        reads, writes = _blocks(self._work, operation)
        with timed() as sample:
            for number in reads:
                self._start(self._handle.async_pread, number)
            for number in writes:
                self._start(self._handle.async_pwrite, number)
            num_done = self._handle.wait()
            if writes:
                sync_files([self._path])
        assert num_done == self._work.num_blocks, (num_done, self._work.num_blocks)
        return sample

    def _start(self, call: Any, number: int) -> None:
        result = call(self._tensors[number], str(self._path), number * self._work.block_nbytes)
        if result != 0:
            raise SkippedError(f"async_io refused a request with {result}")

    def close(self) -> None:
        """Free the page-locked memory."""
        for tensor in self._tensors:
            self._handle.free_cpu_locked_tensor(tensor)


def _blocks(work: Work, operation: str) -> tuple[Sequence[int], Sequence[int]]:
    """Return the blocks that an operation reads, and the blocks that it writes."""
    if operation == MIXED:
        return work.halves
    everything = range(work.num_blocks)
    return (everything, range(0)) if operation == READ else (range(0), everything)
