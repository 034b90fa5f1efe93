"""Prompts are tokenized as chat turns or as plain text, and settings for generation are passed on unchanged."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.base import limited
from megatrain.data.encoding import load_tokenizer
from megatrain.tasks.prompts import GenerationSettings, PromptError, generation_options, prompt_tokens

MODEL = Path(__file__).parents[3] / "examples/quickstart/model"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(template: str | None) -> Any:
    tokenizer = load_tokenizer(str(MODEL))
    tokenizer.chat_template = template
    return tokenizer


def test_prompt_becomes_the_last_turn_of_the_conversation() -> None:
    tokenizer = make_tokenizer(TEMPLATE)
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Aye"}]
    for arguments, expected in (
        (("Why?",), "<user>Why?\n<assistant>"),
        (("Why?", "Be brief"), "<system>Be brief\n<user>Why?\n<assistant>"),
        (("Why?", "", history), "<user>Hi\n<assistant>Aye\n<user>Why?\n<assistant>"),
        (("Why?", "Be brief", history), "<system>Be brief\n<user>Hi\n<assistant>Aye\n<user>Why?\n<assistant>"),
    ):
        assert prompt_tokens(tokenizer, *arguments).tolist() == [tokenizer(expected)["input_ids"]]


def test_prompt_without_a_chat_template_is_plain_text() -> None:
    tokenizer = make_tokenizer(None)
    assert prompt_tokens(tokenizer, "Call me").tolist() == [tokenizer("Call me")["input_ids"]]
    with pytest.raises(PromptError, match=r"^this model has no chat template, so it supports no system message$"):
        prompt_tokens(tokenizer, "Call me", "Be brief")
    with pytest.raises(PromptError, match=r"^this prompt has no tokens: write the beginning of a text$"):
        prompt_tokens(tokenizer, "")


def test_a_template_can_reject_a_prompt() -> None:
    tokenizer = make_tokenizer("{{ raise_exception('no  questions\n here') }}")
    with pytest.raises(PromptError, match=r"^the chat template rejects it: no questions here$"):
        prompt_tokens(tokenizer, "Why?")


@pytest.mark.parametrize(
    ("template", "limit"),
    [
        ("{% set wide = 'a'.center(600_000_000) %}Hi", "256 MiB of memory"),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "1 s of processor time"),
    ],
)
def test_a_template_has_limited_time_and_memory(monkeypatch: pytest.MonkeyPatch, template: str, limit: str) -> None:
    monkeypatch.setattr(limited, "MAX_CPU_S", 1)
    monkeypatch.setattr(limited, "MAX_EXTRA_BYTES", 256 << 20)
    with pytest.raises(PromptError) as refused:
        prompt_tokens(make_tokenizer(template), "Why?")
    assert str(refused.value) == f"the chat template of {MODEL} cannot be used: it takes more than {limit}"


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (None, {}),
        (0.0, {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}),
        (0.7, {"do_sample": True, "temperature": 0.7}),
    ],
)
def test_options_of_generation(temperature: float | None, expected: dict[str, Any]) -> None:
    settings = GenerationSettings(7, temperature)
    padded, unpadded, endless = (
        SimpleNamespace(pad_token_id=pad, eos_token_id=end) for pad, end in ((3, 5), (None, 5), (None, None))
    )
    assert generation_options(settings, padded, 9) == {"max_new_tokens": 7, **expected}
    assert generation_options(settings, unpadded, 6) == {"max_new_tokens": 6, **expected, "pad_token_id": 5}
    assert generation_options(settings, endless, 7) == {"max_new_tokens": 7, **expected}
