"""Wrong rows: each format with each field missing or of the wrong type, and conversations that cannot be trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from wrong_inputs.workplace import ROWS, Workplace, WrongInput, chat

CODE = 4
COMMANDS = ("check", "run")
FILE = "rows.jsonl"
#: Format -> a valid row.
SOUND: dict[str, dict[str, Any]] = {
    "messages": chat("Who speaks?", "Call me Ishmael."),
    "sharegpt": {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Ishmael."}]},
    "alpaca": {"instruction": "Who speaks?", "output": "Call me Ishmael."},
    "prompt_completion": {"prompt": "Who speaks? ", "completion": "Call me Ishmael."},
    "text": {"text": "Call me Ishmael."},
    "tokenized": {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8]},
}
NO_TEXTS: dict[str, Any] = {"null": None, "a number": 7, "a list": ["x"], "an object": {"x": 1}, "true": True}
NO_LISTS: dict[str, Any] = {"null": None, "a number": 7, "text": "x", "nothing": [], "an object": {"x": 1}}
NO_MESSAGES: dict[str, Any] = {"numbers": [7], "nulls": [None], "texts": ["x"], "lists": [[]], "empty objects": [{}]}
NO_TOKENS: dict[str, Any] = {
    "halves": [1.5],
    "texts": ["a"],
    "negative": [-1, 2],
    "lists": [[1]],
    "too large": [1 << 40],
}
USER, ASSISTANT = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ishmael."}
#: Name -> conversation that cannot be trained on.
CONVERSATIONS: dict[str, list[Any]] = {
    "unknown role": [{"role": "narrator", "content": "x"}, ASSISTANT],
    "role of another case": [{"role": "User", "content": "x"}, ASSISTANT],
    "role is a number": [{"role": 1, "content": "x"}, ASSISTANT],
    "role is a list": [{"role": ["user"], "content": "x"}, ASSISTANT],
    "no role": [{"content": "x"}, ASSISTANT],
    "no content": [{"role": "user"}, ASSISTANT],
    "content is null": [USER, {"role": "assistant", "content": None}],
    "content is a number": [USER, {"role": "assistant", "content": 7}],
    "content is an image": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, ASSISTANT],
    "nobody answers": [USER],
    "only a system prompt": [{"role": "system", "content": "x"}],
    "an empty answer": [USER, {"role": "assistant", "content": ""}],
    "weight of two": [USER, {**ASSISTANT, "weight": 2}],
    "train is text": [USER, {**ASSISTANT, "train": "yes"}],
    "not trained at all": [USER, {**ASSISTANT, "weight": 0}],
    "tool call without name": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}],
    "tool call is text": [USER, {"role": "assistant", "tool_calls": ["x"]}],
    "tool call is a number": [USER, {"role": "assistant", "tool_calls": 7}],
    "tool arguments broken": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}],
    "half a surrogate": [USER, {"role": "assistant", "content": "\ud800"}],
}
#: Name -> conversation that a chat template refuses because its roles do not alternate.
ORDERS: dict[str, list[Any]] = {
    "assistant first": [ASSISTANT, USER],
    "two questions": [USER, USER, ASSISTANT],
    "two answers": [USER, ASSISTANT, ASSISTANT],
    "system in the middle": [USER, {"role": "system", "content": "x"}, ASSISTANT],
}
IN_TURN = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
#: Name -> (wrong row, format in the config).
OTHER_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "nothing known": ({"question": "?", "answer": "!"}, "auto"),
    "no fields": ({}, "auto"),
    "preferences": ({"prompt": "a", "chosen": "b", "rejected": "c"}, "auto"),
    "only content": ({"content": "x"}, "auto"),
    "only input and output": ({"input": "x", "output": "y"}, "auto"),
    "another format": (SOUND["text"], "messages"),
    "chats as prompts": ({"prompt": [USER], "completion": "x"}, "auto"),
    "history is no list of pairs": ({**SOUND["alpaca"], "history": [["a"]]}, "alpaca"),
    "history is broken JSON": ({**SOUND["alpaca"], "history": "[["}, "alpaca"),
    "tools are broken JSON": ({**SOUND["messages"], "tools": "[{"}, "messages"),
    "tools are numbers": ({**SOUND["messages"], "tools": [7]}, "messages"),
    "messages are broken JSON": ({"messages": '[{"role": "user"'}, "messages"),
    "labels too short": ({"input_ids": [5, 6, 7], "labels": [5]}, "tokenized"),
    "labels shifted": ({"input_ids": [5, 6, 7], "labels": [6, 7, 8]}, "tokenized"),
    "labels are text": ({"input_ids": [5, 6], "labels": "5 6"}, "tokenized"),
    "mask too long": ({"input_ids": [5, 6], "loss_mask": [1, 1, 1]}, "tokenized"),
    "padding in the middle": ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, "tokenized"),
    "nothing attended": ({"input_ids": [5, 6, 7], "attention_mask": [0, 0, 0]}, "tokenized"),
    "nothing labelled": ({"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}, "tokenized"),
    "ids without embeddings": ({"input_ids": [5, 6, 99999]}, "tokenized"),
}


def _put_between_valid_rows(
    format: str, row: object, *, template: str = "", sound: object = None
) -> Callable[..., Any]:
    """Return a function that puts a row between two valid rows. The message must name the second line."""

    def spoil(work: Workplace) -> Sequence[str]:
        good = sound or SOUND.get(format, ROWS[0])
        work.rows(FILE, [json.dumps(good), row if isinstance(row, str) else json.dumps(row), json.dumps(good)])
        work.config.put("data.bad_rows", '"error"')
        work.config.put("data.train.format", f'"{format}"')
        if template:
            work.config.put("model.chat_template", f'"{work.file("turns.jinja", template)}"')
        return (f"{FILE} line 2",)

    return spoil


def field_cases() -> Iterator[WrongInput]:
    """Yield rows of every format in which one field is missing or has a forbidden value."""
    for format, sound in SOUND.items():
        for name, value in sound.items():
            if name != "labels":
                row = {key: other for key, other in sound.items() if key != name}
                yield _case(f"{format} without {name}", "data: missing field", _put_between_valid_rows(format, row))
            wrong = NO_LISTS if isinstance(value, list) else NO_TEXTS
            if format in ("messages", "sharegpt"):
                wrong = {**wrong, **NO_MESSAGES}
            elif format == "tokenized":
                wrong = {**wrong, **NO_TOKENS} if name == "input_ids" else {"a number": 7, "text": "x"}
            for what, bad in wrong.items():
                spoil = _put_between_valid_rows(format, {**sound, name: bad})
                yield _case(f"{format}: {name} is {what}", "data: wrong type", spoil)


def _case(name: str, kind: str, spoil: Callable[..., Any]) -> WrongInput:
    return WrongInput(name, kind, CODE, spoil, COMMANDS)


def cases() -> Iterator[WrongInput]:
    yield from field_cases()
    for name, messages in CONVERSATIONS.items():
        yield _case(name, "data: bad conversation", _put_between_valid_rows("messages", {"messages": messages}))
    for name, messages in ORDERS.items():
        spoil = _put_between_valid_rows("messages", {"messages": messages}, template=IN_TURN)
        yield _case(name, "data: roles in the wrong order", spoil)
    for name, (row, format) in OTHER_ROWS.items():
        if name == "ids without embeddings":
            continue
        yield _case(name, "data: bad row", _put_between_valid_rows(format, row))

    def too_large(work: Workplace) -> Sequence[str]:
        work.rows(FILE, [SOUND["tokenized"], OTHER_ROWS["ids without embeddings"][0]])
        return "99999", "vocab_size"

    yield _case("ids without embeddings", "data: bad row", too_large)

    def too_many_bad_rows(work: Workplace) -> Sequence[str]:
        work.rows(FILE, [json.dumps(ROWS[0]), *[json.dumps({"messages": CONVERSATIONS["unknown role"]})] * 2])
        return f"data.train.0 ({work.folder / FILE})", "2 of 3 rows", "data.max_dropped"

    def too_many_truncated_rows(work: Workplace) -> Sequence[str]:
        work.rows(FILE, [chat("Who?", "Ishmael. " * 99), chat("Who?", "Ahab. " * 99), ROWS[0]])
        return f"data.train.0 ({work.folder / FILE})", "2 truncated to data.max_length", "Raise data.max_length"

    def truncated_eval_rows(work: Workplace) -> Sequence[str]:
        work.rows("held_out.jsonl", [chat("Who?", "Ishmael. " * 99)])
        return "data.eval.0", "held_out.jsonl", "data.max_dropped"

    yield _case("most rows are dropped", "data: most is lost", too_many_bad_rows)
    yield _case("most rows are cut", "data: most is lost", too_many_truncated_rows)
    yield _case("most rows of an evaluation are cut", "data: most is lost", truncated_eval_rows)
