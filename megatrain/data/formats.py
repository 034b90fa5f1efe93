"""Rows of training files, whatever their format, as conversations, prompts with completions, or plain text."""

from __future__ import annotations

import glob
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatrain.data.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

Format = Literal["auto", "messages", "prompt_completion", "text"]
EXTENSIONS = (".jsonl", ".json", ".txt")
ROLES = ("system", "developer", "user", "assistant", "tool")
_READ_AS = ".jsonl (one object per line), .json (a list of objects) and .txt"
_GUESSES = {
    "conversations": "ShareGPT rows are not read in this release; convert them to messages with role and content",
    "instruction": 'For Alpaca rows without input write columns = { prompt = "instruction", completion = "output" }',
    "question": 'Write for example columns = { prompt = "question", completion = "answer" } under this [[data.train]]',
    "input": 'Write for example columns = { prompt = "input", completion = "output" } under this [[data.train]]',
    "content": 'Write columns = { text = "content" } under this [[data.train]]',
    "chosen": "Preference rows are not read in this release",
    "input_ids": "Tokenized rows are not read in this release; give the text",
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order.

    Attributes:
        messages: each with the text fields ``role`` and ``content``.
        where: file and row.
        trained_from: only assistant messages from this index on are trained; 0 for a plain conversation.
    """

    messages: tuple[Mapping[str, str], ...]
    where: str
    trained_from: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and the text that follows it, both verbatim: no chat template is applied."""

    prompt: str
    completion: str
    where: str


@dataclass(frozen=True, slots=True)
class Document:
    """Plain text that is trained whole."""

    text: str
    where: str


Row = Conversation | Completion | Document


def find_files(path: str) -> list[Path]:
    """Return the files that a path, glob or folder names, sorted.

    Raises:
        DataError: nothing there, or a file of a kind that is not read.
    """
    base = Path(path)
    if base.is_dir():
        files = sorted(file for file in base.rglob("*") if file.suffix.lower() in EXTENSIONS and file.is_file())
        if not files:
            raise DataError(path, "the folder holds no data file", f"Files that are read: {_READ_AS}")
        return files
    if base.is_file():
        files = [base]
    elif glob.has_magic(path):
        files = sorted(Path(match) for match in glob.glob(path, recursive=True) if Path(match).is_file())
        if not files:
            raise DataError(path, "no file matches", "Check the pattern; it is relative to the config file")
    else:
        raise DataError(path, "there is no such file or folder", "Paths are relative to the config file")
    for file in files:
        if file.suffix.lower() not in EXTENSIONS:
            raise DataError(
                str(file), f'"{file.suffix or file.name}" files are not read', f"Files that are read: {_READ_AS}"
            )
    return files


def read_rows(
    path: str, *, format: Format = "auto", columns: Mapping[str, str] | None = None, max_samples: int | None = None
) -> Iterator[Row]:
    """Yield the rows of a path, glob or folder in a fixed order, one at a time.

    Args:
        path: file, glob or folder.
        format: what a row holds; "auto" looks at its fields, row by row.
        columns: our field name -> theirs.
        max_samples: stop after this many rows.

    Raises:
        DataError: a missing or empty file, broken JSON, or a row without the fields of its format.
    """
    count = 0
    for file in find_files(path):
        rows_before = count
        for row in _read_file(file, format, dict(columns or {})):
            if max_samples is not None and count >= max_samples:
                return
            count += 1
            yield row
        if count == rows_before:
            raise DataError(str(file), "the file is empty", "Remove it or fill it")


def _read_file(file: Path, format: Format, columns: Mapping[str, str]) -> Iterator[Row]:
    if file.suffix.lower() == ".txt":
        if format not in ("auto", "text"):
            raise DataError(str(file), f'a .txt file has no format "{format}"', 'Leave format out, or write "text"')
        text = _read_text(file)
        if text.strip():
            yield Document(text, str(file))
        return
    objects = _json_lines(file) if file.suffix.lower() == ".jsonl" else _json_list(file)
    for where, value in objects:
        if not isinstance(value, dict):
            raise DataError(where, f"a row must be an object with fields, this is {_kind(value)}")
        yield _to_row(value, where, format, columns)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(str(file), f"the file is not UTF-8 text (byte {error.start})", "Convert it to UTF-8") from None
    except OSError as error:
        raise DataError(str(file), f"the file cannot be read: {error.strerror or error}") from None


def _json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        with file.open("rb") as stream:
            for number, raw in enumerate(stream, start=1):
                where = f"{file} line {number}"
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise DataError(
                        where, f"not UTF-8 text (byte {error.start} of the line)", "Convert it to UTF-8"
                    ) from None
                if line.strip():
                    yield where, _parse_json(line, where)
    except OSError as error:
        raise DataError(str(file), f"the file cannot be read: {error.strerror or error}") from None


def _parse_json(line: str, where: str) -> Any:
    try:
        return json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        start = line.strip()[:40]
        if line.strip() in ("[", "[{") or line.lstrip().startswith("[{"):
            raise DataError(where, "this is a JSON list, not one object per line", "Name the file .json") from None
        raise DataError(
            where,
            f"broken JSON at column {error.colno}: {error.msg}. The line begins: {start}",
            "Fix or remove the line",
        ) from None


def _json_list(file: Path) -> Iterator[tuple[str, Any]]:
    text = _read_text(file)
    if not text.strip():
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        remedy = "One object per line? Name the file .jsonl" if error.msg == "Extra data" else "Fix the file"
        raise DataError(
            f"{file} line {error.lineno}", f"broken JSON at column {error.colno}: {error.msg}", remedy
        ) from None
    if not isinstance(rows, list):
        raise DataError(
            str(file), f"a .json file must hold a list of rows, this is {_kind(rows)}", "Wrap the rows in [ ]"
        )
    for number, value in enumerate(rows, start=1):
        yield f"{file} row {number}", value


def _to_row(value: dict[str, Any], where: str, format: Format, columns: Mapping[str, str]) -> Row:
    names = {field: columns.get(field, field) for field in ("messages", "prompt", "completion", "text")}
    if format == "auto":
        format = _detect(value, names, where)
    needed = {"messages": ("messages",), "prompt_completion": ("prompt", "completion"), "text": ("text",)}[format]
    for field in needed:
        if names[field] not in value:
            raise DataError(where, f"no field `{names[field]}`; the row has {_fields(value)}", _guess(value))
    if format == "messages":
        return Conversation(_check_messages(value[names["messages"]], where, names["messages"]), where)
    if format == "text":
        return Document(_check_text(value[names["text"]], where, names["text"]), where)
    prompt, completion = value[names["prompt"]], value[names["completion"]]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _check_messages(prompt, where, names["prompt"])
        after = _check_messages(completion, where, names["completion"])
        return Conversation((*before, *after), where, trained_from=len(before))
    return Completion(
        _check_text(prompt, where, names["prompt"]), _check_text(completion, where, names["completion"]), where
    )


def _detect(
    value: Mapping[str, Any], names: Mapping[str, str], where: str
) -> Literal["messages", "prompt_completion", "text"]:
    if names["messages"] in value:
        return "messages"
    if names["prompt"] in value and names["completion"] in value:
        return "prompt_completion"
    if names["text"] in value:
        return "text"
    raise DataError(
        where,
        f"no field that is known: messages, prompt and completion, or text; the row has {_fields(value)}",
        _guess(value),
    )


def _guess(value: Iterable[str]) -> str:
    for field in value:
        if field in _GUESSES:
            return _GUESSES[field]
    return 'Say which is which under this [[data.train]], for example columns = { text = "body" }'


def _check_text(value: object, where: str, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(where, f"`{name}` must be text, this is {_kind(value)}")
    return value


def _check_messages(value: object, where: str, name: str) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise DataError(where, f"`{name}` must be a list of messages, this is {_kind(value)}")
    messages = []
    for number, message in enumerate(value, start=1):
        place = f"{where}, message {number}"
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            seen = _fields(message) if isinstance(message, dict) else _kind(message)
            raise DataError(place, f"a message needs `role` and `content`, this has {seen}")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise DataError(place, f"role {json.dumps(role)} is not known", f"Roles: {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise DataError(place, f"`content` must be text, this is {_kind(content)}")
        messages.append({"role": role, "content": content})
    return tuple(messages)


def _fields(value: Iterable[str]) -> str:
    names = [f"`{name}`" for name in value]
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "no fields"


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if value == [] or value == "":
        return "empty"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
