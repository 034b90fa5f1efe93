"""A config with mistakes is used without them, so that the rest can be looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.config import ConfigError, load_config
from megatrain.config.salvage import salvage

GOOD = """task = "sft"
output_dir = "out"
[model]
model_name_or_path = "org/model"
[[data.train]]
path = "chat.jsonl"
"""


def problems_of(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return caught.value


@pytest.mark.parametrize(
    "wrong",
    [
        "[training]\nbogus = 3\n",
        '[optimizer]\nlearning_rate = "x"\n',
        "[tiers.ram]\nsize = 3\n",
        '[[data.train]]\npath = "b.jsonl"\nformat = "nonsense"\n',
        "[training]\ntrain_batch_tokens = 100\n",
        '[placement]\nweights = ["nvme"]\n',
        "[bogus]\nx = 1\n",
    ],
)
def test_the_rest_can_be_used(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(GOOD + wrong)
    error = problems_of(path)
    config, further = salvage(path, (), error.problems)
    assert config is not None and further == []
    assert config.model.model_name_or_path == "org/model"
    assert config.data.train[0].path.endswith("chat.jsonl")


def test_problems_behind_others_are_found(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(GOOD + '[optimizer]\nlearning_rate = "x"\n[training]\ntrain_batch_tokens = 100\n')
    config, further = salvage(path, (), problems_of(path).problems)
    assert config is not None and config.training.train_batch_tokens is None
    assert [(problem.key, problem.line) for problem in further] == [("training.train_batch_tokens", 10)]


@pytest.mark.parametrize("text", ['task = "sft"\n', "x = = 1", GOOD.replace('"sft"', '"dpo"')])
def test_too_little_is_left(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    config, _ = salvage(path, (), problems_of(path).problems)
    assert config is None


def test_further_files_are_laid_over(tmp_path: Path) -> None:
    path, over = tmp_path / "run.toml", tmp_path / "over.toml"
    path.write_text(GOOD)
    over.write_text("[data]\nmax_length = 64\nbogus = 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, [over])
    config, _ = salvage(path, (over,), caught.value.problems)
    assert config is not None and config.data.max_length == 64
