"""Batches have the right shapes, masks and counts, and the same order for the same seed and position."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.base.batch_keys import IGNORED_LABEL
from megatrain.data.chat import RowEncoder
from megatrain.data.formats import Document, PromptCompletion
from megatrain.data.loader import BatchLoader, StepBatch
from megatrain.data.packing import BatchShape
from megatrain.data.row_order import LoaderPosition
from megatrain.data.rows_report import DataError, DataReport
from megatrain.data.token_dataset import TokenDataset
from oracles.rows_in_memory import encode_rows, loader_of

PAD = 0


def dataset_of(lengths: list[int]) -> TokenDataset:
    """Return documents whose tokens count up from 1 through the dataset.

    Even tokens are trained on, except each document's first.
    """
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(1, starts[-1] + 1, dtype=np.int32)
    trained = tokens % 2 == 0
    trained[starts[:-1]] = False
    report = DataReport(len(lengths), len(lengths), 0, 0, 0, len(tokens), int(trained.sum()))
    return TokenDataset(tokens, trained, starts, report)


def make_loader(
    dataset: TokenDataset, *, packing: bool = True, seed: int = 3, rows: int = 2, count: int = 3
) -> BatchLoader:
    return loader_of(dataset, BatchShape(rows, count, 16, packing), data_seed=seed, pad_token_id=PAD)


def flat(batch: StepBatch) -> list[Any]:
    return [(name, values.tolist()) for micro in batch.micro_batches for name, values in sorted(micro.items())]


def epoch_of(loader: BatchLoader) -> list[StepBatch]:
    return list(itertools.islice(loader, loader.steps_per_epoch))


LENGTHS = st.lists(st.integers(2, 16), min_size=1, max_size=60)


@settings(max_examples=50, deadline=None)
@given(LENGTHS, st.booleans(), st.integers(0, 5))
def test_an_epoch_holds_every_token_once(lengths: list[int], packing: bool, seed: int) -> None:
    dataset = dataset_of(lengths)
    batches = epoch_of(make_loader(dataset, packing=packing, seed=seed))
    ids = torch.cat([micro["input_ids"].flatten() for batch in batches for micro in batch.micro_batches])
    labels = torch.cat([micro["labels"].flatten() for batch in batches for micro in batch.micro_batches])
    assert sorted(ids[ids != PAD].tolist()) == dataset.tokens.tolist()
    assert sorted(labels[labels != IGNORED_LABEL].tolist()) == dataset.tokens[dataset.trained].tolist()
    assert torch.equal(labels[labels != IGNORED_LABEL], ids[labels != IGNORED_LABEL])
    assert sum(batch.num_real_tokens for batch in batches) == sum(lengths)
    assert sum(batch.num_trained_tokens for batch in batches) == int(dataset.trained.sum())


@settings(max_examples=50, deadline=None)
@given(LENGTHS)
def test_packed_rows_restart_positions_and_mask_first_tokens(lengths: list[int]) -> None:
    dataset = dataset_of(lengths)
    first_tokens = set(dataset.tokens[dataset.starts[:-1]].tolist())
    for batch in epoch_of(make_loader(dataset)):
        for micro in batch.micro_batches:
            assert set(micro) == {"input_ids", "labels", "position_ids"}
            assert all(values.shape == (2, 16) and values.dtype == torch.int64 for values in micro.values())
            for ids, labels, positions in zip(
                *(micro[n].tolist() for n in ("input_ids", "labels", "position_ids")), strict=True
            ):
                for at, token in enumerate(ids):
                    starts = token in first_tokens or (token == PAD and (at == 0 or ids[at - 1] != PAD))
                    assert positions[at] == (0 if starts else positions[at - 1] + 1)
                    assert labels[at] == IGNORED_LABEL or not starts


def test_padded_rows() -> None:
    batch = next(make_loader(dataset_of([3, 5, 9, 4, 2, 7]), packing=False))
    for micro in batch.micro_batches:
        assert set(micro) == {"input_ids", "labels", "attention_mask"}
        lengths = micro["attention_mask"].sum(1)
        assert micro["input_ids"].shape == (2, int(lengths.max()))
        assert torch.equal(micro["attention_mask"], (micro["input_ids"] != PAD).long())
        assert (micro["labels"][micro["attention_mask"] == 0] == IGNORED_LABEL).all()


@pytest.mark.parametrize("packing", [True, False])
def test_last_step_is_padded_with_untrained_rows(packing: bool) -> None:
    loader = make_loader(dataset_of([16] * 8), packing=packing)
    first, last = epoch_of(loader)
    assert loader.steps_per_epoch == 2
    assert first.num_real_tokens == 6 * 16
    assert last.num_real_tokens == 2 * 16
    for micro in last.micro_batches[:2]:  # rows are dealt in turn, so the two rows go to two micro-batches
        assert (micro["labels"] != IGNORED_LABEL).any(dim=1).tolist() == [True, False]
    empty = last.micro_batches[2]
    assert (empty["labels"] == IGNORED_LABEL).all()
    assert packing or (empty["attention_mask"].sum(1) == 1).all()


@pytest.mark.parametrize("packing", [True, False])
def test_seek_gives_the_same_batches(packing: bool) -> None:
    dataset = dataset_of([5, 9, 3, 16, 2, 8, 11, 4, 6, 7] * 4)
    straight = list(itertools.islice(make_loader(dataset, packing=packing), 12))
    for number in (0, 1, 5, 11):
        loader = make_loader(dataset, packing=packing)
        if number:
            loader.seek(straight[number - 1].position)
        assert flat(next(loader)) == flat(straight[number])
        assert loader.position == straight[number].position
    assert len({batch.epoch for batch in straight}) > 1


def test_batches_depend_on_seed_and_epoch() -> None:
    dataset = dataset_of([5, 9, 3, 16, 2, 8, 11, 4, 6, 7] * 4)
    assert [flat(b) for b in epoch_of(make_loader(dataset))] == [flat(b) for b in epoch_of(make_loader(dataset))]
    assert flat(next(make_loader(dataset, seed=4))) != flat(next(make_loader(dataset)))
    loader = make_loader(dataset)
    first, second = epoch_of(loader), epoch_of(loader)
    assert [batch.epoch for batch in second] == [1] * len(second)
    assert flat(first[0]) != flat(second[0])
    assert second[-1].position == LoaderPosition(2, 0)


@pytest.mark.parametrize(
    ("packing", "expected"),
    [
        (False, [[1, 39, 43, 15, 25, 33, 10, 22], [15, 22, 25, 10, 1, 39, 43, 33]]),
        (True, [[1, 10, 25], [1, 10, 25], [10, 1, 25]]),
    ],
)
def test_row_order_is_stable_across_versions(packing: bool, expected: list[list[int]]) -> None:
    """The expected numbers are the first token of each row.

    If a new version changed the order, a resumed run would see some documents twice.
    """
    loader = make_loader(dataset_of([9, 5, 7, 3, 8, 6, 4, 2]), packing=packing, seed=7, rows=1, count=1)
    found = [[int(step.micro_batches[0]["input_ids"][0, 0]) for step in epoch_of(loader)] for _ in expected]
    assert found == expected


def test_num_steps() -> None:
    loader = make_loader(dataset_of([16] * 8))
    assert (loader.num_steps(1.0), loader.num_steps(2.6), loader.num_steps(0.01), loader.num_steps(3, 7)) == (
        2,
        6,
        1,
        7,
    )


def test_packed_documents_do_not_see_each_other(tokenizer: Any) -> None:
    """Hugging Face models separate packed documents by position, so each document has the same logits as on its own."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    dataset = dataset_of([7, 5, 9, 4])
    micro = next(make_loader(dataset, rows=1, count=1)).micro_batches[0]
    with torch.no_grad():
        packed = model(input_ids=micro["input_ids"], position_ids=micro["position_ids"], use_cache=False).logits[0]
        starts = [*(micro["position_ids"][0] == 0).nonzero().flatten().tolist(), 16]
        assert len(starts) > 2
        for start, end in itertools.pairwise(starts):
            alone = model(input_ids=micro["input_ids"][:, start:end], use_cache=False).logits[0]
            torch.testing.assert_close(packed[start:end], alone)


def test_text_is_cut_into_pieces(tokenizer: Any) -> None:
    dataset = encode_rows([Document("Call me Ishmael. " * 20, "x")], RowEncoder(tokenizer), max_length=16)
    lengths = dataset.lengths().tolist()
    assert lengths[:-1] == [16] * (len(lengths) - 1)
    assert not dataset.trained[dataset.starts[:-1]].any()
    assert dataset.report.num_trained_tokens == dataset.report.num_tokens - len(dataset)
    text = tokenizer.decode(dataset.tokens.tolist())
    assert ("Call me Ishmael. " * 20 + "<|endoftext|>").startswith(text)


@pytest.mark.parametrize(("overlong", "kept"), [("truncate", 2), ("drop", 1)])
def test_overlong(tokenizer: Any, overlong: str, kept: int) -> None:
    rows = [
        PromptCompletion("The", " whale" * 30, "a"),
        PromptCompletion("The", " sea", "b"),
        PromptCompletion("The sea " * 30, "x", "c"),
    ]
    dataset = encode_rows(rows, RowEncoder(tokenizer), max_length=16, overlong=overlong)
    assert len(dataset) == kept
    report = dataset.report
    assert (report.num_rows, report.num_documents) == (3, kept)
    if overlong == "truncate":  # only the prompt of the last row is left
        assert (report.num_truncated, report.num_untrained, report.num_too_long) == (2, 1, 0)
        assert "2 truncated, 1 dropped without a trained token (first: " in str(report)
    else:
        assert (report.num_truncated, report.num_too_long) == (0, 2)


def test_overlong_error_names_the_row(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"rows line 7: \d+ tokens are more than data.max_length = 16"):
        encode_rows(
            [PromptCompletion("The", " whale" * 30, "rows line 7")],
            RowEncoder(tokenizer),
            max_length=16,
            overlong="error",
        )


def test_nothing_to_train_is_refused(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="no token would be trained: 1 row, "):
        encode_rows([PromptCompletion("The", " ", "x")], RowEncoder(tokenizer), max_length=16)
