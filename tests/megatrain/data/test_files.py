"""Supported kinds of files, splits in folders, and hub datasets."""

from __future__ import annotations

import builtins
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatrain.data.files import _PIECE_CHARACTERS, find_files, read_text
from megatrain.data.formats import Conversation, Document, PromptCompletion
from megatrain.data.row_kind import CHATS
from megatrain.data.rows_report import DataError, RowError
from megatrain.data.sources import fetch_dataset, is_hub_name, read_source
from megatrain.data.table import DatasetConfig
from oracles.rows_in_memory import read_rows

ROWS = [{"prompt": "p\u00e9", "completion": 'c,\n"d"'}, {"prompt": "q", "completion": "e"}]
EXPECTED = [("p\u00e9", 'c,\n"d"'), ("q", "e")]


def pairs(path: Path, **options: Any) -> list[tuple[str, str]]:
    rows = list(read_rows(str(path), **options))
    return [(row.prompt, row.completion) for row in rows if isinstance(row, PromptCompletion)]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "jsonl.gz"])
def test_files_of_text(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    if suffix in ("csv", "tsv"):
        mark = "," if suffix == "csv" else "\t"
        quoted = [[f'"{text}"'.replace('"d"', '""d""') for text in row.values()] for row in ROWS]
        lines = "".join(mark.join(cells) + "\n" for cells in [["prompt", "completion"], *quoted])
    content = json.dumps(ROWS) if suffix == "json" else lines
    path.write_bytes(gzip.compress(content.encode()) if suffix.endswith("gz") else content.encode())
    assert pairs(path) == EXPECTED


def test_lines_in_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert pairs(path) == EXPECTED


@pytest.mark.parametrize("kind", ["parquet", "arrow file", "arrow stream", "feather"])
def test_arrow_files(tmp_path: Path, kind: str) -> None:
    import pyarrow
    import pyarrow.feather
    import pyarrow.ipc
    import pyarrow.parquet

    rows = [{"messages": [{"role": "user", "content": row["prompt"]}], "number": 5} for row in ROWS * 300]
    table = pyarrow.Table.from_pylist(rows)
    path = tmp_path / f"a.{'arrow' if 'arrow' in kind else kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=100)
    elif kind == "feather":
        pyarrow.feather.write_feather(table, path)
    else:
        make = pyarrow.ipc.new_file if kind == "arrow file" else pyarrow.ipc.new_stream
        with make(str(path), table.schema) as writer:
            writer.write_table(table)
    found = list(read_rows(str(path)))
    assert len(found) == 600
    assert found[-1] == Conversation(({"role": "user", "content": "q"},), f"{path} row 600")
    assert len(list(read_rows(str(path), max_samples=7))) == 7


def test_arrow_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"a.parquet: .parquet files need pyarrow. Install it: pip install"):
        list(read_rows(str(tmp_path / "a.parquet")))


def test_a_damaged_arrow_file_names_it(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [str(n) * 50 for n in range(5000)]}), path)
    whole = bytearray(path.read_bytes())
    whole[100:-200] = bytes(len(whole) - 300)
    path.write_bytes(bytes(whole))
    with pytest.raises(DataError, match=r"a.parquet.*: this .parquet file cannot be read"):
        list(read_rows(str(path)))


def folder_with(folder: Path, *names: str) -> str:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name}) + "\n")
    return str(folder)


def test_splits_of_a_folder(tmp_path: Path) -> None:
    path = folder_with(tmp_path, "data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl")
    assert [file.name for file in find_files(path)] == ["train-00000-of-00001.jsonl"]
    assert [file.name for file in find_files(path, "test")] == ["test-00000-of-00001.jsonl"]
    with pytest.raises(DataError, match=r'no file in the folder belongs to split "dev". Splits found: train, test'):
        find_files(path, "dev")


def test_splits_without_train_have_to_be_named(tmp_path: Path) -> None:
    path = folder_with(tmp_path, "val.jsonl", "test.jsonl")
    with pytest.raises(DataError, match=r'the folder contains several splits: val, test. Set split = "val"'):
        find_files(path)


def test_a_folder_without_splits_is_read_whole(tmp_path: Path) -> None:
    path = folder_with(tmp_path, "train.jsonl", "more.jsonl", "state.json", "dataset_info.json")
    assert [file.name for file in find_files(path)] == ["more.jsonl", "train.jsonl"]
    assert len(find_files(str(tmp_path / "train.jsonl"), "train")) == 1
    with pytest.raises(DataError, match=r'split = "test" needs a folder or a dataset of the hub'):
        find_files(str(tmp_path / "train.jsonl"), "test")


def test_only_mds_shard_files_are_refused(tmp_path: Path) -> None:
    """Files converted as the error message asks may keep the shard's name. A folder with this name is not a shard."""
    names = ["old.mds/b.jsonl", "shard.00000.mds.jsonl", "shard.00001.mds.parquet"]
    path = folder_with(tmp_path, *reversed(names))
    assert [file.relative_to(path).as_posix() for file in find_files(path)] == names
    assert len(find_files(str(tmp_path / names[1]))) == 1
    (tmp_path / "old.mds" / "shard.00000.mds.zstd").touch()
    with pytest.raises(DataError, match=r"shard\.00000\.mds\.zstd: MDS shards are not supported"):
        find_files(path)


def test_a_large_text_comes_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    line = "Call me Ishmael. Some years ago\r\n"
    path.write_bytes(line.encode() * (2 * _PIECE_CHARACTERS // len(line)))
    pieces = list(read_text(path))
    assert [is_last for _, is_last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) >= 2
    assert all(text.endswith("\n") for text, _ in pieces[:-1])
    assert "".join(text for text, _ in pieces) == path.read_text()
    rows = list(read_rows(str(path)))
    assert rows[0] == Document(pieces[0][0], str(path), is_start=True, is_end=False)


def test_text_without_line_breaks_is_split(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * (_PIECE_CHARACTERS + 5))
    assert "".join(text for text, _ in read_text(path)) == path.read_text()
    path.write_bytes(b"x" * (_PIECE_CHARACTERS + 5) + b"\xff")
    with pytest.raises(DataError, match=rf"not UTF-8 text \(byte {_PIECE_CHARACTERS + 5}\)"):
        list(read_text(path))


def test_bad_rows_are_reported_or_raised(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": 5}\n{"text": "t"}\n')
    with pytest.raises(RowError, match=r"a.jsonl line 1: `text` must be text, not a number"):
        list(read_rows(str(path)))
    told: list[RowError] = []
    assert list(read_rows(str(path), on_bad_row=told.append)) == [Document("t", f"{path} line 2")]
    assert [error.reason for error in told] == ["`text` must be text, not a number"]
    assert list(read_rows(str(path), on_bad_row=told.append, max_samples=1)) == []


def test_hub_names_are_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("tatsu-lab/alpaca")
    (tmp_path / "tatsu-lab/alpaca").mkdir(parents=True)
    assert not is_hub_name("tatsu-lab/alpaca")
    assert not is_hub_name("/data/chat")
    assert not is_hub_name("chat.jsonl")


def test_hub_name_without_datasets_package_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"tatsu-lab/alpaca: there is no such file .* install datasets: pip install"):
        list(read_rows("tatsu-lab/alpaca"))


def test_hub_datasets_are_read_from_their_arrow_files(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    files = fetch_dataset(str(tmp_path))  # a folder replaces the network; a hub name takes the same path
    assert [file.suffix for file in files] == [".arrow"]
    assert [
        (row.prompt, row.completion)
        for row in read_source(DatasetConfig(path="x"), files, CHATS)
        if isinstance(row, PromptCompletion)
    ] == EXPECTED
    with pytest.raises(
        DataError, match=r"no hub dataset could be fetched: .*HF_HUB_OFFLINE is set: unset it to fetch the dataset once"
    ):
        fetch_dataset("nobody/nothing")


def test_subset_of_a_local_path_is_refused(tmp_path: Path) -> None:
    path = folder_with(tmp_path, "a.jsonl")
    with pytest.raises(DataError, match=r'subset = "main" selects a part of a hub dataset, but this is a path'):
        list(read_rows(path, name="main"))


def test_reading_text_opens_no_heavy_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = builtins.__import__

    def spy(name: str, *args: Any, **options: Any) -> Any:
        opened.append(name)
        return real(name, *args, **options)

    path = folder_with(tmp_path, "a.jsonl")
    monkeypatch.setattr(builtins, "__import__", spy)
    assert len(list(read_rows(path))) == 1
    assert not {"pyarrow", "datasets", "transformers"} & set(opened)
