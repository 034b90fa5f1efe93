"""Where each value of a resolved config comes from, and what differs between two runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.config import ConfigError, load_config, to_toml, write_resolved
from megatrain.config.origins import DEFAULT, difference, load_run, resolved_lines

TEXT = """task = "sft"
output_dir = "out"
[model]
model_name_or_path = "org/model"
[[data.train]]
path = "one.jsonl"
columns = { prompt = "q", completion = "a" }
[[data.train]]
path = "two.jsonl"
[optimizer]
learning_rate = 2e-5
[optimizer.lr_scheduler_kwargs]
num_cycles = 0.4
[tiers]
ram = { size = "2GiB" }
[[tiers.nvme]]
path = "scratch"
"""


def origins(path: Path, *extra: Path, overrides: tuple[str, ...] = ()) -> dict[str, str]:
    loaded = load_config(path, extra, overrides)
    lines = resolved_lines(loaded)
    assert "\n".join(line.text for line in lines) + "\n" == to_toml(loaded.config)
    return {line.key: line.origin for line in lines if line.key}


def test_every_value_has_an_origin(tmp_path: Path) -> None:
    path, over = tmp_path / "run.toml", tmp_path / "over.toml"
    path.write_text(TEXT)
    over.write_text("[training]\nmax_steps = 5\n")
    found = origins(path, over, overrides=("seed=7", "data.train.1.weight=2.0"))
    assert found["task"] == f"{path}:1"
    assert found["data.train.0.path"] == f"{path}:6"
    assert found["data.train.0.columns"] == f"{path}:7"
    assert found["data.train.1.path"] == f"{path}:9"
    assert found["optimizer.learning_rate"] == f"{path}:11"
    assert found["optimizer.lr_scheduler_kwargs"] == f"{path}:12"
    assert found["tiers.ram.size"] == f"{path}:15"
    assert found["tiers.nvme.0.path"] == f"{path}:17"
    assert found["training.max_steps"] == f"{over}:2"
    assert (found["seed"], found["data.train.1.weight"]) == ("--set", "--set")
    assert {found["run_name"], found["tiers.nvme.0.size"], found["optimizer.optim"], found["data.packing"]} == {DEFAULT}


def test_difference_of_two_runs(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TEXT)
    before = load_config(path).config
    now = load_config(
        path,
        overrides=[
            "learning_rate=1e-5",
            "data.train.0.path=x.jsonl",
            "data.train.0.columns.prompt=p",
            "tiers.ram.size=3GiB",
        ],
    ).config
    found = difference(before, now)
    assert [change.key for change in found.altering] == ["optimizer.learning_rate"]
    assert [change.key for change in found.by_contents] == ["data.train.0.path", "data.train.0.columns.prompt"]
    assert [change.key for change in found.free] == ["tiers.ram.size"]
    assert difference(before, before).is_empty and not found.is_empty


def test_a_longer_run_has_other_results(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        TEXT.replace("[optimizer]", '[optimizer]\nlr_scheduler_type = "constant"').replace("num_cycles", "#")
    )

    def changed(*overrides: str) -> list[str]:
        before = load_config(path, overrides=overrides[:1]).config
        return [change.key for change in difference(before, load_config(path, overrides=overrides[1:]).config).altering]

    assert changed("max_steps=5", "max_steps=6") == ["training.max_steps"]
    assert changed("num_train_epochs=1.0", "num_train_epochs=2.0") == ["training.num_train_epochs"]
    assert changed("max_steps=5", "max_steps=5", "num_train_epochs=2.0") == []


def test_a_run_is_a_file_or_an_output_dir(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TEXT)
    config = load_config(path).config
    resolved = write_resolved(config)
    assert load_run(path) == load_run(tmp_path / "out") == load_run(resolved) == config
    with pytest.raises(ConfigError, match=r"no config.resolved.toml in this folder. Give a config file"):
        load_run(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        load_run(tmp_path / "nowhere.toml")
