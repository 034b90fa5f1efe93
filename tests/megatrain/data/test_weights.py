"""Source weights decide how many documents of each source an epoch has, and are part of the fingerprint."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.config.schema import RunConfig
from megatrain.data.dataset import load_dataset
from megatrain.data.packing import BatchShape
from megatrain.data.rows_report import DataError, DataReport
from megatrain.data.token_dataset import TokenDataset
from megatrain.training.resolve import resolve_data
from oracles.previews import stats_of
from oracles.rows_in_memory import loader_of

MODEL = Path(__file__).parents[3] / "examples/quickstart/model"


def dataset_of(sizes: list[int], weights: tuple[float, ...]) -> TokenDataset:
    """Return a dataset of documents with 4 tokens each. Every token of document n is n + 1."""
    count = sum(sizes)
    tokens = np.repeat(np.arange(1, count + 1, dtype=np.int32), 4)
    trained = np.tile([False, True, True, True], count)
    starts = np.arange(0, 4 * count + 1, 4, dtype=np.int64)
    report = DataReport(count, count, 0, 0, 0, 4 * count, 3 * count)
    bounds = tuple(int(bound) for bound in np.cumsum([0, *sizes]))
    return TokenDataset(tokens, trained, starts, report, bounds, weights)


def test_documents_of_an_epoch() -> None:
    dataset = dataset_of([10, 20], (2.5, 0.3))
    documents = dataset.epoch_documents(7)
    counts = Counter(documents.tolist())
    assert sorted(counts[document] for document in range(10)) == [2] * 5 + [3] * 5
    assert sum(counts[document] for document in range(10, 30)) == 6
    assert max(counts[document] for document in range(10, 30)) == 1
    assert documents.tolist() == dataset.epoch_documents(7).tolist()
    assert documents.tolist() != dataset.epoch_documents(8).tolist()
    assert dataset_of([10, 20], (1.0, 1.0)).epoch_documents(7).tolist() == list(range(30))


def test_a_fraction_of_the_documents_is_rounded_to_the_nearest() -> None:
    for weight, expected in ((0.26, 3), (0.24, 2), (1.29, 13)):
        assert len(dataset_of([10, 1], (weight, 2.0)).epoch_documents(7)) == expected + 2


@pytest.mark.parametrize("packing", [True, False])
def test_epoch_batches_follow_the_weights(packing: bool) -> None:
    dataset = dataset_of([10, 20], (2.5, 0.3))
    loader = loader_of(dataset, BatchShape(2, 2, 16, packing), data_seed=7)
    seen: Counter[int] = Counter()
    for batch in itertools.islice(loader, loader.steps_per_epoch):
        for micro in batch.micro_batches:
            seen.update(micro["labels"][micro["labels"] != -100].tolist())
    expected = Counter((dataset.epoch_documents(7) + 1).tolist())
    assert seen == Counter({document: 3 * count for document, count in expected.items()})


def test_fingerprint_depends_on_weights() -> None:
    plain, same = dataset_of([10, 20], ()), dataset_of([10, 20], (1.0, 1.0))
    weighted = replace(plain, weights=(2.0, 1.0))
    assert plain.fingerprint() == same.fingerprint() != weighted.fingerprint()
    assert weighted.fingerprint() == replace(plain, weights=(2.0, 1.0)).fingerprint()
    assert weighted.fingerprint() != replace(plain, weights=(1.0, 2.0)).fingerprint()
    assert weighted.fingerprint() != replace(weighted, source_starts=(0, 11, 30)).fingerprint()


def make_config(folder: Path, *weights: float) -> RunConfig:
    sources = []
    for number, weight in enumerate(weights):
        path = folder / f"{number}.jsonl"
        path.write_text("".join(f'{{"prompt": "{n}", "completion": " answer {n}"}}\n' for n in range(4)))
        sources.append({"path": str(path), "weight": weight})
    return RunConfig.model_validate(
        {
            "task": "sft",
            "output_dir": "out",
            "model": {"model_name_or_path": str(MODEL)},
            "data": {"train": sources, "max_length": 32, "cache_dir": str(folder / "cache")},
        }
    )


def test_weights_of_the_config(tmp_path: Path, tokenizer: Any) -> None:
    config = make_config(tmp_path, 3.0, 0.5)
    dataset = load_dataset(resolve_data(config), tokenizer)
    assert (dataset.source_starts, dataset.weights) == ((0, 4, 8), (3.0, 0.5))
    assert len(dataset.epoch_documents(0)) == 14
    stats = stats_of(config)
    assert [(source.weight, source.num_documents) for source in stats.sources] == [(3.0, 4), (0.5, 4)]
    assert stats.num_documents == 14
    assert (stats.num_tokens, stats.report.num_tokens) == (14 * 8, 8 * 8)
    assert stats.num_trained_tokens == 14 * 7


def test_weights_that_select_no_documents_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match="these weights leave no document to train on"):
        load_dataset(resolve_data(make_config(tmp_path, 0.01)), tokenizer)
