"""A scaled-down copy of a model: the same family and the same kinds of layers, narrow and few, with random weights."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.models.small import HEAD_DIM, HEADS, VOCABULARY, small_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NUM_DOCUMENTS, _SHORTEST, _LONGEST = 80, 12, 100  # words


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A model folder with weights, config and a tokenizer of its own, and text to train it on.

    Attributes:
        folder: of the model, and of its tokenizer.
        tokenizer: of the model, and of its tokenizer.
        text: JSON lines.
        family: ``model_type``.
        num_layers: of the copy.
        num_parameters: of the copy.
    """

    folder: Path
    tokenizer: Path
    text: Path
    family: str
    num_layers: int
    num_parameters: int


def default_config() -> PretrainedConfig:
    """Return the model that is used where no config names one: a small Llama."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars while it writes and reads small models."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def write_small_model(config: PretrainedConfig, folder: Path, *, attn_implementation: str, seed: int) -> SmallModel:
    """Write a scaled-down copy of ``config`` with random weights, a tokenizer, and text.

    Raises:
        UnsupportedModelError: no small copy of it can be built and run.
    """
    model = small_model(config, attn_implementation, seed)
    model.save_pretrained(folder / "model")
    tokenizer = _write_tokenizer(folder / "tokenizer")
    text = _write_text(folder / "text.jsonl", seed)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_layers = int(model.config.num_hidden_layers)
    return SmallModel(folder / "model", tokenizer, text, str(config.model_type), num_layers, num_parameters)


def kept_patterns(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the globs that still name a parameter: the small copy has fewer layers."""
    return [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)]


def _write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer whose words are the numbers of its tokens; in a folder of its own, which no family claims."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    words = {"<unk>": 0, "<end>": 1, **{f"w{number}": number for number in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def _write_text(path: Path, seed: int) -> Path:
    """Write documents of many lengths, so that rows are packed, cut and padded."""
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(_NUM_DOCUMENTS):
            words = (f"w{draw.randrange(2, VOCABULARY)}" for _ in range(draw.randint(_SHORTEST, _LONGEST)))
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    return path
