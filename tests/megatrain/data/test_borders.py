"""Prompts and completions are tokenized verbatim, wherever the border between them is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from megatrain.data.chat import RowEncoder, TokenizedRow
from megatrain.data.encoding import load_tokenizer
from megatrain.data.formats import Document, PromptCompletion
from megatrain.data.rows_report import RowError
from oracles.rows_in_memory import encode_row
from tests.megatrain.data.conftest import TOKENIZER


@pytest.fixture
def words(word_tokenizer_file: Path) -> Any:
    """Return a tokenizer with the rules and special tokens of Llama 2, which begins every text with ``<s>``."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    backend = Tokenizer.from_file(str(word_tokenizer_file))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.bos_token_id)]
    )
    return made


def trained_text(tokenizer: Any, encoded: TokenizedRow) -> str:
    shown = [token for token, is_trained in zip(encoded.tokens, encoded.trained, strict=True) if is_trained]
    return "".join(tokenizer.convert_ids_to_tokens(shown)).replace("\u2581", " ")


#: Prompt, completion, and the text of the trained tokens, that is, of all tokens with a character of the completion.
BORDERS = [
    ("Answer: ", "the", " the</s>"),
    ("Answer:", " yes", " yes</s>"),
    ("Answer:\n", "yes", "yes</s>"),
    ("Answer:  ", "the", " the</s>"),
    ("Call me Ishm", "ael there", None),
    ("", "yes", " yes</s>"),
    (" ", "yes", None),
    ("Answer: ", " yes", None),
    ("caf\u00e9 \U0001f600", "\U0001f600!", None),
]


@pytest.mark.parametrize(("prompt", "completion", "trained"), BORDERS)
def test_text_is_verbatim_with_a_dummy_space(words: Any, prompt: str, completion: str, trained: str | None) -> None:
    encoded = encode_row(RowEncoder(words), PromptCompletion(prompt, completion, "x"))
    whole = words(prompt + completion, return_offsets_mapping=True)
    assert encoded.tokens == [*whole["input_ids"], words.eos_token_id]
    assert words.backend_tokenizer.decode(encoded.tokens[1:-1]) == prompt + completion
    expected = [end > len(prompt) for _, end in whole["offset_mapping"]]
    assert encoded.trained == [*expected, True]
    assert trained is None or trained_text(words, encoded) == trained


@pytest.mark.parametrize(("prompt", "completion"), [(prompt, completion) for prompt, completion, _ in BORDERS])
@pytest.mark.parametrize("trims", [False, True])
def test_text_is_verbatim_with_bytes(prompt: str, completion: str, trims: bool) -> None:
    """The offsets of some tokenizers leave out a token's white space."""
    from tokenizers import Tokenizer
    from tokenizers.processors import ByteLevel

    backend = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    backend.post_processor = ByteLevel(add_prefix_space=False, trim_offsets=trims)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    encoded = encode_row(RowEncoder(tokenizer, train_on="all"), PromptCompletion(prompt, completion, "x"))
    assert tokenizer.decode(encoded.tokens) == f"{prompt}{completion}<|endoftext|>"
    encoded = encode_row(RowEncoder(tokenizer), PromptCompletion(prompt, completion, "x"))
    # The expected mask is computed by hand: this tokenizer keeps every byte, so the tokens' sizes give their places in
    # the text.
    sizes = [len(bytes_of(tokenizer, token)) for token in encoded.tokens[:-1]]
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    expected = [end > len(prompt.encode()) for end in ends]
    assert encoded.trained == [False, *expected[1:], True]


def bytes_of(tokenizer: Any, token: int) -> str:
    """Return a token as the byte-level alphabet writes it: one character per byte."""
    return str(tokenizer.convert_ids_to_tokens([token])[0])


def test_white_space_at_the_end_of_a_token_before_the_completion_is_trained() -> None:
    """The token of the colon before the completion contains the newline, but its offsets omit the newline."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocab = {token: number for number, token in enumerate(["a", ":", "\u010a", ":\u010a", "b", "<end>"])}
    backend = Tokenizer(models.BPE(vocab, [(":", "\u010a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    encoded = encode_row(RowEncoder(tokenizer), PromptCompletion("a:", "\nb", "x"))
    assert tokenizer.convert_ids_to_tokens(encoded.tokens) == ["a", ":\u010a", "b", "<end>"]
    assert encoded.trained == [False, True, True, True]


def test_prompt_may_end_with_the_end_token(words: Any) -> None:
    encoded = encode_row(RowEncoder(words), PromptCompletion("hi</s>", "there", "x"))
    assert encoded.tokens == [*words("hi</s>there")["input_ids"], words.eos_token_id]
    assert encoded.tokens.count(words.eos_token_id) == 2
    assert trained_text(words, encoded) == " there</s>"
    assert encoded.special_tokens == ("</s>",)


def test_special_tokens_in_a_row_are_trained_and_named(words: Any) -> None:
    encoded = encode_row(RowEncoder(words), PromptCompletion("q ", "The tag <s> is html, <s> too", "x"))
    assert encoded.tokens[:-1] == words("q The tag <s> is html, <s> too")["input_ids"]
    assert encoded.special_tokens == ("<s>",)
    assert encode_row(RowEncoder(words), PromptCompletion("q ", "no tag", "x")).special_tokens == ()
    assert encode_row(RowEncoder(words), Document("a</s>b", "x")).special_tokens == ("</s>",)


def test_text_that_the_tokenizer_changes_is_refused(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((TOKENIZER / name).read_bytes())
    rules = json.loads((tmp_path / "tokenizer.json").read_text())
    rules["normalizer"] = {"type": "Replace", "pattern": {"String": "whale"}, "content": "fish"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    encoder = RowEncoder(load_tokenizer(str(tmp_path)))
    with pytest.raises(RowError, match="decode to ' a fish', but the row has ' a whale'"):
        encode_row(encoder, PromptCompletion("It is", " a whale", "x"))
    assert sum(encode_row(encoder, PromptCompletion("A whale", " is it", "x")).trained) == 3
