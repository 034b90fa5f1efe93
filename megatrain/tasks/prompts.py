"""Tokenization of prompts and conversations, and settings for generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatrain.base.limited import LimitError, run_limited

if TYPE_CHECKING:
    import torch

__all__ = ["GenerationSettings", "PromptError", "generation_options", "prompt_tokens"]


class PromptError(Exception):
    """Error for a prompt that cannot be continued. The message states the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """Sampling and length of generated text.

    Attributes:
        temperature: Temperature for sampling. 0 selects the most likely token. None uses generation_config.json.
        seed: Random seed for sampling. None is equivalent to 0.
        system: System message before each prompt, or "" for no system message.
    """

    max_new_tokens: int = 512
    temperature: float | None = None
    seed: int | None = None
    system: str = ""


def _check_template(tokenizer: Any, messages: Sequence[dict[str, str]]) -> None:
    """Render a conversation with limited time and memory, because the template is an untrusted program."""

    def render() -> None:
        try:
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except (MemoryError, OverflowError):
            raise
        except Exception:  # a template can raise any exception; the caller reports it
            return

    try:
        run_limited(render)
    except LimitError as error:
        raise PromptError(f"the chat template of {tokenizer.name_or_path} cannot be used: {error}") from None


def prompt_tokens(
    tokenizer: Any, prompt: str, system: str = "", history: Sequence[dict[str, str]] = ()
) -> torch.Tensor:
    """Return a prompt's tokens, ``(1, tokens)``. The prompt is a chat turn, or plain text if there is no chat template.

    Args:
        system: System message, or "" for no system message.
        history: Earlier messages of the conversation.

    Raises:
        PromptError: The prompt has no tokens, the template rejects it, or there is a system message but no template.
    """
    if not tokenizer.chat_template:
        if system:
            raise PromptError("this model has no chat template, so it supports no system message")
        tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
        if tokens.shape[1] == 0:
            raise PromptError("this prompt has no tokens: write the beginning of a text")
    else:
        system_messages = [{"role": "system", "content": system}] if system else []
        messages = [*system_messages, *history, {"role": "user", "content": prompt}]
        if not history:
            _check_template(tokenizer, messages)
        try:
            tokens = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
        except Exception as error:  # a template can raise any exception
            raise PromptError(f"the chat template rejects it: {' '.join(str(error).split())}") from error
    return tokens  # type: ignore[no-any-return]


def generation_options(settings: GenerationSettings, tokenizer: Any, available_positions: int) -> dict[str, Any]:
    """Return the arguments of transformers' ``generate``, except the prompt.

    Args:
        available_positions: Number of positions that the model has left for new tokens.
    """
    options: dict[str, Any] = {"max_new_tokens": min(available_positions, settings.max_new_tokens)}
    if settings.temperature == 0:
        options |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    elif settings.temperature is not None:
        options |= {"do_sample": True, "temperature": settings.temperature}
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        options["pad_token_id"] = tokenizer.eos_token_id
    return options
