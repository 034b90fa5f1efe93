"""Rows of training files, whatever their format, as conversations, prompts with completions, text, or tokens."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megatrain.base.batch_keys import IGNORED_LABEL
from megatrain.data.images import NamedImage
from megatrain.data.messages import ImagePlaces, field_names, kind, parse_inner_json, read_messages, read_tools
from megatrain.data.rows_report import DataError, RowError

Format = Literal[
    "auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokenized", "preference",
]  # fmt: skip

_FIELDS = (
    "messages", "conversations", "prompt", "completion", "text", "instruction", "input", "output", "system",
    "history", "tools", "images", "input_ids", "labels", "loss_mask", "attention_mask", "chosen", "rejected", "label",
    "kto_tag", "margin",
)  # fmt: skip
_NEEDED = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
    "tokenized": ("input_ids",),
    "preference": (),
}
_READ_WITH_CHATS = ("system", "tools", "images", "image")
#: Fields that each format reads, where these are not all.
_READ: dict[str, tuple[str, ...]] = {
    "messages": ("messages", *_READ_WITH_CHATS),
    "sharegpt": ("conversations", *_READ_WITH_CHATS),
    "alpaca": ("instruction", "output", "input", "history", *_READ_WITH_CHATS),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
    "tokenized": ("input_ids", "labels", "loss_mask", "attention_mask"),
}
#: Formats that a chat template writes as text.
CHATS = ("messages", "sharegpt", "alpaca")
#: Formats that a config must name: other tasks have rows with the same fields.
_ASKED_FOR = ("preference",)
_KNOWN = "messages, conversations, instruction and output, prompt and completion, text, or input_ids"
#: Usual names of fields, the likeliest first: of prompts, of answers, and of plain texts.
_PROMPTS = ("prompt", "question", "instruction", "query", "input", "inputs", "problem", "q")
_ANSWERS = ("completion", "answer", "response", "output", "outputs", "target", "targets", "solution", "a")
_PLAIN_TEXTS = ("text", "content", "body", "document", "article")
#: Fields of rows that reinforcement learning takes.
_PROMPT_ALONE = {"prompt", "solution", "reward", "ground_truth", "reward_model", "data_source", "ability", "extra_info"}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order.

    Attributes:
        messages: each with the text fields ``role`` and ``content``; some with ``tool_calls``, ``reasoning_content``.
        where: file and row.
        trained_from: only assistant messages from this index on are trained; 0 for a plain conversation.
        tools: what the assistant may call, for the chat template.
        flags: for each message, whether the row itself says that it is trained; empty: it says nothing.
        images: those that marks in the messages stand for, in order.
        unread: columns of the row that its format does not read.
    """

    messages: tuple[Mapping[str, Any], ...]
    where: str
    trained_from: int = 0
    tools: tuple[Mapping[str, Any], ...] | None = None
    flags: tuple[bool | None, ...] = ()
    images: tuple[NamedImage, ...] = ()
    unread: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class PromptCompletion:
    """A prompt and the text that follows it, both verbatim: no chat template is applied."""

    prompt: str
    completion: str
    where: str
    unread: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Document:
    """Plain text that is trained whole.

    Attributes:
        is_start: whether the text begins here. A file too large for one piece comes as several.
        is_end: whether the text ends here.
        unread: columns of the row that its format does not read.
    """

    text: str
    where: str
    is_start: bool = True
    is_end: bool = True
    unread: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Tokens made by the user's own tokenization.

    Attributes:
        trained: for each, whether it is trained; None: all, and it may be cut into pieces as plain text is.
        unread: columns of the row that its format does not read.
    """

    tokens: tuple[int, ...]
    trained: tuple[bool, ...] | None
    where: str
    unread: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Preference:
    """Answers to one prompt that are compared, or one answer that is judged.

    Attributes:
        answer: the prompt with the chosen answer, or with the only one.
        rejected: the prompt with the rejected answer; None: there is only one.
        is_good: whether the answer is a good one.
        where: file and row.
        margin: by how much the chosen answer is better, for losses that ask for it.
        unread: columns of the row that its format does not read.
    """

    answer: Conversation | PromptCompletion
    rejected: Conversation | PromptCompletion | None
    is_good: bool
    where: str
    margin: float = 0.0
    unread: tuple[str, ...] = field(default=(), compare=False)


#: What is tokenized, one text or several.
PlainRow = Conversation | PromptCompletion | Document | Tokenized
Row = PlainRow | Preference


def to_row(value: object, where: str, format: Format, columns: Mapping[str, str], folder: Path = Path()) -> Row:
    """Return what a row of a file holds.

    Args:
        value: field -> value.
        where: file and row, for errors.
        format: what it holds; "auto": seen from its fields. Capitals and spaces around a name do not count where a
            field is not there as it is written.
        columns: our field name -> theirs, with dots where it is in an object within the row.
        folder: that relative paths of images begin at.

    Raises:
        RowError: it is no object with fields, or a field holds something that it must not.
        DataError: the fields of the format are not there, or of none of them; or it is preference data.
    """
    if not isinstance(value, Mapping) or not value:
        said = "a row must be an object with fields"
        more = "; a list of rows belongs into a .json file" if isinstance(value, list) else ""
        raise RowError(where, f"{said}, this is {kind(value)}", f"Fix or remove the row{more}", reason=said)
    names = _names(format, columns)
    value = _with_names(value, names, columns, format)
    if format == "auto":
        format = _detect(value, names, where, columns)
    row = _read_row(value, where, format, names, columns, folder)
    return replace(row, unread=unread) if (unread := _unread(value, names, format, row)) else row


def _read_row(
    value: Mapping[str, Any],
    where: str,
    format: Format,
    names: dict[str, str],
    columns: Mapping[str, str],
    folder: Path,
) -> Row:
    """Return a row of a format; arguments and errors as of :func:`to_row`."""
    if format == "preference":
        return _preference(value, where, names, columns)
    if format in ("messages", "sharegpt"):
        usual, other = ("messages", "conversations") if format == "messages" else ("conversations", "messages")
        names["messages"] = names[usual] if names[usual] in value or names[other] not in value else names[other]
        names["conversations"] = names["messages"]
    for needed in _NEEDED[format]:
        if names[needed] not in value:
            if refused := preferences(value):
                raise DataError(where, *refused)
            if absent := absent_column(value, columns):
                raise DataError(where, *absent)
            raise DataError(
                where, f"no field `{names[needed]}`; the row has {field_names(value)}", _guess(value, where)
            )
    if format in ("messages", "sharegpt"):
        return _conversation(value, where, names, columns, folder)
    if format == "alpaca":
        return _alpaca(value, where, names, folder)
    if format == "text":
        return Document(_text(value[names["text"]], where, names["text"]), where)
    if format == "tokenized":
        return _tokenized(value, where, names)
    return _prompt_completion(value, where, names, columns, folder)


def _unread(value: Mapping[str, Any], names: Mapping[str, str], format: Format, row: Row) -> tuple[str, ...]:
    """Return the columns of a row that have a value and are not read."""
    fields = _READ.get(format, tuple(names))
    if format == "prompt_completion" and isinstance(row, Conversation):
        fields += _READ_WITH_CHATS
    read = {names.get(field, field) for field in fields}
    read |= {name.partition(".")[0] for name in read}
    return tuple(name for name, inner in value.items() if name not in read and inner not in (None, "", [], {}))


def _names(format: Format, columns: Mapping[str, str]) -> dict[str, str]:
    """Return their name of each field of ours; prompt, query and response are Alpaca's under other names."""
    names = {field: columns.get(field, field) for field in _FIELDS}
    is_alpaca = format == "alpaca" or (format == "auto" and {"query", "instruction", "output"} & set(columns))
    synonyms = {"prompt": "instruction", "query": "input", "response": "output"} if is_alpaca else {
        "response": "completion"
    }  # fmt: skip
    names.update({ours: columns[synonym] for synonym, ours in synonyms.items() if synonym in columns})
    return names


def row_columns(columns: Mapping[str, str]) -> dict[str, str]:
    """Return those of ``columns`` that name fields of rows, not of the messages in them."""
    return {ours: theirs for ours, theirs in columns.items() if ours in _FIELDS or ours in ("query", "response")}


def absent_column(value: Mapping[str, Any], columns: Mapping[str, str]) -> tuple[str, str] | None:
    """Return what to say, and what to do, if ``columns`` names a field that a row, or all rows, do not have."""
    for ours, theirs in row_columns(columns).items():
        if theirs not in value:
            close = difflib.get_close_matches(theirs.casefold(), [name.casefold() for name in value], 1, 0.6)
            meant = next((name for name in value if close and name.casefold() == close[0]), None)
            advice = f'Did you mean {ours} = "{meant}"?' if meant else "Name one that is there"
            said = f'no column `{theirs}` (columns = {{ {ours} = "{theirs}" }}); the row has {field_names(value)}'
            return said, advice
    return None


def _with_names(
    value: Mapping[str, Any], names: Mapping[str, str], columns: Mapping[str, str], format: Format
) -> Mapping[str, Any]:
    """Return a row whose fields are called as they are looked for.

    A field that is there as it is written is what is meant. Others are found without regard to capitals: those that
    ``columns`` names, and where no format fits otherwise (``Question,Answer`` of a spreadsheet) all that are known.
    """
    columns = row_columns(columns)
    return with_columns(value, columns if _fits(value, names, format) else {**names, **columns})


def with_columns(value: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """Return a row in which fields have the names that ``columns`` gives them: other capitals, or places in objects."""
    wanted = [theirs for theirs in columns.values() if theirs not in value]
    if not wanted:
        return value
    found = dict(value)
    for name in wanted:
        same = [key for key in found if key.strip().casefold() == name.strip().casefold()]
        if len(same) == 1:
            found[name] = found.pop(same[0])
        elif "." in name and (inner := _nested(value, name.split("."))) is not None:
            found[name] = inner
    return found


def _nested(value: object, keys: Sequence[str]) -> object:
    """Return what is in objects within objects; None: nothing."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _fits(value: Mapping[str, Any], names: Mapping[str, str], format: Format) -> bool:
    """Return whether the fields of a format, or of any, are there."""
    if format == "preference":
        return any(names[field] in value for field in ("chosen", "rejected", *_JUDGED))
    formats = (
        [needed for name, needed in _NEEDED.items() if name not in _ASKED_FOR]
        if format == "auto"
        else [_NEEDED[format]]
    )
    return any(all(names[field] in value for field in needed) for needed in formats)


def _detect(
    value: Mapping[str, Any], names: Mapping[str, str], where: str, columns: Mapping[str, str]
) -> Literal["messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokenized"]:
    if refused := preferences(value):
        raise DataError(where, *refused)
    found: Literal["messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokenized"]
    for found in ("tokenized", "messages", "sharegpt", "prompt_completion", "alpaca", "text"):
        if all(names[field] in value for field in _NEEDED[found]):
            return found
    if absent := absent_column(value, columns):
        raise DataError(where, *absent)
    raise DataError(where, f"no field that is known: {_KNOWN}; the row has {field_names(value)}", _guess(value, where))


def format_of(row: Row, value: Mapping[str, Any]) -> Format:
    """Return the format that a row was read as."""
    if isinstance(row, Document):
        return "text"
    if isinstance(row, Tokenized):
        return "tokenized"
    if isinstance(row, Preference):
        return "preference"
    if isinstance(row, PromptCompletion) or row.trained_from:
        return "prompt_completion"
    fields = {name.strip().casefold() for name in value}
    return "messages" if "messages" in fields else "sharegpt" if "conversations" in fields else "alpaca"


def preferences(value: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what a row is, and what to do, if it says which answers are better, as TRL's trainers take it."""
    if "chosen" in value and "rejected" in value:
        return (
            "this is preference data (`chosen` and `rejected`), which sft and pretrain do not train on",
            f'Write task = "dpo"; or, to train on the better answer alone, write {_better_answer(value)}',
        )
    is_judged = isinstance(value.get("label"), bool) and "prompt" in value and "completion" in value
    if is_judged or isinstance(value.get("kto_tag"), bool):
        return (
            f"this is unpaired preference data (`{'label' if is_judged else 'kto_tag'}` says if the answer is a good "
            "one), of KTO's kind; trained "
            "as it is, bad answers would be learned like good ones",
            'Write task = "dpo" with loss_type = "kto"; or write format = "prompt_completion" to train on all of them',
        )
    if "completions" in value and "labels" in value and "prompt" in value:
        return (
            "this is stepwise preference data (`completions`, each with a label), which sft and pretrain do not train "
            "on",
            "Write the good steps as one `completion`",
        )
    return None


_PREFERENCE_FIELDS = "`prompt`, `chosen` and `rejected`, or `prompt`, `completion` and `label`"
_JUDGED = "label", "kto_tag"


def _preference(
    value: Mapping[str, Any], where: str, names: Mapping[str, str], columns: Mapping[str, str]
) -> Preference:
    """Return a row as TRL or LLaMA-Factory writes it: two answers, or one with a label."""
    chosen, rejected = names["chosen"], names["rejected"]
    if chosen in value and rejected in value:
        prompt, tools = _prompt_of(value, where, names, columns), read_tools(value.get(names["tools"]), where)
        if value[chosen] == value[rejected]:
            reason = f"`{chosen}` and `{rejected}` are the same"
            raise RowError(where, f"{reason}: there is nothing to prefer", reason=reason)
        answers = [_answer(value[name], where, name, columns) for name in (chosen, rejected)]
        if isinstance(answers[0], str) != isinstance(answers[1], str):
            raise RowError(where, f"of `{chosen}` and `{rejected}` one is text and the other is a list of messages")
        first, second = _with_prompt(prompt, answers, where, (chosen, rejected), tools)
        return Preference(first, second, True, where, _margin(value, where, names["margin"]))
    label = next((names[name] for name in _JUDGED if names[name] in value), None)
    if label is None:
        if absent := absent_column(value, columns):
            raise DataError(where, *absent)
        missing = next(
            (name for name in (chosen, rejected) if (chosen in value or rejected in value) and name not in value), ""
        )
        said = f"no field `{missing}`" if missing else f"no preferences: they have the fields {_PREFERENCE_FIELDS}"
        advice = 'If they have other names, write for example columns = { chosen = "better", rejected = "worse" }'
        raise DataError(where, f"{said}; the row has {field_names(value)}", advice)
    if not isinstance(value[label], bool):
        raise DataError(
            where,
            f"`{label}` says whether the answer is a good one, and must be true or false; this is {kind(value[label])}",
            "Write true or false",
        )
    prompt, only = _judged(value, where, names, columns)
    (answer,) = _with_prompt(
        prompt, [only], where, (names["completion"],), read_tools(value.get(names["tools"]), where)
    )
    return Preference(answer, None, value[label], where)


def _margin(value: Mapping[str, Any], where: str, name: str) -> float:
    margin = value.get(name)
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise RowError(where, f"`{name}` must be a number, this is {kind(margin)}")
    return float(margin)


_Messages = tuple[dict[str, Any], ...]


def _prompt_of(
    value: Mapping[str, Any], where: str, names: Mapping[str, str], columns: Mapping[str, str]
) -> str | _Messages | None:
    """Return the prompt of a row: text, or messages, or None where the answers hold it."""
    if names["prompt"] in value:
        return _answer(value[names["prompt"]], where, names["prompt"], columns)
    for name in ("conversations", "messages"):
        if names[name] in value:
            return _with_system(
                value, names, read_messages(value[names[name]], where, names[name], columns, ImagePlaces())[0]
            )
    if names["instruction"] in value:
        return _asked(value, where, names, ImagePlaces())
    return None


def _judged(
    value: Mapping[str, Any], where: str, names: Mapping[str, str], columns: Mapping[str, str]
) -> tuple[str | _Messages | None, str | _Messages]:
    """Return prompt and answer of a row with a label."""
    prompt = _prompt_of(value, where, names, columns)
    for name in ("completion", "output"):
        if names[name] in value and prompt is not None:
            return prompt, _answer(value[names[name]], where, names[name], columns)
    if isinstance(prompt, tuple) and prompt[-1]["role"] == "assistant":  # a whole conversation
        return prompt[:-1], prompt[-1:]
    raise DataError(where, f"no field `{names['completion']}`; the row has {field_names(value)}", _guess(value, where))


def _answer(value: object, where: str, name: str, columns: Mapping[str, str]) -> str | _Messages:
    """Return text as it is, and a message, or several, as messages."""
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, list):
        return read_messages(value, where, name, columns, ImagePlaces())[0]
    return _text(value, where, name)


def _with_system(value: Mapping[str, Any], names: Mapping[str, str], messages: _Messages) -> _Messages:
    system = value.get(names["system"])
    if isinstance(system, str) and system.strip() and messages[0]["role"] not in ("system", "developer"):
        return ({"role": "system", "content": system}, *messages)
    return messages


def _with_prompt(
    prompt: str | _Messages | None,
    answers: Sequence[str | _Messages],
    where: str,
    names: Sequence[str],
    tools: tuple[Mapping[str, Any], ...] | None,
) -> list[Conversation | PromptCompletion]:
    """Return the prompt with each answer. Answers may repeat it at their start; without one, what they share is it."""
    if isinstance(answers[0], str):
        texts = [answer for answer in answers if isinstance(answer, str)]
        if isinstance(prompt, tuple):
            chats = [({"role": "assistant", "content": text},) for text in texts]
            return [_chat(prompt, answer, where, tools) for answer in chats]
        if prompt is None:
            prompt = _shared_text(texts)
            texts = [text[len(prompt) :] for text in texts]
        for text, name in zip(texts, names, strict=True):
            if not text.strip():
                raise RowError(where, f"`{name}` has no answer beside the prompt", reason=f"`{name}` has no answer")
        return [PromptCompletion(prompt, text, where) for text in texts]
    lists = [answer for answer in answers if not isinstance(answer, str)]
    repeats = len(lists[0]) > 1 and lists[0][0]["role"] != "assistant"
    if isinstance(prompt, str):
        # Some data sets have the text of the question beside answers that are whole conversations.
        asked = [next((m["content"] for m in messages if m["role"] == "user"), None) for messages in lists]
        if not repeats:
            prompt = ({"role": "user", "content": prompt},)
        elif all(isinstance(text, str) and text.strip() == prompt.strip() for text in asked):
            prompt = None
        else:
            raise _no_prefix(where, names)
    if prompt is None:
        prompt = _shared_messages(lists)
        if not prompt:
            raise RowError(
                where,
                f"{' and '.join(f'`{name}`' for name in names)} begin with different messages, so there is no prompt",
                reason="there is no prompt that the answers share",
            )
        repeats = True
    if repeats:
        if any(messages[: len(prompt)] != prompt for messages in lists):
            raise _no_prefix(where, names)
        lists = [messages[len(prompt) :] for messages in lists]
    for messages, name in zip(lists, names, strict=True):
        if not any(message["role"] == "assistant" for message in messages):
            raise RowError(
                where, f"`{name}` has no turn of the assistant beside the prompt", reason=f"`{name}` has no answer"
            )
    return [_chat(prompt, messages, where, tools) for messages in lists]


def _chat(
    prompt: _Messages, answer: Sequence[Mapping[str, Any]], where: str, tools: tuple[Mapping[str, Any], ...] | None
) -> Conversation:
    return Conversation((*prompt, *answer), where, trained_from=len(prompt), tools=tools)


def _no_prefix(where: str, names: Sequence[str]) -> RowError:
    return RowError(
        where,
        f"`prompt` is not what {' and '.join(f'`{name}`' for name in names)} begin with",
        "Leave the prompt out of the answers, or leave `prompt` out of the row",
        reason="`prompt` is not what the answers begin with",
    )


def _shared_text(texts: Sequence[str]) -> str:
    """Return what texts begin with in common; white space at its end belongs to the answers."""
    length = next((n for n, chars in enumerate(zip(*texts, strict=False)) if len(set(chars)) > 1), min(map(len, texts)))
    shared = texts[0][:length]
    return shared.removesuffix(" ")


def _shared_messages(lists: Sequence[_Messages]) -> _Messages:
    """Return the messages that conversations begin with in common, up to the last one that is no answer."""
    length = next(
        (n for n, pair in enumerate(zip(*lists, strict=False)) if any(m != pair[0] for m in pair)), min(map(len, lists))
    )
    while length and lists[0][length - 1]["role"] == "assistant":
        length -= 1
    return lists[0][:length]


def _better_answer(value: Mapping[str, Any]) -> str:
    """Return the lines of a config with which the better of two answers is trained."""
    if "prompt" in value and isinstance(value["prompt"], str) == isinstance(value["chosen"], str):
        return 'format = "prompt_completion" and columns = { completion = "chosen" } under this [[data.train]]'
    if isinstance(value["chosen"], str):
        return 'format = "text" and columns = { text = "chosen" } under this [[data.train]]'
    return 'format = "messages" and columns = { messages = "chosen" } under this [[data.train]]'


def _guess(value: Mapping[str, Any], where: str) -> str:
    """Return what to write for a row whose fields have other names, with the names that it has."""
    if "prompt" in value and set(value) <= _PROMPT_ALONE:
        return (
            "A prompt without an answer is what GRPO and other reinforcement learning take; sft needs `prompt` and "
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
            f"`{prompt}` may be the prompt, but no field is an answer as text{but}. Add one, for example `answer`, and "
            f"write {_columns(prompt=prompt, completion='answer')} under this [[data.train]]{header}"
        )
    if not (prompt and answer) and not text:
        if not texts:
            return "No field of the row is text. Write rows with `messages`, `prompt` and `completion`, or `text`"
        if len(texts) == 2:
            prompt, answer = texts
        text = max(texts, key=lambda path: len(texts[path]))
    shown = _columns(prompt=prompt, completion=answer) if prompt and answer else _columns(text=text)
    return f"Write for example {shown} under this [[data.train]]{header}"


def _columns(**names: str | None) -> str:
    shown = ", ".join(f"{ours} = {json.dumps(theirs, ensure_ascii=False)}" for ours, theirs in names.items())
    return f"columns = {{ {shown} }}"


def _texts_in(value: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    """Yield the text fields of a row, then those of objects within it, with dots between their names."""
    for name, inner in value.items():
        if isinstance(inner, str) and inner.strip():
            yield f"{within}{name}", inner
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _texts_in(inner, f"{within}{name}.")


def _text(value: object, where: str, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(where, f"`{name}` must be text, this is {kind(value)}")
    return value


def _conversation(
    value: Mapping[str, Any], where: str, names: Mapping[str, str], columns: Mapping[str, str], folder: Path
) -> Conversation:
    images = _images(value, names)
    messages, flags = read_messages(value[names["messages"]], where, names["messages"], columns, images)
    system = value.get(names["system"])
    if isinstance(system, str) and system.strip() and messages[0]["role"] not in ("system", "developer"):
        messages, flags = ({"role": "system", "content": system}, *messages), (None, *flags)
    given = flags if any(flag is not None for flag in flags) else ()
    tools = read_tools(value.get(names["tools"]), where)
    return Conversation(messages, where, tools=tools, flags=given, images=images.found(folder, where))


def _images(value: Mapping[str, Any], names: Mapping[str, str]) -> ImagePlaces:
    """Return the places of a row's images, with those of its column ``images``, or of one image."""
    return ImagePlaces(value.get(names["images"]), value.get("image"))


def _alpaca(value: Mapping[str, Any], where: str, names: Mapping[str, str], folder: Path) -> Conversation:
    """Return an instruction, with its input below it, as the user's turn; the output as the assistant's."""
    images = _images(value, names)
    messages = list(_asked(value, where, names, images))
    answer = _text(value[names["output"]], where, names["output"])
    messages.append({"role": "assistant", "content": images.text(answer, where)})
    tools = read_tools(value.get(names["tools"]), where)
    return Conversation(tuple(messages), where, tools=tools, images=images.found(folder, where))


def _asked(value: Mapping[str, Any], where: str, names: Mapping[str, str], images: ImagePlaces) -> _Messages:
    """Return what is before the answer of a row of Alpaca's kind."""

    def optional(field: str) -> str:
        found = value.get(names[field])
        return "" if found is None else _text(found, where, names[field])

    messages: list[dict[str, str]] = []
    if optional("system").strip():
        messages.append({"role": "system", "content": optional("system")})
    history = value.get(names["history"])
    history = parse_inner_json(history, where, names["history"]) if history else []
    for turn in history if isinstance(history, list) else [history]:
        if not isinstance(turn, list | tuple) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise RowError(where, f"`{names['history']}` must be a list of pairs: what was asked, what was answered")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    instruction = _text(value[names["instruction"]], where, names["instruction"])
    asked = "\n".join(text for text in (instruction, optional("input")) if text.strip())
    messages.append({"role": "user", "content": asked})
    return tuple({**message, "content": images.text(message["content"], where)} for message in messages)


def _prompt_completion(
    value: Mapping[str, Any], where: str, names: Mapping[str, str], columns: Mapping[str, str], folder: Path
) -> Row:
    prompt, completion = value[names["prompt"]], value[names["completion"]]
    if isinstance(prompt, list) and isinstance(completion, list):
        images = _images(value, names)
        before, flags_before = read_messages(prompt, where, names["prompt"], columns, images)
        after, flags_after = read_messages(completion, where, names["completion"], columns, images)
        flags = (*flags_before, *flags_after)
        return Conversation(
            (*before, *after),
            where,
            trained_from=len(before),
            tools=read_tools(value.get(names["tools"]), where),
            flags=flags if any(flag is not None for flag in flags) else (),
            images=images.found(folder, where),
        )
    return PromptCompletion(_text(prompt, where, names["prompt"]), _text(completion, where, names["completion"]), where)


def _tokenized(value: Mapping[str, Any], where: str, names: Mapping[str, str]) -> Tokenized:
    """Return tokens without padding; what is trained is in ``labels`` (-100: not) or ``loss_mask`` (0: not)."""
    tokens = _integers(value[names["input_ids"]], where, names["input_ids"])
    if any(token < 0 for token in tokens):
        raise RowError(
            where, f"`{names['input_ids']}` holds a negative token id", "Remove it; padding is told by attention_mask"
        )
    kept = range(len(tokens))
    trained: tuple[bool, ...] | None = None
    for name in ("labels", "loss_mask", "attention_mask"):
        if value.get(names[name]) is None:
            continue
        numbers = _integers(value[names[name]], where, names[name])
        if len(numbers) != len(tokens):
            raise RowError(
                where,
                f"`{names[name]}` has {len(numbers)} numbers for {len(tokens)} tokens",
                reason=f"`{names[name]}` is not as long as the tokens",
            )
        if name == "attention_mask":
            kept = range(*_attended(numbers, where, names[name]))
            continue
        found = tuple(number != (IGNORED_LABEL if name == "labels" else 0) for number in numbers)
        if name == "labels" and any(new and a != b for new, a, b in zip(found, numbers, tokens, strict=True)):
            raise RowError(
                where,
                f"`{names[name]}` is neither the token nor {IGNORED_LABEL} at each place",
                "Write labels that are not shifted: the loss compares each token with the prediction before it",
            )
        trained = found if trained is None else tuple(a and b for a, b in zip(trained, found, strict=True))
    part = slice(kept.start, kept.stop)
    return Tokenized(tokens[part], None if trained is None else trained[part], where)


def _integers(value: object, where: str, name: str) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(type(n) in (int, bool) for n in value):
        raise RowError(where, f"`{name}` must be a list of whole numbers, this is {kind(value)}")
    return tuple(map(int, value))


def _attended(mask: Sequence[int], where: str, name: str) -> tuple[int, int]:
    """Return where the one run of ones begins and ends."""
    first = next((index for index, number in enumerate(mask) if number), len(mask))
    last = len(mask) - next((index for index, number in enumerate(reversed(mask)) if number), len(mask))
    if not all(mask[first:last]):
        raise RowError(where, f"`{name}` has zeros in the middle", "Put padding at the ends only")
    return (first, last) if first < last else (0, 0)
