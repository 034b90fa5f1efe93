"""A look at a trained model: answers of a Hugging Face folder, a token at a time, by plain transformers.

For models that fit into memory whole. Nothing here is fast; servers such as vLLM are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.base.limited import LimitError, run_limited
from megatrain.base.names import CHECKPOINTS_NAME, trained_model
from megatrain.models.folder import ModelFolder, TensorFile
from tiered.units import format_size

if TYPE_CHECKING:
    import torch

__all__ = [
    "Chat",
    "ChatError",
    "ChatSettings",
    "TooLargeError",
    "generation_options",
    "is_adapter",
    "open_chat",
    "prompt_tokens",
]

_ADAPTER_CONFIG, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_INSTEAD = "megatrain-tier generate streams it; vLLM and llama.cpp serve large models"
_SHARE = 0.9  # of the free memory that weights may take: activations and the cache of keys come on top


class ChatError(Exception):
    """There is no model to talk to, or a conversation cannot go on; the text says why and what to do."""


class TooLargeError(Exception):
    """A model does not fit into memory as a whole."""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How answers are made.

    Attributes:
        max_new_tokens: most tokens of an answer.
        temperature: 0: the likeliest token each time; None: as the model's generation_config.json says.
        seed: What sampling draws from; None: another one each time.
        system: the message in front of each conversation, "" for none.
    """

    max_new_tokens: int = 512
    temperature: float | None = None
    seed: int | None = None
    system: str = ""


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter of peft."""
    return (folder / _ADAPTER_CONFIG).is_file()


def open_chat(folder: Path, places: Sequence[tuple[torch.device, int]], settings: ChatSettings) -> Chat:
    """Load the model of an exported folder, whole.

    Args:
        folder: Where a model is, an adapter, whose base model is then loaded too, or of the run that wrote one of them.
        places: devices with the bytes of memory that are free there; the first that the weights fit is taken.
        settings: How answers are made.

    Raises:
        ChatError: the folder is of something else.
        ModelFolderError: files of the model are missing or damaged.
        TooLargeError: it does not fit.
    """
    folder = trained_model(folder)
    nbytes = _check(folder)
    device = next((device for device, free_bytes in places if nbytes <= _SHARE * free_bytes), None)
    if device is None:
        free = ", ".join(f"{format_size(free_bytes)} ({device.type})" for device, free_bytes in places)
        raise TooLargeError(
            f"{folder}: the weights take {format_size(nbytes)}, and there are {free} free. A chat loads them whole; "
            f"{_INSTEAD}"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    from megatrain.models.small import no_progress_bars

    if settings.seed is not None:
        set_seed(settings.seed)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        with no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(str(folder), dtype="auto", trust_remote_code=False)
        model.to(device).eval()
    except Exception as error:  # transformers raises many kinds; each one means that this folder cannot be opened
        raise ChatError(f"{folder}: transformers cannot open it: {' '.join(str(error).split())}") from error
    return Chat(model, tokenizer, settings)


def _check(folder: Path) -> int:
    """Return the bytes of the weights.

    Raises:
        ChatError: the folder is of something else.
    """
    if folder.is_file():
        what = "a config" if folder.suffix == ".toml" else "a file"
        raise ChatError(f"{folder}: this is {what}, and a chat needs the folder that a run or an export wrote")
    if not folder.is_dir():
        raise ChatError(f"{folder}: there is no such folder. Give the one that a run or an export wrote")
    if is_adapter(folder):
        try:
            base = json.loads((folder / _ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
        except (OSError, ValueError, KeyError, TypeError):
            raise ChatError(f"{folder / _ADAPTER_CONFIG}: names no base model. Export the run again") from None
        records = list(TensorFile(folder / _ADAPTER_WEIGHTS).records.values())
        if Path(base).is_dir():
            records += ModelFolder(base).records.values()
        elif Path(base).is_absolute():
            raise ChatError(
                f"{folder}: its base model is gone: {base}. Bring it back, or export with --merge while it is there"
            )
        return sum(record.nbytes for record in records)
    if not (folder / "config.json").is_file():
        if (folder / CHECKPOINTS_NAME).is_dir():
            raise ChatError(
                f"{folder}: this is the folder of a run that has no model yet. Write one with megatrain-tier export "
                f"{folder} OUT, then megatrain-tier chat OUT"
            )
        raise ChatError(
            f"{folder}: there is no model in it (no config.json). Give the folder that a run or an export wrote"
        )
    return sum(record.nbytes for record in ModelFolder(folder).records.values())


@dataclass
class Chat:
    """A conversation with a model. Without a chat template, each prompt is a text that the model continues.

    Args:
        model: A model of transformers, on its device.
        tokenizer: its tokenizer.
        settings: How answers are made.
    """

    model: Any
    tokenizer: Any
    settings: ChatSettings
    _messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def has_template(self) -> bool:
        """Whether prompts are turns of a chat."""
        return bool(self.tokenizer.chat_template)

    @property
    def description(self) -> str:
        """Class, size, dtype and device, in a few words."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        size = f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
        dtype = str(self.model.dtype).removeprefix("torch.")
        return f"{type(self.model).__name__}, {size} parameters, {dtype}, {self.model.device.type}"

    def forget(self) -> None:
        """Begin another conversation."""
        self._messages.clear()

    def answer(self, prompt: str, on_text: Callable[[str], None]) -> str:
        """Return the answer to a prompt; what was said before is known.

        Args:
            prompt: what the user says, or the beginning of a text.
            on_text: told each piece of the answer as soon as its characters are whole.

        Raises:
            ChatError: the conversation is longer than the model's positions, or the template refuses it.
            KeyboardInterrupt: the answer was interrupted; what there is of it belongs to the conversation.
        """
        tokens = self._tokens(prompt)
        config = self.model.config.get_text_config()
        most = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
        room = self.settings.max_new_tokens if most is None else most - tokens.shape[1]
        if room < 1:
            raise ChatError(f"the conversation has {tokens.shape[1]:,} tokens, and the model {most:,} positions")
        options = generation_options(self.settings, self.tokenizer, room)
        streamer = _Streamer(self.tokenizer, on_text)
        try:
            mask = tokens.new_ones(tokens.shape)
            self.model.generate(input_ids=tokens, attention_mask=mask, streamer=streamer, **options)
        finally:
            self._messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": streamer.text}]
        return streamer.text

    def _tokens(self, prompt: str) -> torch.Tensor:
        """Return the tokens of a conversation with a new prompt, of shape [1, tokens]."""
        tokens = prompt_tokens(self.tokenizer, prompt, self.settings.system, self._messages)
        return tokens.to(self.model.device)


def _check_template(tokenizer: Any, messages: Sequence[dict[str, str]]) -> None:
    """Render a conversation within limits: the template is a program, and may be of a stranger."""

    def render() -> None:
        try:
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except (MemoryError, OverflowError):
            raise
        except Exception:  # a template raises what it likes; the caller reports that
            return

    try:
        run_limited(render)
    except LimitError as error:
        raise ChatError(f"the chat template of {tokenizer.name_or_path} cannot be used: {error}") from None


def prompt_tokens(
    tokenizer: Any, prompt: str, system: str = "", earlier: Sequence[dict[str, str]] = ()
) -> torch.Tensor:
    """Return the tokens of a prompt, of shape [1, tokens]: a turn of a chat, or without a template a text to continue.

    Args:
        tokenizer: The model's tokenizer.
        prompt: what the user says.
        system: the message in front, "" for none.
        earlier: messages of the conversation.

    Raises:
        ChatError: there is no token, or the template refuses it.
    """
    if not tokenizer.chat_template:
        tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
        if tokens.shape[1] == 0:
            raise ChatError("there is no token in this prompt: write the beginning of a text")
    else:
        first = [{"role": "system", "content": system}] if system else []
        messages = [*first, *earlier, {"role": "user", "content": prompt}]
        if not earlier:
            _check_template(tokenizer, messages)
        try:
            tokens = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
        except Exception as error:  # whatever a template raises
            raise ChatError(f"the chat template refuses it: {' '.join(str(error).split())}") from error
    return tokens  # type: ignore[no-any-return]


def generation_options(settings: ChatSettings, tokenizer: Any, room: int) -> dict[str, Any]:
    """Return what transformers' ``generate`` is told beside the prompt.

    Args:
        settings: How answers are made.
        tokenizer: The model's tokenizer.
        room: most tokens that there are positions for.
    """
    options: dict[str, Any] = {"max_new_tokens": min(room, settings.max_new_tokens)}
    if settings.temperature == 0:
        options |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    elif settings.temperature is not None:
        options |= {"do_sample": True, "temperature": settings.temperature}
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        options["pad_token_id"] = tokenizer.eos_token_id
    return options


class _Streamer:
    """Passes on text as tokens come; the interface is that of transformers' streamers."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        self._tokenizer, self._on_text = tokenizer, on_text
        self._tokens: list[int] = []
        self._is_prompt = True
        self.text = ""

    def put(self, tokens: torch.Tensor) -> None:
        """Take the prompt first, then one token at a time."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self._tokens += tokens.view(-1).tolist()
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half a character: the next token completes it
            self._say(text)

    def end(self) -> None:
        """Pass on what is left."""
        self._say(self._tokenizer.decode(self._tokens, skip_special_tokens=True))

    def _say(self, text: str) -> None:
        if len(text) > len(self.text):
            piece, self.text = text[len(self.text) :], text
            self._on_text(piece)
