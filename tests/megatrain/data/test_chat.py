"""The trained tokens decode to exactly the assistant's text and its end of turn, for every kind of template."""

# ruff: noqa: E501  -- one case per line reads best
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain.data.chat import RowEncoder, TokenizedRow
from megatrain.data.formats import Conversation, Document, PromptCompletion, Tokenized
from megatrain.data.rows_report import DataError, RowError
from oracles.rows_in_memory import encode_row

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nBe kind<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MERGES_SYSTEM = (  # the system message goes into the first user turn; roles must alternate; "assistant" is "model"
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ (first if loop.first else '') + (m['content'] | trim) }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GENERATION_MARKERS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS_OLD_THOUGHTS = (  # earlier turns lose their thoughts; a last turn without one gets an empty thought
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% set answer = m['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}{% if '</think>' in m['content'] %}{{ m['content'] }}{% else %}<think>\n\n</think>\n\n{{ answer }}{% endif %}"
    "{% else %}{{ answer }}{% endif %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWERS_INSIDE = (  # a tool's answer is in the turn that called it, before the end of that turn
    "{% for m in messages %}{% if m['role'] != 'tool' %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m.get('tool_calls') or [] %}{{ call.function.name }} {{ call.function.arguments['of'] }} "
    "{% endfor %}"
    "{% if m.get('tool_calls') and not loop.last %}{{ loop.nextitem.content }}{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m['role'] | upper }}: {{ m['content'] }}\n{% endfor %}"
OTHER_LAST_END = (  # earlier turns end with one token, the last with another
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{{ '<|return|>' if loop.last and m['role'] == 'assistant' else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CHAT = (
    ("system", "Short"),
    ("user", "Hi there"),
    ("assistant", "Call me Ishmael."),
    ("user", "Why?"),
    ("assistant", "So be it"),
)


def conversation(*turns: tuple[str, str], loss_start: int = 0) -> Conversation:
    return Conversation(tuple({"role": role, "content": content} for role, content in turns), "rows line 1", loss_start)


def trained_runs(tokenizer: Any, encoded: TokenizedRow) -> list[str]:
    """Return the text of each unbroken run of trained tokens."""
    runs: list[list[int]] = [[]]
    for token, wanted in zip(encoded.tokens, encoded.trained, strict=True):
        if wanted:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]


@pytest.mark.parametrize(
    ("template", "end", "train_on", "expected"),
    [
        (CHATML, "<|im_end|>", "assistant", ["Call me Ishmael.", "So be it"]),
        (CHATML, "<|im_end|>", "completion", ["So be it"]),
        (LLAMA3, "<|eot_id|>", "assistant", ["Call me Ishmael.", "So be it"]),
        (LLAMA3, "<|eot_id|>", "completion", ["So be it"]),
        (MERGES_SYSTEM, "<end_of_turn>", "assistant", ["Call me Ishmael.", "So be it"]),
        (GENERATION_MARKERS, "<|im_end|>", "assistant", ["Call me Ishmael.", "So be it"]),
        (GENERATION_MARKERS, "<|im_end|>", "completion", ["So be it"]),
        (DROPS_OLD_THOUGHTS, "<|im_end|>", "completion", ["<think>\n\n</think>\n\nSo be it"]),
        (DROPS_OLD_THOUGHTS, "<|im_end|>", "assistant", ["Call me Ishmael.", "<think>\n\n</think>\n\nSo be it"]),
    ],
)
def test_exactly_the_assistant(tokenizer: Any, template: str, end: str, train_on: Any, expected: list[str]) -> None:
    tokenizer.chat_template = template
    encoded = encode_row(RowEncoder(tokenizer, train_on=train_on), conversation(*CHAT))
    assert trained_runs(tokenizer, encoded) == [text + end for text in expected]
    whole = tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in CHAT], tokenize=False)
    assert tokenizer.decode(encoded.tokens) == whole


def test_plain_template_trains_neither_headers_nor_foreign_whitespace(tokenizer: Any) -> None:
    tokenizer.chat_template = PLAIN
    encoded = encode_row(RowEncoder(tokenizer), conversation(*CHAT))
    first, last = trained_runs(tokenizer, encoded)
    assert first.strip() == "Call me Ishmael."
    assert last.strip() == "So be it<|endoftext|>"  # this template has no token for the end of the last turn


def test_each_turn_keeps_its_end_token(tokenizer: Any) -> None:
    tokenizer.chat_template = OTHER_LAST_END
    encoded = encode_row(RowEncoder(tokenizer), conversation(*CHAT))
    assert trained_runs(tokenizer, encoded) == ["Call me Ishmael.<|im_end|>", "So be it<|return|>"]


def test_thought_of_the_last_turn_is_trained(tokenizer: Any) -> None:
    tokenizer.chat_template = DROPS_OLD_THOUGHTS
    row = conversation(("user", "Why?"), ("assistant", "<think>\nhmm\n</think>\n\nBecause"))
    encoded = encode_row(RowEncoder(tokenizer), row)
    assert trained_runs(tokenizer, encoded) == ["<think>\nhmm\n</think>\n\nBecause<|im_end|>"]


def test_a_rewritten_turn_is_not_trained(tokenizer: Any) -> None:
    tokenizer.chat_template = DROPS_OLD_THOUGHTS
    row = conversation(("user", "a"), ("assistant", "<think>\nhmm\n</think>\n\nB"), ("user", "c"), ("assistant", "d"))
    for train_on in ("assistant", "completion"):
        encoded = encode_row(RowEncoder(tokenizer, train_on=train_on), row)
        assert trained_runs(tokenizer, encoded) == ["<think>\n\n</think>\n\nd<|im_end|>"]
    assert encode_row(RowEncoder(tokenizer), row).untrained_turns == ("the chat template rewrites it",)
    with pytest.raises(RowError, match="line 1: message 2 cannot be separated from the rest: the chat template rewri"):
        encode_row(RowEncoder(tokenizer), replace(row, messages=(*row.messages[:2], *row.messages[2:3])))


CALL = {"type": "function", "function": {"name": "depth", "arguments": {"of": "sea"}}}


@pytest.mark.parametrize(("shown", "is_trained"), [(" {{ call.function.arguments['of'] }}", True), ("", False)])
def test_partially_rendered_tool_call_is_not_trained(tokenizer: Any, shown: str, is_trained: bool) -> None:
    calls = "{% for call in m.get('tool_calls') or [] %}{{ call.function.name }}" + shown + "{% endfor %}"
    tokenizer.chat_template = CHATML.replace(
        "{{ m['content'] }}<|im_end|>", "{{ m['content'] }}" + calls + "<|im_end|>"
    )
    messages = (
        {"role": "user", "content": "How deep?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "So be it"},
    )
    encoded = encode_row(RowEncoder(tokenizer), Conversation(messages, "rows line 1"))
    assert trained_runs(tokenizer, encoded) == ["depth sea<|im_end|>"] * is_trained + ["So be it<|im_end|>"]
    assert encoded.untrained_turns == (
        () if is_trained else ("the chat template leaves out a part of its `tool_calls`",)
    )


def test_tool_answer_inside_an_assistant_turn_is_not_trained(tokenizer: Any) -> None:
    tokenizer.chat_template = ANSWERS_INSIDE
    messages = (
        {"role": "user", "content": "How deep?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "11 km"},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "So be it"},
    )
    encoded = encode_row(RowEncoder(tokenizer), Conversation(messages, "rows line 1"))
    assert "depth sea 11 km<|im_end|>" in tokenizer.decode(encoded.tokens)
    assert trained_runs(tokenizer, encoded) == ["So be it<|im_end|>"]
    assert encoded.untrained_turns == ("the chat template rewrites it",)


def test_white_space_around_content(tokenizer: Any) -> None:
    row = conversation(("user", "a"), ("assistant", "  b \n"))
    tokenizer.chat_template = LLAMA3
    assert trained_runs(tokenizer, encode_row(RowEncoder(tokenizer), row)) == ["b<|eot_id|>"]
    tokenizer.chat_template = CHATML
    (run,) = trained_runs(tokenizer, encode_row(RowEncoder(tokenizer), row))
    assert run.replace("<|im_end|>", "").strip() == "b"
    assert run.endswith("<|im_end|>")


def test_repeated_texts_are_distinguished(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    row = conversation(("user", "yes"), ("assistant", "yes"), ("user", "assistant\nyes"), ("assistant", "yes"))
    encoded = encode_row(RowEncoder(tokenizer, train_on="completion"), row)
    assert trained_runs(tokenizer, encoded) == ["yes<|im_end|>"]
    assert encoded.trained.index(True) == len(encoded.tokens) - 3


def test_empty_turns_and_no_assistant_train_nothing(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    encoder = RowEncoder(tokenizer)
    assert sum(encode_row(encoder, conversation(("user", "a"), ("assistant", " "))).trained) == 0
    assert sum(encode_row(encoder, conversation(("user", "a"))).trained) == 0


def test_trained_from_masks_earlier_turns(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    encoded = encode_row(RowEncoder(tokenizer), conversation(*CHAT, loss_start=4))
    assert trained_runs(tokenizer, encoded) == ["So be it<|im_end|>"]


def test_only_the_last_turn(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    row = conversation(*CHAT, loss_start=2)
    assert trained_runs(tokenizer, encode_row(RowEncoder(tokenizer, train_on="completion"), row)) == [
        "Call me Ishmael.<|im_end|>",
        "So be it<|im_end|>",
    ]
    for each in (row, conversation(*CHAT)):
        encoded = encode_row(RowEncoder(tokenizer, train_on="last_assistant"), each)
        assert trained_runs(tokenizer, encoded) == ["So be it<|im_end|>"]


@pytest.mark.parametrize(
    ("train_on", "flags", "expected"),
    [
        ("assistant", (None, None, False, None, None), ["So be it<|im_end|>"]),
        ("assistant", (None, None, None, None, False), ["Call me Ishmael.<|im_end|>"]),
        ("last_assistant", (None, True, True, None, False), ["Call me Ishmael.<|im_end|>"]),
    ],
)
def test_rows_can_select_trained_turns(
    tokenizer: Any, train_on: Any, flags: tuple[bool | None, ...], expected: list[str]
) -> None:
    tokenizer.chat_template = CHATML
    encoded = encode_row(RowEncoder(tokenizer, train_on=train_on), replace(conversation(*CHAT), flags=flags))
    assert trained_runs(tokenizer, encoded) == expected


def test_turns_excluded_by_a_row_are_not_trained(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    row = replace(conversation(*CHAT), flags=(None, None, False, None, None))
    before, after = trained_runs(tokenizer, encode_row(RowEncoder(tokenizer, train_on="all"), row))
    assert before.endswith("<|im_start|>assistant\n")
    assert after.startswith("\n<|im_start|>user\nWhy?")


def test_pretokenized_rows_are_kept(tokenizer: Any) -> None:
    encoded = encode_row(RowEncoder(tokenizer), Tokenized((5, 6, 7), (True, False, True), "x"))
    assert (encoded.tokens, encoded.trained, encoded.is_text) == ([5, 6, 7], [False, False, True], False)
    assert encode_row(RowEncoder(tokenizer), Tokenized((5, 6, 7), None, "x")).is_text


def test_batch_encoding_matches_single_row_encoding(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    encoder = RowEncoder(tokenizer)
    rows = [
        Document("Call me Ishmael.", "x"),
        conversation(*CHAT),
        PromptCompletion("The whale", " is white", "x"),
        conversation(("user", "a")),
        PromptCompletion("", "Call me", "x"),
        Tokenized((5, 6), None, "x"),
    ]
    assert list(encoder.encode_many(rows)) == [encode_row(encoder, row) for row in rows]


def test_train_on_all(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    encoded = encode_row(RowEncoder(tokenizer, train_on="all"), conversation(*CHAT))
    assert encoded.trained == [False] + [True] * (len(encoded.tokens) - 1)


def test_conversation_rejected_by_the_template_raises(tokenizer: Any) -> None:
    tokenizer.chat_template = MERGES_SYSTEM
    with pytest.raises(
        DataError, match="rows line 1: the chat template rejects this conversation: roles must alternate"
    ):
        encode_row(RowEncoder(tokenizer), conversation(("assistant", "a"), ("user", "b")))


def test_no_template(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="this tokenizer has no chat template, which `messages` need"):
        encode_row(RowEncoder(tokenizer), conversation(*CHAT))


def test_markers_at_the_wrong_place_are_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}A:{% endgeneration %}{% endif %}"
        "{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(RowError, match=r"message 2 cannot .* the generation markers of the chat template do not encl"):
        encode_row(RowEncoder(tokenizer), conversation(("user", "a"), ("assistant", "b")))


def test_completion_masks_the_prompt_and_ends(tokenizer: Any) -> None:
    encoded = encode_row(RowEncoder(tokenizer), PromptCompletion("The whale", " is white", "x"))
    assert trained_runs(tokenizer, encoded) == [" is white<|endoftext|>"]
    assert tokenizer.decode(encoded.tokens) == "The whale is white<|endoftext|>"


def test_token_that_crosses_the_border_is_trained(tokenizer: Any) -> None:
    encoded = encode_row(RowEncoder(tokenizer), PromptCompletion("The wh", "ale", "x"))
    assert encoded.tokens == [*tokenizer("The whale")["input_ids"], tokenizer.eos_token_id]
    assert trained_runs(tokenizer, encoded) == [" whale<|endoftext|>"]


def test_completion_without_prompt_or_text(tokenizer: Any) -> None:
    encoded = encode_row(RowEncoder(tokenizer), PromptCompletion("", "Call me", "x"))
    assert tokenizer.decode(encoded.tokens) == "Call me<|endoftext|>"
    assert sum(encoded.trained) == len(encoded.tokens) - 1
    assert sum(encode_row(RowEncoder(tokenizer), PromptCompletion("a", " ", "x")).trained) == 0
    encoded = encode_row(RowEncoder(tokenizer, train_on="all"), PromptCompletion("The whale", " is white", "x"))
    assert sum(encoded.trained) == len(encoded.tokens) - 1


def test_document_is_trained_whole_with_an_end_token(tokenizer: Any) -> None:
    encoded = encode_row(RowEncoder(tokenizer), Document("Call me Ishmael.", "x"))
    assert tokenizer.decode(encoded.tokens) == "Call me Ishmael.<|endoftext|>"
    assert encoded.trained == [False] + [True] * (len(encoded.tokens) - 1)
    assert encoded.is_text


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30)


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MERGES_SYSTEM, GENERATION_MARKERS])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(TEXT, min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0))
def test_any_text_is_masked_exactly_or_refused(tokenizer: Any, template: str, texts: list[str]) -> None:
    tokenizer.chat_template = template
    turns = [(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]
    encoded = encode_row(RowEncoder(tokenizer), conversation(*turns))
    runs = trained_runs(tokenizer, encoded)
    wanted = [text.strip() for role, text in turns if role == "assistant" and text.strip()]
    assert [run.rsplit("<", 1)[0].strip() for run in runs] == wanted
