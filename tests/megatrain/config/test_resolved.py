"""Resolved configs can be read back, traced to the source of each value, and compared key by key."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.config import ConfigError, config_from_toml, load_config, to_toml, write_resolved
from megatrain.config.resolved import DEFAULT, compare, difference, load_run_config, resolved_lines
from megatrain.config.schema import RunConfig

BASE = """
task = "sft"
output_dir = "out"
[model]
model_name_or_path = "org/model"
[[data.train]]
path = "chat.jsonl"
"""


def config(folder: Path, *overrides: str, text: str = BASE) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides=overrides).config


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("learning_rate=2e-5", "optimizer.learning_rate: 1e-05 -> 2e-05"),
        ("seed=7", "seed: 42 -> 7"),
        ("per_device_train_batch_size=4", "training.per_device_train_batch_size: 8 -> 4"),
        ("gradient_accumulation_steps=2", "training.gradient_accumulation_steps: 1 -> 2"),
        ("num_train_epochs=2.0", "training.num_train_epochs: 1.0 -> 2.0"),
        ("compute_dtype=bfloat16", 'precision.compute_dtype: "auto" -> "bfloat16"'),
        ("max_length=512", "data.max_length: 1024 -> 512"),
        ("packing=false", "data.packing: true -> false"),
        ("device=cpu", 'device: "auto" -> "cpu"'),
        ("attn_implementation=eager", 'model.attn_implementation: "auto" -> "eager"'),
        ("model.compile=true", "model.compile: false -> true"),
        ("mlp_rows=4096", "model.mlp_rows: 0 -> 4096"),
        ("use_liger_kernel=true", 'model.use_liger_kernel: "auto" -> true'),
        ('freeze=["*.bias"]', 'model.freeze: [] -> ["*.bias"]'),
        ("adam_beta2=0.99", "optimizer.adam_beta2: 0.95 -> 0.99"),
        ("lr_scheduler_kwargs.num_cycles=0.4", "optimizer.lr_scheduler_kwargs.num_cycles: not set -> 0.4"),
    ],
)
def test_result_altering_keys(tmp_path: Path, override: str, shown: str) -> None:
    changes = compare(config(tmp_path), config(tmp_path, override))
    assert shown in [str(change) for change in changes.altering]


@pytest.mark.parametrize(
    "override",
    [
        "output_dir=/elsewhere",
        "model_name_or_path=org/moved",
        "data.train.0.path=moved.jsonl",
        "data.train.0.columns.prompt=question",
        "tiers.ram.size=2GiB",
        "tiers.nvme.0.path=scratch",
        "placement.optimizer=ram",
        "save_steps=7",
        "save_interval=45min",
        "export.dtype=bfloat16",
        "progress=none",
        "trace_steps=[3]",
        "prefetch=0",
        "sgd_momentum=0.5",
    ],
)
def test_keys_that_may_change_freely(tmp_path: Path, override: str) -> None:
    changes = compare(config(tmp_path), config(tmp_path, override))
    assert changes.altering == ()
    assert changes.free


def test_equal_configs_have_no_changes(tmp_path: Path) -> None:
    changes = compare(config(tmp_path), config(tmp_path))
    assert (changes.altering, changes.free) == ((), ())


def test_a_batch_in_tokens_hides_the_keys_it_replaces(tmp_path: Path) -> None:
    changes = compare(config(tmp_path, "train_batch_tokens=8192"), config(tmp_path))
    assert [str(change) for change in changes.altering] == [
        "training.train_batch_tokens: 8192 -> not set",
        "training.per_device_train_batch_size: not set -> 8",
        "training.gradient_accumulation_steps: not set -> 1",
    ]


def test_a_group_that_is_added(tmp_path: Path) -> None:
    group = '[[optimizer.groups]]\nparams = ["*.bias"]\nlearning_rate = 1e-4\n'
    changes = compare(config(tmp_path), config(tmp_path, text=BASE + group))
    assert [change.key for change in changes.altering] == [
        "optimizer.groups.0.params",
        "optimizer.groups.0.learning_rate",
    ]


@pytest.mark.parametrize(
    ("schedule", "warmup", "alters"),
    [
        ("constant", 0.03, False),
        ("constant_with_warmup", 0.03, True),
        ("constant_with_warmup", 5, False),
        ("constant_with_warmup", 0, False),
        ("inverse_sqrt", 5, False),
        ("linear", 5, True),
        ("cosine", 0, True),
    ],
)
def test_more_steps_alter_only_schedules_that_depend_on_max_steps(
    tmp_path: Path, schedule: str, warmup: float, alters: bool
) -> None:
    table = (f"lr_scheduler_type={schedule}", f"warmup_steps={warmup}")
    changes = compare(config(tmp_path, *table, "max_steps=20"), config(tmp_path, *table, "max_steps=30"))
    assert bool(changes.altering) == alters
    assert len(changes.altering) + len(changes.free) == 1


def test_epochs_are_free_if_max_steps_is_set(tmp_path: Path) -> None:
    before, now = (config(tmp_path, "max_steps=20", f"num_train_epochs={n}") for n in (1, 2))
    assert [change.key for change in compare(before, now).free] == ["training.num_train_epochs"]
    assert compare(config(tmp_path), now).altering


def test_keys_of_a_newly_chosen_optimizer_alter_results(tmp_path: Path) -> None:
    before, now = config(tmp_path), config(tmp_path, "optim=sgd", "sgd_momentum=0.5")
    assert {change.key for change in compare(before, now).altering} >= {"optimizer.optim", "optimizer.sgd_momentum"}


@given(
    steps=st.integers(1, 10**6),
    learning_rate=st.floats(1e-9, 1.0),
    interval=st.one_of(st.none(), st.floats(1e-3, 1e7)),
    name=st.text(min_size=1, max_size=8).filter(lambda text: text.isprintable()),
)
def test_config_round_trips_through_toml(steps: int, learning_rate: float, interval: float | None, name: str) -> None:
    values = {
        "task": "sft",
        "output_dir": "/out",
        "run_name": name,
        "model": {"model_name_or_path": name},
        "data": {"train": [{"path": name, "columns": {"prompt": name}}]},
        "optimizer": {"learning_rate": learning_rate},
        "checkpoint": {"save_steps": steps} | ({} if interval is None else {"save_interval": f"{interval:.6f}s"}),
    }
    before = RunConfig.model_validate(values)
    again = config_from_toml(to_toml(before))
    assert again == before
    assert compare(before, again) == compare(again, before)
    assert not compare(before, again).altering and not compare(before, again).free


def test_dumped_config_loads_without_the_original_file(tmp_path: Path) -> None:
    before = config(tmp_path, "tiers.nvme.0.path=scratch", "resume_from_checkpoint=other")
    (tmp_path / "run.toml").unlink()
    assert config_from_toml(to_toml(before)) == before


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("seed = 42", "seeds = 42", "unknown key `seeds`. A newer version of megatrain-tier wrote it: upgrade"),
        ('optim = "adamw"', 'optim = "soap"', 'optimizer.optim = "soap" is not allowed. A newer version of megatrain'),
        ("seed = 42", "seed = = 42", "this is not TOML: Invalid value"),
    ],
)
def test_config_of_another_version_gives_a_clear_error(tmp_path: Path, old: str, new: str, expected: str) -> None:
    text = to_toml(config(tmp_path))
    assert text.count(f"\n{old}\n") == 1
    with pytest.raises(ConfigError) as caught:
        config_from_toml(text.replace(f"\n{old}\n", f"\n{new}\n"), "checkpoint of step 3")
    assert expected in str(caught.value)
    assert "in checkpoint of step 3" in str(caught.value)


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


def test_a_default_that_follows_from_another_key_is_a_default(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(BASE.replace('"sft"', '"pretrain"') + "[data]\nmax_length = 64\n")
    found = origins(path)
    assert load_config(path).config.data.train_on == "all"
    assert (found["data.train_on"], found["data.max_length"]) == (DEFAULT, f"{path}:9")


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
    assert load_run_config(path) == load_run_config(tmp_path / "out") == load_run_config(resolved) == config
    with pytest.raises(ConfigError, match=r"no config.resolved.toml in this folder. Give a config file"):
        load_run_config(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        load_run_config(tmp_path / "nowhere.toml")
