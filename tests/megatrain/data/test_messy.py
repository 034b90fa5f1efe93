"""Messy chats of real users: every row is trained on, or dropped with a count, a reason and an example."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.config.schema import RunConfig
from megatrain.data.dataset import load_dataset
from megatrain.data.rows_report import DataError, RowError
from megatrain.data.token_dataset import TokenDataset
from megatrain.training.resolve import resolve_data
from oracles.previews import preview_of, stats_of
from oracles.rows_in_memory import read_rows

DATA = Path(__file__).parents[2] / "data"
MODEL = Path(__file__).parents[3] / "examples/quickstart/model"
TEMPLATES = DATA / "chat_templates"


def make_config(path: Path, template: str = "gemma3", **data: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "task": "sft",
            "output_dir": "out",
            "model": {"model_name_or_path": str(MODEL), "chat_template": str(TEMPLATES / f"{template}.jinja")},
            "data": {"train": [{"path": str(path)}], "max_length": 128, "cache_dir": "none", **data},
        }
    )


def load(tokenizer: Any, config: RunConfig) -> TokenDataset:
    tokenizer.chat_template = Path(config.model.chat_template).read_text(encoding="utf-8")
    return load_dataset(resolve_data(config), tokenizer)


def test_every_messy_row_is_trained_or_explained(tokenizer: Any) -> None:
    path = DATA / "messy_chats.jsonl"
    report = load(tokenizer, make_config(path)).report
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert report.num_rows == len(rows)
    assert {(each.reason, each.count) for each in report.dropped} == {
        ("the chat template rejects this conversation: Conversation roles must alternate user/assistant/user/"
         "assistant/...", 3),
        ("`messages` must be a list of messages, not empty", 1),
        ("`messages` must be a list of messages, not null", 1),
        ("a message lacks `role` or `content`", 1),
        ('unknown role "narrator"', 1),
        ("`content` must be text, not null", 1),
    }  # fmt: skip
    assert [(each.reason, each.count) for each in report.untrained_turns] == [("it is empty", 1)]
    assert report.num_untrained == 2  # one without an answer, one whose only answer is empty
    assert report.num_documents == report.num_rows - report.num_dropped == sum(row["trained"] for row in rows)
    for each in report.dropped:
        assert each.example.startswith(str(path))
        counted = "1 row" if each.count == 1 else f"{each.count} rows"
        assert f"  {counted} dropped: {each.reason} (first: {each.example})" in str(report)


def test_a_lenient_template_trains_more(tokenizer: Any) -> None:
    report = load(tokenizer, make_config(DATA / "messy_chats.jsonl", "chatml")).report
    assert sum(each.count for each in report.dropped) == 5


def test_first_bad_row_raises_with_bad_rows_error(tokenizer: Any) -> None:
    with pytest.raises(RowError, match=r"messy_chats.jsonl line 2: the chat template rejects this conversation"):
        load(tokenizer, make_config(DATA / "messy_chats.jsonl", bad_rows="error"))


def test_first_row_is_named_if_all_are_bad(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": null}\n' * 3)
    with pytest.raises(DataError) as caught:
        load(tokenizer, make_config(path))
    assert "data.train: no token would be trained: 3 rows, 0 documents" in str(caught.value)
    assert f"The first error is: {path} line 1: `messages` must be a list of messages, not null" in str(caught.value)


def test_rows_cut_before_the_answer_are_counted(tokenizer: Any) -> None:
    report = load(tokenizer, make_config(DATA / "messy_chats.jsonl", max_length=16)).report
    assert (report.num_truncated, report.num_untrained) == (5, 4)
    assert report.num_documents == report.num_rows - report.num_dropped


def test_preview_shows_dropped_rows(tokenizer: Any) -> None:
    config = make_config(DATA / "messy_chats.jsonl")
    previews = preview_of(config, n=100)
    rows = (DATA / "messy_chats.jsonl").read_text(encoding="utf-8").splitlines()
    assert [preview.number for preview in previews] == list(range(1, len(rows) + 1))
    for preview, line in zip(previews, rows, strict=True):
        assert bool(preview.dropped) != json.loads(line)["trained"], preview
        assert preview.where.startswith(f"{DATA / 'messy_chats.jsonl'} line {preview.number}")
    first = previews[0]
    assert "".join(segment.text for segment in first.segments if segment.is_trained) == (
        "Hello you<end_of_turn><|endoftext|>"  # this tokenizer has no token for the end of turn
    )
    assert sum(segment.text.count("<start_of_turn>") for segment in first.segments) == 2


def test_stats_match_the_report(tokenizer: Any) -> None:
    stats = stats_of(make_config(DATA / "messy_chats.jsonl"))
    assert stats.report.num_dropped == sum(
        not json.loads(line)["trained"] for line in DATA.joinpath("messy_chats.jsonl").read_text().splitlines()
    )
    assert sum(each.num_documents for each in stats.histogram) == stats.num_documents == stats.report.num_documents


def test_reading_keeps_the_order(tmp_path: Path) -> None:
    rows = list(read_rows(str(DATA / "messy_chats.jsonl"), on_bad_row=lambda error: None))
    numbers = [int(row.location.split("line ")[1]) for row in rows]
    assert numbers == sorted(numbers)
