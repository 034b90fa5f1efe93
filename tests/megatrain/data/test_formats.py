"""Rows of every format, and what is said about files that cannot be used."""

# ruff: noqa: E501  -- one case per line reads best
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.data.errors import DataError
from megatrain.data.formats import Completion, Conversation, Document, find_files, read_rows


def write(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def test_formats_are_seen_row_by_row(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "a.jsonl",
        lines({"messages": MESSAGES, "id": 1}, {"prompt": "p", "completion": "c"}, {"text": "t"}) + "\n",
    )
    assert list(read_rows(path)) == [
        Conversation(tuple(MESSAGES), f"{path} line 1"),
        Completion("p", "c", f"{path} line 2"),
        Document("t", f"{path} line 3"),
    ]


def test_json_list_txt_and_columns(tmp_path: Path) -> None:
    listed = write(tmp_path, "a.json", json.dumps([{"q": "p", "a": "c"}]))
    columns = {"prompt": "q", "completion": "a"}
    assert list(read_rows(listed, columns=columns)) == [Completion("p", "c", f"{listed} row 1")]
    text = write(tmp_path, "b.txt", "one\n\ntwo\n")
    assert list(read_rows(text)) == [Document("one\n\ntwo\n", text)]


def test_conversational_prompt_and_completion_train_the_completion(tmp_path: Path) -> None:
    path = write(
        tmp_path, "a.jsonl", lines({"prompt": MESSAGES, "completion": [{"role": "assistant", "content": "x"}]})
    )
    (row,) = read_rows(path)
    assert isinstance(row, Conversation)
    assert (len(row.messages), row.trained_from) == (3, 2)


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", b"\xef\xbb\xbf" + lines({"text": "t"}).encode())
    assert list(read_rows(path)) == [Document("t", f"{path} line 1")]


def test_max_samples_stops_early(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", lines({"text": "a"}, {"text": "b"}, {"text": "c"}) + "broken")
    assert [row.text for row in read_rows(path, max_samples=2) if isinstance(row, Document)] == ["a", "b"]


def test_folders_and_globs_are_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl", "sub/c.json", "notes.md"):
        write(tmp_path, name, lines({"text": "x"}))
    assert [path.name for path in find_files(str(tmp_path))] == ["a.jsonl", "b.txt", "c.json"]
    assert [path.name for path in find_files(str(tmp_path / "*.*l"))] == ["a.jsonl"]
    assert [path.name for path in find_files(str(tmp_path / "**/*.json"))] == ["c.json"]


BAD: dict[str, tuple[str, str | bytes, str]] = {
    "broken line": ("a.jsonl", lines({"text": "t"}) + '{"text": "x"\n', "a.jsonl line 2: broken JSON at column 13: Expecting ',' delimiter. The line begins: {\"text\": \"x\""),
    "list in jsonl": ("a.jsonl", '[{"text": "x"}]\n', "a.jsonl line 1: a row must be an object with fields, this is a list"),
    "split list in jsonl": ("a.jsonl", '[\n{"text": "x"}\n]\n', "line 1: this is a JSON list, not one object per line. Name the file .json"),
    "text row": ("a.jsonl", '"hello"\n', "line 1: a row must be an object with fields, this is text"),
    "empty": ("a.jsonl", "\n \n", "a.jsonl: the file is empty"),
    "empty text": ("a.txt", " \n", "a.txt: the file is empty"),
    "empty json": ("a.json", "", "a.json: the file is empty"),
    "no field": ("a.jsonl", lines({"body": "x"}), "line 1: no field that is known: messages, prompt and completion, or text; the row has `body`. Say which is which"),
    "alpaca": ("a.jsonl", lines({"instruction": "x", "output": "y"}), 'write columns = { prompt = "instruction", completion = "output" }'),
    "gsm8k": ("a.jsonl", lines({"question": "x", "answer": "y"}), 'columns = { prompt = "question", completion = "answer" }'),
    "sharegpt": ("a.jsonl", lines({"conversations": []}), "ShareGPT rows are not read in this release; convert them to messages"),
    "no role": ("a.jsonl", lines({"messages": [{"from": "human", "value": "x"}]}), "line 1, message 1: a message needs `role` and `content`, this has `from`, `value`"),
    "bad role": ("a.jsonl", lines({"messages": [{"role": "human", "content": "x"}]}), 'message 1: role "human" is not known. Roles: system, developer, user'),
    "null content": ("a.jsonl", lines({"messages": [{"role": "user", "content": None}]}), "message 1: `content` must be text, this is null"),
    "no messages": ("a.jsonl", lines({"messages": []}), "`messages` must be a list of messages, this is empty"),
    "number as text": ("a.jsonl", lines({"text": 5}), "`text` must be text, this is a number"),
    "mixed prompt": ("a.jsonl", lines({"prompt": MESSAGES, "completion": "x"}), "`prompt` must be text, this is a list"),
    "latin 1": ("a.jsonl", b'{"text": "\xe9"}\n', "line 1: not UTF-8 text (byte 10 of the line). Convert it to UTF-8"),
    "latin 1 text": ("a.txt", b"t\xe9", "a.txt: the file is not UTF-8 text (byte 1)"),
    "json object": ("a.json", "{}", "a .json file must hold a list of rows, this is an object. Wrap the rows in [ ]"),
    "json lines": ("a.json", lines({"text": "a"}, {"text": "b"}), "One object per line? Name the file .jsonl"),
    "parquet": ("a.parquet", b"PAR1", '".parquet" files are not read. Files that are read: .jsonl (one object per line), .json (a list of objects) and .txt'),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_file(tmp_path: Path, name: str) -> None:
    file, content, expected = BAD[name]
    path = write(tmp_path, file, content)
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    assert expected in str(caught.value)
    assert str(caught.value).startswith(path)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("none.jsonl", "none.jsonl: there is no such file or folder"),
        ("*.jsonl", "*.jsonl: no file matches. Check the pattern"),
        ("", "the folder holds no data file"),
    ],
)
def test_nothing_there(tmp_path: Path, path: str, expected: str) -> None:
    with pytest.raises(DataError) as caught:
        list(read_rows(str(tmp_path / path)))
    assert expected in str(caught.value)


def test_format_that_the_row_does_not_have(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", lines({"text": "t"}))
    with pytest.raises(DataError, match=r"line 1: no field `messages`; the row has `text`"):
        list(read_rows(path, format="messages"))
    text = write(tmp_path, "a.txt", "t")
    with pytest.raises(DataError, match=r'a \.txt file has no format "messages"'):
        list(read_rows(text, format="messages"))


def test_one_empty_file_among_others_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", lines({"text": "t"}))
    empty = write(tmp_path, "b.jsonl", "")
    with pytest.raises(DataError) as caught:
        list(read_rows(str(tmp_path)))
    assert str(caught.value).startswith(f"{empty}: the file is empty")
