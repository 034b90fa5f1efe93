"""Preference rows in the formats of TRL and LLaMA-Factory: two answers to a prompt, or one answer with a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatrain.data.formats import (
    Conversation,
    DataRow,
    PromptCompletion,
    RowFields,
    RowReader,
    find_absent_column,
    guess_columns,
    instruction_messages,
    require_text,
)
from megatrain.data.messages import RowImages, field_names, read_messages, type_name
from megatrain.data.rows_report import DataError, RowError

_LARGEST_MARGIN = 3.4028234663852886e38  # largest fp32 value; the loss is computed in fp32


@dataclass(frozen=True, slots=True)
class Preference(DataRow):
    """Two answers to a prompt, of which one is preferred, or one answer with a label.

    Attributes:
        answer: Prompt and chosen answer, or prompt and only answer.
        rejected: Prompt and rejected answer, or None if there is only one answer.
        is_good: Whether ``answer`` is desirable.
        margin: Margin by which the chosen answer is better, for losses with a margin.
    """

    answer: Conversation | PromptCompletion
    rejected: Conversation | PromptCompletion | None
    is_good: bool
    location: str
    margin: float = 0.0
    unread_columns: tuple[str, ...] = field(default=(), compare=False)

    @property
    def answers(self) -> tuple[Conversation | PromptCompletion, ...]:
        """All answers, the better one first."""
        return (self.answer,) if self.rejected is None else (self.answer, self.rejected)

    @property
    def num_characters(self) -> int:
        """Total number of characters in the answers, each counted with its prompt."""
        return sum(answer.num_characters for answer in self.answers)


_PREFERENCE_FIELDS = "`prompt`, `chosen` and `rejected`, or `prompt`, `completion` and `label`"
_LABEL_FIELDS = "label", "kto_tag"

_Messages = tuple[dict[str, Any], ...]


def _read_preference(fields: RowFields) -> Preference:
    """Parse a row that has two answers, or one answer and a label."""
    value, location, names = fields.value, fields.location, fields.names
    chosen, rejected = names["chosen"], names["rejected"]
    if "chosen" in fields and "rejected" in fields:
        prompt, tools = _read_prompt(fields), fields.tools()
        if value[chosen] == value[rejected]:
            reason = f"`{chosen}` and `{rejected}` are the same"
            raise RowError(location, f"{reason}: there is nothing to prefer", reason=reason)
        answers = [_read_answer(fields, name) for name in ("chosen", "rejected")]
        if isinstance(answers[0], str) != isinstance(answers[1], str):
            raise RowError(location, f"of `{chosen}` and `{rejected}` one is text and the other is a list of messages")
        chosen_row, rejected_row = _add_prompt(prompt, answers, location, (chosen, rejected), tools)
        return Preference(chosen_row, rejected_row, True, location, _read_margin(fields))
    label = next((names[name] for name in _LABEL_FIELDS if name in fields), None)
    if label is None:
        if error_parts := find_absent_column(value, fields.columns):
            raise DataError(location, *error_parts)
        column = next(
            (name for name in (chosen, rejected) if (chosen in value or rejected in value) and name not in value), ""
        )
        problem = f"no field `{column}`" if column else f"no preferences: they have the fields {_PREFERENCE_FIELDS}"
        advice = 'If they have other names, write for example columns = { chosen = "better", rejected = "worse" }'
        raise DataError(location, f"{problem}; the row has {field_names(value)}", advice)
    if not isinstance(value[label], bool):
        raise DataError(
            location,
            f"`{label}` says whether the answer is a good one, and must be true or false; this is "
            f"{type_name(value[label])}",
            "Write true or false",
        )
    prompt, completion = _read_labelled(fields)
    (answer,) = _add_prompt(prompt, [completion], location, (names["completion"],), fields.tools())
    return Preference(answer, None, value[label], location)


def _read_margin(fields: RowFields) -> float:
    margin = fields.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) <= _LARGEST_MARGIN:
        description = f"{type_name(margin)}, {margin!r:.20}"
        raise RowError(fields.location, f"`{fields.names['margin']}` must be a number of fp32, this is {description}")
    return float(margin)


def _read_prompt(fields: RowFields) -> str | _Messages | None:
    """Return a row's prompt as text or messages, or None if the answers contain the prompt."""
    if "prompt" in fields:
        return _read_answer(fields, "prompt")
    for name in ("conversations", "messages"):
        if name in fields:
            messages, _ = fields.messages(name, RowImages())
            system = fields.system_text(messages)
            return ({"role": "system", "content": system}, *messages) if system else messages
    return instruction_messages(fields, RowImages()) if "instruction" in fields else None


def _read_labelled(fields: RowFields) -> tuple[str | _Messages | None, str | _Messages]:
    """Return the prompt and the answer of a row with a label."""
    prompt, location = _read_prompt(fields), fields.location
    for name in ("completion", "output"):
        if name in fields and prompt is not None:
            return prompt, _read_answer(fields, name)
    if isinstance(prompt, tuple) and prompt[-1]["role"] == "assistant":  # the prompt includes the answer
        return prompt[:-1], prompt[-1:]
    missing_name = fields.names["prompt" if prompt is None else "completion"]
    problem = f"no field `{missing_name}`; the row has {field_names(fields.value)}"
    raise DataError(location, problem, guess_columns(fields.value, location))


def _read_answer(fields: RowFields, name: str) -> str | _Messages:
    """Return a field's text unchanged, or its message or messages as a tuple."""
    value, column = fields[name], fields.names[name]
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, list):
        return read_messages(value, fields.location, column, fields.columns, RowImages())[0]
    return require_text(value, fields.location, column)


def _add_prompt(
    prompt: str | _Messages | None,
    answers: Sequence[str | _Messages],
    location: str,
    names: Sequence[str],
    tools: tuple[Mapping[str, Any], ...] | None,
) -> list[Conversation | PromptCompletion]:
    """Return the prompt with each answer. Without a prompt, the answers' common start is the prompt."""
    texts = [answer for answer in answers if isinstance(answer, str)]
    if texts and not isinstance(prompt, tuple):
        return _make_completions(prompt, texts, location, names)
    lists = [({"role": "assistant", "content": text},) if isinstance(text, str) else text for text in answers]
    prompt, num_repeated = _prompt_messages(prompt, lists, location, names)
    if any(messages[:num_repeated] != prompt[:num_repeated] for messages in lists):
        raise _no_prefix_error(location, names)
    lists = [messages[num_repeated:] for messages in lists]
    for messages, name in zip(lists, names, strict=True):
        if not any(message["role"] == "assistant" for message in messages):
            raise RowError(
                location, f"`{name}` has no turn of the assistant after the prompt", reason=f"`{name}` has no answer"
            )
    return [Conversation((*prompt, *answer), location, loss_start=len(prompt), tools=tools) for answer in lists]


def _make_completions(
    prompt: str | None, texts: Sequence[str], location: str, names: Sequence[str]
) -> list[Conversation | PromptCompletion]:
    """Return a text prompt with each answer. If there is no prompt, use the answers' common start as the prompt."""
    if prompt is None:
        prompt = _shared_text(texts)
        texts = [text[len(prompt) :] for text in texts]
    for text, name in zip(texts, names, strict=True):
        if not text.strip():
            raise RowError(location, f"`{name}` has no answer after the prompt", reason=f"`{name}` has no answer")
    return [PromptCompletion(prompt, text, location) for text in texts]


def _prompt_messages(
    prompt: str | _Messages | None, lists: Sequence[_Messages], location: str, names: Sequence[str]
) -> tuple[_Messages, int]:
    """Return the prompt as messages, and the number of prompt messages that the answers repeat."""
    has_conversations = len(lists[0]) > 1 and lists[0][0]["role"] != "assistant"
    if isinstance(prompt, str) and has_conversations:
        # In some datasets, the prompt is the question as text, and each answer is a whole conversation.
        questions = [next((m["content"] for m in messages if m["role"] == "user"), None) for messages in lists]
        if any(not isinstance(text, str) or text.strip() != prompt.strip() for text in questions):
            raise _no_prefix_error(location, names)
        prompt = None
    if prompt is None:
        prefix = _shared_messages(lists)
        if not prefix:
            raise RowError(
                location,
                f"{' and '.join(f'`{name}`' for name in names)} begin with different messages, so there is no prompt",
                reason="there is no prompt that the answers share",
            )
        return prefix, len(prefix)
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
    return messages, len(messages) if has_conversations else 0


def _no_prefix_error(location: str, names: Sequence[str]) -> RowError:
    return RowError(
        location,
        f"`prompt` is not what {' and '.join(f'`{name}`' for name in names)} begin with",
        "Leave the prompt out of the answers, or leave `prompt` out of the row",
        reason="`prompt` is not what the answers begin with",
    )


def _shared_text(texts: Sequence[str]) -> str:
    """Return the common start of several texts, without a trailing space, which belongs to the answers."""
    length = next((n for n, chars in enumerate(zip(*texts, strict=False)) if len(set(chars)) > 1), min(map(len, texts)))
    return texts[0][:length].removesuffix(" ")


def _shared_messages(lists: Sequence[_Messages]) -> _Messages:
    """Return the messages with which all conversations begin, without trailing assistant messages."""
    length = next(
        (n for n, pair in enumerate(zip(*lists, strict=False)) if any(m != pair[0] for m in pair)), min(map(len, lists))
    )
    while length and lists[0][length - 1]["role"] == "assistant":
        length -= 1
    return lists[0][:length]


PREFERENCE = RowReader(
    "preference",
    "rows of preferences: answers to one prompt that are compared, or one that is judged",
    _read_preference,
    alternatives=("chosen", "rejected", *_LABEL_FIELDS),
    fields=None,
)
