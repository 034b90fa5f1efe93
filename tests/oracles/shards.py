"""Writes data shards in every format that supports streaming."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def lines(rows: Sequence[Row]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_jsonl(folder: Path, shards: Sequence[Sequence[Row]]) -> None:
    for number, rows in enumerate(shards):
        (folder / f"part-{number:03d}.jsonl").write_bytes(lines(rows))


def write_gz(folder: Path, shards: Sequence[Sequence[Row]]) -> None:
    for number, rows in enumerate(shards):
        (folder / f"part-{number:03d}.jsonl.gz").write_bytes(gzip.compress(lines(rows)))


def write_zst(folder: Path, shards: Sequence[Sequence[Row]]) -> None:
    """Write two zstd frames per file, as programs that append to a file do."""
    import pyarrow

    codec = pyarrow.Codec("zstd")
    for number, rows in enumerate(shards):
        half = len(rows) // 2
        frames = [codec.compress(lines(part), asbytes=True) for part in (rows[:half], rows[half:]) if part]
        (folder / f"part-{number:03d}.jsonl.zst").write_bytes(b"".join(frames))


def write_parquet(folder: Path, shards: Sequence[Sequence[Row]]) -> None:
    """Write row groups of three rows, so that cursors point to the start, the middle and the end of a group."""
    import pyarrow
    import pyarrow.parquet

    for number, rows in enumerate(shards):
        table = pyarrow.Table.from_pylist(list(rows))
        pyarrow.parquet.write_table(table, folder / f"part-{number:03d}.parquet", row_group_size=3)


WRITERS: Mapping[str, Callable[[Path, Sequence[Sequence[Row]]], None]] = {
    "jsonl": write_jsonl,
    "gz": write_gz,
    "zst": write_zst,
    "parquet": write_parquet,
}
