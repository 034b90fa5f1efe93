"""Shards of streamed sources and settings of sources are compared as whole values."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatrain.data.rows_report import DataError
from megatrain.data.shards import Shard, Shards
from megatrain.data.table import DatasetConfig, EvalSetConfig, weights_at


@pytest.mark.parametrize(
    ("name", "shard"),
    [
        ("a.jsonl", True),
        ("a.ndjson", True),
        ("A.JSONL", True),
        ("a.jsonl.gz", True),
        ("a.ndjson.zst", True),
        ("a.jsonl.zstd", True),
        ("a.parquet", True),
        ("a.parquet.gz", False),
        ("a.json", False),
        ("a.csv.gz", False),
    ],
)
def test_kinds_of_shards(tmp_path: Path, name: str, shard: bool) -> None:
    (tmp_path / name).write_bytes(b"12345")
    if shard:
        assert Shards(str(tmp_path)).shards == [Shard(str(tmp_path / name), name, 5)]
        return
    with pytest.raises(DataError) as refused:
        Shards(str(tmp_path))
    assert str(refused.value) == (
        f"{tmp_path}: no file there can be streamed, for example '{tmp_path / name}'. Supported shards: .jsonl (also "
        "compressed: .jsonl.gz, .jsonl.zst or .jsonl.zstd) and .parquet"
    )


def test_shards_are_sorted_and_named_below_their_common_folder(tmp_path: Path) -> None:
    for name, count in (("data/b/2.jsonl", 3), ("data/a/1.jsonl", 1), ("data/b/10.jsonl", 2), ("data/b/notes.md", 9)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("\n" * count)
    found = [("a/1.jsonl", 1), ("b/10.jsonl", 2), ("b/2.jsonl", 3)]
    for path in ("", "data", "data/**/*.jsonl"):
        assert Shards(str(tmp_path / path)).describe() == found
    assert Shards(str(tmp_path / "data/b")).describe() == [("10.jsonl", 2), ("2.jsonl", 3)]
    assert Shards(str(tmp_path / "data/b/2.jsonl")).describe() == [("2.jsonl", 3)]
    assert len(Shards(str(tmp_path / "data/*/1*.jsonl"))) == 2
    with pytest.raises(DataError) as refused:
        Shards(str(tmp_path / "none"))
    assert str(refused.value) == (
        f"{tmp_path}/none: there is no such file or folder, or the folder is empty. Check the path"
    )
    with pytest.raises(DataError) as refused:
        Shards("nope://bucket/x")
    assert str(refused.value).startswith("nope://bucket/x: it cannot be opened: ")
    assert str(refused.value).endswith(". Use the path of a folder, or a URL that fsspec supports")


def test_rows_of_a_shard_from_any_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 0}\n\n{"n": 1}\n{"n": 2}\n')
    rows = [(f"{path} line {line}", {"n": number}) for number, line in enumerate((1, 3, 4))]
    table = tmp_path / "b.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"n": list(range(5))}), table, row_group_size=2)
    shards = Shards(str(tmp_path))
    for start in range(5):
        assert list(shards.rows(0, start)) == rows[start:]
        assert list(shards.rows(1, start)) == [(f"{table} row {n + 1}", {"n": n}) for n in range(start, 5)]


def test_weights_at_a_step() -> None:
    schedules: list[dict[str, float]] = [{"20": 0.0, "5": 3.0}, {}, {"5": 4.0, "100": 1.0}]
    sources = [
        DatasetConfig(path="x", weight=weight, weight_from_step=schedule)
        for weight, schedule in zip((1.0, 2.0, 0.5), schedules, strict=True)
    ]
    for step, expected in (
        (0, ([1.0, 2.0, 0.5], 5)),
        (4, ([1.0, 2.0, 0.5], 5)),
        (5, ([3.0, 2.0, 4.0], 20)),
        (19, ([3.0, 2.0, 4.0], 20)),
        (20, ([0.0, 2.0, 4.0], 100)),
        (100, ([0.0, 2.0, 1.0], None)),
    ):
        assert weights_at(sources, step) == expected


def test_names_and_limits_of_evaluation_sets() -> None:
    for path, name in (
        ("held_out.jsonl", "held_out"),
        ("data/dev/", "dev"),
        ("data/val-*.jsonl", "val-"),
        ("x/a.b2.jsonl.gz", "a"),
        ("v1.5/text.txt", "text"),
        ("*.txt", "eval"),
        ("me/set", "set"),
    ):
        assert EvalSetConfig(path=path).display_name == name
        assert EvalSetConfig(path=path, name="own").display_name == "own"
    given = EvalSetConfig(path="x", name="own", format="text", weight=2.0, max_samples=5)
    for limit, expected in ((None, 5), (3, 3), (7, 5)):
        assert given.as_source(limit) == DatasetConfig(path="x", format="text", weight=2.0, max_samples=expected)
    assert EvalSetConfig(path="x").as_source().max_samples is None
    assert EvalSetConfig(path="x").as_source(4).max_samples == 4
