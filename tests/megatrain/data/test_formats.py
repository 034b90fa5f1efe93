"""Rows of every format, and the messages about unusable files."""

# ruff: noqa: E501  -- one case per line reads best
from __future__ import annotations

import gzip
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


NO_FIELD = "no known field (messages, conversations, instruction and output, prompt and completion, text, or input_ids); the row has "
BAD: dict[str, tuple[str, str | bytes, str]] = {
    "broken line": ("a.jsonl", lines({"text": "t"}) + '{"text": "x"\n', "a.jsonl line 2: broken JSON at column 13: Expecting ',' delimiter. The line begins: {\"text\": \"x\". Fix or remove the line"),
    "cut line": ("a.jsonl", '{"text": "x\n', 'a.jsonl line 1: broken JSON at column 10: Unterminated string. The line begins: {"text": "x. Fix or remove the line'),
    "list in jsonl": ("a.jsonl", '[{"text": "x"}]\n', "a.jsonl line 1: a row must be an object with fields, not a list. Fix or remove the row; a list of rows must be in a .json file"),
    "split list in jsonl": ("a.jsonl", '[\n{"text": "x"}\n]\n', "a.jsonl line 1: this is a JSON list, not one object per line. Rename the file to .json"),
    "text row": ("a.jsonl", '"hello"\n', "a.jsonl line 1: a row must be an object with fields, not text. Fix or remove the row"),
    "empty": ("a.jsonl", "\n \n", "a.jsonl: the file is empty. Remove it or fill it"),
    "empty text": ("a.txt", " \n", "a.txt: the file is empty. Remove it or fill it"),
    "empty json": ("a.json", "", "a.json: the file is empty. Remove it or fill it"),
    "no field": ("a.jsonl", lines({"body": "x"}), f'a.jsonl line 1: {NO_FIELD}`body`. Write for example columns = {{ text = "body" }} under this [[data.train]]'),
    "object within": ("a.jsonl", lines({"id": "7", "meta": {"q": "x", "a": "y"}}), f'a.jsonl line 1: {NO_FIELD}`id`, `meta`. Write for example columns = {{ prompt = "meta.q", completion = "meta.a" }} under this [[data.train]]'),
    "names of its own": ("a.jsonl", lines({"id": 1, "frage": "x", "antwort": "y"}), f'a.jsonl line 1: {NO_FIELD}`id`, `frage`, `antwort`. Write for example columns = {{ prompt = "frage", completion = "antwort" }} under this [[data.train]]'),
    "ultrafeedback": ("a.jsonl", lines({"source": "evol", "instruction": "x", "models": ["m"], "completions": [{"response": "y", "score": 8.5}]}), f'a.jsonl line 1: {NO_FIELD}`source`, `instruction`, `models`, `completions`. `instruction` may be the prompt, but no field contains an answer as text (`models` and `completions`: lists). Add one, for example `answer`, and write columns = {{ prompt = "instruction", completion = "answer" }} under this [[data.train]]'),
    "squad": ("a.jsonl", lines({"id": "1", "title": "t", "context": "c", "question": "x", "answers": {"text": ["y"], "answer_start": [5]}}), f'a.jsonl line 1: {NO_FIELD}`id`, `title`, `context`, `question`, `answers`. `question` may be the prompt, but no field contains an answer as text. Add one, for example `answer`, and write columns = {{ prompt = "question", completion = "answer" }} under this [[data.train]]'),
    "no text": ("a.jsonl", lines({"id": 7, "score": 0.5}), f"a.jsonl line 1: {NO_FIELD}`id`, `score`. No field of the row is text. Write rows with `messages`, `prompt` and `completion`, or `text`"),
    "csv without header": ("a.csv", "Who?,Ishmael\nWhy?,Because\n", f'a.csv row 1: {NO_FIELD}`Who?`, `Ishmael`. Write for example columns = {{ prompt = "Who?", completion = "Ishmael" }} under this [[data.train]]. The first line of the file must name its columns'),
    "pretty-printed": ("a.jsonl", '{\n  "text": "x"\n}\n{\n  "text": "y"\n}\n', "a.jsonl line 1: the object spans several lines. Write one object per line (jq -c . FILE), or a list of objects in a .json file"),
    "input only": ("a.jsonl", lines({"input": "x", "answer": "y"}), f'a.jsonl line 1: {NO_FIELD}`input`, `answer`. Write for example columns = {{ prompt = "input", completion = "answer" }} under this [[data.train]]'),
    "preference": ("a.jsonl", lines({"prompt": "x", "chosen": "y", "rejected": "z"}), 'a.jsonl line 1: this is preference data (`chosen` and `rejected`), which sft and pretrain do not train on. Set task = "dpo"; or, to train only on the better answer, write format = "prompt_completion" and columns = { completion = "chosen" } under this [[data.train]]'),
    "preference, implicit": ("a.jsonl", lines({"chosen": "xy", "rejected": "xz"}), 'a.jsonl line 1: this is preference data (`chosen` and `rejected`), which sft and pretrain do not train on. Set task = "dpo"; or, to train only on the better answer, write format = "text" and columns = { text = "chosen" } under this [[data.train]]'),
    "preference, chats": ("a.jsonl", lines({"chosen": MESSAGES, "rejected": MESSAGES}), 'a.jsonl line 1: this is preference data (`chosen` and `rejected`), which sft and pretrain do not train on. Set task = "dpo"; or, to train only on the better answer, write format = "messages" and columns = { messages = "chosen" } under this [[data.train]]'),
    "preference, unpaired": ("a.jsonl", lines({"prompt": "x", "completion": "y", "label": False}), 'a.jsonl line 1: this is unpaired preference data for KTO (`label` says whether the answer is good), so sft and pretrain would also train on bad answers. Set task = "dpo" with loss_type = "kto"; or set format = "prompt_completion" to train on all answers'),
    "preference, stepwise": ("a.jsonl", lines({"prompt": "x", "completions": ["y"], "labels": [True]}), "a.jsonl line 1: this is stepwise preference data (`completions`, each with a label), which sft and pretrain do not train on. Join the good steps to one `completion`"),
    "prompt alone": ("a.jsonl", lines({"prompt": "x", "solution": "3"}), f"a.jsonl line 1: {NO_FIELD}`prompt`, `solution`. Prompts without answers are data for reinforcement learning such as GRPO; sft needs `prompt` and `completion`, or `messages`"),
    "gsm8k": ("a.jsonl", lines({"question": "x", "answer": "y"}), f'a.jsonl line 1: {NO_FIELD}`question`, `answer`. Write for example columns = {{ prompt = "question", completion = "answer" }} under this [[data.train]]'),
    "empty sharegpt": ("a.jsonl", lines({"conversations": []}), "a.jsonl line 1: `conversations` must be a list of messages, not empty. Fix or remove the row"),
    "no role": ("a.jsonl", lines({"messages": [{"speaker": "human", "text": "x"}]}), "a.jsonl line 1, message 1: a message needs `role` and `content`, but this message has `speaker`, `text`. Fix or remove the row"),
    "no message": ("a.jsonl", lines({"messages": ["hi"]}), "a.jsonl line 1, message 1: a message must be an object with `role` and `content`, not text. Fix or remove the row"),
    "bad role": ("a.jsonl", lines({"messages": [{"role": "narrator", "content": "x"}]}), 'a.jsonl line 1, message 1: unknown role "narrator". Roles: system, developer, user, assistant, tool'),
    "sound": ("a.jsonl", lines({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}), "a.jsonl line 1, message 1: `content` contains a part that is neither text nor an image: input_audio. Remove the row: only texts and images are supported"),
    "picture": ("a.jsonl", lines({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "a.jsonl line 1: the row has 0 images but 1 placeholders for them (<image>, or parts of type image). Write one placeholder for each image"),
    "pictures": ("a.jsonl", lines({"messages": [{"role": "user", "content": "<image>"}], "images": ["a", "b"]}), "a.jsonl line 1: the row has 2 images but 1 placeholders for them (<image>, or parts of type image). Write one placeholder for each image"),
    "weight": ("a.jsonl", lines({"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}), "a.jsonl line 1, message 1: `weight` must be 0 or 1, not 0.5. Fix or remove the row"),
    "call": ("a.jsonl", lines({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]}), "a.jsonl line 1, message 1: a tool call needs the `name` of its function. Fix or remove the row"),
    "arguments": ("a.jsonl", lines({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}), "a.jsonl line 1, message 1: `arguments` contains broken JSON at column 2: Expecting property name enclosed in double quotes. Fix or remove the row"),
    "tools": ("a.jsonl", lines({"messages": MESSAGES, "tools": "[1"}), "a.jsonl line 1: `tools` contains broken JSON at column 3: Expecting ',' delimiter. Fix or remove the row"),
    "tools kind": ("a.jsonl", lines({"messages": MESSAGES, "tools": {"a": 1}}), "a.jsonl line 1: `tools` must be a list of objects, not an object. Fix or remove the row"),
    "history": ("a.jsonl", lines({"instruction": "x", "output": "y", "history": [["a"]]}), "a.jsonl line 1: `history` must be a list of pairs (question, answer). Fix or remove the row"),
    "output": ("a.jsonl", lines({"instruction": "x", "output": 4}), "a.jsonl line 1: `output` must be text, not a number. Fix or remove the row"),
    "negative id": ("a.jsonl", lines({"input_ids": [1, -1]}), "a.jsonl line 1: `input_ids` contains a negative token id. Remove it; attention_mask marks padding"),
    "float id": ("a.jsonl", lines({"input_ids": [1, 2.5]}), "a.jsonl line 1: `input_ids` must be a list of whole numbers, not a list. Fix or remove the row"),
    "short labels": ("a.jsonl", lines({"input_ids": [1, 2], "labels": [1]}), "a.jsonl line 1: `labels` has 1 numbers for 2 tokens. Fix or remove the row"),
    "shifted labels": ("a.jsonl", lines({"input_ids": [1, 2], "labels": [2, -100]}), "a.jsonl line 1: `labels` has a value that is neither the token at its position nor -100. Do not shift the labels: the loss compares each token with the prediction before it"),
    "holes": ("a.jsonl", lines({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}), "a.jsonl line 1: `attention_mask` has zeros in the middle. Put padding at the ends only"),
    "csv cells": ("a.csv", "text,id\nx,1,2\n", "a.csv row 1 (line 2): 3 cells for 2 columns (separator: commas). Put cells that contain the separator or a line break in double quotes"),
    "csv quotes": ("a.csv", 'text\n"x"y\n', "a.csv line 2: broken CSV: ',' expected after '\"'. Fix the line"),
    "no gzip": ("a.jsonl.gz", b"not gzip", "a.jsonl.gz: the file cannot be read: Not a gzipped file (b'no'). Check its permissions, or fetch it again"),
    "deep": ("a.jsonl", "[" * 100000 + "\n", "a.jsonl line 1: broken JSON nested too deeply. The line begins: [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[. Fix or remove the line"),
    "null content": ("a.jsonl", lines({"messages": [{"role": "user", "content": None}]}), "a.jsonl line 1, message 1: `content` must be text, not null. Fix or remove the row"),
    "no messages": ("a.jsonl", lines({"messages": []}), "a.jsonl line 1: `messages` must be a list of messages, not empty. Fix or remove the row"),
    "number as text": ("a.jsonl", lines({"text": 5}), "a.jsonl line 1: `text` must be text, not a number. Fix or remove the row"),
    "mixed prompt": ("a.jsonl", lines({"prompt": MESSAGES, "completion": "x"}), "a.jsonl line 1: `prompt` must be text, not a list. Fix or remove the row"),
    "latin 1": ("a.jsonl", b'{"text": "\xe9"}\n', "a.jsonl line 1: not UTF-8 text (byte 10 of the line). Convert it to UTF-8"),
    "latin 1 text": ("a.txt", b"t\xe9", "a.txt: the file is not UTF-8 text (byte 1). Convert it to UTF-8"),
    "json object": ("a.json", "{}", "a.json: a .json file must contain a list of rows, not an object without such a list. Wrap the rows in [ ]"),
    "broken json": ("a.json", '[{"text": "x"}', "a.json line 1: broken JSON at column 15: Expecting ',' delimiter. Fix the file"),
    "mds": ("shard.00000.mds", b"", "shard.00000.mds: MDS shards are not supported. Convert them to .jsonl or .parquet: write each row of streaming.StreamingDataset as one line of JSON"),
    "other": ("a.xlsx", b"PK", 'a.xlsx: ".xlsx" files are not supported. Supported files: .jsonl (one object per line), .json (a list of objects), .csv, .tsv, .txt, .parquet and .arrow'),
    "several texts": ("a.jsonl", lines({"id": 7, "alpha": "x", "meta": {"inner": {"beta": "longest"}, "gamma": "xy"}, "delta": "xyz"}), f'a.jsonl line 1: {NO_FIELD}`id`, `alpha`, `meta`, `delta`. Write for example columns = {{ text = "meta.inner.beta" }} under this [[data.train]]'),
    "many names": ("a.jsonl", lines({f"f{n}": n for n in range(9)}), f"a.jsonl line 1: {NO_FIELD}`f0`, `f1`, `f2`, `f3`, `f4`, `f5`, `f6`, `f7`, .... No field of the row is text. Write rows with `messages`, `prompt` and `completion`, or `text`"),
    "eight names": ("a.jsonl", lines({f"f{n}": n for n in range(8)}), f"a.jsonl line 1: {NO_FIELD}`f0`, `f1`, `f2`, `f3`, `f4`, `f5`, `f6`, `f7`. No field of the row is text. Write rows with `messages`, `prompt` and `completion`, or `text`"),
    "four lists": ("a.jsonl", lines({"Query ": "x", "b": [1], "c": [2], "d": [], "e": [3]}), f'a.jsonl line 1: {NO_FIELD}`Query `, `b`, `c`, `d`, `e`. `Query ` may be the prompt, but no field contains an answer as text (`b` and `c` and `d`: lists). Add one, for example `answer`, and write columns = {{ prompt = "Query ", completion = "answer" }} under this [[data.train]]'),
    "csv without an answer": ("a.tsv.gz", gzip.compress(b"question\tid\nx\t1\n"), f'a.tsv.gz row 1: {NO_FIELD}`question`, `id`. `question` may be the prompt, but no field contains an answer as text. Add one, for example `answer`, and write columns = {{ prompt = "question", completion = "answer" }} under this [[data.train]]. The first line of the file must name its columns'),
    "likely names come first": ("a.jsonl", lines({"q": "1", "solution": "2", "question": "3", "answer": "4"}), f'a.jsonl line 1: {NO_FIELD}`q`, `solution`, `question`, `answer`. Write for example columns = {{ prompt = "question", completion = "answer" }} under this [[data.train]]'),
    "likely text comes first": ("a.jsonl", lines({"article": "1", "body": "2", "prompt": 5}), f'a.jsonl line 1: {NO_FIELD}`article`, `body`, `prompt`. Write for example columns = {{ text = "body" }} under this [[data.train]]'),
    "same name twice": ("a.jsonl", lines({"question": "1", "meta": {"question": "2", "answer": "3"}}), f'a.jsonl line 1: {NO_FIELD}`question`, `meta`. Write for example columns = {{ prompt = "question", completion = "meta.answer" }} under this [[data.train]]'),
    "preference, one chat": ("a.jsonl", lines({"prompt": "x", "chosen": MESSAGES, "rejected": MESSAGES}), 'a.jsonl line 1: this is preference data (`chosen` and `rejected`), which sft and pretrain do not train on. Set task = "dpo"; or, to train only on the better answer, write format = "messages" and columns = { messages = "chosen" } under this [[data.train]]'),
    "preference, kto_tag": ("a.jsonl", lines({"messages": MESSAGES, "kto_tag": True}), 'a.jsonl line 1: this is unpaired preference data for KTO (`kto_tag` says whether the answer is good), so sft and pretrain would also train on bad answers. Set task = "dpo" with loss_type = "kto"; or set format = "prompt_completion" to train on all answers'),
    "pair of other lengths": ("a.jsonl", lines({"instruction": "x", "output": "y", "history": [["a", "b"], ["c", "d", "e"]]}), "a.jsonl line 1: `history` must be a list of pairs (question, answer). Fix or remove the row"),
    "number in a pair": ("a.jsonl", lines({"instruction": "x", "output": "y", "history": [["a", "b"], ["c", 4]]}), "a.jsonl line 1: `history` must be a list of pairs (question, answer). Fix or remove the row"),
    "mask of other length": ("a.jsonl", lines({"input_ids": [1, 2], "loss_mask": [1, 0, 1]}), "a.jsonl line 1: `loss_mask` has 3 numbers for 2 tokens. Fix or remove the row"),
    "text as ids": ("a.jsonl", lines({"input_ids": "12"}), "a.jsonl line 1: `input_ids` must be a list of whole numbers, not text. Fix or remove the row"),
    "second message": ("a.jsonl", lines({"messages": [*MESSAGES, {"role": "tool"}]}), "a.jsonl line 1, message 3: a message needs `role` and `content`, but this message has `role`. Fix or remove the row"),
    "sharegpt names": ("a.jsonl", lines({"conversations": [{"from": "human"}]}), "a.jsonl line 1, message 1: a message needs `from` and `content`, but this message has `from`. Fix or remove the row"),
    "two calls": ("a.jsonl", lines({"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}], "function_call": {"name": "g"}}]}), "a.jsonl line 1, message 1: a message has both `tool_calls` and `function_call`. Keep one of them"),
    "second image part": ("a.jsonl", lines({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, 5, {"type": "video"}]}]}), "a.jsonl line 1, message 1: `content` contains a part that is neither text nor an image: a number. Remove the row: only texts and images are supported"),
    "flag as text": ("a.jsonl", lines({"messages": [MESSAGES[0], {"role": "assistant", "content": "x", "training": "no"}]}), 'a.jsonl line 1, message 2: `training` must be 0 or 1, not "no". Fix or remove the row'),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_file(tmp_path: Path, name: str) -> None:
    file, content, expected = BAD[name]
    path = write(tmp_path, file, content)
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    assert str(caught.value) == f"{tmp_path}/{expected}"


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_columnar_file_without_contents_is_refused(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, f"a{suffix}", b"PAR1")
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    assert str(caught.value).startswith(f"{path}: this {suffix} file cannot be read: ")
    assert str(caught.value).endswith(". Download or write it again")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (
            "none.jsonl",
            "/none.jsonl: there is no such file or folder. Check the path; it is relative to the config file",
        ),
        ("*.jsonl", "/*.jsonl: no file matches. Check the pattern; it is relative to the config file"),
        (
            "",
            ": the folder contains no data file. Supported files: .jsonl (one object per line), .json (a list of "
            "objects), .csv, .tsv, .txt, .parquet and .arrow",
        ),
    ],
)
def test_empty_folder_is_reported(tmp_path: Path, path: str, expected: str) -> None:
    with pytest.raises(DataError) as caught:
        list(read_rows(str(tmp_path / path)))
    assert str(caught.value) == f"{tmp_path}{expected}"


def test_row_without_the_requested_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", lines({"text": "t"}))
    with pytest.raises(DataError) as caught:
        list(read_rows(path, format="messages"))
    assert str(caught.value) == (
        f'{path} line 1: no field `messages`; the row has `text`. Write for example columns = {{ text = "text" }} '
        "under this [[data.train]]"
    )
    text = write(tmp_path, "a.txt", "t")
    with pytest.raises(DataError, match=r'a \.txt file cannot have format "messages"'):
        list(read_rows(text, format="messages"))


def test_one_empty_file_among_others_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", lines({"text": "t"}))
    empty = write(tmp_path, "b.jsonl", "")
    with pytest.raises(DataError) as caught:
        list(read_rows(str(tmp_path)))
    assert str(caught.value) == f"{empty}: the file is empty. Remove it or fill it"


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
