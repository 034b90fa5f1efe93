"""packing = "concat": texts are joined with end tokens between them, and cut into full rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from megatrain.config import ConfigError, load_config
from megatrain.data.chat import RowEncoder
from megatrain.data.dataset import load_dataset
from megatrain.data.formats import Document
from megatrain.data.packing import BatchShape
from megatrain.data.token_dataset import TokenDataset
from megatrain.training.resolve import resolve_data
from oracles.rows_in_memory import encode_rows, loader_of

LENGTH = 16
TEXTS = [" ".join(["Call me Ishmael."] * count) for count in (1, 3, 2, 9, 1, 1, 4)]


def encode(tokenizer: Any, *texts: str, max_length: int = LENGTH) -> TokenDataset:
    rows = [Document(text, f"{number}.txt") for number, text in enumerate(texts)]
    return encode_rows(rows, RowEncoder(tokenizer), max_length=max_length, join_texts=True)


def rows_of(dataset: TokenDataset) -> list[list[int]]:
    return [dataset.tokens[a:b].tolist() for a, b in zip(dataset.starts, dataset.starts[1:], strict=False)]


def trained_of(dataset: TokenDataset) -> list[list[bool]]:
    return [dataset.trained[a:b].tolist() for a, b in zip(dataset.starts, dataset.starts[1:], strict=False)]


def test_texts_are_joined_and_cut_to_full_rows(tokenizer: Any) -> None:
    dataset = encode(tokenizer, *TEXTS)
    joined = [token for text in TEXTS for token in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
    rows = rows_of(dataset)
    assert [token for row in rows for token in row] == joined
    assert all(len(row) == LENGTH for row in rows[:-1]) and len(rows[-1]) == len(joined) % LENGTH > 1
    assert all(trained == [False] + [True] * (len(trained) - 1) for trained in trained_of(dataset))
    assert dataset.begins_row.all()
    (counts,) = dataset.report.sources
    assert (counts.num_rows, counts.num_rows_lost, counts.num_tokens_lost) == (len(TEXTS), 0, 0)


def test_packed_rows_have_no_document_borders(tokenizer: Any) -> None:
    dataset = encode(tokenizer, *TEXTS)
    loader = loader_of(dataset, BatchShape(1, 1, LENGTH, packing=True), data_seed=1)
    seen = []
    for _ in range(loader.steps_per_epoch):
        (batch,) = next(loader).micro_batches
        num_real = int((batch["labels"] != -100).sum()) + 1
        assert batch["position_ids"][0, :num_real].tolist() == list(range(num_real))
        seen.append(batch["input_ids"][0, :num_real].tolist())
    assert sorted(seen) == sorted(rows_of(dataset))


def test_each_row_begins_with_bos_if_texts_do(tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    for max_length in range(3, 24):  # a border falls on every position of a text, including its start
        dataset = encode(tokenizer, *TEXTS, max_length=max_length)
        rows = rows_of(dataset)
        assert all(row[0] == bos and row[1:2] != [bos] for row in rows), max_length
        assert all(len(row) == max_length for row in rows[:-1])
        texts = [token for row in rows for token in row if token != bos]
        joined = [t for text in TEXTS for t in (*tokenizer(text, add_special_tokens=False)["input_ids"], eos)]
        num_lost = dataset.report.sources[0].num_tokens_lost  # a last row of one token has nothing to train
        assert 0 <= num_lost <= 1 and texts == joined[: len(joined) - num_lost]
        for row, trained in zip(rows, trained_of(dataset), strict=True):
            assert not trained[0]
            assert all(trained[2:]), row  # only a token after a <bos> inside a text is untrained


def test_config_with_concat_packing(tmp_path: Path, tokenizer: Any) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in (*TEXTS, "")))
    path = tmp_path / "run.toml"
    sources = '[[data.train]]\npath = "a.jsonl"\n[[data.train]]\npath = "b.jsonl"\n'
    path.write_text(
        'task = "pretrain"\noutput_dir = "out"\n[model]\nmodel_name_or_path = "m"\n[data]\npacking = "concat"\n'
        f'max_length = {LENGTH}\ncache_dir = "cache"\n{sources}'
    )
    dataset = load_dataset(resolve_data(load_config(path).config), tokenizer)
    first = len(encode(tokenizer, *TEXTS))
    assert dataset.source_starts == (0, first, 2 * first)  # no row has texts of two sources
    assert [counts.num_rows_lost for counts in dataset.report.sources] == [1, 1]
    apart = load_dataset(resolve_data(load_config(path, overrides=["packing=true"]).config), tokenizer)
    assert (len(apart), len(dataset)) == (32, 26)  # a separate cache entry
    with pytest.raises(ConfigError, match=r'"concat" joins plain text.*Write packing = true'):
        load_config(path, overrides=["task=sft"])
