"""Rows in the formats of other tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatrain.data.formats import Conversation, DataRow, Document, PromptCompletion, Tokenized
from megatrain.data.rows_report import DataError
from oracles.rows_in_memory import to_row

HELLO = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"})
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def row(value: dict[str, Any], format: Any = "auto", **columns: str) -> DataRow:
    return to_row(value, "x", format, columns)


def messages(value: dict[str, Any], format: Any = "auto", **columns: str) -> list[tuple[str, str]]:
    made = row(value, format, **columns)
    assert isinstance(made, Conversation)
    return [(message["role"], message["content"]) for message in made.messages]


def test_sharegpt() -> None:
    value = {
        "system": "Short",
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {"x": 1}})},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "hello"},
        ],
    }
    made = row(value)
    assert isinstance(made, Conversation)
    assert [message["role"] for message in made.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert made.messages[2] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert row(value, "sharegpt") == row(value, "messages") == made
    assert messages({"chat": value["conversations"][:1]}, messages="chat") == [("user", "hi")]
    assert messages({"chat": value["conversations"][:1]}, "sharegpt", conversations="chat") == [("user", "hi")]


def test_custom_names_of_role_and_content() -> None:
    value = {"messages": [{"speaker": "human", "text": "hi"}, {"speaker": "bot", "text": "hello"}]}
    assert messages(value, role="speaker", content="text") == [("user", "hi"), ("assistant", "hello")]


def test_messages_as_json_text_with_parts_and_flags() -> None:
    value = [
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": "hello", "weight": 0},
        {"role": "assistant", "content": "again", "train": True},
    ]
    made = row({"messages": json.dumps(value)})
    assert isinstance(made, Conversation)
    assert [message["content"] for message in made.messages] == ["hi", "hello", "again"]
    assert made.flags == (None, False, True)


def test_calls_and_tools() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    value = {"messages": [*HELLO[:1], {"role": "assistant", "content": None, "tool_calls": [call]}]}
    made = row({**value, "tools": json.dumps([tool])})
    assert isinstance(made, Conversation)
    assert made.tools == (tool,)
    assert made.messages[1] == {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "1"}]}


def test_alpaca() -> None:
    value = {"instruction": "Add", "input": "2 and 2", "output": "4"}
    assert messages(value) == [("user", "Add\n2 and 2"), ("assistant", "4")]
    assert messages({**value, "input": ""}) == [("user", "Add"), ("assistant", "4")]
    more = {**value, "input": None, "system": "Count", "history": [["Add 1", "1"]]}
    expected = [("system", "Count"), ("user", "Add 1"), ("assistant", "1"), ("user", "Add"), ("assistant", "4")]
    assert messages(more) == messages(more, "alpaca") == expected


@pytest.mark.parametrize(
    "columns",
    [
        {"instruction": "q", "output": "a"},
        {"prompt": "q", "query": "extra", "response": "a"},
    ],
)
def test_alpaca_under_other_names(columns: dict[str, str]) -> None:
    assert messages({"q": "Add", "a": "4", "extra": ""}, **columns) == [("user", "Add"), ("assistant", "4")]


def test_prompt_and_response_columns_are_not_alpaca() -> None:
    assert row({"q": "p", "a": "c"}, prompt="q", response="a") == PromptCompletion("p", "c", "x")
    assert row({"prompt": "p", "response": "c"}, "alpaca", prompt="prompt", response="response") == Conversation(
        ({"role": "user", "content": "p"}, {"role": "assistant", "content": "c"}), "x"
    )


def test_tokens() -> None:
    assert row({"input_ids": [5, 6, 7]}) == Tokenized((5, 6, 7), None, "x")
    assert row({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}) == Tokenized((5, 6, 7), (False, True, True), "x")
    padded = {"input_ids": [0, 5, 6, 0], "attention_mask": [0, 1, 1, 0], "loss_mask": [1, 0, 1, 1]}
    assert row(padded) == Tokenized((5, 6), (False, True), "x")
    assert row({"ids": [5], "attention_mask": [0]}, input_ids="ids") == Tokenized((), None, "x")


def test_most_specific_field_determines_the_format() -> None:
    assert isinstance(row({"text": "t", "messages": list(HELLO)}), Conversation)
    assert isinstance(row({"text": "t", "prompt": "p", "completion": "c"}), PromptCompletion)
    assert isinstance(row({"text": "t", "instruction": "p", "output": "c"}), Conversation)
    assert row({"text": "t", "instruction": "p", "output": "c"}, "text") == Document("t", "x")


@pytest.mark.parametrize("format", ["alpaca", "tokenized", "sharegpt", "messages", "prompt_completion"])
def test_row_without_the_fields_of_its_format_is_refused(format: str) -> None:
    with pytest.raises(DataError, match=r"x: no field `\w+`; the row has `text`"):
        row({"text": "t"}, format)
