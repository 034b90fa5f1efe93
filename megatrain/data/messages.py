"""Conversion of messages from several tools' formats to one structure: role, text, tool calls and training flag."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.data.images import IMAGE_MARK, NamedImage
from megatrain.data.rows_report import RowError

ROLES = ("system", "developer", "user", "assistant", "tool")
#: Names that other tools use for the roles.
_ROLE_SYNONYMS = {
    "human": "user", "prompter": "user",
    "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant", "ai": "assistant",
    "function": "tool", "observation": "tool", "ipython": "tool", "tool_response": "tool",
}  # fmt: skip
_CALL_ROLES = ("function_call", "tool_call")  # ShareGPT roles of messages that contain a tool call as JSON
_CALL_FIELDS = ("tool_calls", "function_call")
_FLAG_FIELDS = ("train", "training", "weight")


def read_messages(
    value: object, location: str, name: str, columns: Mapping[str, str], images: RowImages
) -> tuple[tuple[dict[str, Any], ...], tuple[bool | None, ...]]:
    """Return a row's messages, and each message's training flag, which is None if not set.

    Args:
        value: Value of the row's field ``name``: a list of messages, or the list as JSON text.
        location: File and row, for error messages.
        columns: Names that the messages use for ``role`` and ``content``.

    Raises:
        RowError: The value is not a list of messages, a role is unknown, or a message's content is not text.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_inner_json(value, location, name)
    if not isinstance(value, list) or not value:
        raise RowError(location, f"`{name}` must be a list of messages, not {type_name(value)}")
    messages, flags = [], []
    for position, message in enumerate(value, start=1):
        message_location = f"{location}, message {position}"
        if not isinstance(message, dict):
            problem = f"a message must be an object with `role` and `content`, not {type_name(message)}"
            raise RowError(message_location, problem)
        messages.append(_read_message(message, message_location, columns, images))
        flags.append(_parse_flag(message, message_location))
    return tuple(messages), tuple(flags)


def _read_message(message: dict[str, Any], location: str, keys: Mapping[str, str], images: RowImages) -> dict[str, Any]:
    role_name = keys.get("role") or ("from" if "from" in message and "role" not in message else "role")
    content_name = keys.get("content") or ("value" if "value" in message and "content" not in message else "content")
    calls = _find_calls(message, location)
    if role_name not in message or (content_name not in message and not calls):
        names = field_names(message)
        raise RowError(
            location,
            f"a message needs `{role_name}` and `{content_name}`, but this message has {names}",
            reason=f"a message lacks `{role_name}` or `{content_name}`",
        )
    role, content = message[role_name], message.get(content_name)
    result: dict[str, Any] = {"role": _parse_role(role, location)}
    if role in _CALL_ROLES:
        calls, content = parse_inner_json(content, location, content_name), ""
    result["content"] = _parse_content(content, location, content_name, images, is_optional=bool(calls))
    if calls:
        result["tool_calls"] = [_parse_tool_call(c, location) for c in (calls if isinstance(calls, list) else [calls])]
    known_fields = {*result, role_name, content_name, *_CALL_FIELDS, *_FLAG_FIELDS}
    # Keep all other fields, because templates read many of them (`reasoning_content`, `name`, `recipient`).
    return result | _other_fields(message, known_fields)


def _find_calls(message: Mapping[str, Any], location: str) -> Any:
    """Return a message's tool calls (a list, one call or None) from ``tool_calls`` or the older ``function_call``."""
    calls = {name: parse_inner_json(message[name], location, name) for name in _CALL_FIELDS if message.get(name)}
    if len(calls) > 1:
        raise RowError(location, "a message has both `tool_calls` and `function_call`", "Keep one of them")
    return next(iter(calls.values()), None)


def _parse_role(role: object, location: str) -> str:
    if role in _CALL_ROLES:
        return "assistant"
    standard_role = _ROLE_SYNONYMS.get(role, role) if isinstance(role, str) else role
    if standard_role not in ROLES:
        role_text = json.dumps(role, ensure_ascii=False)
        raise RowError(location, f"unknown role {role_text}", f"Roles: {', '.join(ROLES)}")
    return str(standard_role)


def _parse_content(content: object, location: str, name: str, images: RowImages, *, is_optional: bool) -> str:
    if content is None and is_optional:
        return ""
    if isinstance(content, list):  # chat APIs represent content as a list of parts
        parts = [part if isinstance(part, dict) else {"type": type_name(part)} for part in content]
        types = [str(part.get("type")) for part in parts if not (_is_text(part) or part.get("type") in _IMAGE_TYPES)]
        if types:
            raise RowError(
                location,
                f"`{name}` contains a part that is neither text nor an image: {types[0]}",
                "Remove the row: only texts and images are supported",
            )
        return "".join(images.mark(part["text"], location) if _is_text(part) else images.add(part) for part in parts)
    if not isinstance(content, str):
        raise RowError(location, f"`{name}` must be text, not {type_name(content)}")
    return images.mark(content, location)


#: Names of image parts in the messages of OpenAI and in transformers' chat templates.
_IMAGE_TYPES = ("image_url", "image", "input_image")


def _is_text(part: Mapping[str, Any]) -> bool:
    # In columnar formats, image parts also have a field `text`, but it is empty.
    return isinstance(part.get("text"), str) and part.get("type") not in _IMAGE_TYPES


class RowImages:
    """Images of a row, collected in the order of their placeholders in the messages.

    Args:
        images: Images from a column of the row. Each placeholder without its own image takes the next one.
        optional_images: Like ``images``, but ignored if the messages have no placeholder for them.
    """

    def __init__(self, images: object = None, optional_images: object = None) -> None:
        self._is_optional = images is None
        images = optional_images if images is None else images
        if isinstance(images, Mapping | str | bytes):
            images = [images]
        self._column_images = list(images) if isinstance(images, Sequence) else []
        self._images: list[Any] = []

    def mark(self, text: str, location: str) -> str:
        """Replace each ``<image>`` in a text with the image mark if the row has a column of images."""
        if IMAGE_MARK in text:
            raise RowError(location, f"the text contains {IMAGE_MARK!a}, which is the internal mark of images")
        if not self._column_images or _PLACEHOLDER not in text:
            return text
        self._images += [None] * text.count(_PLACEHOLDER)
        return text.replace(_PLACEHOLDER, IMAGE_MARK)

    def add(self, part: Mapping[str, Any]) -> str:
        """Record the image in a message's image part, and return the image mark."""
        image = next((part[key] for key in _IMAGE_KEYS if part.get(key) not in (None, "")), None)
        self._images.append(image)
        return IMAGE_MARK

    def match(self, folder: Path, location: str) -> tuple[NamedImage, ...]:
        """Return the image of each placeholder. The images are not read.

        Raises:
            RowError: The number of placeholders differs from the number of images.
        """
        num_placeholders = sum(image is None for image in self._images)
        if self._is_optional and not num_placeholders:
            self._column_images = []
        if num_placeholders != len(self._column_images):
            raise RowError(
                location,
                f"the row has {len(self._column_images)} images but {num_placeholders} placeholders for them "
                f"({_PLACEHOLDER}, or parts of type image)",
                "Write one placeholder for each image",
                reason="the numbers of images and of placeholders differ",
            )
        images = iter(self._column_images)
        return tuple(NamedImage(next(images) if image is None else image, folder, location) for image in self._images)


_PLACEHOLDER = "<image>"
_IMAGE_KEYS = ("image_url", "image", "url", "path", "base64", "bytes")


def _parse_tool_call(value: object, location: str) -> dict[str, Any]:
    """Return a tool call in a standard form. Its arguments are an object, as most chat templates expect."""
    call = value if isinstance(value, dict) else {}
    function = call.get("function") or call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(location, "a tool call needs the `name` of its function", reason="a tool call has no name")
    name = "arguments" if function.get("arguments") is not None else "parameters"
    field = function.get(name)
    arguments = parse_inner_json(field, location, name) if isinstance(field, str) and field.strip() else field
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if not isinstance(arguments, dict):
        raise RowError(
            location,
            f"`{name}` of the tool call `{function['name']}` must be an object, not {type_name(arguments)}",
            'Write an object, such as {"city": "Rome"}, or the object as JSON text',
            reason=f"`{name}` of a tool call is not an object",
        )
    call_function = {"name": function["name"], "arguments": arguments}
    if function is not call:
        call_function.update(_other_fields(function, ("name", "arguments", "parameters")))
    other_fields = _other_fields(call, ("type", "function", "name", "arguments", "parameters"))
    return {"type": "function", "function": call_function, **other_fields}


def _other_fields(value: Mapping[str, Any], names: Container[str]) -> dict[str, Any]:
    """Return an object's fields that are not null and not in ``names``."""
    return {key: field for key, field in value.items() if key not in names and field is not None}


def arguments_to_text(messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return the messages with all tool calls' arguments converted to JSON text."""

    def convert_call(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}

    return tuple(
        {**message, "tool_calls": [convert_call(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    )


def _parse_flag(message: Mapping[str, Any], location: str) -> bool | None:
    """Return a message's training flag (``train``, ``training`` or ``weight``), or None if it is not set."""
    for name in _FLAG_FIELDS:
        value = message.get(name)
        if value is None:
            continue
        if value not in (0, 1):  # this also accepts false and true
            raise RowError(location, f"`{name}` must be 0 or 1, not {json.dumps(value, default=str)}")
        return bool(value)
    return None


def read_tools(value: object, location: str) -> tuple[dict[str, Any], ...] | None:
    """Return a row's tools, or None. The value is a list of JSON schemas, or this list as JSON text.

    Raises:
        RowError: The value is not a list of objects.
    """
    if isinstance(value, str) and value.strip():
        value = parse_inner_json(value, location, "tools")
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError(location, f"`tools` must be a list of objects, not {type_name(value)}")
    return tuple(value)


def describe_json_error(error: json.JSONDecodeError) -> str:
    """Return the column and cause of a JSON error, without the "at" or "starting at" of some parser messages."""
    return f"at column {error.colno}: {error.msg.removesuffix(' at').removesuffix(' starting')}"


def parse_inner_json(value: object, location: str, name: str) -> Any:
    """Parse a field's value if it is text, else return it. Raises RowError if the text is not JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        detail = f" {describe_json_error(error)}" if isinstance(error, json.JSONDecodeError) else ""
        problem = f"`{name}` contains broken JSON"
        raise RowError(location, f"{problem}{detail}", reason=problem) from None


def field_names(value: Mapping[str, Any]) -> str:
    """Return the names of an object's first eight fields, for messages."""
    names = [f"`{name}`" for name in value]
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "no fields"


def type_name(value: object) -> str:
    """Return the type of a JSON value in words, for error messages."""
    if value is None:
        return "null"
    if value in ([], "", {}):
        return "empty"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
