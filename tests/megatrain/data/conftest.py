"""A real, small tokenizer (BPE, 1024 tokens) with the special tokens of the templates under test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.data.tokenizer import load_tokenizer

TOKENIZER = Path(__file__).parents[3] / "examples/quickstart/model"
SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|return|>",
)  # fmt: skip


@pytest.fixture
def tokenizer() -> Any:
    made = load_tokenizer(str(TOKENIZER))
    made.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return made
