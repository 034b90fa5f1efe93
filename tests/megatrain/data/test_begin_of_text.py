"""If the tokenizer starts a text with <bos>, each document cut from a longer text also starts with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from megatrain.config import load_config
from megatrain.data.chat import RowEncoder
from megatrain.data.formats import Document, Tokenized
from megatrain.data.packing import BatchShape
from megatrain.data.token_dataset import TokenDataset
from oracles.previews import preview_of
from oracles.rows_in_memory import encode_rows, loader_of

LENGTH = 16
TEXT = "Call me Ishmael. Some years ago, never mind how long precisely, having little money in my purse. " * 4


@pytest.fixture
def with_bos(tokenizer: Any) -> Any:
    """Return a tokenizer that puts <s> before every text, as the tokenizers of Llama and Gemma do."""
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    template = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


def documents(dataset: TokenDataset) -> list[tuple[list[int], list[bool]]]:
    parts = [slice(a, b) for a, b in zip(dataset.starts, dataset.starts[1:], strict=False)]
    return [(dataset.tokens[part].tolist(), dataset.trained[part].tolist()) for part in parts]


def encode(tokenizer: Any, *rows: Any) -> TokenDataset:
    return encode_rows(rows, RowEncoder(tokenizer), max_length=LENGTH)


def test_every_piece_of_a_text_begins_with_bos(with_bos: Any) -> None:
    dataset = encode(with_bos, Document(TEXT, "a.txt"))
    pieces = documents(dataset)
    bos, eos = with_bos.bos_token_id, with_bos.eos_token_id
    num_tokens = len(with_bos(TEXT, add_special_tokens=False)["input_ids"]) + 1  # plus the end token
    assert len(pieces) == -(-num_tokens // (LENGTH - 1)) > 3
    assert all(tokens[0] == bos and bos not in tokens[1:] for tokens, _ in pieces)
    assert {len(tokens) for tokens, _ in pieces[:-1]} == {LENGTH}
    assert len(pieces[-1][0]) == 1 + num_tokens - (len(pieces) - 1) * (LENGTH - 1)
    assert [token for tokens, _ in pieces for token in tokens[1:]] == [
        *with_bos(TEXT, add_special_tokens=False)["input_ids"], eos,
    ]  # fmt: skip
    first, *later = (trained for _, trained in pieces)
    assert first == [False] + [True] * (LENGTH - 1)  # <bos> predicts how a text begins
    assert all(trained == [False, False] + [True] * (len(trained) - 2) for trained in later)  # but not its middle
    assert dataset.report.num_tokens == sum(len(tokens) for tokens, _ in pieces)
    assert dataset.report.num_trained_tokens == sum(sum(trained) for _, trained in pieces)
    assert dataset.begins_row.tolist() == [True] + [False] * (len(pieces) - 1)


def test_text_read_in_parts_is_one_document(with_bos: Any) -> None:
    half = len(TEXT) // 2
    parts = [Document(TEXT[:half], "a.txt", is_end=False), Document(TEXT[half:], "a.txt", is_start=False)]
    pieces = documents(encode(with_bos, *parts, Document("Loomings.", "b.txt")))
    bos = with_bos.bos_token_id
    assert all(tokens[0] == bos and bos not in tokens[1:] for tokens, _ in pieces)
    assert all(len(tokens) == LENGTH for tokens, _ in pieces[:-2])
    assert with_bos.decode(pieces[-1][0]) == "<s>Loomings.<|endoftext|>"


def test_pieces_of_token_rows_begin_with_bos_if_the_row_does(with_bos: Any) -> None:
    bos = with_bos.bos_token_id
    ids = tuple(range(40, 80))
    begun = documents(encode(with_bos, Tokenized((bos, *ids), None, "x")))
    assert [tokens[0] for tokens, _ in begun] == [bos] * 3
    assert [token for tokens, _ in begun for token in tokens[1:]] == list(ids)
    without = documents(encode(with_bos, Tokenized(ids, None, "x")))
    assert [token for tokens, _ in without for token in tokens] == list(ids)


def test_text_is_only_split_without_a_bos_tokenizer(tokenizer: Any) -> None:
    pieces = documents(encode(tokenizer, Document(TEXT, "a.txt")))
    assert RowEncoder(tokenizer).start_tokens == ()
    assert [token for tokens, _ in pieces for token in tokens][:-1] == tokenizer(TEXT)["input_ids"]
    assert all(trained == [False] + [True] * (len(trained) - 1) for _, trained in pieces)


@pytest.mark.parametrize("max_length", [1024, 3, 2])
def test_pieces_of_any_length(max_length: int, with_bos: Any) -> None:
    dataset = encode_rows([Document(TEXT, "a.txt")], RowEncoder(with_bos), max_length=max_length)
    num_tokens = len(with_bos(TEXT, add_special_tokens=False)["input_ids"]) + 2  # plus the start and end tokens
    assert int(dataset.lengths().max()) == min(max_length, num_tokens)
    begins = [tokens[0] == with_bos.bos_token_id for tokens, _ in documents(dataset)]
    assert all(begins) or max_length == 2  # with a length of 2, only <bos> and one untrained token fit


def test_packed_documents_begin_at_position_0(with_bos: Any) -> None:
    dataset = encode(with_bos, *(Document(TEXT[: 20 + 30 * n], "a.txt") for n in range(9)))
    loader = loader_of(dataset, BatchShape(4, 1, LENGTH, packing=True), data_seed=1)
    batch = next(loader).micro_batches[0]
    is_bos = batch["input_ids"] == with_bos.bos_token_id
    assert bool((batch["position_ids"][is_bos] == 0).all())
    assert bool((batch["labels"][is_bos] == -100).all())


def test_preview_shows_bos(with_bos: Any, tmp_path: Path) -> None:
    with_bos.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": TEXT}))
    (tmp_path / "run.toml").write_text(
        f'task = "pretrain"\noutput_dir = "out"\n[model]\nmodel_name_or_path = "model"\n[data]\nmax_length = {LENGTH}\n'
        '[[data.train]]\npath = "rows.jsonl"\n'
    )
    config = load_config(tmp_path / "run.toml").config
    (preview,) = preview_of(config, 1)
    pieces = documents(encode(with_bos, Document(TEXT, "a.txt")))
    text = "".join(segment.text for segment in preview.segments)
    assert text.count("<s>") == preview.num_pieces == len(pieces)
    assert (preview.num_tokens, preview.num_trained) == (
        sum(len(tokens) for tokens, _ in pieces), sum(sum(trained) for _, trained in pieces),
    )  # fmt: skip
