"""Shards of rows, written in every format that is streamed; MDS by its published layout, byte by byte."""

from __future__ import annotations

import gzip
import json
import struct
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
    """Two frames to a file, as programs that append write it."""
    import pyarrow

    codec = pyarrow.Codec("zstd")
    for number, rows in enumerate(shards):
        half = len(rows) // 2
        frames = [codec.compress(lines(part), asbytes=True) for part in (rows[:half], rows[half:]) if part]
        (folder / f"part-{number:03d}.jsonl.zst").write_bytes(b"".join(frames))


def write_parquet(folder: Path, shards: Sequence[Sequence[Row]]) -> None:
    """Groups of three rows: a cursor stands before, in and behind them."""
    import pyarrow
    import pyarrow.parquet

    for number, rows in enumerate(shards):
        table = pyarrow.Table.from_pylist(list(rows))
        pyarrow.parquet.write_table(table, folder / f"part-{number:03d}.parquet", row_group_size=3)


def write_mds(folder: Path, shards: Sequence[Sequence[Row]], *, packed: bool = False) -> None:
    """Shards of columns of texts, of whole numbers and of arrays, and their index."""
    names = sorted(shards[0][0])
    kinds = [_kind(shards[0][0][name]) for name in names]
    entries = []
    for number, rows in enumerate(shards):
        samples = []
        for row in rows:
            values = [_encoded(row[name]) for name in names]
            sizes = [len(value) for value, (_, size) in zip(values, kinds, strict=True) if size is None]
            samples.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(values))
        config = json.dumps({"column_names": names}).encode()
        at = 4 * (len(rows) + 2) + len(config)
        offsets = [at]
        for sample in samples:
            offsets.append(offsets[-1] + len(sample))
        data = struct.pack(f"<{len(offsets) + 1}I", len(rows), *offsets) + config + b"".join(samples)
        name = f"shard.{number:05d}.mds"
        entry = {
            "column_encodings": [kind for kind, _ in kinds],
            "column_names": names,
            "column_sizes": [size for _, size in kinds],
            "compression": "zstd:7" if packed else None,
            "format": "mds",
            "hashes": [],
            "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
            "samples": len(rows),
            "size_limit": 1 << 26,
            "version": 2,
            "zip_data": None,
        }
        if packed:
            import pyarrow

            data = pyarrow.Codec("zstd").compress(data, asbytes=True)
            entry["zip_data"] = {"basename": name + ".zstd", "bytes": len(data), "hashes": {}}
            name += ".zstd"
        (folder / name).write_bytes(data)
        entries.append(entry)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))


def write_packed_mds(folder: Path, shards: Sequence[Sequence[Row]]) -> None:
    write_mds(folder, shards, packed=True)


def _kind(value: object) -> tuple[str, int | None]:
    if isinstance(value, int):
        return "int", 8
    return ("ndarray:uint16", None) if isinstance(value, list) else ("str", None)


def _encoded(value: Any) -> bytes:
    if isinstance(value, int):
        return struct.pack("<q", value)
    if isinstance(value, list):  # one dimension, of less than 256 values
        return bytes([1 << 2, len(value)]) + struct.pack(f"<{len(value)}H", *value)
    return str(value).encode()


WRITERS: Mapping[str, Callable[[Path, Sequence[Sequence[Row]]], None]] = {
    "jsonl": write_jsonl,
    "gz": write_gz,
    "zst": write_zst,
    "parquet": write_parquet,
    "mds": write_mds,
    "mds.zstd": write_packed_mds,
}
