"""Search for the assistant's text in a rendered conversation, with verification.

Four methods are tried in order. Each method checks its result against the rendered text. If a template rewrites a text,
no method succeeds, and the text is left out of the loss instead of getting a wrong mask.
1. Markers: use the template's own ``{% generation %}`` markers.
2. Sentinels: render a sentinel instead of each assistant text, then replace each sentinel with its text. The result
   must equal the original rendering.
3. Prefixes: render the messages before the turn, and the messages through the turn. Both must be prefixes of the text.
4. Replacement, for tool calls: render a sentinel instead of the turn. The text around the sentinel delimits the turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatrain.base.limited import LimitError, run_limited
from megatrain.data.images import IMAGE_MARK
from megatrain.data.rows_report import DataError, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = Mapping[str, Any]
Messages = Sequence[Message]
Tools = Sequence[Mapping[str, Any]] | None

EMPTY_TEXT = "it is empty"
REWRITTEN_TEXT = "the chat template rewrites it"
OMITTED_CALLS = "the chat template has no place for its `tool_calls`"
PARTIAL_CALLS = "the chat template leaves out a part of its `tool_calls`"
OUTSIDE_MARKERS = "the generation markers of the chat template do not enclose it"
REMEDY = 'Use a template with {% generation %} markers (model.chat_template), or train_on = "all"'
_STRIP_FUNCTIONS: tuple[Callable[[str], str], ...] = (str, str.strip, str.rstrip, str.lstrip)
_SENTINEL = "qzsentinel"
#: Name of the tokenizer attribute that holds the path of a chat template outside the tokenizer's folder.
TEMPLATE_FILE = "chat_template_file"
_MAX_TESTED_ROLES = 24  # maximum role sequences per template that are rendered with time and memory limits
#: Tested role sequences by template. All renderers share them, because each test is slow: it forks the process.
_TESTED_ROLES: dict[str, set[tuple[str, ...]]] = {}
#: Fields that link a tool's result to its call. Templates can omit them, because they are never in the loss.
_LINK_FIELDS = ("id", "tool_call_id")


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """Range of the rendered text, from ``start`` to ``end``, that contains the message with index ``message``."""

    message: int
    start: int
    end: int


def template_source(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the path of a tokenizer's chat template, or the tokenizer's folder if the folder contains the template."""
    return str(getattr(tokenizer, TEMPLATE_FILE, tokenizer.name_or_path))


class ChatRenderer:
    """Renderer of conversations with a tokenizer's chat template. It also locates the assistant's text.

    Args:
        use_parts: Whether the template expects messages as lists of text and image parts, as image-text models do.

    Raises:
        DataError: The tokenizer has no chat template, or the template uses too much time or memory.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, use_parts: bool = False) -> None:
        self._use_parts = use_parts
        template = tokenizer.chat_template
        if not (isinstance(template, str) or (isinstance(template, dict) and "default" in template)):
            raise DataError(
                str(tokenizer.name_or_path),
                "this tokenizer has no chat template, which `messages` need",
                "Set model.chat_template to a .jinja file, or use rows with prompt and completion",
            )
        self._tokenizer = tokenizer
        self._rendered_fields: set[str] = set()  # fields that have already changed a rendering
        probe: Messages = [{"role": "user", "content": "hello"}]
        self._tested_roles = _TESTED_ROLES.setdefault(json.dumps([template, use_parts]), set())
        try:
            text, prompted_text = (self.render(probe, "", add_generation_prompt=prompt) for prompt in (False, True))
        except RowError:
            text = prompted_text = ""
        self._prompt = prompted_text[len(text) :] if prompted_text.startswith(text) else ""

    def render(
        self, messages: Messages, location: str, *, tools: Tools = None, add_generation_prompt: bool = False
    ) -> str:
        """Render a conversation as text.

        Raises:
            RowError: The template rejects the conversation, for example because the roles do not alternate.
            DataError: The template uses too much time or memory.
        """
        roles = tuple(str(message.get("role")) for message in messages)
        if len(self._tested_roles) < _MAX_TESTED_ROLES and roles not in self._tested_roles:
            self._check_limits(messages, tools)
            self._tested_roles.add(roles)
        try:
            return self._apply(messages, tools, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template can raise any exception
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            problem = f"the chat template rejects this conversation: {reason}"
            raise RowError(location, problem, "Fix or remove the row") from None

    def _apply(self, messages: Messages, tools: Tools, *, add_generation_prompt: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            self._template_messages(messages),
            tools=None if tools is None else [dict(tool) for tool in tools],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        assert isinstance(text, str), type(text)
        return text

    def _check_limits(self, messages: Messages, tools: Tools) -> None:
        """Render a conversation with limited time and memory, because the template is an untrusted program.

        Raises:
            DataError: The template uses too much time or memory.
        """

        def render() -> None:
            for prompted in (False, True):
                try:
                    self._apply(messages, tools, add_generation_prompt=prompted)
                except (MemoryError, OverflowError):
                    raise
                except Exception:  # a template can raise any exception, which `render` reports
                    return

        try:
            run_limited(render)
        except LimitError as error:
            raise DataError(
                template_source(self._tokenizer),
                f"the chat template cannot be used: {error} for one conversation",
                "Set model.chat_template to another file",
            ) from None

    def _template_messages(self, messages: Messages) -> list[dict[str, Any]]:
        """Return the messages in the structure that the template expects."""
        if not self._use_parts:
            return [dict(message) for message in messages]
        return [{**message, "content": list(_split_parts(message["content"]))} for message in messages]

    def find_omitted_fields(self, messages: Messages, text: str, location: str, tools: Tools = None) -> tuple[str, ...]:
        """Return the conversation's fields that the template does not render.

        A field counts as rendered if removing it changes the rendering. Once a field has passed this slow test, later
        texts of the field only need to occur in ``text``. The test comes first, because short texts occur by chance.

        Args:
            text: The result of :meth:`render`.
            location: File and row, for error messages.
        """
        compact_text = "".join(text.split())
        field_indices: dict[str, list[int]] = {}
        for index, message in enumerate(messages):
            for name, value in message.items():
                if (
                    name == "role"
                    or name in _LINK_FIELDS
                    or (name == "name" and message["role"] == "tool")
                    or not value
                ):
                    continue
                if name == "content":
                    # Skip assistant texts, because the loss mask is verified, and images, because they have no text.
                    if message["role"] == "assistant" or IMAGE_MARK in value:
                        continue
                    name = f"content of {message['role']} messages"
                    if _occurs_in(value, compact_text):
                        continue
                elif name in self._rendered_fields and _all_occur_in(value, compact_text):
                    continue
                field_indices.setdefault(name, []).append(index)
        omitted = [
            name
            for name, indices in field_indices.items()
            if not self._affects_rendering(name, messages, indices, text, tools)
        ]
        if tools and not ("tools" in self._rendered_fields and _all_occur_in(tools, compact_text)):
            omitted += [] if self._affects_rendering("tools", messages, (), text, tools) else ["tools"]
        if any("tool_calls" in message for message in messages) and "tool_calls" not in omitted:
            omitted += self._find_omitted_parts(("names", "arguments"), "tool_calls", messages, text, tools)
        if tools and "tools" not in omitted:
            omitted += self._find_omitted_parts(("names", "descriptions", "parameters"), "tools", messages, text, tools)
        return tuple(omitted)

    def _find_omitted_parts(
        self, kinds: Sequence[str], field: str, messages: Messages, text: str, tools: Tools
    ) -> list[str]:
        """Return the kinds of texts that the template omits from at least one tool or tool call."""
        compact_text = "".join(text.split())

        def is_shown(kind: str, change: Callable[[str], str]) -> bool | None:
            changed_messages, changed_tools = messages, tools
            if field == "tools":
                changed_tools = [_map_leaves(tool, kind, change) for tool in tools or ()]
            else:
                calls = [[_map_leaves(call, kind, change) for call in message.get(field) or ()] for message in messages]
                pairs = zip(messages, calls, strict=True)
                changed_messages = [{**m, field: new_calls} if new_calls else m for m, new_calls in pairs]
            if [*changed_messages, *(changed_tools or ())] == [*messages, *(tools or ())]:
                return None
            try:
                return self.render(changed_messages, "", tools=changed_tools) != text
            except RowError:
                return True

        omitted = []
        for kind in kinds:
            name = f"{kind} of {field}"
            is_complete = name in self._rendered_fields or is_shown(kind, lambda leaf: leaf + _SENTINEL)
            if is_complete:
                self._rendered_fields.add(name)
                is_complete = is_shown(kind, lambda leaf: leaf if _occurs_in(leaf, compact_text) else leaf + _SENTINEL)
            omitted += [name] if is_complete is False else []
        return [field] if len(omitted) == len(kinds) else omitted

    def _affects_rendering(
        self, name: str, messages: Messages, indices: Sequence[int], text: str, tools: Tools
    ) -> bool:
        """Return whether the rendering changes if a field is removed from some messages or the tools are removed."""

        def remove_field(message: Message) -> Message:
            if name not in message:
                return {**message, "content": ""}
            return {key: value for key, value in message.items() if key != name}

        changed_messages = [remove_field(message) if i in indices else message for i, message in enumerate(messages)]
        try:
            is_rendered = self.render(changed_messages, "", tools=None if name == "tools" else tools) != text
        except RowError:
            is_rendered = True
        if is_rendered:
            self._rendered_fields.add(name)
        return is_rendered

    def find_assistant_spans(
        self, messages: Messages, text: str, location: str, indices: Sequence[int], tools: Tools = None
    ) -> dict[int, MessageSpan | str]:
        """Locate assistant messages in ``text``. Return each message's span (without end of turn), or why it has none.

        Args:
            text: The result of :meth:`render`.
            location: File and row, for error messages.
            indices: Indices of the assistant messages to locate.
        """
        results: dict[int, MessageSpan | str] = {index: EMPTY_TEXT for index in indices}
        turns = [index for index in indices if _is_plain_answer(messages[index]) or messages[index].get("tool_calls")]
        if not turns:
            return results
        chat = _RenderedConversation(self, messages, tools, text, location)
        marked_spans = self._find_by_markers(chat)
        if marked_spans is not None:
            results.update({index: marked_spans[index] for index in turns})
            return results
        plain_answers = [index for index in turns if _is_plain_answer(messages[index])]
        spans = _find_by_sentinels(chat, [i for i, message in enumerate(messages) if _is_plain_answer(message)]) or {}
        for index in plain_answers:  # search each turn alone, because one rewritten turn makes the joint search fail
            if index not in spans:
                spans.update(_find_by_sentinels(chat, [index]) or {})
        for index in turns:
            span = spans.get(index)
            if span is None and (prefix_span := _find_by_prefixes(chat, index)) is not None:
                results[index] = prefix_span
                continue
            span = span or _find_by_replacement(chat, index)
            results[index] = REWRITTEN_TEXT if span is None else self._extend_to_prompt(chat, span)
        return results

    def _find_by_markers(self, chat: _RenderedConversation) -> dict[int, MessageSpan | str] | None:
        template = self._tokenizer.get_chat_template(tools=None if chat.tools is None else list(chat.tools))
        if "generation %}" not in template and "generation -%}" not in template:
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        special_tokens: dict[str, Any] = dict(self._tokenizer.special_tokens_map)
        result: Any = render_jinja_template(
            conversations=[self._template_messages(chat.messages)],
            tools=None if chat.tools is None else [dict(tool) for tool in chat.tools],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **special_tokens,
        )
        rendered, marks = result
        turns = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if rendered[0] != chat.text or len(marks[0]) != len(turns):
            return None
        spans: dict[int, MessageSpan | str] = {}
        for index, (start, end) in zip(turns, marks[0], strict=True):
            is_enclosed = _contains_message(chat.text[start:end], chat.messages[index])
            spans[index] = MessageSpan(index, int(start), int(end)) if is_enclosed else OUTSIDE_MARKERS
        return spans

    def _extend_to_prompt(self, chat: _RenderedConversation, span: MessageSpan) -> MessageSpan:
        """Extend a span left to the generation prompt, so that it includes text such as an empty thinking block.

        At inference, the model starts after the generation prompt, so it must also learn to produce this text. Without
        a generation prompt, the text could be a role header. In that case, extend the span only over white space.
        """
        history = chat.messages[: span.message]
        if not history or (self._prompt and chat.text.endswith(self._prompt, 0, span.start)):
            return span
        try:
            prompt = chat.render(history, add_prompt=True)
            has_prompt = prompt != chat.render(history)
        except RowError:
            return span
        if not chat.text.startswith(prompt) or len(prompt) > span.start:
            return span
        if has_prompt or not chat.text[len(prompt) : span.start].strip():
            return MessageSpan(span.message, len(prompt), span.end)
        return span


def _split_parts(content: str) -> Iterator[dict[str, str]]:
    for index, text in enumerate(content.split(IMAGE_MARK)):
        if index:
            yield {"type": "image"}
        if text:
            yield {"type": "text", "text": text}


@dataclass(frozen=True, slots=True)
class _RenderedConversation:
    """A conversation and its rendered text."""

    renderer: ChatRenderer
    messages: Messages
    tools: Tools
    text: str
    location: str

    def render(self, messages: Messages, *, add_prompt: bool = False) -> str:
        return self.renderer.render(messages, self.location, tools=self.tools, add_generation_prompt=add_prompt)


def _is_plain_answer(message: Message) -> bool:
    """Return whether a message is a nonempty assistant message without tool calls."""
    return message["role"] == "assistant" and not message.get("tool_calls") and bool(message["content"].strip())


def _find_by_sentinels(chat: _RenderedConversation, turns: Sequence[int]) -> dict[int, MessageSpan] | None:
    prefix = _SENTINEL
    while any(prefix in message["content"] for message in chat.messages):
        prefix += "z"
    sentinels = {index: f"{prefix}{index}end" for index in turns}
    marked_messages = [
        {**message, "content": sentinels[index]} if index in sentinels else message
        for index, message in enumerate(chat.messages)
    ]
    try:
        frame = chat.render(marked_messages)
    except RowError:
        return None
    if any(frame.count(sentinel) != 1 for sentinel in sentinels.values()):
        return None
    for change in _STRIP_FUNCTIONS:
        contents = {index: change(chat.messages[index]["content"]) for index in turns}
        spans = _replace_sentinels(frame, sentinels, contents, chat.text)
        if spans is not None:
            return spans
    return None


def _find_by_replacement(chat: _RenderedConversation, index: int) -> MessageSpan | None:
    """Locate a turn with tool calls. Render a sentinel instead of the turn, and match the text around the sentinel."""
    if not chat.messages[index].get("tool_calls"):
        return None
    try:
        frame = chat.render(
            [*chat.messages[:index], {"role": "assistant", "content": _SENTINEL}, *chat.messages[index + 1 :]]
        )
    except RowError:
        return None
    prefix, sentinel, suffix = frame.partition(_SENTINEL)
    end = len(chat.text) - len(suffix)
    is_match = sentinel and chat.text.startswith(prefix) and chat.text.endswith(suffix) and len(prefix) <= end
    if not is_match or not _contains_message(chat.text[len(prefix) : end], chat.messages[index]):
        return None
    later_texts = [message["content"].strip() for message in chat.messages[index + 1 :]]
    if any(text and text in chat.text[len(prefix) : end] for text in later_texts):
        return None  # the span includes later messages; without the tool call, the template omits them from `frame`
    return MessageSpan(index, len(prefix), end)


def _find_by_prefixes(chat: _RenderedConversation, index: int) -> MessageSpan | None:
    """Locate a turn between the generation prompt and the text that the template appends to every turn."""
    messages = chat.messages
    try:
        prompt_text = chat.render(messages[:index], add_prompt=True) if index else ""
        history_text = chat.render(messages[:index]) if index else ""
        turn_text = chat.render(messages[: index + 1])
        frame = chat.render([*messages[:index], {"role": "assistant", "content": _SENTINEL}])
    except RowError:
        return None
    suffix = frame[frame.rindex(_SENTINEL) + len(_SENTINEL) :] if _SENTINEL in frame else ""
    if not turn_text.endswith(suffix):
        if not messages[index].get("tool_calls"):
            return None
        suffix = turn_text[len(turn_text.rstrip()) :]  # include the call's end-of-turn text, but no white space
    end = len(turn_text) - len(suffix)
    if not (chat.text.startswith(turn_text) and turn_text.startswith(prompt_text) and len(prompt_text) <= end):
        return None
    # Check the message with its generation prompt, because the prompt can contain the start of a thinking block.
    message_text = turn_text[len(history_text) if prompt_text.startswith(history_text) else len(prompt_text) : end]
    return MessageSpan(index, len(prompt_text), end) if _contains_message(message_text, messages[index]) else None


def _contains_message(turn_text: str, message: Message) -> bool:
    """Return whether a rendered turn contains a message's text and the names and arguments of all its tool calls."""
    if "".join(message["content"].split()) not in "".join(turn_text.split()):
        return False
    calls = message.get("tool_calls") or ()
    return all(text in turn_text or json.dumps(text)[1:-1] in turn_text for call in calls for text in iter_texts(call))


def _occurs_in(text: str, compact_text: str) -> bool:
    """Return whether a text occurs, verbatim or as JSON, in ``compact_text``: a rendering without white space."""
    forms = (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
    return any("".join(form.split()) in compact_text for form in forms)


def _all_occur_in(value: object, compact_text: str) -> bool:
    """Return whether a value contains texts and all of them occur in ``compact_text``."""
    texts = list(iter_texts(value))
    return bool(texts) and all(_occurs_in(text, compact_text) for text in texts)


def iter_texts(value: object) -> Iterator[str]:
    """Yield all texts in a value. For a tool call, yield only the texts in its ``function``."""
    if isinstance(value, Mapping):
        children: Iterable[Any] = [value["function"]] if "function" in value else value.values()
    else:
        children = value if isinstance(value, list | tuple) else ()
    if isinstance(value, str):
        yield value
    for child in children:
        yield from iter_texts(child)


def _map_leaves(value: Any, kind: str, change: Callable[[str], str], key: str = "") -> Any:
    """Return a copy of a tool or tool call with ``change`` applied to each of its texts of this kind."""
    if isinstance(value, Mapping) and key == "properties" and kind == "parameters":
        return {change(name): _map_leaves(child, kind, change) for name, child in value.items()}
    if key == "arguments" and kind == "arguments":
        return _map_arguments(value, change)
    if isinstance(value, Mapping):
        is_deep = key != "arguments" and kind != "names"
        children = value if is_deep else {"function": value["function"]} if "function" in value else {}
        changed_fields = {name: _map_leaves(child, kind, change, name) for name, child in children.items()}
        if kind == "names" and isinstance(value.get("name"), str):
            changed_fields["name"] = change(value["name"])
        return {**value, **changed_fields}
    if kind == "descriptions" and key == "description" and isinstance(value, str):
        return change(value)
    return value


def _map_arguments(value: Any, change: Callable[[str], str]) -> Any:
    """Return a tool call's arguments with ``change`` applied to all names and values (as JSON if they are not text)."""
    if isinstance(value, Mapping):
        return {change(name): _map_arguments(child, change) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [_map_arguments(child, change) for child in value]
    text = value if isinstance(value, str) else json.dumps(value)
    return value if (changed_text := change(text)) == text else changed_text


def _replace_sentinels(
    frame: str, sentinels: Mapping[int, str], contents: Mapping[int, str], text: str
) -> dict[int, MessageSpan] | None:
    """Replace the sentinels in ``frame`` with contents. Return the contents' spans if the result equals ``text``."""
    spans: dict[int, MessageSpan] = {}
    result, end = "", 0
    for index, sentinel in sorted(sentinels.items(), key=lambda item: frame.index(item[1])):
        start = frame.index(sentinel)
        result += frame[end:start]
        spans[index] = MessageSpan(index, len(result), len(result) + len(contents[index]))
        result += contents[index]
        end = start + len(sentinel)
    return spans if result + frame[end:] == text else None
