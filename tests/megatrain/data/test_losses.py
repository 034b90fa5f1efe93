"""Dropped or cut rows and tokens are counted per source. Too many cause a warning, and still more cause an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import load_config
from megatrain.data.dataset import load_dataset
from megatrain.data.rows_report import DataError, DataReport, SourceCounts, check_losses
from megatrain.training.resolve import resolve_data

SHORT = {"prompt": "Who? ", "completion": "Ishmael"}
BAD = {"messages": [{"role": "nobody", "content": "x"}]}
UNTRAINED = {"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}
NUM_TOKENS = 96
IDS = list(range(NUM_TOKENS))
LONG = {"input_ids": IDS, "labels": IDS}


def load(folder: Path, tokenizer: Any, *sources: list[dict[str, Any]], **keys: object) -> tuple[Any, DataReport]:
    values = {"max_length": 64, "cache_dir": str(folder / "cache"), **keys}
    text = "[data]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    for number, rows in enumerate(sources):
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        text += f'[[data.train]]\npath = "{number}.jsonl"\n'
    path = folder / "run.toml"
    path.write_text(f'task = "sft"\noutput_dir = "out"\n[model]\nmodel_name_or_path = "m"\n{text}')
    config = load_config(path).config
    data = resolve_data(config)
    return data, load_dataset(data, tokenizer).report


def test_each_source_is_counted_alone(tmp_path: Path, tokenizer: Any) -> None:
    sources = [SHORT, SHORT, SHORT], [SHORT, BAD, UNTRAINED, LONG]
    data, report = load(tmp_path, tokenizer, *sources)
    good, bad = report.sources
    assert good.num_rows == 3 and good.num_rows_lost == good.num_tokens_lost == 0 and good.lost_share == 0
    assert (bad.num_rows, bad.num_rows_lost) == (4, 3)
    assert (bad.num_bad, bad.num_untrained, bad.num_truncated, bad.num_too_long) == (1, 1, 1, 0)
    assert bad.num_tokens_lost == 3 + NUM_TOKENS - 64
    assert good.num_tokens + bad.num_tokens - bad.num_tokens_lost == report.num_tokens
    assert bad.lost_share == 3 / 4
    again = load(tmp_path, tokenizer, *sources)[1]
    assert again == report  # from the cache
    assert data.source_names == [f"data.train.{n} ({tmp_path / f'{n}.jsonl'})" for n in (0, 1)]


def test_rows_truncated_to_no_labels_are_counted_once(tmp_path: Path, tokenizer: Any) -> None:
    cut = {"input_ids": IDS, "labels": [*([-100] * (NUM_TOKENS - 1)), IDS[-1]]}
    (counts,) = load(tmp_path, tokenizer, [SHORT, cut])[1].sources
    assert (counts.num_rows_lost, counts.num_truncated, counts.num_untrained) == (1, 1, 1)
    assert counts.num_tokens_lost == NUM_TOKENS


def test_dropped_overlong_rows_count_all_their_tokens(tmp_path: Path, tokenizer: Any) -> None:
    (counts,) = load(tmp_path, tokenizer, [SHORT, LONG], overlong="drop")[1].sources
    assert (counts.num_rows_lost, counts.num_too_long, counts.num_tokens_lost) == (1, 1, NUM_TOKENS)


def test_splitting_a_text_loses_no_tokens(tmp_path: Path, tokenizer: Any) -> None:
    (counts,) = load(tmp_path, tokenizer, [{"text": "Call me Ishmael. " * 200}, {"text": ""}])[1].sources
    num_tokens = len(tokenizer("Call me Ishmael. " * 200)["input_ids"]) + 1  # plus the end token
    assert (counts.num_rows_lost, counts.num_tokens_lost, counts.num_tokens) == (1, 0, num_tokens)


def report(**counts: int) -> DataReport:
    return DataReport(0, 0, 0, 0, 0, 0, 0, sources=(SourceCounts(**counts),))


@pytest.mark.parametrize(
    ("counts", "warned"),
    [
        ({"num_rows": 100, "num_rows_lost": 5, "num_bad": 5}, False),
        ({"num_rows": 100, "num_rows_lost": 6, "num_bad": 6}, True),
        ({"num_rows": 1000, "num_rows_lost": 1, "num_tokens": 100, "num_tokens_lost": 50, "num_truncated": 1}, True),
        ({}, False),
    ],
)
def test_losses_above_five_percent_warn(counts: dict[str, int], warned: bool) -> None:
    found = check_losses(report(**counts), ["data.train.0 (x.jsonl)"], 0.5)
    assert len(found) == warned
    if warned:
        assert found[0].startswith("data.train.0 (x.jsonl): ") and "`megatrain-tier data stats CONFIG`" in found[0]
        assert ("Raise data.max_length" in found[0]) == ("num_truncated" in counts)


def test_losses_above_max_dropped_are_refused() -> None:
    half = {"num_rows": 200, "num_rows_lost": 101, "num_too_long": 101}
    with pytest.raises(DataError) as refused:
        check_losses(report(**half), ["data.train.0 (x.jsonl)"], 0.5)
    text = str(refused.value)
    assert text.startswith("data.train.0 (x.jsonl): 101 of 200 rows (50.5%)") and "101 dropped as too long" in text
    assert "more than data.max_dropped = 0.5. Raise data.max_length" in text and "set max_dropped = 0.51" in text
    assert len(check_losses(report(**half), ["x"], 0.51)) == 1
    assert check_losses(report(num_rows=1000, num_rows_lost=10), ["x"], 1.0) == []
    with pytest.raises(DataError):
        check_losses(report(num_rows=1000, num_rows_lost=10), ["x"], 0.0)
