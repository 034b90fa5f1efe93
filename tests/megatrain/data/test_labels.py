"""The first token of each word has its tag, the others none: compared with tags by hand."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.data.labels import Labelled, Labels, Tagged, encode_labelled

LABELS = Labels(("O", "NAME", "PLACE"), "token")
#: Words, their tags, and a tag (or none) for each token that a word is made of.
WORDS = [("Call", "O"), ("Ishmael", "NAME"), ("in", "O"), ("Nantucket", "PLACE"), ("caf\u00e9", "PLACE"), ("x", None)]


@pytest.mark.parametrize("count", range(1, len(WORDS) + 1))
def test_the_first_token_of_each_word_has_its_tag(tokenizer: Any, count: int) -> None:
    """Tokens of bytes hold the blank before a word, so that they begin where the word before ends."""
    words, tags = zip(*WORDS[:count], strict=True)
    (found,) = encode_labelled([Tagged(words, tags, "row 1")], tokenizer, LABELS, 512)
    assert isinstance(found, Labelled)
    tokens, expected = [], []
    for number, (word, tag) in enumerate(WORDS[:count]):
        of_word = tokenizer(word if number == 0 else f" {word}")["input_ids"]
        tokens += of_word
        expected += [-100 if tag is None else LABELS.names.index(tag), *([-100] * (len(of_word) - 1))]
    assert len(tokens) > count or count == 1
    assert found.tokens == tokens
    assert found.labels == expected


def test_words_of_several_tokens_that_begin_with_a_blank_alone(tokenizer: Any) -> None:
    """A blank that is a token of its own belongs to the word after it."""
    assert tokenizer.convert_ids_to_tokens(tokenizer(" \u00e9")["input_ids"])[0] == "\u0120"
    (found,) = encode_labelled([Tagged(("in", "\u00e9"), ("PLACE", "NAME"), "row 1")], tokenizer, LABELS, 512)
    assert isinstance(found, Labelled)
    assert [label for label in found.labels if label != -100] == [2, 1]
