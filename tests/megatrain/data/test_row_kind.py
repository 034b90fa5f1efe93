"""A new kind of rows is one object. Encoding, previews, cache keys, batches and counts need nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast, get_args

import pytest
import torch

from megatrain.base.errors import ConfigError
from megatrain.config.load import load_config
from megatrain.data.dataset import load_dataset
from megatrain.data.encoding import load_tokenizer
from megatrain.data.formats import READERS, DataRow, PlainRow, PromptCompletion, RowFields, RowReader
from megatrain.data.packing import BatchShape
from megatrain.data.preference_format import PREFERENCE
from megatrain.data.preview import dataset_stats, preview_rows
from megatrain.data.row_kind import DocumentFacts, RowKind, TokenDocument, row_kind
from megatrain.data.table import RowFormat
from megatrain.tasks.table import TASK_FACTS, TaskFacts
from megatrain.training.resolve_rows import resolve_data
from oracles.rows_in_memory import loader_of
from oracles.tiered_run import QUICKSTART

CONFIG = """
config_version = 1
task = "{task}"
output_dir = "out"
[model]
model_name_or_path = "{model}"
[data]
max_length = 32
cache_dir = "cache"
[[data.train]]
path = "rows.jsonl"
"""
ROWS = [{"prompt": f"{n}: ", "answers": ["best", "second", "third"], "better": f"good {n}"} for n in range(5)]


def test_config_formats_match_the_readers() -> None:
    assert set(get_args(RowFormat)) == {"auto", *READERS, PREFERENCE.name}
    assert all(name == reader.name for name, reader in READERS.items())


def test_each_task_has_a_kind_of_rows(tmp_path: Path) -> None:
    found = {}
    for task, facts in TASK_FACTS.items():
        Path(tmp_path, "run.toml").write_text(CONFIG.format(task=task, model=QUICKSTART))
        kind = row_kind(facts.rows(None))
        if task != "distill":  # its config needs scores
            assert load_config(tmp_path / "run.toml").config.row_kind is kind
        assert kind.num_documents == 1 or not facts.is_packed, task
        found[task] = kind.key_name, kind.is_text
    assert found == {
        "sft": ("", False),
        "pretrain": ("", True),
        "distill": ("", False),
        "dpo": ("pairs", False),
        "reward": ("texts", False),
    }


@dataclass(frozen=True)
class RankedRow(DataRow):
    """A prompt with three answers, the best one first."""

    answers: Sequence[PromptCompletion]
    location: str
    unread_columns: tuple[str, ...] = ()

    @property
    def num_characters(self) -> int:
        return sum(answer.num_characters for answer in self.answers)


def _read(fields: RowFields) -> RankedRow:
    answers = [PromptCompletion(fields.text("prompt"), text, fields.location) for text in fields["answers"]]
    return RankedRow(answers, fields.location)


class RankedRows(RowKind):
    """Kind of rows with three documents each, which share a micro-batch."""

    key_name = "ranked"
    reader = RowReader("ranked", "rows of ranked answers", _read, ("prompt", "answers"))
    num_documents = 3

    def texts_of(self, row: DataRow) -> Sequence[PlainRow]:
        assert isinstance(row, RankedRow)
        return row.answers

    def titles_of(self, row: DataRow) -> Sequence[str]:
        return ["first", "second", "third"]

    def documents_of(self, examples: Any, max_length: int, state: Any) -> tuple[list[TokenDocument], Any]:
        found = []
        for _, texts in examples:
            for rank, text in enumerate(texts):
                found.append(TokenDocument(text, begins_row=rank == 0, role=rank + 1))
        return found, None

    def collate(self, batch: Any, facts: Sequence[DocumentFacts | None]) -> Any:
        return batch | {"rank": torch.tensor([0 if each is None else each.role for each in facts])}


@pytest.fixture
def ranked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RowKind:
    """Make task = "sft" train on ranked rows, which cannot be packed, and return their kind."""
    monkeypatch.chdir(tmp_path)
    module = ModuleType("megatrain.data.ranked_rows")
    module.RANKED = kind = RankedRows()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    facts = TaskFacts("ranks", "ranks.jsonl", 1e-5, 1e-4, rows=lambda table: "ranked_rows.RANKED", is_packed=False)
    monkeypatch.setitem(cast("dict[str, TaskFacts]", TASK_FACTS), "sft", facts)
    return kind


def problem_of(line: str, table: str) -> str:
    """Add a line to a table of the config, and return the config's only problem."""
    Path("run.toml").write_text(CONFIG.format(task="sft", model=QUICKSTART).replace(table, f"{table}\n{line}"))
    with pytest.raises(ConfigError) as caught:
        load_config("run.toml")
    (problem,) = caught.value.problems
    return str(problem)


@pytest.mark.parametrize("num_documents", [1, 3])
@pytest.mark.parametrize("packing", ["true", '"concat"'])
def test_packing_is_refused_for_unpackable_rows(
    ranked: RowKind, monkeypatch: pytest.MonkeyPatch, num_documents: int, packing: str
) -> None:
    monkeypatch.setattr(ranked, "num_documents", num_documents)
    monkeypatch.setattr(ranked, "reader", None if num_documents == 1 else ranked.reader)
    assert problem_of(f"packing = {packing}", "[data]").endswith(
        f'data.packing = {packing}, but with task = "sft" each text needs a separate row. '
        "Leave the key out, or write packing = false"
    )


def test_wrong_format_error_names_the_fields_of_the_row_kind(ranked: RowKind) -> None:
    rows = "rows of ranked answers (prompt, answers)"
    for format in ("alpaca", "preference"):
        found = problem_of(f'format = "{format}"', "[[data.train]]")
        assert found.endswith(f'.format = "{format}", but task = "sft" trains on {rows}. Leave the key out')


def test_new_row_kind_needs_one_class_and_one_entry(ranked: RowKind) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("run.toml").write_text(CONFIG.format(task="sft", model=QUICKSTART))
    config = load_config("run.toml").config
    assert config.row_kind is ranked and config.rows_per_example == 3 and not config.data.packing
    data, tokenizer = resolve_data(config), load_tokenizer(str(QUICKSTART))
    dataset = load_dataset(data, tokenizer)
    assert len(dataset) == 15 and dataset.roles.tolist() == [1, 2, 3] * 5
    assert dataset.kind.summary(dataset.roles) == "5 rows"
    assert [dropped.reason for dropped in dataset.report.unread] == ["better"]
    assert [row.kind for row in preview_rows(data, tokenizer, n=1)] == ["first", "second", "third"]
    assert dataset_stats(data, tokenizer, 6, 3).num_documents == 15

    loader = loader_of(dataset, BatchShape(6, 1, 32, packing=False), data_seed=1)
    assert loader.steps_per_epoch == 3
    for _ in range(2):
        assert next(loader).micro_batches[0]["rank"].tolist() == [1, 1, 2, 2, 3, 3]
    assert next(loader).micro_batches[0]["rank"].tolist() == [1, 0, 2, 0, 3, 0]
    assert len([folder for folder in Path("cache").iterdir() if folder.is_dir() and folder.name != "checksums"]) == 1
