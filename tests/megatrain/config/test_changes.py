"""Every key is known to alter results or not, and two configs are compared key by key."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.config import ConfigError, RunConfig, config_from_toml, load_config, to_toml
from megatrain.config.changes import ALTERS_RESULTS, alters_results, compare
from megatrain.config.keys import known_keys, known_tables

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


def test_every_key_is_classified() -> None:
    for key in known_keys():
        assert alters_results(key) in (True, False)


def test_every_class_is_of_a_key_that_exists() -> None:
    assert set(ALTERS_RESULTS) <= known_keys() | known_tables()


def test_tables_that_mix_both_name_each_key() -> None:
    """A new key of such a table must be decided upon: no prefix may do it."""
    assert not {"model", "data", "training"} & set(ALTERS_RESULTS)
    with pytest.raises(AssertionError, match=r"data\.shuffle is not classified"):
        alters_results("data.shuffle")


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
        ("use_liger_kernel=true", "model.use_liger_kernel: false -> true"),
        ('freeze=["*.bias"]', 'model.freeze: [] -> ["*.bias"]'),
        ("adam_beta2=0.99", "optimizer.adam_beta2: 0.95 -> 0.99"),
        ("lr_scheduler_kwargs.num_cycles=0.4", "optimizer.lr_scheduler_kwargs.num_cycles: not set -> 0.4"),
    ],
)
def test_what_alters_results(tmp_path: Path, override: str, shown: str) -> None:
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
def test_what_is_free(tmp_path: Path, override: str) -> None:
    changes = compare(config(tmp_path), config(tmp_path, override))
    assert changes.altering == ()
    assert changes.free


def test_nothing_changed_is_no_change(tmp_path: Path) -> None:
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
def test_training_longer_alters_only_schedules_that_know_the_end(
    tmp_path: Path, schedule: str, warmup: float, alters: bool
) -> None:
    table = (f"lr_scheduler_type={schedule}", f"warmup_steps={warmup}")
    changes = compare(config(tmp_path, *table, "max_steps=20"), config(tmp_path, *table, "max_steps=30"))
    assert bool(changes.altering) == alters
    assert len(changes.altering) + len(changes.free) == 1


def test_epochs_mean_nothing_beside_steps(tmp_path: Path) -> None:
    before, now = (config(tmp_path, "max_steps=20", f"num_train_epochs={n}") for n in (1, 2))
    assert [change.key for change in compare(before, now).free] == ["training.num_train_epochs"]
    assert compare(config(tmp_path), now).altering


def test_a_key_of_another_optimizer_alters_when_that_is_chosen(tmp_path: Path) -> None:
    before, now = config(tmp_path), config(tmp_path, "optim=sgd", "sgd_momentum=0.5")
    assert {change.key for change in compare(before, now).altering} >= {"optimizer.optim", "optimizer.sgd_momentum"}


@given(
    steps=st.integers(1, 10**6),
    learning_rate=st.floats(1e-9, 1.0),
    interval=st.one_of(st.none(), st.floats(1e-3, 1e7)),
    name=st.text(min_size=1, max_size=8).filter(lambda text: text.isprintable()),
)
def test_a_config_comes_back_from_its_text(steps: int, learning_rate: float, interval: float | None, name: str) -> None:
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


def test_the_text_needs_no_file(tmp_path: Path) -> None:
    before = config(tmp_path, "tiers.nvme.0.path=scratch", "resume_from_checkpoint=other")
    (tmp_path / "run.toml").unlink()
    assert config_from_toml(to_toml(before)) == before


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("seed = 42", "seeds = 42", "unknown key `seeds`. A newer version of megatrain-tier wrote it: upgrade"),
        ('optim = "adamw"', 'optim = "muon"', 'optimizer.optim = "muon" is not a choice. A newer version of megatrain'),
        ("seed = 42", "seed = = 42", "this is not TOML: Invalid value"),
    ],
)
def test_a_text_of_another_version(tmp_path: Path, old: str, new: str, expected: str) -> None:
    text = to_toml(config(tmp_path))
    assert text.count(f"\n{old}\n") == 1
    with pytest.raises(ConfigError) as caught:
        config_from_toml(text.replace(f"\n{old}\n", f"\n{new}\n"), "checkpoint of step 3")
    assert expected in str(caught.value)
    assert "in checkpoint of step 3" in str(caught.value)
