"""Models of any size that benches create: Llamas with random weights, and other architectures without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bench.common import QUICKSTART


def llama_config(hidden: int, layers: int, vocabulary: int, **more: Any) -> Any:
    """Return the config of a Llama with 64-dimensional heads and untied embeddings. ``hidden`` is a multiple of 64."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        **more,
    )


def write_llama(folder: Path, *, hidden: int, layers: int, vocabulary: int = 8192) -> Path:
    """Write a Llama model folder with random fp32 weights and the quickstart's tokenizer, and return the folder.

    Args:
        hidden: Hidden size, a multiple of 64.
        layers: Number of decoder layers.
        vocabulary: Size of the vocabulary, at least the tokenizer's 1,024.
    """
    from transformers import AutoTokenizer, LlamaForCausalLM

    torch.manual_seed(0)
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = llama_config(hidden, layers, vocabulary, max_position_embeddings=2048, **special)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(QUICKSTART / "model").save_pretrained(folder)
    return folder


def write_shape(folder: Path, model_type: str, **values: Any) -> Path:
    """Write a model folder of any architecture with the quickstart's tokenizer and no weights, and return the folder.

    Configs of runs that use the folder must set ``model.train_from_scratch = true``.

    Args:
        model_type: Architecture, as in ``config.json``.
        values: Other values of ``config.json``. The vocabulary must have at least 1,024 tokens.
    """
    from transformers import AutoConfig, AutoTokenizer

    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    AutoConfig.for_model(model_type, **special, **values).save_pretrained(folder)
    AutoTokenizer.from_pretrained(QUICKSTART / "model").save_pretrained(folder)
    return folder
