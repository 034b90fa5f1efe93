"""Previews show exactly the trained tokens, and the statistics of the data match the batches."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.config.schema import RunConfig
from megatrain.data.dataset import load_dataset
from megatrain.data.encoding import load_tokenizer
from megatrain.data.packing import BatchShape
from megatrain.data.preview import RowPreview
from megatrain.data.row_order import EpochOrder
from megatrain.data.rows_report import DataError
from megatrain.engine.table import TrainingConfig
from megatrain.training.resolve import resolve_batch, resolve_data
from oracles.previews import preview_of, stats_of
from oracles.rows_in_memory import loader_of

MODEL = Path(__file__).parents[3] / "examples/quickstart/model"
TEXT = Path(__file__).parents[3] / "examples/quickstart/loomings.txt"


def make_config(folder: Path, rows: list[dict[str, Any]], **data: Any) -> RunConfig:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "b.txt").write_text("Call me Ishmael. " * 40)
    return RunConfig.model_validate(
        {
            "task": "sft",
            "output_dir": "out",
            "model": {"model_name_or_path": str(MODEL)},
            "data": {
                "train": [{"path": str(folder / "a.jsonl")}, {"path": str(folder / "b.txt")}],
                "max_length": 16,
                "cache_dir": str(folder / "cache"),
                **data,
            },
        }
    )


ROWS: list[dict[str, Any]] = [
    {"prompt": "The whale", "completion": " is white"},
    {"prompt": "The whale", "completion": 5},
    {"prompt": "The whale " * 20, "completion": "is white"},
    {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8]},
]


def shown(preview: RowPreview) -> list[tuple[str, bool]]:
    return [(segment.text, segment.is_trained) for segment in preview.segments]


def test_rows_as_they_are_trained(tmp_path: Path) -> None:
    first, second, third = preview_of(make_config(tmp_path, ROWS))
    assert shown(first) == [("The whale", False), (" is white<|endoftext|>", True)]
    assert (first.number, first.kind, first.dropped) == (1, "prompt and completion", "")
    assert first.where == f"{tmp_path / 'a.jsonl'} line 1"
    assert (first.num_tokens, first.num_tokens_before) == (first.num_tokens, first.num_tokens)
    assert 0 < first.num_trained < first.num_tokens
    assert (second.segments, second.dropped) == (
        (),
        "`completion` must be text, not a number. Fix or remove the row",
    )
    assert second.where == f"{tmp_path / 'a.jsonl'} line 2"
    assert third.dropped == "none of its first 16 tokens (data.max_length) would be trained"
    assert (third.num_tokens, third.num_trained) == (16, 0)
    assert third.num_tokens_before == 43


def test_one_row_of_all_sources(tmp_path: Path) -> None:
    config = make_config(tmp_path, ROWS)
    (fourth,) = preview_of(config, row=4)
    assert (fourth.kind, [trained for _, trained in shown(fourth)]) == ("tokens", [False, True, False, True])
    (fifth,) = preview_of(config, row=5)
    assert (fifth.kind, fifth.where) == ("text", str(tmp_path / "b.txt"))
    assert fifth.segments[-1].text.endswith("<|endoftext|>")
    with pytest.raises(DataError, match=r"--row: there is no row 6. The data has 5 rows"):
        preview_of(config, row=6)
    with pytest.raises(DataError, match=r"--row: there is no row 0. The first row is row 1"):
        preview_of(config, row=0)
    assert json.loads(json.dumps(fifth.to_json()))["number"] == 5


def test_overlong_rows_are_marked(tmp_path: Path) -> None:
    third = preview_of(make_config(tmp_path, ROWS, overlong="drop"))[2]
    assert third.dropped == f"{third.num_tokens_before} tokens are more than data.max_length = 16"


@pytest.mark.parametrize("batch", [{}, {"train_batch_tokens": 4 * 32}], ids=["rows", "tokens"])
def test_padding_matches_real_micro_batches(tmp_path: Path, batch: dict[str, int]) -> None:
    """A step may be given in tokens, which the planner splits into micro-batches.

    The rows are sorted by length on purpose.
    """
    rows = [{"text": "The whale " * count} for count in (1, 1, 1, 1, 2, 2, 6, 6, 6, 9, 9, 9)]
    config = make_config(tmp_path, rows, packing=False, max_length=32)
    config = config.model_copy(
        update={"training": TrainingConfig.model_validate(batch or config.training.model_dump())}
    )
    stats, cut = stats_of(config), resolve_batch(config, "cpu")
    dataset = load_dataset(resolve_data(config), load_tokenizer(str(MODEL)))
    shape = BatchShape(cut.micro_batch_rows, cut.num_micro_batches, 32, packing=False)
    loader = loader_of(dataset, shape, data_seed=config.data_seed)
    batches = itertools.islice(loader, loader.steps_per_epoch)
    tokens = sum(part["input_ids"].numel() for batch in batches for part in batch.micro_batches)
    assert stats.padding_share == pytest.approx(1 - stats.num_tokens / tokens) and 0.3 < stats.padding_share < 0.4


@pytest.mark.parametrize("packing", [True, False])
def test_figures_match_the_batches(tmp_path: Path, packing: bool) -> None:
    config = make_config(tmp_path, ROWS, packing=packing)
    stats = stats_of(config)
    dataset = load_dataset(resolve_data(config), load_tokenizer(str(MODEL)))
    shape = BatchShape(8, 1, 16, packing)
    loader = loader_of(dataset, shape, data_seed=config.data_seed)
    batches = list(itertools.islice(loader, loader.steps_per_epoch))
    assert stats.num_rows == EpochOrder(dataset, shape, config.data_seed).num_rows
    assert stats.num_steps == loader.steps_per_epoch
    assert stats.num_tokens == sum(batch.num_real_tokens for batch in batches)
    assert stats.num_trained_tokens == sum(batch.num_trained_tokens for batch in batches)
    tokens = sum(part["input_ids"].numel() for batch in batches for part in batch.micro_batches)
    assert stats.padding_share == pytest.approx(1 - stats.num_tokens / tokens)
    assert (stats.padding_share < stats.padding_share_other) == packing
    assert stats.percentiles[100] == 16
    assert sum(each.num_documents for each in stats.histogram) == len(dataset)
    assert all(each.low <= each.high for each in stats.histogram)
    assert json.loads(json.dumps(stats.to_json()))["num_rows"] == stats.num_rows
