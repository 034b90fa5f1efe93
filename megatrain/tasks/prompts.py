"""Prompts as tokens, after the earlier turns of a conversation, and the settings of their continuation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatrain.base.limited import LimitError, run_limited

if TYPE_CHECKING:
    import torch

__all__ = ["GenerationSettings", "PromptError", "generation_options", "prompt_tokens"]


class PromptError(Exception):
    """A prompt cannot be continued; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """Sampling and length of completions.

    Attributes:
        temperature: 0 takes the likeliest token each time. None uses the model's generation_config.json.
        seed: Seed of sampling. None means 0.
        system: System message before each prompt, or "".
    """

    max_new_tokens: int = 512
    temperature: float | None = None
    seed: int | None = None
    system: str = ""


def _check_template(tokenizer: Any, messages: Sequence[dict[str, str]]) -> None:
    """Render a conversation within limits, because the template is a program and may be untrusted."""

    def render() -> None:
        try:
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except (MemoryError, OverflowError):
            raise
        except Exception:  # a template may raise anything; the caller reports it
            return

    try:
        run_limited(render)
    except LimitError as error:
        raise PromptError(f"the chat template of {tokenizer.name_or_path} cannot be used: {error}") from None


def prompt_tokens(
    tokenizer: Any, prompt: str, system: str = "", earlier: Sequence[dict[str, str]] = ()
) -> torch.Tensor:
    """Return the tokens of a prompt, [1, tokens]: a turn of a chat, or without a template a text to continue.

    Args:
        system: System message, or "".

    Raises:
        PromptError: The prompt has no tokens, the template refuses it, or there is a system message but no template.
    """
    if not tokenizer.chat_template:
        if system:
            raise PromptError("this model has no chat template, so it takes no system message")
        tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
        if tokens.shape[1] == 0:
            raise PromptError("there is no token in this prompt: write the beginning of a text")
    else:
        first = [{"role": "system", "content": system}] if system else []
        messages = [*first, *earlier, {"role": "user", "content": prompt}]
        if not earlier:
            _check_template(tokenizer, messages)
        try:
            tokens = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
        except Exception as error:  # a template may raise anything
            raise PromptError(f"the chat template refuses it: {' '.join(str(error).split())}") from error
    return tokens  # type: ignore[no-any-return]


def generation_options(settings: GenerationSettings, tokenizer: Any, room: int) -> dict[str, Any]:
    """Return the arguments of transformers' ``generate`` besides the prompt.

    Args:
        room: Number of free positions.
    """
    options: dict[str, Any] = {"max_new_tokens": min(room, settings.max_new_tokens)}
    if settings.temperature == 0:
        options |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    elif settings.temperature is not None:
        options |= {"do_sample": True, "temperature": settings.temperature}
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        options["pad_token_id"] = tokenizer.eos_token_id
    return options
