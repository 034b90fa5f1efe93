"""``megatrain-tier init`` writes a config that loads, and passes `check` if its paths exist. It overwrites no file."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result

from megatrain.base.facts import Drive, MachineFacts, ModelFacts
from megatrain.config import load_config
from megatrain.config.keys import SCHEMA_FILE_NAME
from megatrain.config.starter import starter_toml
from megatrain.extras.translate import translate
from megatrain.machine import facts
from megatrain.machine.file_systems import FileSystem
from megatrain.models.folder import model_facts
from megatrain.tasks.table import TASK_FACTS
from oracles.rows_in_memory import read_rows
from processes.saved_run import QUICKSTART, cli_module, command_group, make_run
from tiered import GiB


def call(*words: object) -> Result:
    return CliRunner().invoke(command_group(), list(map(str, words)))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_init_writes_a_config_for_this_machine(here: Path) -> None:
    result = call("init")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        f"wrote  run.toml and {SCHEMA_FILE_NAME}",
        "fill   model_name_or_path, path",
        "next   megatrain-tier check run.toml",
    ]
    text = Path("run.toml").read_text()
    assert text.startswith(f"#:schema ./{SCHEMA_FILE_NAME}\n")
    config = load_config("run.toml").config
    assert config.task == "sft" and config.tiers.ram.size.is_auto
    assert json.loads(Path(SCHEMA_FILE_NAME).read_text())["properties"]["task"]
    assert sorted(path.name for path in here.iterdir()) == [SCHEMA_FILE_NAME, "run.toml"]


@pytest.mark.skipif(not Path("/sys").is_dir(), reason="no folder here is unwritable for root")
def test_a_folder_that_cannot_be_written_in_is_named(here: Path) -> None:
    result = call("init", "/sys")
    assert result.exit_code == 2 and SCHEMA_FILE_NAME not in result.stderr, result.output
    assert "/sys: nothing can be written in this folder (" in result.stderr
    assert "Name a file in another one" in result.stderr
    result = call("init", "--example", "/sys/here")
    assert result.exit_code == 2 and "/sys/here: this folder cannot be made (" in result.stderr, result.output


def test_init_overwrites_no_file(here: Path) -> None:
    Path("run.toml").write_text("mine")
    result = call("init")
    assert result.exit_code == 2 and "run.toml: already exists; nothing was written" in result.stderr
    assert [path.name for path in here.iterdir()] == ["run.toml"]
    assert Path("run.toml").read_text() == "mine"
    assert call("init", "nowhere/run.toml").exit_code == 2
    Path(SCHEMA_FILE_NAME).write_text("not ours")
    assert call("init", "other.toml").exit_code == 0
    assert Path(SCHEMA_FILE_NAME).read_text() == "not ours"
    Path(SCHEMA_FILE_NAME).write_text('{"title": "Config of megatrain-tier"}')
    assert call("init", "third.toml", "--json").exit_code == 0
    assert "properties" in Path(SCHEMA_FILE_NAME).read_text(), "an older schema of this program is renewed"


def test_config_with_model_and_data_passes_check(here: Path) -> None:
    make_run(here)
    (here / "configs").mkdir()
    result = call("init", "configs", "--task", "pretrain", "--model", "model", "--data", "data.txt", "--json")
    assert result.exit_code == 0, result.output
    path = json.loads(result.stdout)["path"]
    assert path == str(here / "configs/run.toml")
    config = load_config(path).config
    assert config.model.model_name_or_path == str(here / "model")
    assert config.data.train[0].path == str(here / "data.txt")
    assert "0.1 M parameters" in Path(path).read_text()
    checked = call("check", path, "--json")
    assert checked.exit_code == 0, checked.output


def test_init_does_not_overwrite_a_concurrently_created_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program writes the file between the first check and the write."""
    translate_file = translate.translate_file

    def starter(*_: object, **__: object) -> str:
        Path("run.toml").write_text("other")
        return "ours"

    def translation(*words: Any, **options: Any) -> object:
        Path("imported.toml").write_text("other")
        return translate_file(*words, **options)

    monkeypatch.setattr("megatrain.config.starter.starter_toml", starter)
    monkeypatch.setattr(translate, "translate_file", translation)
    Path("ds_config.json").write_text('{"train_micro_batch_size_per_gpu": 2}')
    for words, name in ((["init"], "run.toml"), (["import", "ds_config.json", "-o", "imported.toml"], "imported.toml")):
        result = call(*words)
        assert result.exit_code == 2 and f"{name}: already exists; nothing was written" in result.stderr, words
        assert Path(name).read_text() == "other"


def test_hub_names_are_written_unchanged(here: Path) -> None:
    assert call("init", "--model", "org/model", "--data", "org/chats").exit_code == 0
    config = load_config("run.toml").config
    assert (config.model.model_name_or_path, config.data.train[0].path) == ("org/model", "org/chats")


def test_task_option_accepts_every_task() -> None:
    (option,) = (each for each in cli_module("init").command.params if each.name == "task")
    assert tuple(cast("Any", option.type).choices) == tuple(TASK_FACTS), "the list is in cli/init.py"


@pytest.mark.parametrize("task", TASK_FACTS)
def test_preference_rows_are_detected_only_for_preference_tasks(here: Path, task: str) -> None:
    Path("rows.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    result = call("init", "--task", task, "--data", "rows.jsonl")
    assert ("data   rows are read as preference" in result.stdout) == (task in ("dpo", "reward")), result.output


@pytest.mark.parametrize("task", TASK_FACTS)
@pytest.mark.parametrize("has_lora", [False, True])
@pytest.mark.parametrize("gpu", [None, 24 * GiB])
@pytest.mark.parametrize(
    "drives",
    [
        (),
        (Drive("scratch", 900 * GiB, "ext4"),),
        (
            Drive("scratch", 9 * GiB, "tmpfs", "not a drive"),
            Drive('/mnt/a "b"', GiB, "xfs"),
            Drive("/mnt/c", GiB, "xfs"),
        ),
    ],
)
@pytest.mark.parametrize("model", [None, ModelFacts("m"), ModelFacts("m", 8_000_000_000, 256)])
def test_every_starter_loads_without_a_warning(
    tmp_path: Path, task: str, has_lora: bool, gpu: int | None, drives: tuple[Drive, ...], model: ModelFacts | None
) -> None:
    path = tmp_path / "run.toml"
    machine = MachineFacts(64 * GiB, 50 * GiB, gpu, drives)
    path.write_text(starter_toml(machine, task, model, None, has_lora=has_lora))
    loaded = load_config(path)
    assert loaded.warnings == ()
    config = loaded.config
    assert len(config.tiers.nvme) == (not has_lora and any(not drive.objection for drive in drives))
    assert config.lora.is_on == has_lora and config.task == task
    assert ("[tiers.gpu]" in path.read_text()) == (gpu is not None)
    if model is not None and model.max_positions:
        assert config.data.max_length == 256


def test_model_facts_are_read_from_the_config_without_weights() -> None:
    found = model_facts("x", QUICKSTART / "model")
    assert found.num_parameters == 0 and found.max_positions == 512, "it has a config and no weights"
    assert model_facts("x", None) == model_facts("x", QUICKSTART) == ModelFacts("x")


def test_unsuitable_file_systems_are_rejected() -> None:
    tmpfs, nfs, ext4 = (FileSystem("0:1", kind, "source", "/mnt") for kind in ("tmpfs", "nfs4", "ext4"))
    assert "RAM" in facts._objection(tmpfs, 99 * GiB)
    assert "doctor" in facts._objection(nfs, 99 * GiB)
    assert facts._objection(ext4, GiB) == "little free space"
    assert facts._objection(ext4, 99 * GiB) == ""


USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize(
    ("row", "format", "columns"),
    [
        ({"messages": [USER, ASSISTANT]}, "auto", {}),
        ({"conversation": [USER, ASSISTANT], "id": 3}, "messages", {"messages": "conversation"}),
        ({"question": "Hi", "answer": "Hello"}, "alpaca", {"instruction": "question", "output": "answer"}),
        ({"prompt": "Hi", "response": "Hello"}, "alpaca", {"instruction": "prompt", "output": "response"}),
        ({"title": "x", "content": "text"}, "text", {"text": "content"}),
    ],
)
def test_init_detects_the_columns_of_the_data(
    here: Path, row: dict[str, object], format: str, columns: dict[str, str]
) -> None:
    """The config that `init` writes reads exactly these rows."""
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    result = call("init", "--data", "rows.jsonl")
    assert result.exit_code == 0, result.output
    assert "data   rows are read as" in result.stdout
    (table,) = load_config("run.toml").config.data.train
    assert (table.format, dict(table.columns)) == (format, columns)
    (found,) = read_rows(table.path, format=table.format, columns=table.columns)
    assert "Hi" in str(found) or "text" in str(found)


def test_init_reports_unusable_data_at_once(here: Path) -> None:
    Path("rows.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    result = call("init", "--task", "sft", "--data", "rows.jsonl")
    assert result.exit_code == 0 and "this is preference data" in result.stdout
    assert "# FILL IN:" in Path("run.toml").read_text()
    assert load_config("run.toml").config.data.train[0].path == str(here / "rows.jsonl")
    missing = call("init", "b.toml", "--data", "./nowhere.jsonl")
    assert missing.exit_code == 0 and "there is no such file or folder" in missing.stdout


@pytest.mark.parametrize(
    ("row", "loss"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "sigmoid"),
        ({"prompt": "a", "completion": "b", "label": True}, "kto"),
    ],
)
def test_init_detects_preference_data(here: Path, row: dict[str, object], loss: str) -> None:
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    result = call("init", "--data", "rows.jsonl")
    assert result.exit_code == 0 and "data   rows are read as preference" in result.stdout
    config = load_config("run.toml").config
    assert config.task == "dpo" and config.preference.loss_type == loss


def test_init_selects_pretraining_for_plain_text(here: Path) -> None:
    (here / "texts").mkdir()
    (here / "texts/a.txt").write_text("")
    (here / "texts/b.txt").write_text("Call me Ishmael.")
    Path("rows.jsonl").write_text('{"text": "Call me Ishmael."}\n')
    for number, data in enumerate(("texts", "texts/b.txt", "rows.jsonl")):
        assert call("init", f"{number}.toml", "--data", data).exit_code == 0
        assert load_config(f"{number}.toml").config.task == "pretrain"
    assert call("init", "own.toml", "--data", "texts", "--task", "sft").exit_code == 0
    assert load_config("own.toml").config.task == "sft", "an explicit option has priority"


def test_unusable_first_row_does_not_decide_the_format(here: Path) -> None:
    same, pair = ({"prompt": "a", "chosen": "b", "rejected": answer} for answer in "bc")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (same, pair)))
    result = call("init", "--data", "rows.jsonl")
    assert result.exit_code == 0 and "rows are read as preference" in result.stdout
    assert load_config("run.toml").config.task == "dpo" and "FILL IN: FILL" not in Path("run.toml").read_text()
    assert "path" not in next((line for line in result.stdout.splitlines() if line.startswith("fill")), "").split(", ")


def test_adapters(here: Path) -> None:
    assert call("init", "--lora").exit_code == 0
    config = load_config("run.toml").config
    assert (config.lora.r, config.lora.lora_alpha, config.optimizer.learning_rate) == (16, 32, 1e-4)
    assert {TASK_FACTS[task].lora_learning_rate for task in ("sft", "pretrain", "distill", "reward")} == {1e-4}
    assert not config.tiers.nvme, "the model is read from its folder"
    assert call("init", "full.toml").exit_code == 0
    text = Path("full.toml").read_text()
    assert not load_config("full.toml").config.lora.is_on and "\n# [lora]\n# r = 16 " in text
    for line in ("[lora]", "r = 16 ", "lora_alpha = 32 "):  # as the comment in the file says
        text = text.replace(f"\n# {line}", f"\n{line}")
    Path("full.toml").write_text(text.replace("learning_rate = 1e-05", "learning_rate = 0.0001"))
    loaded = load_config("full.toml")
    assert loaded.config.lora.r == 16 and not loaded.warnings
    assert call("init", "x", "--example", "--lora").exit_code == 2


def test_a_model_without_a_chat_template_gets_prompts_and_completions(here: Path) -> None:
    make_run(here)
    Path("rows.jsonl").write_text('{"question": "Who?", "answer": "Ishmael."}\n')
    assert call("init", "plain.toml", "--model", "model", "--data", "rows.jsonl").exit_code == 0
    (here / "model/chat_template.jinja").write_text("{{ messages }}")
    assert call("init", "chats.toml", "--model", "model", "--data", "rows.jsonl").exit_code == 0
    tables = [load_config(f"{name}.toml").config.data.train[0] for name in ("plain", "chats")]
    assert [(table.format, dict(table.columns)) for table in tables] == [
        ("prompt_completion", {"prompt": "question", "completion": "answer"}),
        ("alpaca", {"instruction": "question", "output": "answer"}),
    ]


def test_chats_for_a_model_without_a_chat_template_are_reported(here: Path) -> None:
    make_run(here)
    row = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ishmael."}]}
    Path("rows.jsonl").write_text(json.dumps(row))
    said = "model  it has no chat template, which such rows need: set model.chat_template"
    assert said in call("init", "a.toml", "--model", "model", "--data", "rows.jsonl").output
    assert said not in call("init", "b.toml", "--data", "rows.jsonl").output
    (here / "model/chat_template.jinja").write_text("{{ messages }}")
    assert said not in call("init", "c.toml", "--model", "model", "--data", "rows.jsonl").output
    (here / "model/tokenizer_config.json").unlink()
    assert said not in call("init", "d.toml", "--model", "model", "--data", "rows.jsonl").output


@pytest.mark.parametrize("name", ["models/Llama-3--8B", "models/..", "models/tiny."])
def test_a_model_path_that_does_not_exist_yet_is_written(here: Path, name: str) -> None:
    """huggingface_hub raises an error for these names."""
    result = call("init", "--model", name)
    assert result.exit_code == 0, result.output
    assert f'model_name_or_path = "{name}"' in (here / "run.toml").read_text()


def test_the_template_of_a_hub_model_is_looked_up_in_the_cache(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`init` does not use the network, and prints nothing about a model that is not in the cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    commit = "0123456789" * 4
    snapshot = here / "hub" / "models--someone--tiny" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit)
    (snapshot / "tokenizer_config.json").write_text("{}")
    row = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ishmael."}]}
    Path("rows.jsonl").write_text(json.dumps(row))
    said = "model  it has no chat template, which such rows need: set model.chat_template"
    assert said in call("init", "a.toml", "--model", "someone/tiny", "--data", "rows.jsonl").output
    assert said not in call("init", "b.toml", "--model", "someone/other", "--data", "rows.jsonl").output
    Path("pairs.jsonl").write_text('{"question": "Who?", "answer": "Ishmael."}\n')
    assert call("init", "c.toml", "--model", "someone/tiny", "--data", "pairs.jsonl").exit_code == 0
    assert 'format = "prompt_completion"' in Path("c.toml").read_text()
    (snapshot / "chat_template.jinja").write_text("{{ messages }}")
    assert said not in call("init", "d.toml", "--model", "someone/tiny", "--data", "rows.jsonl").output


@pytest.mark.parametrize("task", ["pretrain", pytest.param("sft", marks=pytest.mark.slow)])
def test_generated_config_runs_unedited(here: Path, task: str) -> None:
    """All commands from `init` to `generate` work with the unedited config. Two processes can also use it."""
    make_run(here)
    Path("rows.jsonl").write_text('{"prompt": "Who?", "completion": " Ishmael."}\n' * 9)
    words = ["run.toml", "--model", "model", "--data", "data.txt" if task == "pretrain" else "rows.jsonl"]
    for command in (
        ["init", *words],
        ["check", "run.toml"],
        ["plan", "run.toml"],
        ["plan", "run.toml", "--processes", "2"],
        ["run", "run.toml"],
        ["generate", "run.toml", "-p", "Call me", "--max-new-tokens", "2"],
        ["generate", "outputs/first", "-p", "Call me", "--max-new-tokens", "2"],
    ):
        result = call(*command)
        assert result.exit_code == 0, (command, result.output)
        assert "no effect" not in result.output, (command, result.output)
    if task == "sft":
        ranks = call("run", "run.toml", "--processes", "2", "--set", "output_dir=outputs/ranks")
        assert ranks.exit_code == 0, ranks.output
    assert load_config("run.toml").config.task == task


def test_init_keeps_home_variable_in_paths(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here / "home"))
    (here / "home").mkdir()
    (here / "home/a.txt").write_text("text")
    result = call("init", "--data", "$HOME/a.txt")
    assert result.exit_code == 0 and "rows are read as text" in result.stdout
    assert 'path = "$HOME/a.txt"' in Path("run.toml").read_text()
    assert load_config("run.toml").config.data.train[0].path == str(here / "home/a.txt")


def test_each_file_has_its_own_run_folder_and_missing_data_is_named(tmp_path: Path) -> None:
    config = tmp_path / "my runs" / "lora.toml"
    config.parent.mkdir()
    result = CliRunner().invoke(command_group(), ["init", str(config), "--data", "d/nix.jsonl"])
    assert result.exit_code == 0, result.output
    assert tomllib.loads(config.read_text())["output_dir"] == "outputs/lora"
    assert "nix.jsonl: there is no such file yet" in result.stdout
    assert f"next   megatrain-tier check '{config}'" in result.stdout, "a line to paste"
