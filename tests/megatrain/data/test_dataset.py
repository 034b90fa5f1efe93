"""From a config to tokens: several sources, unusable tokenizers, and rows that a task refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import load_config
from megatrain.data.dataset import load_dataset
from megatrain.data.encoding import load_tokenizer, pad_token_id
from megatrain.data.rows_report import DataError
from megatrain.training.resolve import resolve_data

MODEL = Path(__file__).parents[3] / "examples/quickstart/model"
CHATML = "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}\n{% endfor %}"


def write_config(folder: Path, task: str, *paths: str) -> Path:
    sources = "".join(f'[[data.train]]\npath = "{path}"\n' for path in paths)
    text = f'task = "{task}"\noutput_dir = "out"\n[model]\nmodel_name_or_path = "{MODEL}"\n[data]\nmax_length = 32\n'
    path = folder / "run.toml"
    path.write_text(text + sources)
    return path


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("Call me Ishmael. " * 10)
    rows = [{"prompt": "Who? ", "completion": "Ishmael"}, {"messages": [{"role": "user", "content": "hi"}]}]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_sources_in_order(files: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    dataset = load_dataset(resolve_data(load_config(write_config(files, "sft", "a.txt", "b.jsonl")).config), tokenizer)
    assert dataset.report.num_rows == 3
    assert dataset.report.num_untrained == 1  # the conversation without an assistant
    texts = [
        tokenizer.decode(dataset.tokens[a:b].tolist()) for a, b in zip(dataset.starts, dataset.starts[1:], strict=False)
    ]
    assert texts[0].startswith("Call me Ishmael.")
    assert texts[-1] == "Who? Ishmael<|endoftext|>"
    assert "3 rows" in str(dataset.report)


def test_pretraining_takes_text_only(files: Path, tokenizer: Any) -> None:
    config = load_config(write_config(files, "pretrain", "a.txt", "b.jsonl")).config
    with pytest.raises(DataError, match=r'b.jsonl line 1: task = "pretrain" needs plain text, and this row is not'):
        load_dataset(resolve_data(config), tokenizer)


def test_sources_are_read_once_unless_a_checksum_is_needed(
    files: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cache, computing a checksum reads a source a second time. Only a run that saves needs the checksum."""
    read: list[Path] = []
    monkeypatch.setattr("megatrain.data.dataset.read_checksum", lambda file: str(read.append(file)))
    config = load_config(write_config(files, "sft", "a.txt"), overrides=["data.cache_dir=none"]).config
    loaded = load_dataset(resolve_data(config), tokenizer)
    assert read == []
    assert len(loaded.source_checksums()) == 1 and read == [files / "a.txt"]


def test_max_samples(files: Path, tokenizer: Any) -> None:
    config = load_config(write_config(files, "sft", "b.jsonl"), overrides=["data.train.0.max_samples=1"])
    assert load_dataset(resolve_data(config.config), tokenizer).report.num_rows == 1


def test_tokenizer_with_a_template_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(CHATML)
    tokenizer = load_tokenizer(str(MODEL), chat_template=str(path))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "[user]\nx\n"
    assert pad_token_id(tokenizer) == 0
    tokenizer.pad_token_id, tokenizer.eos_token_id = None, 7
    assert pad_token_id(tokenizer) == 7
    tokenizer.eos_token_id = None
    assert pad_token_id(tokenizer) == 0


def test_missing_tokenizer_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no such folder. Check model.model_name_or_path"):
        load_tokenizer(str(tmp_path / "none"))
    with pytest.raises(
        DataError, match=r"Download the model first, for example: hf download Qwen/Qwen3-0.6B --local-dir"
    ):
        load_tokenizer("Qwen/Qwen3-0.6B")


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no tokenizer.json: only fast tokenizers are supported"):
        load_tokenizer(str(tmp_path))


def test_broken_tokenizer_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(DataError, match="the tokenizer cannot be opened"):
        load_tokenizer(str(tmp_path))
