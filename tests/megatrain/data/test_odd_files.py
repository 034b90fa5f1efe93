"""Files from spreadsheets, downloads and other tools, with unusual column names, separators and layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.config.schema import RunConfig
from megatrain.data.dataset import load_dataset
from megatrain.data.formats import Conversation, Document, PromptCompletion
from megatrain.data.pair_rows import PAIRS
from megatrain.data.rows_report import DataError, RowError
from megatrain.data.sources import detect_format
from megatrain.training.resolve import resolve_data
from oracles.rows_in_memory import read_rows

MODEL = Path(__file__).parents[3] / "examples/quickstart/model"


def write(folder: Path, name: str, content: str) -> str:
    (folder / name).write_text(content)
    return str(folder / name)


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def make_config(path: str, **data: Any) -> RunConfig:
    values = {"train": [{"path": path}], "max_length": 64, "cache_dir": "none", **data}
    model = {"model_name_or_path": str(MODEL)}
    return RunConfig.model_validate({"task": "sft", "output_dir": "out", "model": model, "data": values})


# -- missing columns ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["auto", "prompt_completion"])
def test_missing_column_error_suggests_the_closest_one(tmp_path: Path, format: Any) -> None:
    path = write(tmp_path, "a.jsonl", lines({"prompt": "a", "completion": "b"}))
    with pytest.raises(DataError) as raised:
        list(read_rows(path, format=format, columns={"prompt": "prmpt"}))
    assert str(raised.value) == (
        f'{path} line 1: no column `prmpt` (columns = {{ prompt = "prmpt" }}); the row has `prompt`, `completion`. '
        'Did you mean prompt = "prompt"?'
    )
    with pytest.raises(DataError, match=r"no column `zzz`.* Use the name of an existing column"):
        list(read_rows(path, format=format, columns={"prompt": "zzz"}))


def test_missing_preference_column_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", lines({"prompt": "a", "better": "b", "worse": "c"}))
    with pytest.raises(DataError, match=r'line 1: no column `bett`.* Did you mean chosen = "better"'):
        list(read_rows(path, kind=PAIRS, columns={"chosen": "bett", "rejected": "worse"}))


def test_optional_column_missing_from_all_rows_is_named(tmp_path: Path) -> None:
    """Some rows may lack a system prompt; if all rows lack it, the name is wrong."""
    row = {"instruction": "a", "output": "b"}
    path = write(tmp_path, "a.jsonl", lines(row, {**row, "sys": "s"}, row))
    assert len(list(read_rows(path, columns={"system": "sys"}))) == 3
    with pytest.raises(DataError, match=r'no column `syss`.* Did you mean system = "sys"'):
        list(read_rows(path, columns={"system": "syss"}))
    assert len(list(read_rows(path, columns={"system": "syss"}, max_samples=2))) == 2, "the rest may have it"
    chats = [{"from": "user", "value": "a"}, {"from": "gpt", "value": "b"}]
    path = write(tmp_path, "b.jsonl", lines({"messages": chats}))
    assert len(list(read_rows(path, columns={"role": "from", "content": "value"}))) == 1, "names within messages"


# -- names and separators of spreadsheets ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "columns"),
    [
        ("Instruction,Output", {}),
        ("INSTRUCTION, output ", {}),
        ("Question,Answer", {"instruction": "question", "output": "answer"}),
        ("Question,Answer", {"instruction": "Question", "output": "Answer"}),
    ],
)
def test_header_case_is_ignored(tmp_path: Path, header: str, columns: dict[str, str]) -> None:
    path = write(tmp_path, "a.csv", f"{header}\nHi,Hello\n")
    (row,) = read_rows(path, columns=columns)
    assert isinstance(row, Conversation)
    assert [message["content"] for message in row.messages] == ["Hi", "Hello"]


def test_exact_field_name_takes_precedence(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", lines({"text": "small", "Text": "large", "Messages": [1]}))
    (row,) = read_rows(path)
    assert isinstance(row, Document) and row.text == "small"
    with pytest.raises(DataError, match="no field `text`; the row has `Text`, `TEXT`"):
        list(read_rows(write(tmp_path, "b.jsonl", lines({"Text": "a", "TEXT": "b"})), format="text"))


def test_suggested_columns_keep_the_file_spelling(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "Question,Answer\nHi,Hello\n")
    with pytest.raises(DataError, match=r'columns = { prompt = "Question", completion = "Answer" }'):
        list(read_rows(path))
    preview = detect_format(path)
    assert (preview.format, dict(preview.columns)) == ("alpaca", {"instruction": "Question", "output": "Answer"})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'prompt;completion\n"a; b";c\n'),
        ("a.csv", "prompt\tcompletion\na; b\tc\n"),
        ("a.tsv", 'prompt,completion\n"a; b",c\n'),
        ("a.csv", 'prompt,"completion"\na; b,c\n'),
    ],
)
def test_separator_is_detected_from_the_header(tmp_path: Path, name: str, content: str) -> None:
    (row,) = read_rows(write(tmp_path, name, content))
    assert isinstance(row, PromptCompletion) and (row.prompt, row.completion) == ("a; b", "c")


def test_single_csv_column_is_not_split(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "text\nThis; that\nand\tmore\n")
    assert [row.text for row in read_rows(path) if isinstance(row, Document)] == ["This; that", "and\tmore"]
    path = write(tmp_path, "b.csv", "prompt;completion\na;b;c\n")
    with pytest.raises(DataError, match=r"3 cells for 2 columns \(separator: semicolons\). Put cells"):
        list(read_rows(path))


# -- lists within objects -------------------------------------------------------------------------------------------

ROW = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    ("content", "json_key"),
    [
        ({"data": [ROW, ROW], "version": 1}, None),
        ({"version": {"number": 1}, "data": {"rows": [ROW, ROW]}}, None),
        ({"train": [ROW, ROW], "test": [ROW]}, "train"),
        ({"data": {"train": [ROW, ROW], "test": [ROW]}}, "data.train"),
    ],
)
def test_row_list_inside_a_json_object_is_found(tmp_path: Path, content: Any, json_key: str | None) -> None:
    path = write(tmp_path, "a.json", json.dumps(content, indent=1))
    assert len(list(read_rows(path, json_key=json_key))) == 2
    config = make_config(path)
    table = config.data.train[0].model_copy(update={"json_key": json_key})
    config = config.model_copy(update={"data": config.data.model_copy(update={"train": [table]})})
    assert resolve_data(config).table.train[0].json_key == json_key


@pytest.mark.parametrize(
    ("content", "json_key", "said"),
    [
        ({"train": [ROW], "test": [ROW]}, None, "`test`. Set json_key next to this path, for example"),
        ({"train": [ROW]}, "tra", "there is no list of rows at `tra`. Lists of rows found: `train`"),
        ({"messages": [{"role": "user", "content": "a"}]}, None, "not an object without such a list. Wrap the rows in"),
        ([ROW], "data", "there is no list of rows at `data`. Lists of rows found: none"),
    ],
)  # fmt: skip
def test_missing_json_list_is_named(tmp_path: Path, content: Any, json_key: str | None, said: str) -> None:
    path = write(tmp_path, "a.json", json.dumps(content))
    with pytest.raises(DataError) as raised:
        list(read_rows(path, json_key=json_key))
    assert said in str(raised.value) and str(raised.value).startswith(path)
    with pytest.raises(DataError, match=r"json_key = .* is only for .json files"):
        list(read_rows(write(tmp_path, "a.jsonl", lines(ROW)), json_key="data"))


def test_a_column_may_be_within_an_object(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", lines({"doc": {"body": "a"}}, {"doc": {"body": "b"}}))
    found = list(read_rows(path, format="text", columns={"text": "doc.body"}))
    assert [row.text for row in found if isinstance(row, Document)] == ["a", "b"]


# -- empty rows and files -------------------------------------------------------------------------------------------


def test_empty_files_are_skipped_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    for number in range(3):
        write(tmp_path, f"{number}.txt", "Call me Ishmael. " * number)
    write(tmp_path, "3.txt", "\n")
    config = make_config(str(tmp_path), max_dropped=0.0)
    report = load_dataset(resolve_data(config), tokenizer).report
    assert report.num_rows == 2 and report.num_dropped == 0 and report.sources[0].lost_share == 0
    assert f"2 empty files skipped (first: {tmp_path / '0.txt'})" in str(report)
    assert type(report).from_json(json.loads(json.dumps(report.to_json()))) == report
    with pytest.raises(RowError, match=r"0.txt: the file is empty"):
        load_dataset(resolve_data(make_config(str(tmp_path), bad_rows="error")), tokenizer)
    for number in (1, 2):
        write(tmp_path, f"{number}.txt", "")
    with pytest.raises(DataError, match=r"this file and 3 other files are empty. Remove it or fill it"):
        load_dataset(resolve_data(config), tokenizer)


def test_non_object_rows_are_counted_together(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path, "a.jsonl", lines(ROW, {}, ["a"], "b", ROW, ROW, ROW))
    report = load_dataset(resolve_data(make_config(path)), tokenizer).report
    assert [(each.reason, each.count, each.example) for each in report.dropped] == [
        ("a row must be an object with fields", 3, f"{path} line 2")
    ]
    with pytest.raises(RowError, match="line 2: a row must be an object with fields, not empty"):
        load_dataset(resolve_data(make_config(path, bad_rows="error")), tokenizer)


# -- detection by init ----------------------------------------------------------------------------------------------


def test_format_detection_reads_beyond_the_first_row(tmp_path: Path) -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    same = {"prompt": "a", "chosen": "b", "rejected": "b"}
    assert detect_format(write(tmp_path, "a.jsonl", lines(same, pair))).format == "preference"
    assert detect_format(write(tmp_path, "a.jsonl", lines({}, [1], same, same, pair))).problem == ""
    alike = detect_format(write(tmp_path, "a.jsonl", lines(same, same)))
    assert alike.format == "preference" and "nothing to prefer" in alike.problem
    assert detect_format(write(tmp_path, "a.jsonl", lines({"messages": []}, ROW))).format == "prompt_completion"
    assert detect_format(write(tmp_path, "a.csv", "Prompt,Chosen,Rejected\na,b,c\n")).format == "preference"


def test_format_detection_skips_empty_files(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", "")
    write(tmp_path, "b.txt", "text")
    assert detect_format(str(tmp_path)).format == "text"
    write(tmp_path, "b.txt", " ")
    with pytest.raises(DataError, match=r"a.txt: the file is empty"):
        detect_format(str(tmp_path))
