"""Readers of row formats. A reader converts a row to a conversation, a prompt with its completion, text, or tokens."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, cast, get_args

from megatrain.base.batch_keys import IGNORED_LABEL
from megatrain.data.images import NamedImage
from megatrain.data.messages import RowImages, field_names, parse_inner_json, read_messages, read_tools, type_name
from megatrain.data.rows_report import DataError, RowError
from megatrain.data.table import ColumnName, RowFormat

#: Column names that are synonyms of fields, and names of fields inside messages.
_SYNONYMS, _MESSAGE_FIELDS = ("query", "response"), ("role", "content")
_FIELDS = tuple(name for name in get_args(ColumnName) if name not in (*_SYNONYMS, *_MESSAGE_FIELDS))
_CHAT_FIELDS = ("system", "tools", "images", "image")
_NAMES = "messages, conversations, instruction and output, prompt and completion, text, or input_ids"
#: Common column names of prompts, answers and plain texts. The most likely names come first.
_PROMPT_NAMES = ("prompt", "question", "instruction", "query", "input", "inputs", "problem", "q")
_ANSWER_NAMES = ("completion", "answer", "response", "output", "outputs", "target", "targets", "solution", "a")
_TEXT_NAMES = ("text", "content", "body", "document", "article")
#: Columns of rows for reinforcement learning. These rows have no answer.
_RL_COLUMNS = {"prompt", "solution", "reward", "ground_truth", "reward_model", "data_source", "ability", "extra_info"}


class DataRow:
    """One row of a data file.

    Attributes:
        location: File and row, for messages.
        unread_columns: Columns of the row that its format does not read.
    """

    __slots__ = ()
    location: str
    unread_columns: tuple[str, ...]

    #: Names of the attributes whose lengths add up to the row's number of characters.
    length_fields: ClassVar[tuple[str, ...]] = ()

    @property
    def num_characters(self) -> int:
        """Approximate number of characters in the row."""
        return sum(len(getattr(self, name)) for name in self.length_fields)


@dataclass(frozen=True, slots=True)
class Conversation(DataRow):
    """A chat.

    Attributes:
        messages: Messages in order. Each has the text fields ``role`` and ``content``; some also have ``tool_calls``.
        loss_start: Index of the first message that can be in the loss. Above 0 for a prompt with its completion.
        tools: Tools that the assistant can call. The chat template renders them.
        flags: Loss flag of each message, None for messages without a flag. Empty if no message has a flag.
        images: Images in the order of the image marks in the messages, one image per mark.
    """

    title: ClassVar[str] = "conversation"
    messages: tuple[Mapping[str, Any], ...]
    location: str
    loss_start: int = 0
    tools: tuple[Mapping[str, Any], ...] | None = None
    flags: tuple[bool | None, ...] = ()
    images: tuple[NamedImage, ...] = ()
    unread_columns: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_characters(self) -> int:
        """Total length of all messages' contents."""
        return sum(len(message["content"]) for message in self.messages)


@dataclass(frozen=True, slots=True)
class PromptCompletion(DataRow):
    """A prompt and its completion. Both are used verbatim, without a chat template."""

    title: ClassVar[str] = "prompt and completion"
    length_fields: ClassVar[tuple[str, ...]] = ("prompt", "completion")
    prompt: str
    completion: str
    location: str
    unread_columns: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Document(DataRow):
    """Plain text. All of its tokens are in the loss.

    Attributes:
        is_start: Whether this is the first piece of the text. Large text files are read in several pieces.
        is_end: Whether this is the last piece of the text.
    """

    title: ClassVar[str] = "text"
    length_fields: ClassVar[tuple[str, ...]] = ("text",)
    text: str
    location: str
    is_start: bool = True
    is_end: bool = True
    unread_columns: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Tokenized(DataRow):
    """A row that the user has already tokenized.

    Attributes:
        trained: Loss mask, one flag per token. None to put all tokens in the loss and to split the row like plain text.
    """

    title: ClassVar[str] = "tokens"
    length_fields: ClassVar[tuple[str, ...]] = ("tokens",)
    tokens: tuple[int, ...]
    trained: tuple[bool, ...] | None
    location: str
    unread_columns: tuple[str, ...] = field(default=(), compare=False)


#: Row types that contain exactly one text.
PlainRow = Conversation | PromptCompletion | Document | Tokenized


@dataclass(frozen=True, slots=True)
class RowFields:
    """Access to a row's fields by their standard names.

    Attributes:
        value: Values of the row by column name.
        location: File and row, for error messages.
        names: Column name of each field.
        columns: The config's ``columns``, which also has the names of fields in messages.
        folder: Base folder for relative image paths.
    """

    value: Mapping[str, Any]
    location: str
    names: dict[str, str]
    columns: Mapping[str, str]
    folder: Path = Path()

    def name(self, field: str) -> str:
        """Return a field's column name."""
        return self.names.get(field, field)

    def __contains__(self, field: str) -> bool:
        return self.name(field) in self.value

    def __getitem__(self, field: str) -> Any:
        return self.value[self.name(field)]

    def get(self, field: str) -> Any:
        """Return a field's value, or None if the row does not have the field."""
        return self.value.get(self.name(field))

    def text(self, field: str) -> str:
        """Return a field's text. Raises RowError if the value is not text."""
        return require_text(self[field], self.location, self.name(field))

    def messages(self, field: str, images: RowImages) -> tuple[tuple[dict[str, Any], ...], tuple[bool | None, ...]]:
        """Return a field's messages and flags, as ``read_messages`` does."""
        return read_messages(self[field], self.location, self.name(field), self.columns, images)

    def tools(self) -> tuple[Mapping[str, Any], ...] | None:
        """Return the tools that the assistant can call, or None."""
        return read_tools(self.get("tools"), self.location)

    def images(self) -> RowImages:
        """Return a new :class:`RowImages` with the images of the row's ``images`` or ``image`` column."""
        return RowImages(self.get("images"), self.value.get("image"))

    def system_text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the row's system text, or "" if it has none or if the messages already start with a system message."""
        system = self.get("system")
        if not isinstance(system, str) or not system.strip() or messages[0]["role"] in ("system", "developer"):
            return ""
        return system


@dataclass(frozen=True, slots=True)
class RowReader:
    """Reader of one row format.

    Attributes:
        name: Value of ``format`` in a config.
        title: Description of the rows and of their use, for comments in a generated config.
        read: Function that parses a row. Raises RowError, or DataError if fields are missing.
        alternatives: Fields of which a row must have at least one. Empty if there is no such requirement.
        fields: Optional fields that the reader uses, or None for all known fields.
    """

    name: str
    title: str
    read: Callable[[RowFields], DataRow]
    required: tuple[str, ...] = ()
    alternatives: tuple[str, ...] = ()
    fields: tuple[str, ...] | None = ()

    def matches(self, value: Mapping[str, Any], names: Mapping[str, str]) -> bool:
        """Return whether a row has the fields that this format requires."""
        has_any = not self.alternatives or any(names.get(field, field) in value for field in self.alternatives)
        return has_any and all(names.get(field, field) in value for field in self.required)

    def find_unread_columns(self, row: DataRow, fields: RowFields) -> tuple[str, ...]:
        """Return a row's nonempty columns that this format does not read."""
        names = tuple(fields.names) if self.fields is None else (*self.required, *self.fields)
        if isinstance(row, Conversation):
            names += _CHAT_FIELDS
        read_columns = set(map(fields.name, names))
        read_columns |= {name.partition(".")[0] for name in read_columns}
        return tuple(
            name for name, cell in fields.value.items() if name not in read_columns and cell not in (None, "", [], {})
        )


def read_row(
    value: object, location: str, format: RowFormat | RowReader, columns: Mapping[str, str], folder: Path = Path()
) -> tuple[str, DataRow]:
    """Parse a row. Return the name of its format and the parsed row.

    Args:
        value: The row, as a mapping.
        location: File and row, for error messages.
        format: Format of the row, or "auto" to detect it from the column names. Column names without an exact match are
            matched case-insensitively, without surrounding spaces.
        columns: Column name of each field. A dotted name refers to a field inside an object.
        folder: Base folder for relative image paths.

    Raises:
        RowError: The row is not an object with fields, or a field has an invalid value.
        DataError: A required field is missing, no format matches the row, or the row is preference data.
    """
    if not isinstance(value, Mapping) or not value:
        rule = "a row must be an object with fields"
        hint = "; a list of rows must be in a .json file" if isinstance(value, list) else ""
        raise RowError(location, f"{rule}, not {type_name(value)}", f"Fix or remove the row{hint}", reason=rule)
    if isinstance(format, RowReader):
        readers = [format]
    else:
        readers = list(READERS.values()) if format == "auto" else [READERS[format]]
    names = _map_fields(columns, is_alpaca=format == "alpaca", is_auto=format == "auto")
    row_value = _rename_columns(value, names, columns, readers)
    reader = _detect_reader(row_value, names, location, columns, readers) if format == "auto" else readers[0]
    fields = RowFields(row_value, location, names, columns, folder)
    if reader.read is _read_conversation:
        _name_messages(fields, reader.required[0])
    for required_field in reader.required:
        if required_field not in fields:
            if error_parts := explain_preferences(row_value):
                raise DataError(location, *error_parts)
            if error_parts := find_absent_column(row_value, columns):
                raise DataError(location, *error_parts)
            problem = f"no field `{fields.name(required_field)}`; the row has {field_names(row_value)}"
            raise DataError(location, problem, guess_columns(row_value, location))
    row = reader.read(fields)
    unread_columns = reader.find_unread_columns(row, fields)
    return reader.name, replace(cast("Any", row), unread_columns=unread_columns) if unread_columns else row


def _name_messages(fields: RowFields, default_name: str) -> None:
    """Map ``messages`` and ``conversations`` to whichever column the row has, because one reader reads both formats."""
    names, other_name = fields.names, "conversations" if default_name == "messages" else "messages"
    names["messages"] = names[default_name] if default_name in fields or other_name not in fields else names[other_name]
    names["conversations"] = names["messages"]


def _map_fields(columns: Mapping[str, str], *, is_alpaca: bool, is_auto: bool) -> dict[str, str]:
    """Return each field's column name. Keys of ``columns`` can be other tools' field names, such as ``response``."""
    names = {field: columns.get(field, field) for field in _FIELDS}
    is_alpaca = is_alpaca or (is_auto and bool({"query", "instruction", "output"} & set(columns)))
    synonyms = {"prompt": "instruction", "query": "input", "response": "output"} if is_alpaca else {
        "response": "completion"
    }  # fmt: skip
    names.update({field: columns[synonym] for synonym, field in synonyms.items() if synonym in columns})
    return names


def row_columns(columns: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of ``columns`` for fields of rows, without the entries for fields of messages."""
    return {field: column for field, column in columns.items() if field in (*_FIELDS, *_SYNONYMS)}


def find_absent_column(value: Mapping[str, Any], columns: Mapping[str, str]) -> tuple[str, str] | None:
    """Return (problem, remedy) if ``columns`` names a column that the row does not have, else None."""
    for key, column in row_columns(columns).items():
        if column not in value:
            matches = difflib.get_close_matches(column.casefold(), [name.casefold() for name in value], 1, 0.6)
            suggestion = next((name for name in value if matches and name.casefold() == matches[0]), None)
            advice = f'Did you mean {key} = "{suggestion}"?' if suggestion else "Use the name of an existing column"
            problem = f'no column `{column}` (columns = {{ {key} = "{column}" }}); the row has {field_names(value)}'
            return problem, advice
    return None


def _rename_columns(
    value: Mapping[str, Any], names: Mapping[str, str], columns: Mapping[str, str], readers: Sequence[RowReader]
) -> Mapping[str, Any]:
    """Return a row whose columns are renamed to the expected names if they differ only in case.

    Names in ``columns`` without an exact match are always matched case-insensitively. All other known names are matched
    case-insensitively only if no format fits the row, for example in a spreadsheet with ``Question,Answer``.
    """
    columns = row_columns(columns)
    is_match = any(reader.matches(value, names) for reader in readers)
    return with_columns(value, columns if is_match else {**names, **columns})


def with_columns(value: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """Return a row with its columns renamed to the names in ``columns``. Ignore case, and resolve dotted names."""
    missing_names = [column for column in columns.values() if column not in value]
    if not missing_names:
        return value
    row = dict(value)
    for name in missing_names:
        matches = [key for key in row if key.strip().casefold() == name.strip().casefold()]
        if len(matches) == 1:
            row[name] = row.pop(matches[0])
        elif "." in name and (nested_value := _get_nested(value, name.split("."))) is not None:
            row[name] = nested_value
    return row


def _get_nested(value: object, keys: Sequence[str]) -> object:
    """Return the value at a path of keys in nested objects, or None if there is no such path."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _detect_reader(
    value: Mapping[str, Any],
    names: Mapping[str, str],
    location: str,
    columns: Mapping[str, str],
    readers: Sequence[RowReader],
) -> RowReader:
    if error_parts := explain_preferences(value):
        raise DataError(location, *error_parts)
    reader = next((reader for reader in readers if reader.matches(value, names)), None)
    if reader is not None:
        return reader
    if error_parts := find_absent_column(value, columns):
        raise DataError(location, *error_parts)
    problem = f"no known field ({_NAMES}); the row has {field_names(value)}"
    raise DataError(location, problem, guess_columns(value, location))


def explain_preferences(value: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return (problem, remedy) if a row is preference data in a TRL format, else None."""
    if "chosen" in value and "rejected" in value:
        return (
            "this is preference data (`chosen` and `rejected`), which sft and pretrain do not train on",
            f'Set task = "dpo"; or, to train only on the better answer, write {_better_answer(value)}',
        )
    is_judged = isinstance(value.get("label"), bool) and "prompt" in value and "completion" in value
    if is_judged or isinstance(value.get("kto_tag"), bool):
        return (
            f"this is unpaired preference data for KTO (`{'label' if is_judged else 'kto_tag'}` says whether the "
            "answer is good), so sft and pretrain would also train on bad answers",
            'Set task = "dpo" with loss_type = "kto"; or set format = "prompt_completion" to train on all answers',
        )
    if "completions" in value and "labels" in value and "prompt" in value:
        return (
            "this is stepwise preference data (`completions`, each with a label), which sft and pretrain do not train "
            "on",
            "Join the good steps to one `completion`",
        )
    return None


def _better_answer(value: Mapping[str, Any]) -> str:
    """Return config lines that train only on the better of a row's two answers."""
    if "prompt" in value and isinstance(value["prompt"], str) == isinstance(value["chosen"], str):
        return 'format = "prompt_completion" and columns = { completion = "chosen" } under this [[data.train]]'
    if isinstance(value["chosen"], str):
        return 'format = "text" and columns = { text = "chosen" } under this [[data.train]]'
    return 'format = "messages" and columns = { messages = "chosen" } under this [[data.train]]'


def guess_columns(value: Mapping[str, Any], location: str) -> str:
    """Return advice for a row with unknown columns. Guess each field's column from the column names and values."""
    if "prompt" in value and set(value) <= _RL_COLUMNS:
        return (
            "Prompts without answers are data for reinforcement learning such as GRPO; sft needs `prompt` and "
            "`completion`, or `messages`"
        )
    texts = dict(_iter_texts(value))
    paths = {path.rpartition(".")[2].strip().casefold(): path for path in reversed(texts)}
    prompt, answer, text = (
        next((paths[n] for n in names if n in paths), None) for names in (_PROMPT_NAMES, _ANSWER_NAMES, _TEXT_NAMES)
    )
    header_hint = (
        ". The first line of the file must name its columns" if re.search(r"\.[ct]sv(\.gz)? row \d+$", location) else ""
    )
    if prompt and not answer:
        lists = [f"`{n}`" for n, cell in value.items() if isinstance(cell, list)]
        list_hint = f" ({' and '.join(lists[:3])}: lists)" if lists else ""
        return (
            f"`{prompt}` may be the prompt, but no field contains an answer as text{list_hint}. Add one, for example "
            f"`answer`, and write {_format_columns(prompt=prompt, completion='answer')} under this [[data.train]]"
            f"{header_hint}"
        )
    if not (prompt and answer) and not text:
        if not texts:
            return "No field of the row is text. Write rows with `messages`, `prompt` and `completion`, or `text`"
        if len(texts) == 2:
            prompt, answer = texts
        text = max(texts, key=lambda path: len(texts[path]))
    example = _format_columns(prompt=prompt, completion=answer) if prompt and answer else _format_columns(text=text)
    return f"Write for example {example} under this [[data.train]]{header_hint}"


def _format_columns(**names: str | None) -> str:
    entries = ", ".join(f"{field} = {json.dumps(column, ensure_ascii=False)}" for field, column in names.items())
    return f"columns = {{ {entries} }}"


def _iter_texts(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, text) for each text field of a row, then for each text field of its nested objects."""
    for name, child in value.items():
        if isinstance(child, str) and child.strip():
            yield f"{prefix}{name}", child
    for name, child in value.items():
        if isinstance(child, Mapping):
            yield from _iter_texts(child, f"{prefix}{name}.")


def require_text(value: object, location: str, name: str) -> str:
    """Return the value if it is text. Raises RowError if it is not text."""
    if not isinstance(value, str):
        raise RowError(location, f"`{name}` must be text, not {type_name(value)}")
    return value


def _read_conversation(fields: RowFields) -> Conversation:
    images = fields.images()
    messages, flags = fields.messages("messages", images)
    if system := fields.system_text(messages):
        messages, flags = ({"role": "system", "content": system}, *messages), (None, *flags)
    return _make_conversation(fields, messages, flags, images)


def _make_conversation(
    fields: RowFields,
    messages: tuple[dict[str, Any], ...],
    flags: tuple[bool | None, ...],
    images: RowImages,
    loss_start: int = 0,
) -> Conversation:
    flags = flags if any(flag is not None for flag in flags) else ()
    tools = fields.tools()
    row_images = images.match(fields.folder, fields.location)
    return Conversation(messages, fields.location, loss_start, tools, flags, row_images)


def _read_alpaca(fields: RowFields) -> Conversation:
    """Convert an Alpaca row to a chat. Instruction and input form the user's turn; output is the assistant's turn."""
    images = fields.images()
    messages = instruction_messages(fields, images)
    answer = {"role": "assistant", "content": images.mark(fields.text("output"), fields.location)}
    return _make_conversation(fields, (*messages, answer), (), images)


def instruction_messages(fields: RowFields, images: RowImages) -> tuple[dict[str, Any], ...]:
    """Return an Alpaca row's messages before the answer."""

    def optional_text(field: str) -> str:
        return "" if fields.get(field) is None else fields.text(field)

    messages: list[dict[str, str]] = []
    if optional_text("system").strip():
        messages.append({"role": "system", "content": optional_text("system")})
    name, location = fields.names["history"], fields.location
    history = fields.get("history")
    history = parse_inner_json(history, location, name) if history else []
    for turn in history if isinstance(history, list) else [history]:
        if not isinstance(turn, list | tuple) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise RowError(location, f"`{name}` must be a list of pairs (question, answer)")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    question = "\n".join(text for text in (fields.text("instruction"), optional_text("input")) if text.strip())
    messages.append({"role": "user", "content": question})
    return tuple({**message, "content": images.mark(message["content"], location)} for message in messages)


def _read_text(fields: RowFields) -> Document:
    return Document(fields.text("text"), fields.location)


def _read_prompt_completion(fields: RowFields) -> Conversation | PromptCompletion:
    if isinstance(fields["prompt"], list) and isinstance(fields["completion"], list):
        images = fields.images()
        prompt, prompt_flags = fields.messages("prompt", images)
        answer, answer_flags = fields.messages("completion", images)
        return _make_conversation(fields, (*prompt, *answer), (*prompt_flags, *answer_flags), images, len(prompt))
    return PromptCompletion(fields.text("prompt"), fields.text("completion"), fields.location)


def _read_tokenized(fields: RowFields) -> Tokenized:
    """Return the tokens without padding. A label of -100 or a loss mask of 0 excludes a token from the loss."""
    location, names = fields.location, fields.names
    tokens = _read_integers(fields["input_ids"], location, names["input_ids"])
    if any(token < 0 for token in tokens):
        raise RowError(
            location, f"`{names['input_ids']}` contains a negative token id", "Remove it; attention_mask marks padding"
        )
    kept_range = range(len(tokens))
    trained: tuple[bool, ...] | None = None
    for name in ("labels", "loss_mask", "attention_mask"):
        if fields.get(name) is None:
            continue
        numbers = _read_integers(fields[name], location, names[name])
        if len(numbers) != len(tokens):
            raise RowError(
                location,
                f"`{names[name]}` has {len(numbers)} numbers for {len(tokens)} tokens",
                reason=f"`{names[name]}` and the tokens have different lengths",
            )
        if name == "attention_mask":
            kept_range = range(*_attended_range(numbers, location, names[name]))
            continue
        mask = tuple(number != (IGNORED_LABEL if name == "labels" else 0) for number in numbers)
        if name == "labels" and any(flag and a != b for flag, a, b in zip(mask, numbers, tokens, strict=True)):
            raise RowError(
                location,
                f"`{names[name]}` has a value that is neither the token at its position nor {IGNORED_LABEL}",
                "Do not shift the labels: the loss compares each token with the prediction before it",
            )
        trained = mask if trained is None else tuple(a and b for a, b in zip(trained, mask, strict=True))
    span = slice(kept_range.start, kept_range.stop)
    return Tokenized(tokens[span], None if trained is None else trained[span], location)


def _read_integers(value: object, location: str, name: str) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(type(n) in (int, bool) for n in value):
        raise RowError(location, f"`{name}` must be a list of whole numbers, not {type_name(value)}")
    return tuple(map(int, value))


def _attended_range(mask: Sequence[int], location: str, name: str) -> tuple[int, int]:
    """Return the start and end of a mask's ones. Raises RowError if the ones are not contiguous."""
    start = next((index for index, flag in enumerate(mask) if flag), len(mask))
    stop = len(mask) - next((index for index, flag in enumerate(reversed(mask)) if flag), len(mask))
    if not all(mask[start:stop]):
        raise RowError(location, f"`{name}` has zeros in the middle", "Put padding at the ends only")
    return (start, stop) if start < stop else (0, 0)


#: Formats whose rows are rendered with the chat template.
TEMPLATE_FORMATS = ("messages", "sharegpt", "alpaca")
_TEMPLATE = "rendered with the model's chat template"
#: Readers by format name. "auto" tries them in this order.
READERS: dict[str, RowReader] = {
    reader.name: reader
    for reader in (
        RowReader(
            "tokenized",
            "rows of `input_ids`: used as they are",
            _read_tokenized,
            ("input_ids",),
            fields=("labels", "loss_mask", "attention_mask"),
        ),
        RowReader("messages", f"rows of `messages`: chats, {_TEMPLATE}", _read_conversation, ("messages",)),
        RowReader("sharegpt", f"rows of `conversations`: chats, {_TEMPLATE}", _read_conversation, ("conversations",)),
        RowReader(
            "prompt_completion", "rows of `prompt` and `completion`", _read_prompt_completion, ("prompt", "completion")
        ),
        RowReader(
            "alpaca",
            f"rows of `instruction` and `output`: {_TEMPLATE}",
            _read_alpaca,
            ("instruction", "output"),
            fields=("input", "history"),
        ),
        RowReader("text", "plain text", _read_text, ("text",)),
    )
}
