"""Dropped or cut rows and tokens are counted per source. Too many cause a warning, and still more cause an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import load_config
from megatrain.data.dataset import load_dataset
from megatrain.data.rows_report import (
    DataError,
    DataReport,
    DropCount,
    EmptyFileError,
    RowCounts,
    RowError,
    SourceCounts,
    check_losses,
)
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


STATS = "`megatrain-tier data stats CONFIG`"


@pytest.mark.parametrize(
    ("counts", "warning"),
    [
        ({"num_rows": 100, "num_rows_lost": 5, "num_bad": 5}, ""),
        (
            {"num_rows": 100, "num_rows_lost": 6, "num_bad": 6},
            "6 of 100 rows (6.0%) and 0.0% of the tokens are dropped or truncated: 6 dropped because of an error. Fix "
            "the rows",
        ),
        (
            {"num_rows": 1000, "num_rows_lost": 1, "num_tokens": 100, "num_tokens_lost": 50, "num_truncated": 1},
            "1 of 1,000 rows (0.1%) and 50.0% of the tokens are dropped or truncated: 1 truncated to data.max_length. "
            "Raise data.max_length",
        ),
        (
            {"num_rows": 9, "num_rows_lost": 2, "num_too_long": 1, "num_untrained": 1, "num_tokens": 0},
            "2 of 9 rows (22.2%) and 0.0% of the tokens are dropped or truncated: 1 dropped as too long, 1 dropped "
            "without a trained token. Raise data.max_length",
        ),
        (
            {"num_rows": 1, "num_rows_lost": 1, "num_untrained": 1, "num_turns": 8, "num_turns_lost": 1},
            "1 of 1 row (100.0%) and 0.0% of the tokens are dropped or truncated: 1 dropped without a trained token; 1 "
            "of 8 turns (12.5%) of the assistant are not trained. Fix the rows",
        ),
        (
            {"num_rows": 4000, "num_turns": 2000, "num_turns_lost": 1200},
            "1,200 of 2,000 turns (60.0%) of the assistant are not trained. Set model.chat_template to a template that "
            "renders them completely",
        ),
        ({}, ""),
    ],
)
def test_losses_above_five_percent_warn(counts: dict[str, int], warning: str) -> None:
    name = "data.train.0 (x.jsonl)"
    expected = [f"{name}: {warning}: {STATS} shows the reasons"] if warning else []
    assert check_losses(report(**counts), [name], 1.0) == expected


def test_losses_above_max_dropped_are_refused() -> None:
    half = {"num_rows": 200, "num_rows_lost": 101, "num_too_long": 101}
    with pytest.raises(DataError) as refused:
        check_losses(report(**half), ["data.train.0 (x.jsonl)"], 0.5)
    assert str(refused.value) == (
        "data.train.0 (x.jsonl): 101 of 200 rows (50.5%) and 0.0% of the tokens are dropped or truncated: 101 dropped "
        f"as too long. That is more than data.max_dropped = 0.5. Raise data.max_length ({STATS} shows the reasons), or "
        "accept the loss: set max_dropped = 0.51 in [data]"
    )
    assert len(check_losses(report(**half), ["x"], 0.51)) == len(check_losses(report(**half), ["x"], 0.505)) == 1
    assert check_losses(report(num_rows=1000, num_rows_lost=10), ["x"], 1.0) == []
    with pytest.raises(DataError):
        check_losses(report(num_rows=1000, num_rows_lost=10), ["x"], 0.0)


def test_report_lists_all_counts_and_reasons() -> None:
    counts = RowCounts()
    counts.total.num_rows, counts.total.num_tokens, counts.total.num_truncated = 20, 900, 3
    for number, reason in enumerate(["no role", "no text", "no text"], start=4):
        counts.drop(RowError(f"a line {number}", f"{reason} here", reason=reason))
    for name in ("a.txt", "b.txt"):
        counts.drop(EmptyFileError(name))
    for number in (8, 9):
        counts.count_untrained(f"a line {number}")
    counts.add_turns(5, ["it is empty", "rewritten", "it is empty"], "a line 10")
    counts.add_turns(2, ["rewritten", "rewritten"], "a line 11")
    counts.end_source()
    counts.total.num_rows, counts.total.num_too_long, counts.total.num_tokens = 1030, 4, 5000
    left_out = (("name", 12), ("tools", 13), ("tool_calls", 13), ("arguments of tool_calls", 12), ("end", 14))
    for name, line in left_out:
        counts.record("left_out", [name], f"b line {line}")
    for line, names in ((15, ["<s>", "</s>"]), (16, ["</s>"])):
        counts.record("special_tokens", names, f"b line {line}")
    for name in "abcdefghij":
        counts.record("unread", [name], "b line 17")
    counts.record("unread", ["b"], "b line 18")
    counts.end_source()
    made = counts.report(1000, 4000, 1000)
    assert counts.first_error is not None and str(counts.first_error) == "a line 4: no role here. Fix or remove the row"
    assert made == DataReport(
        num_rows=1030,
        num_documents=1000,
        num_truncated=3,
        num_too_long=4,
        num_untrained=2,
        num_tokens=4000,
        num_trained_tokens=1000,
        dropped=(DropCount("no text", 2, "a line 5"), DropCount("no role", 1, "a line 4")),
        untrained_turns=(DropCount("rewritten", 3, "a line 10"), DropCount("it is empty", 2, "a line 10")),
        first_untrained="a line 8",
        sources=(
            SourceCounts(
                num_rows=23,
                num_truncated=3,
                num_untrained=2,
                num_bad=3,
                num_rows_lost=3,
                num_tokens=900,
                num_turns=7,
                num_turns_lost=5,
            ),
            SourceCounts(num_rows=1007, num_too_long=4, num_tokens=4100),
        ),
        empty_files=DropCount("the file is empty", 2, "a.txt"),
        left_out=tuple(DropCount(name, 1, f"b line {line}") for name, line in left_out),
        special_tokens=(DropCount("</s>", 2, "b line 15"), DropCount("<s>", 1, "b line 15")),
        unread=(DropCount("b", 2, "b line 17"), *(DropCount(name, 1, "b line 17") for name in "acdefghij")),
    )
    assert made.num_dropped == 4 + 2 + 3
    assert str(made).split("\n") == [
        "1,030 rows, 1,000 documents, 4,000 tokens (25.0% trained), 3 truncated, 4 dropped as too long, 2 dropped "
        "without a trained token (first: a line 8), 2 empty files skipped (first: a.txt)",
        "  2 rows dropped: no text (first: a line 5)",
        "  1 row dropped: no role (first: a line 4)",
        "  3 turns not trained: rewritten (first: a line 10)",
        "  2 turns not trained: it is empty (first: a line 10)",
        "  warning: the chat template has no place for tools / tool_calls / arguments of tool_calls (1 of 1,030 rows; "
        "first: b line 13): set model.chat_template to a template with tools",
        "  the chat template leaves out `name` of 1 row (first: b line 12)",
        "  the chat template leaves out `end` of 1 row (first: b line 14)",
        "  ignored columns: `b` (2 rows), `a` (1 row), `c` (1 row), `d` (1 row), `e` (1 row), `f` (1 row), `g` (1 "
        "row), `h` (1 row) and 2 others",
        "  the text of 2 rows contains </s>, which the tokenizer reads as a special token, as in transformers (first: "
        "b line 15)",
        "  the text of 1 row contains <s>, which the tokenizer reads as a special token, as in transformers (first: b "
        "line 15)",
    ]
    assert DataReport.from_json(json.loads(json.dumps(made.to_json()))) == made
    in_pieces = DataReport(1, 2, 0, 0, 0, 7, 7, unread=tuple(DropCount(name, 1, "x") for name in "abcdefgh"))
    assert str(in_pieces) == (
        "1 row (a text file is one row), 2 documents (pieces of texts, or answers), 7 tokens (100.0% trained)\n"
        "  ignored columns: " + ", ".join(f"`{name}` (1 row)" for name in "abcdefgh")
    )
