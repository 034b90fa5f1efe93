"""Rows of every format, and the messages about unusable files."""

# ruff: noqa: E501  -- one case per line reads best
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.data.files import find_files
from megatrain.data.formats import Conversation, Document, PromptCompletion
from megatrain.data.rows_report import DataError
from megatrain.data.table import RowFormat
from oracles.rows_in_memory import read_rows


def write(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def test_format_is_detected_per_row(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "a.jsonl",
        lines({"messages": MESSAGES, "id": 1}, {"prompt": "p", "completion": "c"}, {"text": "t"}) + "\n",
    )
    assert list(read_rows(path)) == [
        Conversation(tuple(MESSAGES), f"{path} line 1"),
        PromptCompletion("p", "c", f"{path} line 2"),
        Document("t", f"{path} line 3"),
    ]


def test_json_list_txt_and_columns(tmp_path: Path) -> None:
    listed = write(tmp_path, "a.json", json.dumps([{"q": "p", "a": "c"}]))
    columns = {"prompt": "q", "completion": "a"}
    assert list(read_rows(listed, columns=columns)) == [PromptCompletion("p", "c", f"{listed} row 1")]
    text = write(tmp_path, "b.txt", "one\n\ntwo\n")
    assert list(read_rows(text)) == [Document("one\n\ntwo\n", text)]


def test_conversational_prompt_and_completion_train_the_completion(tmp_path: Path) -> None:
    path = write(
        tmp_path, "a.jsonl", lines({"prompt": MESSAGES, "completion": [{"role": "assistant", "content": "x"}]})
    )
    (row,) = read_rows(path)
    assert isinstance(row, Conversation)
    assert (len(row.messages), row.loss_start) == (3, 2)


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
    "cut line": ("a.jsonl", '{"text": "x\n', 'a.jsonl line 1: broken JSON at column 10: Unterminated string. The line begins: {"text": "x'),
    "list in jsonl": ("a.jsonl", '[{"text": "x"}]\n', "a.jsonl line 1: a row must be an object with fields, not a list"),
    "split list in jsonl": ("a.jsonl", '[\n{"text": "x"}\n]\n', "line 1: this is a JSON list, not one object per line. Rename the file to .json"),
    "text row": ("a.jsonl", '"hello"\n', "line 1: a row must be an object with fields, not text"),
    "empty": ("a.jsonl", "\n \n", "a.jsonl: the file is empty"),
    "empty text": ("a.txt", " \n", "a.txt: the file is empty"),
    "empty json": ("a.json", "", "a.json: the file is empty"),
    "no field": ("a.jsonl", lines({"body": "x"}), "line 1: no known field (messages, conversations, instruction and output, prompt and completion, text, or input_ids); the row has `body`. Write for example columns = { text = \"body\" } under this [[data.train]]"),
    "object within": ("a.jsonl", lines({"id": "7", "meta": {"q": "x", "a": "y"}}), 'columns = { prompt = "meta.q", completion = "meta.a" }'),
    "names of its own": ("a.jsonl", lines({"id": 1, "frage": "x", "antwort": "y"}), 'columns = { prompt = "frage", completion = "antwort" }'),
    "ultrafeedback": ("a.jsonl", lines({"source": "evol", "instruction": "x", "models": ["m"], "completions": [{"response": "y", "score": 8.5}]}), '`instruction` may be the prompt, but no field contains an answer as text (`models` and `completions`: lists). Add one, for example `answer`, and write columns = { prompt = "instruction", completion = "answer" } under'),
    "squad": ("a.jsonl", lines({"id": "1", "title": "t", "context": "c", "question": "x", "answers": {"text": ["y"], "answer_start": [5]}}), '`question` may be the prompt, but no field contains an answer as text. Add one'),
    "no text": ("a.jsonl", lines({"id": 7, "score": 0.5}), "the row has `id`, `score`. No field of the row is text. Write rows with `messages`"),
    "csv without header": ("a.csv", "Who?,Ishmael\nWhy?,Because\n", 'columns = { prompt = "Who?", completion = "Ishmael" } under this [[data.train]]. The first line of the file must name its columns'),
    "pretty-printed": ("a.jsonl", '{\n  "text": "x"\n}\n{\n  "text": "y"\n}\n', "a.jsonl line 1: the object spans several lines. Write one object per line (jq -c . FILE), or a list of objects in a .json file"),
    "input only": ("a.jsonl", lines({"input": "x", "answer": "y"}), 'columns = { prompt = "input", completion = "answer" }'),
    "preference": ("a.jsonl", lines({"prompt": "x", "chosen": "y", "rejected": "z"}), 'line 1: this is preference data (`chosen` and `rejected`), which sft and pretrain do not train on. Set task = "dpo"; or, to train only on the better answer, write'),
    "preference, explicit": ("a.jsonl", lines({"prompt": "x", "chosen": "y", "rejected": "z"}), 'format = "prompt_completion" and columns = { completion = "chosen" }'),
    "preference, implicit": ("a.jsonl", lines({"chosen": "xy", "rejected": "xz"}), 'format = "text" and columns = { text = "chosen" }'),
    "preference, chats": ("a.jsonl", lines({"chosen": MESSAGES, "rejected": MESSAGES}), 'format = "messages" and columns = { messages = "chosen" }'),
    "preference, unpaired": ("a.jsonl", lines({"prompt": "x", "completion": "y", "label": False}), "this is unpaired preference data for KTO (`label` says whether the answer is good)"),
    "preference, stepwise": ("a.jsonl", lines({"prompt": "x", "completions": ["y"], "labels": [True]}), "this is stepwise preference data"),
    "prompt alone": ("a.jsonl", lines({"prompt": "x", "solution": "3"}), "Prompts without answers are data for reinforcement learning such as GRPO"),
    "gsm8k": ("a.jsonl", lines({"question": "x", "answer": "y"}), 'columns = { prompt = "question", completion = "answer" }'),
    "empty sharegpt": ("a.jsonl", lines({"conversations": []}), "line 1: `conversations` must be a list of messages, not empty"),
    "no role": ("a.jsonl", lines({"messages": [{"speaker": "human", "text": "x"}]}), "line 1, message 1: a message needs `role` and `content`, but this message has `speaker`, `text`"),
    "no message": ("a.jsonl", lines({"messages": ["hi"]}), "message 1: a message must be an object with `role` and `content`, not text"),
    "bad role": ("a.jsonl", lines({"messages": [{"role": "narrator", "content": "x"}]}), 'message 1: unknown role "narrator". Roles: system, developer, user'),
    "sound": ("a.jsonl", lines({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}), "message 1: `content` contains a part that is neither text nor an image: input_audio"),
    "picture": ("a.jsonl", lines({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "the row has 0 images but 1 placeholders for them"),
    "pictures": ("a.jsonl", lines({"messages": [{"role": "user", "content": "<image>"}], "images": ["a", "b"]}), "the row has 2 images but 1 placeholders for them"),
    "weight": ("a.jsonl", lines({"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}), "message 1: `weight` must be 0 or 1, not 0.5"),
    "call": ("a.jsonl", lines({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]}), "message 1: a tool call needs the `name` of its function"),
    "arguments": ("a.jsonl", lines({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}), "`arguments` contains broken JSON at column 2"),
    "tools": ("a.jsonl", lines({"messages": MESSAGES, "tools": "[1"}), "line 1: `tools` contains broken JSON"),
    "tools kind": ("a.jsonl", lines({"messages": MESSAGES, "tools": {"a": 1}}), "line 1: `tools` must be a list of objects, not an object"),
    "history": ("a.jsonl", lines({"instruction": "x", "output": "y", "history": [["a"]]}), "`history` must be a list of pairs"),
    "output": ("a.jsonl", lines({"instruction": "x", "output": 4}), "line 1: `output` must be text, not a number"),
    "negative id": ("a.jsonl", lines({"input_ids": [1, -1]}), "`input_ids` contains a negative token id"),
    "float id": ("a.jsonl", lines({"input_ids": [1, 2.5]}), "`input_ids` must be a list of whole numbers"),
    "short labels": ("a.jsonl", lines({"input_ids": [1, 2], "labels": [1]}), "`labels` has 1 numbers for 2 tokens"),
    "shifted labels": ("a.jsonl", lines({"input_ids": [1, 2], "labels": [2, -100]}), "`labels` has a value that is neither the token at its position nor -100. Do not shift the labels"),
    "holes": ("a.jsonl", lines({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}), "`attention_mask` has zeros in the middle. Put padding at the ends only"),
    "csv cells": ("a.csv", "text,id\nx,1,2\n", "a.csv row 1 (line 2): 3 cells for 2 columns"),
    "csv quotes": ("a.csv", 'text\n"x"y\n', "a.csv line 2: broken CSV"),
    "no gzip": ("a.jsonl.gz", b"not gzip", "a.jsonl.gz: the file cannot be read: Not a gzipped file"),
    "deep": ("a.jsonl", "[" * 100000 + "\n", "a.jsonl line 1: broken JSON nested too deeply"),
    "null content": ("a.jsonl", lines({"messages": [{"role": "user", "content": None}]}), "message 1: `content` must be text, not null"),
    "no messages": ("a.jsonl", lines({"messages": []}), "`messages` must be a list of messages, not empty"),
    "number as text": ("a.jsonl", lines({"text": 5}), "`text` must be text, not a number"),
    "mixed prompt": ("a.jsonl", lines({"prompt": MESSAGES, "completion": "x"}), "`prompt` must be text, not a list"),
    "latin 1": ("a.jsonl", b'{"text": "\xe9"}\n', "line 1: not UTF-8 text (byte 10 of the line). Convert it to UTF-8"),
    "latin 1 text": ("a.txt", b"t\xe9", "a.txt: the file is not UTF-8 text (byte 1)"),
    "json object": ("a.json", "{}", "a .json file must contain a list of rows, not an object without such a list. Wrap the rows in [ ]"),
    "broken json": ("a.json", '[{"text": "x"},]', "a.json line 1: broken JSON at column"),
    "parquet": ("a.parquet", b"PAR1", "a.parquet: this .parquet file cannot be read"),
    "arrow": ("a.arrow", b"ARROW", "a.arrow: this .arrow file cannot be read"),
    "mds": ("shard.00000.mds", b"", "shard.00000.mds: MDS shards are not supported. Convert them to .jsonl or .parquet"),
    "other": ("a.xlsx", b"PK", '".xlsx" files are not supported. Supported files: .jsonl (one object per line), .json (a list of objects), .csv'),
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
        ("", "the folder contains no data file"),
    ],
)
def test_empty_folder_is_reported(tmp_path: Path, path: str, expected: str) -> None:
    with pytest.raises(DataError) as caught:
        list(read_rows(str(tmp_path / path)))
    assert expected in str(caught.value)


def test_row_without_the_requested_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", lines({"text": "t"}))
    with pytest.raises(DataError, match=r"line 1: no field `messages`; the row has `text`"):
        list(read_rows(path, format="messages"))
    text = write(tmp_path, "a.txt", "t")
    with pytest.raises(DataError, match=r'a \.txt file cannot have format "messages"'):
        list(read_rows(text, format="messages"))


def test_one_empty_file_among_others_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", lines({"text": "t"}))
    empty = write(tmp_path, "b.jsonl", "")
    with pytest.raises(DataError) as caught:
        list(read_rows(str(tmp_path)))
    assert str(caught.value).startswith(f"{empty}: the file is empty")


@pytest.mark.parametrize(
    ("row", "format", "columns"),
    [
        ({"prompt": "x", "chosen": "y", "rejected": "z"}, "prompt_completion", {"completion": "chosen"}),
        ({"prompt": MESSAGES[:1], "chosen": MESSAGES[1:], "rejected": MESSAGES[1:]}, "prompt_completion", {"completion": "chosen"}),
        ({"chosen": "xy", "rejected": "xz"}, "text", {"text": "chosen"}),
        ({"chosen": MESSAGES, "rejected": MESSAGES}, "messages", {"messages": "chosen"}),
        ({"prompt": "x", "completion": "y", "label": True}, "prompt_completion", {}),
    ],
)  # fmt: skip
def test_advice_for_preference_rows_works(
    tmp_path: Path, row: dict[str, Any], format: RowFormat, columns: dict[str, str]
) -> None:
    path = write(tmp_path, "a.jsonl", lines(row))
    with pytest.raises(DataError, match="preference data") as raised:
        list(read_rows(path))
    assert f'format = "{format}"' in str(raised.value)
    assert all(f'{ours} = "{theirs}"' in str(raised.value) for ours, theirs in columns.items())
    (found,) = read_rows(path, format=format, columns=columns)
    assert not isinstance(found, Document) or found.text == "xy"
