"""Messages of other tools, converted to one form: role, text, tool calls, and whether each is trained."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.data.images import IMAGE_MARK, NamedImage
from megatrain.data.rows_report import RowError

ROLES = ("system", "developer", "user", "assistant", "tool")
#: Names of roles in other tools.
_OTHER_ROLES = {
    "human": "user", "prompter": "user",
    "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant", "ai": "assistant",
    "function": "tool", "observation": "tool", "ipython": "tool", "tool_response": "tool",
}  # fmt: skip
_CALLS = ("function_call", "tool_call")  # ShareGPT roles: the assistant calls a tool; the text is the call as JSON
_CALL_FIELDS = ("tool_calls", "function_call")
_FLAGS = ("train", "training", "weight")


def read_messages(
    value: object, where: str, name: str, columns: Mapping[str, str], images: ImagePlaces
) -> tuple[tuple[dict[str, Any], ...], tuple[bool | None, ...]]:
    """Return the messages of a row, and the row's training flag of each (None without a flag).

    Args:
        value: the field ``name`` of the row: a list of messages, or the same as JSON text.
        where: file and row, for errors.
        columns: field -> name in the message, for ``role`` and ``content``.

    Raises:
        RowError: not a list of messages, an unknown role, or content that is not text.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_inner_json(value, where, name)
    if not isinstance(value, list) or not value:
        raise RowError(where, f"`{name}` must be a list of messages, this is {kind(value)}")
    messages, flags = [], []
    for number, message in enumerate(value, start=1):
        place = f"{where}, message {number}"
        if not isinstance(message, dict):
            raise RowError(place, f"a message must be an object with `role` and `content`, this is {kind(message)}")
        messages.append(_read_message(message, place, columns, images))
        flags.append(_flag(message, place))
    return tuple(messages), tuple(flags)


def _read_message(
    message: dict[str, Any], where: str, columns: Mapping[str, str], images: ImagePlaces
) -> dict[str, Any]:
    role_name = columns.get("role") or ("from" if "from" in message and "role" not in message else "role")
    content_name = columns.get("content") or ("value" if "value" in message and "content" not in message else "content")
    calls = _calls_of(message, where)
    if role_name not in message or (content_name not in message and not calls):
        seen = field_names(message)
        raise RowError(
            where,
            f"a message needs `{role_name}` and `{content_name}`, this has {seen}",
            reason=f"a message lacks `{role_name}` or `{content_name}`",
        )
    role, content = message[role_name], message.get(content_name)
    read: dict[str, Any] = {"role": _role(role, where)}
    if role in _CALLS:
        calls, content = parse_inner_json(content, where, content_name), ""
    read["content"] = _content(content, where, content_name, images, may_be_missing=bool(calls))
    if calls:
        read["tool_calls"] = [_tool_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]
    consumed = {*read, role_name, content_name, *_CALL_FIELDS, *_FLAGS}
    # Templates read many fields (`reasoning_content`, `name`, `recipient`), so all are passed through.
    return read | _others(message, consumed)


def _calls_of(message: Mapping[str, Any], where: str) -> Any:
    """Return the tool calls of a message: a list, one call, or None. ``function_call`` is an older name."""
    given = {name: parse_inner_json(message[name], where, name) for name in _CALL_FIELDS if message.get(name)}
    if len(given) > 1:
        raise RowError(where, "a message has both `tool_calls` and `function_call`", "Keep one of them")
    return next(iter(given.values()), None)


def _role(role: object, where: str) -> str:
    if role in _CALLS:
        return "assistant"
    known = _OTHER_ROLES.get(role, role) if isinstance(role, str) else role
    if known not in ROLES:
        shown = json.dumps(role, ensure_ascii=False)
        raise RowError(where, f"role {shown} is not known", f"Roles: {', '.join(ROLES)}")
    return str(known)


def _content(content: object, where: str, name: str, images: ImagePlaces, *, may_be_missing: bool) -> str:
    if (content is None and may_be_missing) or content == []:
        return ""
    if isinstance(content, list):  # parts, the form of chat interfaces
        parts = [part if isinstance(part, dict) else {"type": kind(part)} for part in content]
        other = [str(part.get("type")) for part in parts if not (_is_text(part) or part.get("type") in _IMAGES)]
        if other:
            raise RowError(
                where,
                f"`{name}` holds a part that is neither text nor an image: {other[0]}",
                "Remove the row: texts and images are trained",
            )
        return "".join(images.text(part["text"], where) if _is_text(part) else images.part(part) for part in parts)
    if not isinstance(content, str):
        raise RowError(where, f"`{name}` must be text, this is {kind(content)}")
    return images.text(content, where)


#: Types of image parts of a message, of OpenAI and of transformers' chat templates.
_IMAGES = ("image_url", "image", "input_image")


def _is_text(part: Mapping[str, Any]) -> bool:
    # In a columnar format all parts have the field; it is empty in parts of images.
    return isinstance(part.get("text"), str) and part.get("type") not in _IMAGES


class ImagePlaces:
    """The images of one row, in the order of their places in its messages.

    Args:
        column: images of the row outside its messages, if any; each place without an image takes the next one.
        single: like ``column``, for a row with a field ``image``; ignored if the row has no place for it.
    """

    def __init__(self, column: object = None, single: object = None) -> None:
        self._is_single = column is None
        column = single if column is None else column
        if isinstance(column, Mapping | str | bytes):
            column = [column]
        self._column = list(column) if isinstance(column, Sequence) else []
        self._named: list[Any] = []

    def text(self, text: str, where: str) -> str:
        """Return a text with a mark for each ``<image>`` in it, if the row has images outside its messages."""
        if IMAGE_MARK in text:
            raise RowError(where, f"the text holds {IMAGE_MARK!a}, which is the internal mark of images")
        if not self._column or _PLACEHOLDER not in text:
            return text
        self._named += [None] * text.count(_PLACEHOLDER)
        return text.replace(_PLACEHOLDER, IMAGE_MARK)

    def part(self, part: Mapping[str, Any]) -> str:
        """Return the mark of an image part of a message, and record the image."""
        named = next((part[key] for key in _SAYS_WHICH if part.get(key) not in (None, "")), None)
        self._named.append(named)
        return IMAGE_MARK

    def found(self, folder: Path, where: str) -> tuple[NamedImage, ...]:
        """Return the images, not read yet.

        Args:
            where: file and row.

        Raises:
            RowError: the number of places differs from the number of images.
        """
        num_places = sum(named is None for named in self._named)
        if self._is_single and not num_places:
            self._column = []
        if num_places != len(self._column):
            raise RowError(
                where,
                f"the row has {len(self._column)} images and {num_places} places for them ({_PLACEHOLDER}, or parts of "
                "type image)",
                "Write one place for each image",
                reason="a row has another number of images than places for them",
            )
        rest = iter(self._column)
        return tuple(NamedImage(next(rest) if named is None else named, folder, where) for named in self._named)


_PLACEHOLDER = "<image>"
_SAYS_WHICH = ("image_url", "image", "url", "path", "base64", "bytes")


def _tool_call(given_call: object, where: str) -> dict[str, Any]:
    """Return a call with its arguments as an object, which the chat templates of all model families accept."""
    call = given_call if isinstance(given_call, dict) else {}
    function = call.get("function") or call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(where, "a tool call needs the `name` of its function", reason="a tool call without a name")
    name = "arguments" if function.get("arguments") is not None else "parameters"
    given = function.get(name)
    arguments = parse_inner_json(given, where, name) if isinstance(given, str) and given.strip() else given
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if not isinstance(arguments, dict):
        raise RowError(
            where,
            f"`{name}` of the tool call `{function['name']}` must be an object, this is {kind(arguments)}",
            'Write an object, such as {"city": "Rome"}, or the same as JSON text',
            reason=f"`{name}` of a tool call is no object",
        )
    inner = {"name": function["name"], "arguments": arguments}
    if function is not call:
        inner.update(_others(function, ("name", "arguments", "parameters")))
    rest = _others(call, ("type", "function", "name", "arguments", "parameters"))
    return {"type": "function", "function": inner, **rest}


def _others(value: Mapping[str, Any], names: Container[str]) -> dict[str, Any]:
    """Return the fields of an object that have a value and are not in ``names``."""
    return {key: field for key, field in value.items() if key not in names and field is not None}


def with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return messages with the arguments of tool calls as JSON text."""

    def changed(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}

    return tuple(
        {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    )


def _flag(message: Mapping[str, Any], where: str) -> bool | None:
    """Return the training flag of a message: ``weight`` 0 or 1, or ``train`` true or false."""
    for name in _FLAGS:
        value = message.get(name)
        if value is None:
            continue
        if value not in (0, 1):  # true and false are 1 and 0
            raise RowError(where, f"`{name}` must be 0 or 1, this is {json.dumps(value, default=str)}")
        return bool(value)
    return None


def read_tools(value: object, where: str) -> tuple[dict[str, Any], ...] | None:
    """Return the tools of a row: a list of JSON schemas, possibly as JSON text; None if there are none.

    Raises:
        RowError: the value is something else.
    """
    if isinstance(value, str) and value.strip():
        value = parse_inner_json(value, where, "tools")
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError(where, f"`tools` must be a list of objects, this is {kind(value)}")
    return tuple(value)


def json_fault(error: json.JSONDecodeError) -> str:
    """Return position and cause of broken JSON, without the parser's trailing "at"."""
    return f"at column {error.colno}: {error.msg.removesuffix(' at').removesuffix(' starting')}"


def parse_inner_json(value: object, where: str, name: str) -> Any:
    """Return the value of a field that holds JSON as text.

    Raises:
        RowError: the text is not JSON.
    """
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        fault = f" {json_fault(error)}" if isinstance(error, json.JSONDecodeError) else ""
        raise RowError(where, f"`{name}` holds broken JSON{fault}", reason=f"`{name}` holds broken JSON") from None


def field_names(value: Mapping[str, Any]) -> str:
    """Return the names of at most eight fields of an object, for messages."""
    names = [f"`{name}`" for name in value]
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "no fields"


def kind(value: object) -> str:
    """Return the kind of a JSON value, in words."""
    if value is None:
        return "null"
    if value in ([], "", {}):
        return "empty"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
