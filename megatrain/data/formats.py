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
from megatrain.data.messages import RowImages, field_names, kind, parse_inner_json, read_messages, read_tools
from megatrain.data.rows_report import DataError, RowError
from megatrain.data.table import ColumnName, RowFormat

#: Column names that are synonyms of fields, and names of fields inside messages.
_SYNONYMS, _MESSAGE_FIELDS = ("query", "response"), ("role", "content")
_FIELDS = tuple(name for name in get_args(ColumnName) if name not in (*_SYNONYMS, *_MESSAGE_FIELDS))
_CHAT_FIELDS = ("system", "tools", "images", "image")
_KNOWN = "messages, conversations, instruction and output, prompt and completion, text, or input_ids"
#: Usual column names of prompts, answers and plain texts. The most likely names come first.
_PROMPTS = ("prompt", "question", "instruction", "query", "input", "inputs", "problem", "q")
_ANSWERS = ("completion", "answer", "response", "output", "outputs", "target", "targets", "solution", "a")
_PLAIN_TEXTS = ("text", "content", "body", "document", "article")
#: Columns of rows for reinforcement learning. These rows have no answer.
_RL_COLUMNS = {"prompt", "solution", "reward", "ground_truth", "reward_model", "data_source", "ability", "extra_info"}


class DataRow:
    """One row of a data file.

    Attributes:
        where: File and row, for messages.
        unread: Columns of the row that its format does not read.
    """

    __slots__ = ()
    where: str
    unread: tuple[str, ...]

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
        trained_from: Index of the first message that can be in the loss. Above 0 for a prompt with its completion.
        tools: Tools that the assistant can call. The chat template renders them.
        flags: Loss flag of each message, None for messages without a flag. Empty if no message has a flag.
        images: Images in the order of the image marks in the messages, one image per mark.
    """

    title: ClassVar[str] = "conversation"
    messages: tuple[Mapping[str, Any], ...]
    where: str
    trained_from: int = 0
    tools: tuple[Mapping[str, Any], ...] | None = None
    flags: tuple[bool | None, ...] = ()
    images: tuple[NamedImage, ...] = ()
    unread: tuple[str, ...] = field(default=(), compare=False)

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
    where: str
    unread: tuple[str, ...] = field(default=(), compare=False)


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
    where: str
    is_start: bool = True
    is_end: bool = True
    unread: tuple[str, ...] = field(default=(), compare=False)


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
    where: str
    unread: tuple[str, ...] = field(default=(), compare=False)


#: Row types that contain exactly one text.
PlainRow = Conversation | PromptCompletion | Document | Tokenized


@dataclass(frozen=True, slots=True)
class RowFields:
    """Access to a row's fields by their standard names.

    Attributes:
        value: Values of the row by column name.
        where: File and row, for error messages.
        names: Column name of each field.
        columns: The config's ``columns``. It also maps the names of fields in messages.
        folder: Base folder for relative image paths.
    """

    value: Mapping[str, Any]
    where: str
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
        return require_text(self[field], self.where, self.name(field))

    def messages(self, field: str, images: RowImages) -> tuple[tuple[dict[str, Any], ...], tuple[bool | None, ...]]:
        """Return a field's messages and flags, as ``read_messages`` does."""
        return read_messages(self[field], self.where, self.name(field), self.columns, images)

    def tools(self) -> tuple[Mapping[str, Any], ...] | None:
        """Return the tools that the assistant can call, or None."""
        return read_tools(self.get("tools"), self.where)

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
        what: Description of the rows and of their treatment, for comments in a generated config.
        read: Function that parses a row. Raises RowError, or DataError if fields are missing.
        required: Required fields.
        alternatives: Fields of which a row must have at least one. Empty if there is no such requirement.
        fields: Optional fields that the reader uses, or None for all known fields.
    """

    name: str
    what: str
    read: Callable[[RowFields], DataRow]
    required: tuple[str, ...] = ()
    alternatives: tuple[str, ...] = ()
    fields: tuple[str, ...] | None = ()

    def matches(self, value: Mapping[str, Any], names: Mapping[str, str]) -> bool:
        """Return whether a row has the fields that this format requires."""
        has_any = not self.alternatives or any(names.get(field, field) in value for field in self.alternatives)
        return has_any and all(names.get(field, field) in value for field in self.required)

    def unread(self, row: DataRow, fields: RowFields) -> tuple[str, ...]:
        """Return a row's nonempty columns that this format does not read."""
        ours = tuple(fields.names) if self.fields is None else (*self.required, *self.fields)
        if isinstance(row, Conversation):
            ours += _CHAT_FIELDS
        read = set(map(fields.name, ours))
        read |= {name.partition(".")[0] for name in read}
        return tuple(
            name for name, inner in fields.value.items() if name not in read and inner not in (None, "", [], {})
        )


def read_row(
    value: object, where: str, format: RowFormat | RowReader, columns: Mapping[str, str], folder: Path = Path()
) -> tuple[str, DataRow]:
    """Parse a row. Return the name of its format and the parsed row.

    Args:
        value: The row, as a mapping.
        where: File and row, for error messages.
        format: Format of the row, or "auto" to detect it from the column names. Column names without an exact match are
            compared without case and surrounding spaces.
        columns: Column name of each field. A dotted name refers to a field inside an object.
        folder: Base folder for relative image paths.

    Raises:
        RowError: The row is not an object with fields, or a field has an invalid value.
        DataError: A required field is missing, no format matches the row, or the row is preference data.
    """
    if not isinstance(value, Mapping) or not value:
        rule = "a row must be an object with fields"
        more = "; a list of rows must be in a .json file" if isinstance(value, list) else ""
        raise RowError(where, f"{rule}, not {kind(value)}", f"Fix or remove the row{more}", reason=rule)
    if isinstance(format, RowReader):
        readers = [format]
    else:
        readers = list(READERS.values()) if format == "auto" else [READERS[format]]
    names = _map_fields(columns, is_alpaca=format == "alpaca", is_auto=format == "auto")
    found = _rename_columns(value, names, columns, readers)
    reader = _detect_reader(found, names, where, columns, readers) if format == "auto" else readers[0]
    fields = RowFields(found, where, names, columns, folder)
    if reader.read is _read_conversation:
        _name_messages(fields, reader.required[0])
    for required in reader.required:
        if required not in fields:
            if refused := explain_preferences(found):
                raise DataError(where, *refused)
            if absent := find_absent_column(found, columns):
                raise DataError(where, *absent)
            problem = f"no field `{fields.name(required)}`; the row has {field_names(found)}"
            raise DataError(where, problem, guess_columns(found, where))
    row = reader.read(fields)
    unread = reader.unread(row, fields)
    return reader.name, replace(cast("Any", row), unread=unread) if unread else row


def _name_messages(fields: RowFields, usual: str) -> None:
    """Map ``messages`` and ``conversations`` to whichever column the row has, because one reader reads both formats."""
    names, other = fields.names, "conversations" if usual == "messages" else "messages"
    names["messages"] = names[usual] if usual in fields or other not in fields else names[other]
    names["conversations"] = names["messages"]


def _map_fields(columns: Mapping[str, str], *, is_alpaca: bool, is_auto: bool) -> dict[str, str]:
    """Return each field's column name. In ``columns``, Alpaca's fields can be called prompt, query and response."""
    names = {field: columns.get(field, field) for field in _FIELDS}
    is_alpaca = is_alpaca or (is_auto and bool({"query", "instruction", "output"} & set(columns)))
    synonyms = {"prompt": "instruction", "query": "input", "response": "output"} if is_alpaca else {
        "response": "completion"
    }  # fmt: skip
    names.update({ours: columns[synonym] for synonym, ours in synonyms.items() if synonym in columns})
    return names


def row_columns(columns: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of ``columns`` for fields of rows, without the entries for fields of messages."""
    return {ours: theirs for ours, theirs in columns.items() if ours in (*_FIELDS, *_SYNONYMS)}


def find_absent_column(value: Mapping[str, Any], columns: Mapping[str, str]) -> tuple[str, str] | None:
    """Return (problem, remedy) if ``columns`` names a column that the row does not have, else None."""
    for ours, theirs in row_columns(columns).items():
        if theirs not in value:
            close = difflib.get_close_matches(theirs.casefold(), [name.casefold() for name in value], 1, 0.6)
            meant = next((name for name in value if close and name.casefold() == close[0]), None)
            advice = f'Did you mean {ours} = "{meant}"?' if meant else "Use the name of an existing column"
            problem = f'no column `{theirs}` (columns = {{ {ours} = "{theirs}" }}); the row has {field_names(value)}'
            return problem, advice
    return None


def _rename_columns(
    value: Mapping[str, Any], names: Mapping[str, str], columns: Mapping[str, str], readers: Sequence[RowReader]
) -> Mapping[str, Any]:
    """Return a row whose columns are renamed to the expected names if they differ only in case.

    Names in ``columns`` that have no exact match are always compared without case. All other known names are compared
    without case only if no format fits the row, as for a spreadsheet with ``Question,Answer``.
    """
    columns = row_columns(columns)
    fits = any(reader.matches(value, names) for reader in readers)
    return with_columns(value, columns if fits else {**names, **columns})


def with_columns(value: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """Return a row that has the names in ``columns``, which are matched ignoring case, or by path for dotted names."""
    wanted = [theirs for theirs in columns.values() if theirs not in value]
    if not wanted:
        return value
    found = dict(value)
    for name in wanted:
        same = [key for key in found if key.strip().casefold() == name.strip().casefold()]
        if len(same) == 1:
            found[name] = found.pop(same[0])
        elif "." in name and (inner := _get_nested(value, name.split("."))) is not None:
            found[name] = inner
    return found


def _get_nested(value: object, keys: Sequence[str]) -> object:
    """Return the value at a path of keys in nested objects, or None if there is no such path."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _detect_reader(
    value: Mapping[str, Any],
    names: Mapping[str, str],
    where: str,
    columns: Mapping[str, str],
    readers: Sequence[RowReader],
) -> RowReader:
    if refused := explain_preferences(value):
        raise DataError(where, *refused)
    found = next((reader for reader in readers if reader.matches(value, names)), None)
    if found is not None:
        return found
    if absent := find_absent_column(value, columns):
        raise DataError(where, *absent)
    raise DataError(where, f"no known field ({_KNOWN}); the row has {field_names(value)}", guess_columns(value, where))


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


def guess_columns(value: Mapping[str, Any], where: str) -> str:
    """Return advice for a row with unknown column names, guessed from its column names and values."""
    if "prompt" in value and set(value) <= _RL_COLUMNS:
        return (
            "Prompts without answers are data for reinforcement learning such as GRPO; sft needs `prompt` and "
            "`completion`, or `messages`"
        )
    texts = dict(_texts_in(value))
    called = {path.rpartition(".")[2].strip().casefold(): path for path in reversed(texts)}
    prompt, answer, text = (
        next((called[name] for name in names if name in called), None) for names in (_PROMPTS, _ANSWERS, _PLAIN_TEXTS)
    )
    header = (
        ". The first line of the file must name its columns" if re.search(r"\.[ct]sv(\.gz)? row \d+$", where) else ""
    )
    if prompt and not answer:
        lists = [f"`{name}`" for name, inner in value.items() if isinstance(inner, list)]
        but = f" ({' and '.join(lists[:3])}: lists)" if lists else ""
        return (
            f"`{prompt}` may be the prompt, but no field contains an answer as text{but}. Add one, for example "
            f"`answer`, and write {_format_columns(prompt=prompt, completion='answer')} under this [[data.train]]"
            f"{header}"
        )
    if not (prompt and answer) and not text:
        if not texts:
            return "No field of the row is text. Write rows with `messages`, `prompt` and `completion`, or `text`"
        if len(texts) == 2:
            prompt, answer = texts
        text = max(texts, key=lambda path: len(texts[path]))
    shown = _format_columns(prompt=prompt, completion=answer) if prompt and answer else _format_columns(text=text)
    return f"Write for example {shown} under this [[data.train]]{header}"


def _format_columns(**names: str | None) -> str:
    shown = ", ".join(f"{ours} = {json.dumps(theirs, ensure_ascii=False)}" for ours, theirs in names.items())
    return f"columns = {{ {shown} }}"


def _texts_in(value: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, text) for each text field of a row, then for each text field of its nested objects."""
    for name, inner in value.items():
        if isinstance(inner, str) and inner.strip():
            yield f"{within}{name}", inner
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _texts_in(inner, f"{within}{name}.")


def require_text(value: object, where: str, name: str) -> str:
    """Return the value if it is text. Raises RowError if it is not text."""
    if not isinstance(value, str):
        raise RowError(where, f"`{name}` must be text, not {kind(value)}")
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
    trained_from: int = 0,
) -> Conversation:
    given = flags if any(flag is not None for flag in flags) else ()
    tools = fields.tools()
    return Conversation(messages, fields.where, trained_from, tools, given, images.found(fields.folder, fields.where))


def _read_alpaca(fields: RowFields) -> Conversation:
    """Convert an Alpaca row to a chat. Instruction and input become the user's turn, output the assistant's turn."""
    images = fields.images()
    messages = instruction_messages(fields, images)
    answer = {"role": "assistant", "content": images.text(fields.text("output"), fields.where)}
    return _make_conversation(fields, (*messages, answer), (), images)


def instruction_messages(fields: RowFields, images: RowImages) -> tuple[dict[str, Any], ...]:
    """Return an Alpaca row's messages before the answer."""

    def optional(field: str) -> str:
        return "" if fields.get(field) is None else fields.text(field)

    messages: list[dict[str, str]] = []
    if optional("system").strip():
        messages.append({"role": "system", "content": optional("system")})
    name, where = fields.names["history"], fields.where
    history = fields.get("history")
    history = parse_inner_json(history, where, name) if history else []
    for turn in history if isinstance(history, list) else [history]:
        if not isinstance(turn, list | tuple) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise RowError(where, f"`{name}` must be a list of pairs (question, answer)")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    asked = "\n".join(text for text in (fields.text("instruction"), optional("input")) if text.strip())
    messages.append({"role": "user", "content": asked})
    return tuple({**message, "content": images.text(message["content"], where)} for message in messages)


def _read_text(fields: RowFields) -> Document:
    return Document(fields.text("text"), fields.where)


def _read_prompt_completion(fields: RowFields) -> Conversation | PromptCompletion:
    if isinstance(fields["prompt"], list) and isinstance(fields["completion"], list):
        images = fields.images()
        before, flags_before = fields.messages("prompt", images)
        after, flags_after = fields.messages("completion", images)
        return _make_conversation(fields, (*before, *after), (*flags_before, *flags_after), images, len(before))
    return PromptCompletion(fields.text("prompt"), fields.text("completion"), fields.where)


def _read_tokenized(fields: RowFields) -> Tokenized:
    """Return the tokens without padding. ``labels`` of -100 or a ``loss_mask`` of 0 exclude a token from the loss."""
    where, names = fields.where, fields.names
    tokens = _integers(fields["input_ids"], where, names["input_ids"])
    if any(token < 0 for token in tokens):
        raise RowError(
            where, f"`{names['input_ids']}` contains a negative token id", "Remove it; attention_mask marks padding"
        )
    kept = range(len(tokens))
    trained: tuple[bool, ...] | None = None
    for name in ("labels", "loss_mask", "attention_mask"):
        if fields.get(name) is None:
            continue
        numbers = _integers(fields[name], where, names[name])
        if len(numbers) != len(tokens):
            raise RowError(
                where,
                f"`{names[name]}` has {len(numbers)} numbers for {len(tokens)} tokens",
                reason=f"`{names[name]}` and the tokens have different lengths",
            )
        if name == "attention_mask":
            kept = range(*_attended_range(numbers, where, names[name]))
            continue
        found = tuple(number != (IGNORED_LABEL if name == "labels" else 0) for number in numbers)
        if name == "labels" and any(new and a != b for new, a, b in zip(found, numbers, tokens, strict=True)):
            raise RowError(
                where,
                f"`{names[name]}` has a value that is neither the token at its position nor {IGNORED_LABEL}",
                "Do not shift the labels: the loss compares each token with the prediction before it",
            )
        trained = found if trained is None else tuple(a and b for a, b in zip(trained, found, strict=True))
    part = slice(kept.start, kept.stop)
    return Tokenized(tokens[part], None if trained is None else trained[part], where)


def _integers(value: object, where: str, name: str) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(type(n) in (int, bool) for n in value):
        raise RowError(where, f"`{name}` must be a list of whole numbers, not {kind(value)}")
    return tuple(map(int, value))


def _attended_range(mask: Sequence[int], where: str, name: str) -> tuple[int, int]:
    """Return the start and end of a mask's ones. Raises RowError if the ones are not contiguous."""
    first = next((index for index, number in enumerate(mask) if number), len(mask))
    last = len(mask) - next((index for index, number in enumerate(reversed(mask)) if number), len(mask))
    if not all(mask[first:last]):
        raise RowError(where, f"`{name}` has zeros in the middle", "Put padding at the ends only")
    return (first, last) if first < last else (0, 0)


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
