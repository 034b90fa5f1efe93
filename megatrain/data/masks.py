"""Which characters of a rendered conversation the assistant wrote, with proof.

Three ways, tried in order; each one checks its own answer against the rendered text, so a template that rewrites
messages is refused instead of masked wrongly:
1. the template's own ``{% generation %}`` markers;
2. render again with a sentinel in place of each assistant text, find the sentinels, put the texts back: equal to
   the first rendering, or the way does not apply;
3. render the conversation up to the turn, and up to and with it: both must be prefixes of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatrain.data.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Messages = Sequence[Mapping[str, str]]
_UNPROVEN = 'Use a template with {% generation %} markers (model.chat_template), or train_on = "completion" or "all"'


@dataclass(frozen=True, slots=True)
class Span:
    """Characters ``start`` to ``end`` of the rendered text, written by message number ``message``."""

    message: int
    start: int
    end: int


class ChatRenderer:
    """Renders conversations with one tokenizer's chat template and finds the assistant's part.

    Raises:
        DataError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        if not isinstance(tokenizer.chat_template, str):
            raise DataError(
                str(tokenizer.name_or_path),
                "this tokenizer has no chat template, which `messages` need",
                "Set model.chat_template to a .jinja file, or give prompt and completion",
            )
        self._tokenizer = tokenizer
        self._template: str = tokenizer.chat_template
        self.has_markers = "generation %}" in self._template or "generation -%}" in self._template

    def render(self, messages: Messages, where: str, *, add_generation_prompt: bool = False) -> str:
        """Return the conversation as text.

        Raises:
            DataError: the template refuses it, for example because roles do not alternate.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template raises what it likes
            raise DataError(
                where, f"the chat template refuses this conversation: {error}", "Fix or remove the row"
            ) from None
        assert isinstance(text, str), type(text)
        return text

    def assistant_spans(self, messages: Messages, text: str, where: str, chosen: Sequence[int]) -> list[Span]:
        """Return the spans of the chosen assistant messages in ``text``, in order, without end-of-turn tokens.

        Messages without content have none.

        Args:
            messages: the conversation.
            text: what :meth:`render` made of it.
            where: file and row, for errors.
            chosen: indices of assistant messages.

        Raises:
            DataError: no way proves where the assistant's text is.
        """
        wanted = [index for index in chosen if messages[index]["content"].strip()]
        if not wanted:
            return []
        spans = self._by_markers(messages, text, where) if self.has_markers else None
        if spans is None:
            spans = self._by_sentinels(messages, text, where)
        if spans is None:
            spans = {index: self._by_prefixes(messages, text, where, index) for index in wanted}
        return [spans[index] for index in wanted]

    def _by_markers(self, messages: Messages, text: str, where: str) -> dict[int, Span] | None:
        from transformers.utils.chat_template_utils import render_jinja_template

        special: dict[str, Any] = dict(self._tokenizer.special_tokens_map)
        result: Any = render_jinja_template(
            conversations=[[dict(message) for message in messages]],
            chat_template=self._template,
            return_assistant_tokens_mask=True,
            **special,
        )
        rendered, found = result
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if rendered[0] != text or len(found[0]) != len(turns):
            return None
        spans = {index: Span(index, int(start), int(end)) for index, (start, end) in zip(turns, found[0], strict=True)}
        for index, span in spans.items():
            if messages[index]["content"].strip() not in text[span.start : span.end]:
                raise DataError(
                    where, f"the generation markers of the chat template do not enclose message {index + 1}", _UNPROVEN
                )
        return spans

    def _by_sentinels(self, messages: Messages, text: str, where: str) -> dict[int, Span] | None:
        mark = "qzsentinel"
        while any(mark in message["content"] for message in messages):
            mark += "z"
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        sentinels = {index: f"{mark}{index}end" for index in turns}
        marked = [
            {"role": message["role"], "content": sentinels.get(index, message["content"])}
            for index, message in enumerate(messages)
        ]
        try:
            frame = self.render(marked, where)
        except DataError:
            return None
        if any(frame.count(sentinel) != 1 for sentinel in sentinels.values()):
            return None
        changes: tuple[Callable[[str], str], ...] = (str, str.strip, str.rstrip, str.lstrip)
        for change in changes:
            spans = _put_back(frame, sentinels, {index: change(messages[index]["content"]) for index in turns}, text)
            if spans is not None:
                return {index: self._with_lead(messages, text, where, span) for index, span in spans.items()}
        return None

    def _with_lead(self, messages: Messages, text: str, where: str, span: Span) -> Span:
        """Add what the template puts between the generation prompt and the content, such as an empty thought.

        At inference the model starts after the generation prompt, so it must produce that text too. Without a
        generation prompt, the role header would be in that place; then only white space is added.
        """
        before = messages[: span.message]
        if not before:
            return span
        try:
            prompt = self.render(before, where, add_generation_prompt=True)
            has_prompt = prompt != self.render(before, where)
        except DataError:
            return span
        if not text.startswith(prompt) or len(prompt) > span.start:
            return span
        if has_prompt or not text[len(prompt) : span.start].strip():
            return Span(span.message, len(prompt), span.end)
        return span

    def _by_prefixes(self, messages: Messages, text: str, where: str, index: int) -> Span:
        """Take what lies between the generation prompt and what the template puts after any text of this turn."""
        content = messages[index]["content"].strip()
        sentinel = "qzsentinel"
        before = self.render(messages[:index], where, add_generation_prompt=True) if index else ""
        through = self.render(messages[: index + 1], where)
        frame = self.render([*messages[:index], {"role": "assistant", "content": sentinel}], where)
        after = frame[frame.rindex(sentinel) + len(sentinel) :] if sentinel in frame else ""
        written = through[len(before) : len(through) - len(after)]
        if not (
            text.startswith(through)
            and through.startswith(before)
            and through.endswith(after)
            and written.rstrip().endswith(content)
        ):
            raise DataError(
                where,
                f"the chat template rewrites message {index + 1}, so what the assistant wrote cannot be told from "
                "the rest",
                _UNPROVEN,
            )
        return Span(index, len(before), len(before) + len(written))


def _put_back(
    frame: str, sentinels: Mapping[int, str], contents: Mapping[int, str], text: str
) -> dict[int, Span] | None:
    """Replace the sentinels of a frame by contents; return where they went if that makes ``text``, else None."""
    spans: dict[int, Span] = {}
    built, at = "", 0
    for index, sentinel in sorted(sentinels.items(), key=lambda item: frame.index(item[1])):
        found = frame.index(sentinel)
        built += frame[at:found]
        spans[index] = Span(index, len(built), len(built) + len(contents[index]))
        built += contents[index]
        at = found + len(sentinel)
    return spans if built + frame[at:] == text else None
