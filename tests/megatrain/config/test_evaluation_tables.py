"""``[[data.eval]]`` and ``[evaluation]``: defaults, names, and invalid values."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.config import ConfigError, config_from_toml, load_config, to_toml
from megatrain.config.resolved import compare
from megatrain.training.resolve import resolve_evaluation

HEAD = 'task = "sft"\noutput_dir = "out"\n[model]\nmodel_name_or_path = "model"\n[[data.train]]\npath = "chat.jsonl"\n'
SETS = '[[data.eval]]\npath = "held_out.jsonl"\nmax_samples = 7\n[[data.eval]]\nname = "book"\npath = "*.txt"\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(HEAD + text)
    return path


def test_eval_strategy_defaults_to_steps_if_there_are_sets(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "")).config.evaluation.eval_strategy == "no"
    table = load_config(write(tmp_path, SETS)).config.evaluation
    assert (table.eval_strategy, table.eval_steps, table.eval_on_start) == ("steps", 100, False)
    assert (table.per_device_eval_batch_size, table.eval_max_samples) == (None, None)
    epoch = load_config(write(tmp_path, SETS + '[evaluation]\neval_strategy = "epoch"\n'))
    assert epoch.config.evaluation.eval_strategy == "epoch" and not epoch.warnings


@pytest.mark.parametrize(("task", "rows_of_one"), [("sft", 1), ("dpo", 2)])
def test_a_batch_of_evaluations_counts_examples(task: str, rows_of_one: int, tmp_path: Path) -> None:
    path = write(tmp_path, SETS + "[evaluation]\nper_device_eval_batch_size = 1\n")
    path.write_text(path.read_text().replace('task = "sft"', f'task = "{task}"'))
    config = load_config(path).config
    assert resolve_evaluation(config).rows == rows_of_one
    assert resolve_evaluation(load_config(path, (), ["per_device_eval_batch_size=3"]).config).rows == 3 * rows_of_one
    path.write_text(path.read_text().replace("per_device_eval_batch_size = 1\n", ""))
    assert resolve_evaluation(load_config(path).config).rows is None, "the same number as in training"


def test_sets_are_sources_with_a_name(tmp_path: Path) -> None:
    path = write(tmp_path, SETS + '[[data.eval]]\npath = "some/hub"\nsubset = "main"\nsplit = "test"\n')
    first, second, third = load_config(path).config.data.eval
    assert [each.display_name for each in (first, second, third)] == ["held_out", "book", "hub"]
    assert first.path == str(tmp_path / "held_out.jsonl") and second.path == str(tmp_path / "*.txt")
    assert (first.as_source(5).max_samples, first.as_source(9).max_samples, second.as_source(9).max_samples) == (
        5,
        7,
        9,
    )
    assert second.as_source().subset is None and second.as_source().max_samples is None
    assert (third.as_source().path, third.as_source().subset, third.as_source().split) == ("some/hub", "main", "test")


def test_the_resolved_file_gives_the_same_config(tmp_path: Path) -> None:
    more = "[evaluation]\neval_steps = 5\neval_max_samples = 3\nper_device_eval_batch_size = 2\n"
    config = load_config(write(tmp_path, SETS + more)).config
    assert config_from_toml(to_toml(config)) == config
    assert not compare(config, load_config(write(tmp_path, "")).config).altering


@pytest.mark.parametrize("key", ["label_smoothing_factor", "neftune_noise_alpha"])
def test_keys_of_the_training_objective_alter_results(tmp_path: Path, key: str) -> None:
    before = load_config(write(tmp_path, "")).config
    now = load_config(write(tmp_path, ""), overrides=[f"{key}=0.1"]).config
    assert [str(change) for change in compare(before, now).altering] == [f"training.{key}: 0.0 -> 0.1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[evaluation]\neval_strategy = "steps"', "needs rows to evaluate on, but there is no [[data.eval]]"),
        ("[evaluation]\neval_on_start = true", "evaluation.eval_on_start needs rows to evaluate on"),
        ("[evaluation]\neval_strategy = 'never'", 'Write one of "no", "steps", "epoch"'),
        ("[evaluation]\neval_stps = 5", "Did you mean evaluation.eval_steps?"),
        ("[training]\neval_steps = 5", "`eval_steps` belongs in [evaluation]: write evaluation.eval_steps"),
        ("[[data.eval]]\nname = 'x'", "`data.eval.0.path` is missing"),
        (
            "[[data.eval]]\npath = 'a/x.txt'\n[[data.eval]]\npath = 'b/x.txt'",
            'data.eval.1 and data.eval.0 are both called "x"',
        ),
        ("[training]\nlabel_smoothing_factor = 1.0", "training.label_smoothing_factor = 1.0 is out of range"),
        ("[training]\nneftune_noise_alpha = -1", "training.neftune_noise_alpha = -1 is out of range"),
        ("[[data.eval]]\npath = 'a'\ncolumns = { body = 'x' }", "`body` is not a field of a row"),
    ],
)
def test_invalid_evaluation_settings_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text + "\n"))
    assert expected in str(caught.value)


def test_plain_text_evaluation_requires_pretraining(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(HEAD.replace('"sft"', '"pretrain"') + '[[data.eval]]\npath = "x.jsonl"\nformat = "messages"\n')
    with pytest.raises(ConfigError, match=r'data.eval.0.format = "messages" is not plain text'):
        load_config(path)


def test_ineffective_evaluation_keys_are_reported(tmp_path: Path) -> None:
    off = load_config(write(tmp_path, SETS + '[evaluation]\neval_strategy = "no"\n'))
    assert any("[[data.eval]] has no effect" in text for text in off.warnings)
    epoch = load_config(write(tmp_path, SETS + '[evaluation]\neval_strategy = "epoch"\neval_steps = 4\n'))
    assert any("eval_steps has no effect" in text for text in epoch.warnings)
    old = load_config(write(tmp_path, SETS + '[training]\nevaluation_strategy = "epoch"\n'))
    assert old.config.evaluation.eval_strategy == "epoch"
    assert any("`evaluation_strategy` is the name in transformers 4" in text for text in old.warnings)


def test_overrides_prefer_training_sources_to_evaluation_sets(tmp_path: Path) -> None:
    path = write(tmp_path, SETS)
    with pytest.raises(ConfigError, match=r"data.train is a list"):
        load_config(path, overrides=["max_samples=5"])
    config = load_config(path, overrides=["data.eval.1.max_samples=5", "eval_steps=9"]).config
    assert (config.data.eval[1].max_samples, config.evaluation.eval_steps) == (5, 9)


def test_held_out_rows_enable_evaluation(tmp_path: Path) -> None:
    config = load_config(write_val(tmp_path, "0.01")).config
    assert (config.data.val_size, config.evaluation.eval_strategy) == (0.01, "steps")
    assert config_from_toml(to_toml(config)) == config
    now = load_config(write_val(tmp_path, "50")).config
    assert now.data.val_size == 50 and not compare(config, now).altering  # the data's fingerprint detects the change
    loaded = load_config(write_val(tmp_path, "50"), overrides=["eval_strategy=no"])
    assert loaded.warnings == ('data.val_size keeps rows that evaluation.eval_strategy = "no" never evaluates',)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("0", "out of range"),
        ("-1", "out of range"),
        ("1.5", "data.val_size = 1.5 is not a whole number of rows. Write 1, or a fraction below 1 of all rows"),
        ('"1%"', "data.val_size"),
        ("true", "data.val_size"),
    ],
)
def test_invalid_val_size_is_refused(tmp_path: Path, value: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(write_val(tmp_path, value))
    (problem,) = error.value.problems
    assert words in str(problem)


def test_val_size_and_evaluation_sets_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.val_size and \[\[data.eval\]\] both set the rows for evaluation"):
        load_config(write_val(tmp_path, "0.1", SETS))


def write_val(folder: Path, value: str, more: str = "") -> Path:
    path = write(folder, more)
    path.write_text(path.read_text().replace("[[data.train]]", f"[data]\nval_size = {value}\n[[data.train]]"))
    return path
