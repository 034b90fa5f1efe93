"""Every field of a message reaches the chat template, or is counted and reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.data.chat import RowEncoder
from megatrain.data.formats import Conversation
from megatrain.data.rows_report import DataError, DataReport, RowError, check_losses
from oracles.rows_in_memory import encode_row, read_rows, to_row
from tests.megatrain.data.test_losses import load
from tests.megatrain.data.test_templates import CALL, FOLDER, TOOL

QUESTION = {"role": "user", "content": "Weather?"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "stormy"}
ANSWER = {"role": "assistant", "content": "Take a coat."}
SHOWS_FIELDS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning }}{{ m.recipient }}{{ m.content }}"
    "{% for call in m.tool_calls %}[call {{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
)


def row(*messages: Any, **fields: Any) -> Conversation:
    made = to_row({"messages": list(messages), **fields}, "rows line 1", "auto", {})
    assert isinstance(made, Conversation)
    return made


def template(tokenizer: Any, name: str) -> Any:
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def test_all_fields_of_a_message_reach_the_template(tokenizer: Any) -> None:
    tokenizer.chat_template = SHOWS_FIELDS
    said = {"role": "assistant", "content": "Yes.", "reasoning": "Because. ", "recipient": "all ", "audio": None}
    encoded = encode_row(RowEncoder(tokenizer), row(QUESTION, said))
    assert "assistant\nBecause. all Yes.<|im_end|>" in tokenizer.decode(encoded.tokens)
    assert encoded.omitted_fields == ()


def test_function_call_is_a_tool_call(tokenizer: Any) -> None:
    tokenizer.chat_template = SHOWS_FIELDS
    call = {"name": "f", "arguments": '{"city": "Rome"}'}
    for content in ({"content": "One moment."}, {"content": ""}, {"content": None}, {}, {"content": []}):
        for written in (call, json.dumps(call)):
            said = {"role": "assistant", **content, "function_call": written}
            made = row(QUESTION, said, RESULT, ANSWER)
            function = {"name": "f", "arguments": {"city": "Rome"}}
            assert made.messages[1]["tool_calls"] == [{"type": "function", "function": function}]
            shown = tokenizer.decode(encode_row(RowEncoder(tokenizer), made).tokens)
            assert '[call f {"city": "Rome"}]<|im_end|>' in shown
    with pytest.raises(RowError, match="has both `tool_calls` and `function_call`"):
        row(QUESTION, {**CALLING, "function_call": call})


def test_fields_that_the_template_leaves_out_are_named(tokenizer: Any) -> None:
    template(tokenizer, "smollm2")
    said = {"role": "assistant", "content": "Yes.", "reasoning": "why", "end_turn": True}
    assert encode_row(RowEncoder(tokenizer), row(QUESTION, said)).omitted_fields == ("reasoning", "end_turn")
    encoded = encode_row(RowEncoder(tokenizer), row(QUESTION, CALLING, RESULT, ANSWER, tools=[TOOL]))
    assert encoded.omitted_fields == ("tool_calls", "tools")
    assert encoded.untrained_turns == ("the chat template has no place for its `tool_calls`",)
    assert encoded.num_turns == 2
    with pytest.raises(RowError, match="no place for its `tool_calls`"):
        encode_row(RowEncoder(tokenizer), row(QUESTION, CALLING))


def test_short_function_name_in_text_does_not_count_as_a_call(tokenizer: Any) -> None:
    template(tokenizer, "smollm2")
    call = {"type": "function", "function": {"name": "e", "arguments": {}}}
    encoded = encode_row(RowEncoder(tokenizer), row(QUESTION, {**CALLING, "tool_calls": [call]}, ANSWER))
    assert encoded.omitted_fields == ("tool_calls",)


def test_messages_that_a_template_skips_are_named(tokenizer: Any) -> None:
    skips = "{% if m.role != 'tool' %}{{ m.content }}<|im_end|>{% endif %}"
    tokenizer.chat_template = f"{{% for m in messages %}}{skips}{{% endfor %}}"
    encoded = encode_row(RowEncoder(tokenizer), row(QUESTION, ANSWER, RESULT, {"role": "assistant", "content": "Go."}))
    assert encoded.omitted_fields == ("content of tool messages",)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "mistral_nemo", "deepseek_v3"])
def test_tool_templates_render_all_parts(tokenizer: Any, name: str) -> None:
    encoder = RowEncoder(template(tokenizer, name))
    rows = [row(QUESTION, CALLING, RESULT, ANSWER, tools=[TOOL])] * 2  # the first row shows which fields appear
    for encoded in encoder.encode_many(rows):
        assert not isinstance(encoded, RowError), encoded
        # Three templates omit the tools: one always, one except for a fixed line, and one unless a question comes last.
        assert encoded.omitted_fields == (("tools",) if name in ("mistral_nemo", "deepseek_v3", "llama3_1") else ())


# -- in the report -----------------------------------------------------------------------------------------------


def test_turns_the_template_cannot_render_are_counted_and_reported(tmp_path: Path, tokenizer: Any) -> None:
    calls = {"messages": [QUESTION, CALLING, RESULT, ANSWER], "tools": [TOOL]}
    plain = {"messages": [QUESTION, ANSWER]}
    data, report = load(tmp_path, template(tokenizer, "smollm2"), [calls] * 4, [calls, *[plain] * 12], max_length=512)
    assert [(each.reason, each.count) for each in report.left_out] == [("tool_calls", 5), ("tools", 5)]
    assert [(each.num_turns, each.num_turns_lost) for each in report.sources] == [(8, 4), (14, 1)]
    assert [each.lost_share for each in report.sources] == [4 / 8, 1 / 14]
    (remark,) = report.remarks()
    assert remark == (
        "warning",
        "the chat template has no place for tool_calls / tools (5 of 17 rows; first: "
        f"{tmp_path / '0.jsonl'} line 1): set model.chat_template to a template with tools",
    )
    first, second = check_losses(report, data.source_names, 0.5)
    assert first.startswith(f"{data.source_names[0]}: 4 of 8 turns (50.0%) of the assistant are not trained.")
    assert second.startswith(f"{data.source_names[1]}: 1 of 14 turns (7.1%) of the assistant are not trained.")
    with pytest.raises(DataError, match=r"more than data.max_dropped = 0.49"):
        check_losses(report, data.source_names, 0.49)
    assert load(tmp_path, tokenizer, [calls] * 4, [calls, *[plain] * 12], max_length=512)[1] == report  # from the cache
    assert DataReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_special_tokens_in_answers_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    said = {"role": "assistant", "content": "It ends <|im_end|> here"}
    rows = [{"messages": [QUESTION, said]}, {"messages": [QUESTION, ANSWER]}, {"text": "a<|endoftext|>b"}]
    _, report = load(tmp_path, template(tokenizer, "smollm2"), rows)
    assert [(each.reason, each.count) for each in report.special_tokens] == [("<|im_end|>", 1), ("<|endoftext|>", 1)]
    assert "the text of 1 row contains <|im_end|>, which the tokenizer reads as a special token" in str(report)


def test_unread_columns_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    chats = {"messages": [QUESTION, ANSWER], "system": "Be kind.", "system_prompt": "Be kind.", "id": 0, "tags": []}
    dolly = {"instruction": "Who?", "context": "A whaler.", "response": "Ishmael"}
    deep = {"doc": {"body": "Call me"}, "id": 5}
    template(tokenizer, "smollm2")
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in [chats, chats]))
    _, report = load(tmp_path, tokenizer, [chats, chats, {"prompt": "a", "completion": " b", "tools": [TOOL]}])
    assert [(each.reason, each.count) for each in report.unread] == [("system_prompt", 2), ("id", 2), ("tools", 1)]
    assert "ignored columns: `system_prompt` (2 rows), `id` (2 rows), `tools` (1 row)" in str(report)
    columns = {"instruction": "instruction", "output": "response"}
    assert to_row(dolly, "", "auto", columns).unread_columns == ("context",)
    assert to_row(dolly, "", "auto", {**columns, "input": "context"}).unread_columns == ()
    assert to_row(deep, "", "text", {"text": "doc.body"}).unread_columns == ("id",)


# -- columnar files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_keys_of_other_rows_do_not_reach_the_text(tmp_path: Path, tokenizer: Any, suffix: str) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow.feather
    import pyarrow.parquet

    tokenizer.chat_template = SHOWS_FIELDS
    arguments = [{"city": "Rome"}, {"a": 1, "deep": [{"x": 1}, {"y": [None, 2]}]}]
    schemas = [{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}, {"type": "object"}]
    rows = [
        {
            "messages": [QUESTION, {"role": "assistant", "tool_calls": [{"name": "w", "arguments": given}]}, ANSWER],
            "tools": [{"name": "w", "parameters": schema}],
        }
        for given, schema in zip(arguments, schemas, strict=True)
    ]
    table = pyarrow.Table.from_pylist(rows)
    assert table.to_pylist() != rows  # the format adds keys
    path = tmp_path / f"rows.{suffix}"
    (pyarrow.parquet.write_table if suffix == "parquet" else pyarrow.feather.write_feather)(table, str(path))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    encoder = RowEncoder(tokenizer)
    texts, expected = (
        [tokenizer.decode(encode_row(encoder, each).tokens) for each in read_rows(str(tmp_path / name))]
        for name in (path.name, "rows.jsonl")
    )
    assert (
        '[call w {"city": "Rome"}]' in texts[0]
        and '[call w {"a": 1, "deep": [{"x": 1}, {"y": [null, 2]}]}]' in texts[1]
    )
    assert [sorted(text) for text in texts] == [sorted(text) for text in expected]  # keys are in the table's order
    assert '"required": null' not in texts[1]
