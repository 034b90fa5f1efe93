"""Tool calls of several formats are read, and the parts that a chat template leaves out are named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatrain.data.chat import RowEncoder
from megatrain.data.messages import arguments_to_text
from megatrain.data.rows_report import RowError
from oracles.rows_in_memory import encode_row
from tests.megatrain.data.test_fields import ANSWER, CALLING, QUESTION, RESULT, row
from tests.megatrain.data.test_templates import CALL, TOOL


@pytest.mark.parametrize(
    ("calls", "tools", "left_out"),
    [
        ("{{ m.tool_calls | tojson }}", "{{ tools | tojson }}", ()),
        (
            "{{ m.tool_calls | tojson }}",
            "{{ tools[0].function.name }}",
            ("descriptions of tools", "parameters of tools"),
        ),
        ("{{ m.tool_calls[0] | tojson }}", "{{ tools | tojson }}", ("arguments of tool_calls",)),
        (
            "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}",
            "{{ tools | tojson }}",
            ("arguments of tool_calls",),
        ),
    ],
)
def test_omitted_parts_of_tools_and_calls_are_named(
    tokenizer: Any, calls: str, tools: str, left_out: tuple[str, ...]
) -> None:
    tokenizer.chat_template = (
        "{% if tools %}" + tools + "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.tool_calls %}" + calls + "{% endif %}<|im_end|>\n{% endfor %}"
    )
    second = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome", "days": 37}}}
    said = {**CALLING, "tool_calls": [CALL, second]}
    encoder = RowEncoder(tokenizer)
    for _ in range(2):  # the first row shows which fields appear
        encoded = encode_row(encoder, row(QUESTION, said, RESULT, ANSWER, tools=[TOOL]))
        assert encoded.omitted_fields == left_out
        is_lost = "arguments of tool_calls" in left_out
        assert encoded.untrained_turns == ("the chat template leaves out a part of its `tool_calls`",) * is_lost


SAIL = {
    "type": "function",
    "function": {
        "name": "set_sail",
        "description": "Leave port",
        "parameters": {"type": "object", "properties": {"knots": {"type": "number", "description": "Velocity"}}},
    },
}
NAMES, DESCRIPTIONS, PARAMETERS = "names of tools", "descriptions of tools", "parameters of tools"


@pytest.mark.parametrize(
    ("calls", "tools", "left_out"),
    [
        ("{{ c | tojson }}", "{{ t | tojson }}", ()),
        ("{{ c | tojson }}", "{% if loop.first %}{{ t | tojson }}{% endif %}", ("tools",)),
        ("{{ c | tojson }}", "{{ t.function.name }}{{ t.function.description }}", (DESCRIPTIONS, PARAMETERS)),
        (
            "{{ c | tojson }}",
            "{{ t.function.name }}{{ t.function.description }}{{ t.function.parameters.properties | list }}",
            (DESCRIPTIONS,),
        ),
        (
            "{{ c | tojson }}",
            "{{ t.function.name }}{{ t.function.description }}{{ t.function.parameters.properties.values() | list }}",
            (PARAMETERS,),
        ),
        ("{{ c | tojson }}", "{{ t.function.description }}{{ t.function.parameters | tojson }}", (NAMES,)),
        ("{{ c.function.arguments | tojson }}", "{{ t | tojson }}", ("names of tool_calls",)),
        ("{{ c.function.name }}{{ c.function.arguments | list }}", "{{ t | tojson }}", ("arguments of tool_calls",)),
        (
            "{{ c.function.name }}{{ c.function.arguments.values() | list }}",
            "{{ t | tojson }}",
            ("arguments of tool_calls",),
        ),
        ("", "{{ t | tojson }}", ("tool_calls",)),
        ("{{ c | tojson }}", "", ("tools",)),
    ],
)
def test_every_tool_and_call_must_be_rendered(
    tokenizer: Any, calls: str, tools: str, left_out: tuple[str, ...]
) -> None:
    tokenizer.chat_template = (
        "{% for t in tools or [] %}" + tools + "{% endfor %}{% for m in messages %}{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}" + calls + "{% endfor %}<|im_end|>\n{% endfor %}"
    )
    turn = {"type": "function", "function": {"name": "turn", "arguments": {"side": ["port", {"degrees": 37}]}}}
    said = {"role": "assistant", "content": "Aye.", "tool_calls": [CALL, turn]}
    found = row(QUESTION, said, {**RESULT, "name": "turn"}, ANSWER, tools=[TOOL, SAIL])
    assert encode_row(RowEncoder(tokenizer), found).omitted_fields == left_out


def test_a_tool_with_only_a_name_is_left_out_as_a_whole(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"
    named = {"type": "function", "function": {"name": "set_sail"}}
    assert encode_row(RowEncoder(tokenizer), row(QUESTION, ANSWER, tools=[named])).omitted_fields == ("tools",)


def test_tools_that_only_some_rows_render_are_named(tokenizer: Any) -> None:
    """A field that one row renders, and that was found to be rendered, can be missing from another row."""
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if messages | length == 2 and tools %}{{ tools | tojson }}{% endif %}"
    )
    encoder = RowEncoder(tokenizer)
    assert encode_row(encoder, row(QUESTION, ANSWER, tools=[TOOL])).omitted_fields == ()
    assert encode_row(encoder, row(QUESTION, ANSWER, QUESTION, ANSWER, tools=[TOOL])).omitted_fields == ("tools",)
    assert encode_row(encoder, row(QUESTION, ANSWER, tools=[TOOL, SAIL])).omitted_fields == ()
    assert encode_row(RowEncoder(tokenizer), row(QUESTION, ANSWER, QUESTION, ANSWER, tools=[SAIL])).omitted_fields == (
        "tools",
    )


BAD_ARGUMENTS = [
    ("[1]", "a list"),
    ("5", "a number"),
    ("NaN", "a number"),
    ('"x"', "text"),
    (json.dumps(json.dumps({"a": 1})), "text"),
    (0, "a number"),
    (False, "true or false"),
    ([], "empty"),
    ([1], "a list"),
    (1.5, "a number"),
]


@pytest.mark.parametrize(("given", "type_name"), BAD_ARGUMENTS)
@pytest.mark.parametrize("name", ["arguments", "parameters"])
def test_non_object_arguments_are_refused(given: object, type_name: str, name: str) -> None:
    call = {"function": {"name": "f", name: given}}
    with pytest.raises(RowError) as refused:
        row(QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]})
    assert str(refused.value) == (
        f"rows line 1, message 2: `{name}` of the tool call `f` must be an object, not {type_name}. Write an object, "
        'such as {"city": "Rome"}, or the object as JSON text'
    )
    assert refused.value.reason == f"`{name}` of a tool call is not an object"


@pytest.mark.parametrize("given", [None, "", "  ", "{}", {}])
def test_a_call_without_arguments(given: object) -> None:
    made = row(QUESTION, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": given}}]})
    assert made.messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]


def test_foreign_tool_call_formats_are_read() -> None:
    function = {"name": "f", "arguments": {"a": None}}
    expected = [{"type": "function", "function": function, "id": "1"}]
    written = {"id": "1", "type": "function", "function": function}
    flat = {"id": "1", "function": None, **function}
    for calls in ([written], written, json.dumps([written]), json.dumps(written), [flat]):
        for content in ({}, {"content": None}, {"content": ""}, {"content": []}):
            made = row(QUESTION, {"role": "assistant", **content, "tool_calls": calls})
            assert made.messages[1] == {"role": "assistant", "content": "", "tool_calls": expected}
    with pytest.raises(RowError) as refused:
        row(QUESTION, {"role": "assistant", "content": "", "tool_calls": "[{"})
    assert str(refused.value) == (
        "rows line 1, message 2: `tool_calls` contains broken JSON at column 3: Expecting property name enclosed in "
        "double quotes. Fix or remove the row"
    )


def test_other_fields_of_messages_and_calls_are_kept() -> None:
    """A template can read any field. Null fields and the fields of other formats are left out."""
    call = {"id": "1", "index": 0, "type": "x", "function": {"name": "f", "parameters": {"a": 1}, "strict": True}}
    flat = {"name": "g", "parameters": '{"b": 2}', "index": 1, "note": None}
    said = {"from": "gpt", "value": None, "weight": 1, "reasoning": "why", "audio": None, "tool_calls": [call, flat]}
    made = row({"from": "human", "value": "Go", "name": "Ahab"}, said)
    assert made.messages == (
        {"role": "user", "content": "Go", "name": "Ahab"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": "f", "arguments": {"a": 1}, "strict": True},
                    "id": "1",
                    "index": 0,
                },
                {"type": "function", "function": {"name": "g", "arguments": {"b": 2}}, "index": 1},
            ],
            "reasoning": "why",
        },
    )
    assert made.flags == (None, True)
    assert arguments_to_text(made.messages)[1]["tool_calls"][1] == {
        "type": "function",
        "function": {"name": "g", "arguments": '{"b": 2}'},
        "index": 1,
    }
    assert arguments_to_text(made.messages)[0] == made.messages[0]
