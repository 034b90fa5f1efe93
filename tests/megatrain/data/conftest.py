"""Two small real tokenizers: a byte-level BPE of 1,024 tokens, and one that puts a space before each text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.data.encoding import load_tokenizer

TOKENIZER = Path(__file__).parents[3] / "examples/quickstart/model"
TEXT = Path(__file__).parents[3] / "examples/quickstart/loomings.txt"
SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|return|>",
)  # fmt: skip


@pytest.fixture
def tokenizer() -> Any:
    made = load_tokenizer(str(TOKENIZER))
    made.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return made


@pytest.fixture(scope="session")
def word_tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tokenizer with Llama 2's rules, and return its file.

    It puts a space before each text, and uses byte tokens for characters that have no token.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    first = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False, special_tokens=first)
    made.train_from_iterator([line.replace("\n", "") for line in TEXT.read_text().splitlines()[:400]], trainer)
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    rules = json.loads(made.to_str())
    rules["added_tokens"] = []  # byte tokens are ordinary entries of the vocabulary, not special tokens
    path.write_text(json.dumps(rules))
    return path
