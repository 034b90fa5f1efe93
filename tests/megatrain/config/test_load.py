"""A config file is loaded into one validated object, which survives a round trip through its written form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from megatrain.config import ConfigError, LoadedConfig, load_config, to_toml, write_resolved
from megatrain.config.keys import KEYS, TABLES
from megatrain.config.load import salvage
from megatrain.config.schema import RunConfig
from megatrain.training.resolve import resolve_batch

SMALLEST = """
task = "sft"
output_dir = "out"
[model]
model_name_or_path = "model"
[[data.train]]
path = "chat.jsonl"
"""


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def smallest(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return write(tmp_path, SMALLEST)


def test_smallest_file_has_every_default(smallest: Path) -> None:
    loaded = load_config(smallest)
    config = loaded.config
    assert isinstance(loaded, LoadedConfig)
    assert (config.task, config.run_name, config.seed, config.data_seed) == ("sft", "out", 42, 42)
    assert config.data.train_on == "assistant"
    assert config.rows_per_step == 8
    assert config.micro_batch_size == 8
    assert config.tiers.ram.size.is_auto
    assert loaded.warnings == ()
    assert loaded.origins["task"] == f"{smallest}:2"


def test_paths_are_relative_to_the_file(smallest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    more = '[[tiers.nvme]]\npath = "scratch/a"\nmount_point = "scratch"\n'
    config = load_config(write(tmp_path, SMALLEST + more)).config
    assert (config.tiers.nvme[0].path, config.tiers.nvme[0].mount_point) == (
        tmp_path / "scratch/a",
        tmp_path / "scratch",
    )
    assert config.output_dir == tmp_path / "out"
    assert config.model.model_name_or_path == str(tmp_path / "model")
    assert config.data.train[0].path == str(tmp_path / "chat.jsonl")


def test_parent_folders_and_globs_in_paths(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    path = write(folder, SMALLEST.replace('"out"', '"../out"').replace('"chat.jsonl"', '"./data/**/*.jsonl"'))
    config = load_config(path).config
    assert config.output_dir == tmp_path / "out"
    assert config.data.train[0].path == str(folder / "data/**/*.jsonl")


def test_model_name_that_is_not_a_folder_is_unchanged(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, SMALLEST.replace('"model"', '"Qwen/Qwen3-0.6B"'))).config
    assert config.model.model_name_or_path == "Qwen/Qwen3-0.6B"


def test_layers_later_wins_tables_merge_arrays_replace(smallest: Path, tmp_path: Path) -> None:
    extra = write(
        tmp_path,
        'seed = 7\n[optimizer]\nlearning_rate = 3e-4\nadam_beta1 = 0.8\n[[data.train]]\npath = "other.txt"\n',
        "over.toml",
    )
    loaded = load_config(smallest, [extra], ["learning_rate=5e-4"])
    config = loaded.config
    assert config.seed == config.data_seed == 7
    assert (config.optimizer.learning_rate, config.optimizer.adam_beta1) == (5e-4, 0.8)
    assert [dataset.path for dataset in config.data.train] == [str(tmp_path / "other.txt")]
    assert loaded.origins["optimizer.learning_rate"] == "--set"
    assert loaded.origins["optimizer.adam_beta1"] == f"{extra}:4"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("max_length=64", "data.max_length", 64),
        ("data.max_length=64", "data.max_length", 64),
        ("data.train.0.max_samples=5", "data.train.0.max_samples", 5),
        ("run_name=first try", "run_name", "first try"),
        ("run_name='quoted'", "run_name", "quoted"),
        ("packing=false", "data.packing", False),
        ("max_length=4_096", "data.max_length", 4096),
        ("prefetch=0", "advanced.prefetch", 0),
        ("prefetch=1GiB", "advanced.prefetch", 1 << 30),
        ("recompute=none:3", "training.recompute", "none:3"),
        ("placement.weights=ram", "placement.weights", ("ram",)),
        ('freeze=["*.bias"]', "model.freeze", ("*.bias",)),
        ("num_train_epochs=2", "training.num_train_epochs", 2.0),
        ("lr_scheduler_kwargs.num_cycles=0.4", "optimizer.lr_scheduler_kwargs.num_cycles", 0.4),
    ],
)
def test_set(smallest: Path, override: str, key: str, value: object) -> None:
    found: object = load_config(smallest, overrides=[override]).config
    for part in key.split("."):
        if isinstance(found, tuple):
            found = found[int(part)]
        else:
            found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value


def test_set_appends_to_a_list_and_reads_paths_from_here(
    smallest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_config(smallest, overrides=["tiers.nvme.0.path=scratch", "tiers.nvme.0.size=2GiB"]).config
    assert config.tiers.nvme[0].path == tmp_path / "elsewhere/scratch"
    assert config.tiers.nvme[0].size.nbytes == 2 << 30


def test_pretrain_trains_everything(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, SMALLEST.replace('"sft"', '"pretrain"'))).config
    assert config.data.train_on == "all"


def test_names_of_transformers_4_are_accepted_with_a_warning(tmp_path: Path) -> None:
    text = SMALLEST + "[optimizer]\nwarmup_ratio = 0.1\n[training]\ngradient_checkpointing = true\n"
    path = write(tmp_path, text)
    loaded = load_config(path)
    assert loaded.config.optimizer.warmup_steps == 0.1
    assert f"{path}:9: `warmup_ratio` is the name in transformers 4; here: optimizer.warmup_steps" in loaded.warnings
    assert any("`gradient_checkpointing` is always on here" in warning for warning in loaded.warnings)


FULL = (
    SMALLEST
    + """
format = "prompt_completion"
columns = { prompt = "question \\u00e9", completion = "answer" }
max_samples = 20_000
[data]
max_length = 128
packing = false
overlong = "drop"
[training]
train_batch_tokens = 65_536
max_steps = 10
[optimizer]
weight_decay_exclude = []
lr_scheduler_type = "cosine_with_min_lr"
lr_scheduler_kwargs = { min_lr_rate = 0.1 }
[checkpoint]
save_interval = "1h30min"
save_total_limit = 3
resume_from_checkpoint = "../other"
min_free_disk = "20GB"
[export]
max_shard_size = "1500MB"
[tiers]
safety_margin = "2GiB"
[tiers.ram]
size = "90%"
pinned = "1.5GiB"
[[tiers.nvme]]
path = "scratch/a"
mount_point = "scratch"
size = "300GB"
rate = "2.5GB/s"
[[tiers.nvme]]
path = "scratch/b"
rate = "1.25GB/s"
[placement]
optimizer = ["ram", "nvme"]
[advanced]
prefetch = "1000000B"
eviction_policy = "lru"
"""
)


@pytest.mark.parametrize("text", [SMALLEST, FULL])
def test_resolved_file_reproduces_the_config(tmp_path: Path, text: str) -> None:
    config = load_config(write(tmp_path, text)).config
    path = write_resolved(config)
    assert path == tmp_path / "out/config.resolved.toml"
    again = load_config(path).config
    assert again == config
    assert to_toml(again) == path.read_text()
    assert not list(path.parent.glob("*.partial"))


def test_resolved_file_holds_every_key(smallest: Path) -> None:
    text = to_toml(load_config(smallest).config)
    optional = {
        "model.tokenizer_name_or_path", "data.train.columns", "data.train.max_samples", "data.train.subset",
        "data.train.split", "data.train.json_key", "data.train.weight_from_step",
        "data.max_cache_size", "data.val_size",
        "optimizer.lr_scheduler_kwargs",
        "optimizer.groups.params", "optimizer.groups.learning_rate", "optimizer.groups.weight_decay",
        "optimizer.groups.lr_mult", "optimizer.optim_args", "evaluation.greater_is_better",
        "checkpoint.save_interval", "training.train_batch_tokens", "advanced.file_size",
        "tiers.nvme.path", "tiers.nvme.size", "tiers.nvme.rate", "tiers.nvme.max_written",
        "tiers.nvme.mount_point", "model.revision", "lora.rank_pattern", "lora.alpha_pattern",
        "lora.adapter_name_or_path", "distill.scores", "distill.top_k",
        "evaluation.eval_max_samples", "evaluation.per_device_eval_batch_size",
    }  # fmt: skip
    optional |= {key for key in KEYS if key.startswith("data.eval.")}
    for key in KEYS.keys() - optional:
        assert f"\n{key.rsplit('.', 1)[-1]} = " in "\n" + text, key


def test_save_keys_select_the_checkpoint_strategy(smallest: Path, tmp_path: Path) -> None:
    usual = load_config(smallest).config.checkpoint
    assert (usual.save_strategy, usual.save_steps, usual.save_total_limit) == ("steps", 200, 2)
    assert (usual.resume_from_checkpoint, usual.min_free_disk) == ("auto", 1 << 30)
    timed = load_config(smallest, overrides=["save_interval=45min"]).config.checkpoint
    assert (timed.save_strategy, timed.save_interval) == ("time", 2700.0)
    never = load_config(smallest, overrides=["save_strategy=no", "save_on_signal=false"]).config.checkpoint
    assert (usual.is_on, timed.is_on, never.is_on) == (True, True, False)


@pytest.mark.parametrize(("value", "expected"), [("true", "auto"), ("false", "no"), ("auto", "auto"), ("no", "no")])
def test_resume_from_checkpoint_accepts_booleans(smallest: Path, value: str, expected: str) -> None:
    table = load_config(smallest, overrides=[f"resume_from_checkpoint={value}"]).config.checkpoint
    assert table.resume_from_checkpoint == expected


def test_the_run_to_continue_is_relative_to_the_file(
    smallest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, SMALLEST + '[checkpoint]\nresume_from_checkpoint = "../other"\n', "next.toml")
    monkeypatch.chdir("/")
    assert load_config(path).config.checkpoint.resume_from_checkpoint == str(tmp_path.parent / "other")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    config = load_config(smallest, overrides=["resume_from_checkpoint=auto/../other"]).config
    assert config.checkpoint.resume_from_checkpoint == str(tmp_path / "here/other")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["save_strategy=epoch", "save_steps=7"], "checkpoint.save_steps"),
        (["save_strategy=no", "save_interval=1h"], "checkpoint.save_interval"),
    ],
)
def test_keys_of_another_strategy_have_no_effect(smallest: Path, overrides: list[str], key: str) -> None:
    warnings = load_config(smallest, overrides=overrides).warnings
    assert any(line.startswith(f"{key} has no effect with save_strategy") for line in warnings), warnings


def test_unwritable_output_is_a_config_problem(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, SMALLEST.replace('"out"', '"file/inside"'))).config
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output_dir: cannot write in"):
        write_resolved(config)


def test_batch_in_tokens(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, SMALLEST), overrides=["train_batch_tokens=8192", "max_length=512"]).config
    assert config.rows_per_step == 16
    assert config.micro_batch_size is None
    rows = {device: resolve_batch(config, device).micro_batch_rows for device in ("cpu", "cuda")}
    assert rows == {"cpu": 4, "cuda": 16}, "2,048 and 8,192 tokens, whatever memory there is"
    assert resolve_batch(load_config(write(tmp_path, SMALLEST)).config, "cuda").micro_batch_rows == 8, "as it is given"
    cut = {lanes: replace(resolve_batch(config, "cuda"), num_lanes=lanes).num_micro_batches for lanes in (1, 3, 8, 99)}
    assert cut == {1: 1, 3: 4, 8: 8, 99: 16}, "at least one for each lane, if the rows suffice"


def test_config_is_frozen(smallest: Path) -> None:
    config = load_config(smallest).config
    with pytest.raises(ValidationError, match="frozen"):
        config.optimizer.learning_rate = 1.0


def test_every_key_is_described() -> None:
    def check(model: type) -> int:
        fields = model.model_fields  # type: ignore[attr-defined]
        for name, field in fields.items():
            assert field.description, name
        return len(fields)

    assert check(RunConfig) >= 15
    assert {"tiers.ram", "data.train"} <= TABLES.keys()


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
def test_salvage_keeps_the_valid_part_of_a_config(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(GOOD + wrong)
    error = problems_of(path)
    config, further = salvage(path, (), error.problems)
    assert config is not None and further == []
    assert config.model.model_name_or_path == "org/model"
    assert config.data.train[0].path.endswith("chat.jsonl")


def test_salvage_finds_further_problems(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(GOOD + '[optimizer]\nlearning_rate = "x"\n[training]\ntrain_batch_tokens = 100\n')
    config, further = salvage(path, (), problems_of(path).problems)
    assert config is not None and config.training.train_batch_tokens is None
    assert [(problem.key, problem.line) for problem in further] == [("training.train_batch_tokens", 10)]


@pytest.mark.parametrize("text", ['task = "sft"\n', "x = = 1", GOOD.replace('"sft"', '"kto"')])
def test_incomplete_config_cannot_be_salvaged(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    config, _ = salvage(path, (), problems_of(path).problems)
    assert config is None


def test_salvage_applies_additional_config_files(tmp_path: Path) -> None:
    path, over = tmp_path / "run.toml", tmp_path / "over.toml"
    path.write_text(GOOD)
    over.write_text("[data]\nmax_length = 64\nbogus = 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, [over])
    config, _ = salvage(path, (over,), caught.value.problems)
    assert config is not None and config.data.max_length == 64


def test_home_and_variables_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path expands ``~``, ``$NAME`` and ``${NAME}``; an unset variable is reported with its line."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RUNS", "runs")
    monkeypatch.delenv("NO_SUCH", raising=False)
    path = tmp_path / "run.toml"
    text = (
        'config_version = 1\ntask = "sft"\noutput_dir = "${RUNS}/one"\n[model]\nmodel_name_or_path = "$HOME/model"\n'
        '[[data.train]]\npath = "DATA"\n[[tiers.nvme]]\npath = "~/state"\nsize = "1GiB"\n'
    )
    path.write_text(text.replace("DATA", "$HOME/*.jsonl"))
    config = load_config(path, overrides=["checkpoint.resume_from_checkpoint=$HOME/old"]).config
    home = tmp_path / "home"
    assert config.output_dir == tmp_path / "runs/one"
    assert config.model.model_name_or_path == str(home / "model")
    assert config.data.train[0].path == str(home / "*.jsonl")
    assert config.tiers.nvme[0].path == home / "state"
    assert config.checkpoint.resume_from_checkpoint == str(home / "old")
    path.write_text(text.replace("DATA", "$NO_SUCH/x.jsonl") + "[training]\nbogus = 1\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    messages = [str(problem) for problem in raised.value.problems]
    assert len(messages) == 2 and any("bogus" in message for message in messages)
    assert 'line 7: data.train.0.path = "$NO_SUCH/x.jsonl" uses the variable $NO_SUCH, which is not set' in " ".join(
        messages
    )


def test_misspelled_key_causes_no_follow_up_problems(tmp_path: Path) -> None:
    """Consequences of the key's absence are not reported; problems inside a misspelled table are."""
    text = SMALLEST.replace("[[data.train]]", "[data]\nmax_lenght = 128\n[[data.train]]", 1)
    text += "[training]\ntrain_batch_tokens = 512\nmax_steps = 6.5\n[optimiser]\nlearning_rat = 3\n"
    with pytest.raises(ConfigError) as raised:
        load_config(write(tmp_path, text))
    assert [problem.key for problem in raised.value.problems] == [
        "data.max_lenght", "training.max_steps", "optimiser", "optimiser.learning_rat",
    ]  # fmt: skip
    said = str(raised.value)
    assert "Write 6 or 7" in said and "Did you mean optimizer.learning_rate?" in said
    assert "multiple" not in said
    fixed = text.replace("6.5", "6").replace("[optimiser]\nlearning_rat = 3\n", "")
    with pytest.raises(ConfigError) as raised:
        load_config(write(tmp_path, fixed))
    assert [problem.key for problem in raised.value.problems] == ["data.max_lenght"]
    assert salvage(tmp_path / "run.toml", (), raised.value.problems)[1] == [], "nor by `check`"


def test_synonym_of_a_choice_suggests_the_valid_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='Write "sigmoid", which is DPO'):
        load_config(write(tmp_path, SMALLEST), overrides=["task=dpo", "preference.loss_type=dpo"])


def test_default_epochs_do_not_conflict_with_max_steps(tmp_path: Path) -> None:
    """``num_train_epochs = 1.0`` is the default, so only other values conflict with ``max_steps``."""
    for epochs, count in ((1.0, 0), (2.0, 1)):
        loaded = load_config(write(tmp_path, SMALLEST), overrides=["max_steps=5", f"num_train_epochs={epochs}"])
        assert sum("num_train_epochs" in warning for warning in loaded.warnings) == count


def test_set_of_an_unknown_table_changes_no_key_of_the_same_name(smallest: Path) -> None:
    """For example, `wat.seed=3` is an error and does not set `seed`."""
    unknown = {
        "wat.seed=3": "key `wat.seed`",
        "classify.labels=['a']": "table `classify`",
        "trainer.x=3": "table `trainer`",
    }
    for override, name in unknown.items():
        with pytest.raises(ConfigError) as caught:
            load_config(smallest, overrides=[override])
        assert f"--set, unknown {name}" in str(caught.value)
