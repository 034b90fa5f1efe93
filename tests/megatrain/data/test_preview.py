"""Previews show exactly the trained tokens, and the statistics of the data match the batches."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.config.schema import RunConfig
from megatrain.data.dataset import load_dataset
from megatrain.data.encoding import load_tokenizer
from megatrain.data.packing import BatchShape
from megatrain.data.preview import DataStats, LengthBin, RowPreview, SourceStats, TextRun, _padded_tokens
from megatrain.data.row_order import EpochOrder
from megatrain.data.rows_report import DataError, DataReport, DropCount, SourceCounts
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


def tokens_of(*lengths: int) -> list[dict[str, Any]]:
    return [{"input_ids": list(range(5, 5 + length)), "labels": list(range(5, 5 + length))} for length in lengths]


def test_statistics_of_two_sources_with_weights(tmp_path: Path) -> None:
    """The second source is used twice. Its last row is truncated from 20 to 16 tokens, and a row of it is dropped."""
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    rows = [tokens_of(3, 16, 5, 9), [*tokens_of(7), {"text": 5}, *tokens_of(20)]]
    for path, source in zip(paths, rows, strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in source))
    values = {
        "task": "sft",
        "output_dir": "out",
        "model": {"model_name_or_path": str(MODEL)},
        "training": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1},
        "data": {
            "train": [{"path": str(paths[0])}, {"path": str(paths[1]), "weight": 2.0}],
            "max_length": 16,
            "cache_dir": "none",
        },
    }
    packed = stats_of(RunConfig.model_validate(values))
    padded = stats_of(RunConfig.model_validate({**values, "data": {**values["data"], "packing": False}}))
    report = DataReport(
        num_rows=7,
        num_documents=6,
        num_truncated=1,
        num_too_long=0,
        num_untrained=0,
        num_tokens=56,
        num_trained_tokens=50,
        dropped=(DropCount("`text` must be text, not a number", 1, f"{paths[1]} line 2"),),
        sources=(
            SourceCounts(num_rows=4, num_tokens=33),
            SourceCounts(num_rows=3, num_truncated=1, num_bad=1, num_rows_lost=2, num_tokens=27, num_tokens_lost=4),
        ),
    )
    expected = DataStats(
        report=report,
        sources=(SourceStats(str(paths[0]), 1.0, 4, 33, 29), SourceStats(str(paths[1]), 2.0, 2, 23, 21)),
        percentiles={0: 3, 50: 7, 90: 16, 99: 16, 100: 16},
        histogram=(LengthBin(2, 3, 1), LengthBin(4, 7, 2), LengthBin(8, 15, 1), LengthBin(16, 16, 2)),
        num_documents=8,
        num_tokens=79,
        num_trained_tokens=71,
        num_rows=5,  # 3 rows of 16, then 9 + 7, then 7 + 5 + 3
        num_steps=3,
        padding_share=packed.padding_share,
        padding_share_other=padded.padding_share,
    )
    assert packed == expected and packed.padding_share == pytest.approx(1 / 80)
    assert padded == replace(
        expected,
        num_rows=8,
        num_steps=4,
        padding_share=padded.padding_share,
        padding_share_other=packed.padding_share,
    )
    assert packed.to_json() == asdict(packed)


def test_padding_of_unpacked_rows_is_that_of_the_longest_row_of_each_micro_batch() -> None:
    lengths = np.array([3, 8, 5, 2, 7, 1, 4], dtype=np.int64)
    # Rows go to the micro-batches in turn: (3, 5) and (8, 2), then (7, 4) and (1, empty).
    assert _padded_tokens(lengths, 4, 2) == 2 * (5 + 8 + 7 + 1)
    assert _padded_tokens(lengths, 4, 4) == 4 * (8 + 7)
    assert _padded_tokens(lengths, 7, 1) == lengths.sum()


def test_preview_states_every_fact_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    turns = [{"role": role, "content": text} for role, text in (("user", "Who?"), ("assistant", " "), ("user", "So?"))]
    chat = {"messages": [*turns, {"role": "assistant", "content": "A<|endoftext|>b", "note": "x"}]}
    path.write_text("".join(json.dumps(row) + "\n" for row in (chat, {"text": "Call me Ishmael. " * 20})))
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}<|endoftext|>{% endfor %}")
    config = make_config(tmp_path, [], train=[{"path": str(path)}], max_length=64)
    model = config.model.model_copy(update={"chat_template": str(template)})
    first, second = preview_of(config.model_copy(update={"model": model}))
    text = "[user]Who?<|endoftext|>[assistant] <|endoftext|>[user]So?<|endoftext|>[assistant]"
    assert first == RowPreview(
        number=1,
        where=f"{path} line 1",
        kind="conversation",
        segments=(TextRun(text, False), TextRun("A<|endoftext|>b<|endoftext|>", True)),
        num_tokens=first.num_tokens_before,
        num_trained=4,
        num_tokens_before=first.num_tokens_before,
        untrained_turns=("it is empty",),
        left_out=("note",),
        special_tokens=("<|endoftext|>",),
    )
    whole = "Call me Ishmael. " * 20 + "<|endoftext|>"
    assert "".join(segment.text for segment in second.segments) == whole
    num_tokens = second.num_tokens
    assert second == RowPreview(
        number=2,
        where=f"{path} line 2",
        kind="text",
        segments=second.segments,
        num_tokens=num_tokens,
        num_trained=num_tokens - second.num_pieces,
        num_tokens_before=num_tokens,
        num_pieces=-(-num_tokens // 64),
        is_text=True,
    )
    assert second.num_pieces == 3 and [segment.is_trained for segment in second.segments] == [False, True] * 3
