"""``data.val_size`` withholds whole rows from training, and always the same rows."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.config.schema import RunConfig
from megatrain.data.dataset import load_dataset
from megatrain.data.packing import BatchShape
from megatrain.data.rows_report import DataError, DataReport
from megatrain.data.token_dataset import TokenDataset, describe, held_out_part, hold_out
from megatrain.training.resolve import resolve_data
from oracles.previews import stats_of
from oracles.rows_in_memory import loader_of

MODEL = Path(__file__).parents[3] / "examples/quickstart/model"


def dataset_of(pieces: list[int], weights: tuple[float, ...] = (), bounds: tuple[int, ...] = ()) -> TokenDataset:
    """Return a dataset of rows with one or more documents of 4 tokens. Every token of document n is n + 1."""
    count = sum(pieces)
    tokens = np.repeat(np.arange(1, count + 1, dtype=np.int32), 4)
    trained = np.tile([False, True, True, True], count)
    starts = np.arange(0, 4 * count + 1, 4, dtype=np.int64)
    begins = np.array([place == 0 for number in pieces for place in range(number)])
    report = DataReport(len(pieces), count, 0, 0, 0, 4 * count, 3 * count)
    return TokenDataset(tokens, trained, starts, report, bounds, weights, begins_row=begins)


def used(dataset: TokenDataset) -> list[int]:
    assert dataset.in_use is not None
    return [int(document) for document in dataset.in_use]


@settings(deadline=None, max_examples=60)
@given(
    pieces=st.lists(st.integers(1, 4), min_size=2, max_size=40),
    val_size=st.one_of(st.floats(0.001, 0.6), st.integers(1, 50).map(float)),
    seed=st.integers(0, 5),
)
def test_rows_are_taken_whole_and_every_document_is_on_one_side(pieces: list[int], val_size: float, seed: int) -> None:
    whole = dataset_of(pieces)
    wanted = max(1, round(val_size * len(pieces))) if val_size < 1 else int(val_size)
    if wanted >= len(pieces):
        with pytest.raises(DataError, match="leaves nothing to train on"):
            hold_out(whole, val_size, seed)
        return
    training = hold_out(whole, val_size, seed)
    held_out = held_out_part(training)
    assert sorted([*used(training), *used(held_out)]) == list(range(sum(pieces)))
    row_of = np.repeat(np.arange(len(pieces)), pieces)
    rows = {int(row_of[document]) for document in used(held_out)}
    assert len(rows) == wanted and rows.isdisjoint(int(row_of[document]) for document in used(training))
    assert used(hold_out(whole, val_size, seed)) == used(training)
    assert training.epoch_documents(9).tolist() == used(training)


def test_seed_selects_held_out_rows_and_changes_the_fingerprint() -> None:
    whole = dataset_of([1] * 50)
    one, same, other = (hold_out(whole, 0.2, seed) for seed in (1, 1, 2))
    assert used(one) == used(same) != used(other)
    assert one.fingerprint() == same.fingerprint()
    assert len({data.fingerprint() for data in (whole, one, other, hold_out(whole, 11.0, 1))}) == 4


def test_weights_apply_to_the_remaining_rows() -> None:
    training = hold_out(dataset_of([1] * 30, (2.0, 0.5), (0, 10, 30)), 6.0, 0)
    documents = training.epoch_documents(3).tolist()
    first, second = ([document for document in used(training) if (document < 10) == is_first] for is_first in (1, 0))
    assert sorted(document for document in documents if document < 10) == sorted(first * 2)
    assert sum(document >= 10 for document in documents) == round(0.5 * len(second))
    assert set(documents) <= set(used(training))
    assert held_out_part(training).epoch_documents(3).tolist() == used(held_out_part(training))


def test_held_out_rows_can_be_limited() -> None:
    training = hold_out(dataset_of([3] * 10), 5.0, 0)
    everything, some = used(held_out_part(training)), used(held_out_part(training, 2))
    assert (len(everything), some) == (15, everything[:6])
    assert describe(held_out_part(training)) == "5 rows held out from training (data.val_size), 15 documents, 60 tokens"
    assert describe(held_out_part(hold_out(dataset_of([1, 1]), 1.0, 0))).startswith("1 row held out from training")


@pytest.mark.parametrize("packing", [True, False])
def test_training_batches_exclude_held_out_rows(packing: bool) -> None:
    training = hold_out(dataset_of([2] * 20), 0.25, 1)
    seen = []
    for data in (training, held_out_part(training)):
        loader = loader_of(data, BatchShape(2, 2, 16, packing), data_seed=7)
        batches = itertools.islice(loader, loader.steps_per_epoch)
        labels = [micro["labels"] for batch in batches for micro in batch.micro_batches]
        seen.append({int(label) for each in labels for label in each[each != -100]})
    assert seen[0] == {document + 1 for document in used(training)}
    assert seen[1] == set(range(1, 41)) - seen[0] and len(seen[1]) == 10


def make_config(folder: Path, val_size: float, cache: str, *, text: str = "") -> RunConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}", "completion": " answer {n}"}}\n' for n in range(20)))
    if text:
        path = folder / "book.txt"
        path.write_text(text)
    return RunConfig.model_validate(
        {
            "task": "sft",
            "output_dir": "out",
            "model": {"model_name_or_path": str(MODEL)},
            "data": {"train": [{"path": str(path)}], "max_length": 32, "cache_dir": cache, "val_size": val_size},
        }
    )


def test_cached_and_fresh_data_hold_out_the_same_rows(tmp_path: Path, tokenizer: Any) -> None:
    cached = [
        load_dataset(resolve_data(make_config(tmp_path, 0.15, str(tmp_path / "cache"))), tokenizer) for _ in range(2)
    ]
    fresh = load_dataset(resolve_data(make_config(tmp_path, 0.15, "none")), tokenizer)
    assert used(cached[0]) == used(cached[1]) == used(fresh) and len(used(fresh)) == 17
    assert {data.fingerprint() for data in cached} == {fresh.fingerprint()}
    stats = stats_of(make_config(tmp_path, 3, str(tmp_path / "cache")))
    assert (stats.report.num_rows, stats.num_documents, stats.sources[0].num_documents) == (20, 17, 17)
    assert stats.held_out.startswith("3 rows held out from training (data.val_size), ")
    assert sum(each.num_documents for each in stats.histogram) == 17


def test_pieces_of_a_text_stay_together(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "more").mkdir()
    words = "the whale and the sea and the ship " * 40
    base = make_config(tmp_path, 1, "none", text=words)
    second = make_config(tmp_path / "more", 1, "none", text=words + words)
    sources = (*base.data.train, *second.data.train)
    config = base.model_copy(update={"data": base.data.model_copy(update={"train": sources})})
    data = load_dataset(resolve_data(config), tokenizer)
    documents = used(data)
    border = data.source_starts[1]
    assert documents in (list(range(border)), list(range(border, data.source_starts[2])))


def test_too_large_val_size_is_refused_with_a_remedy(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"data.val_size = 20 leaves nothing to train on: the data has 20 rows\. Lower"):
        load_dataset(resolve_data(make_config(tmp_path, 20, "none")), tokenizer)
    with pytest.raises(DataError, match=r"data.val_size = 0.99 leaves nothing to train on: the data has 20 rows"):
        load_dataset(resolve_data(make_config(tmp_path, 0.99, "none")), tokenizer)
    with pytest.raises(DataError, match=r"the data has 1 row\. A text file is one row: use another text file"):
        load_dataset(resolve_data(make_config(tmp_path, 0.1, "none", text="call me " * 99)), tokenizer)


def test_dropped_rows_do_not_count_as_held_out(tmp_path: Path, tokenizer: Any) -> None:
    config = make_config(tmp_path, 3, "none")
    Path(config.data.train[0].path).write_text(
        "".join(f'{{"prompt": "{n}", "completion": "{" answer" if n % 2 else ""}"}}\n' for n in range(8))
    )
    data = load_dataset(resolve_data(config), tokenizer)
    assert (data.report.num_rows, len(data), len(used(data))) == (8, 4, 1)
    assert replace(data, in_use=None).epoch_documents(0).tolist() == [0, 1, 2, 3]
