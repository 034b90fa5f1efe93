"""``megatrain-tier import``: its output, the config that it writes, and its refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from megatrain.config import load_config
from processes.saved_run import command_group

TEXT = "base_model: org/model\ndatasets: [{path: d.jsonl, type: alpaca}]\nlearning_rate: 1e-4\nrope_theta: 5\n"


def call(*words: object) -> Result:
    return CliRunner().invoke(command_group(), ["import", *map(str, words)])


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "theirs.yaml"
    path.write_text(TEXT)
    return path


def test_import_prints_toml_to_stdout_and_notes_to_stderr(source: Path, tmp_path: Path) -> None:
    result = call(source)
    assert result.exit_code == 0, result.output
    (tmp_path / "ours.toml").write_text(result.stdout)
    assert load_config(tmp_path / "ours.toml").config.optimizer.learning_rate == 1e-4
    assert "no equivalent here:\n  rope_theta = 5: no key here does this" in result.stderr
    assert "to fill in" not in result.stderr


def test_a_file_is_written_once(source: Path, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    out = tmp_path / "configs/ours.toml"
    result = call(source, "-o", out)
    assert result.exit_code == 0 and result.stdout == ""
    assert f"written to {out}" in result.stderr and f"next: megatrain-tier check {out}" in result.stderr
    assert load_config(out).config.output_dir == tmp_path / "model-out", "relative to the tool's working directory"
    before = out.read_text()
    again = call(source, "-o", out)
    assert again.exit_code == 2 and "already exists" in again.stderr
    assert out.read_text() == before


def test_json(source: Path) -> None:
    values = json.loads(call(source, "--json").stdout)
    assert (values["tool"], values["out"]) == ("axolotl", None)
    assert values["no_equivalent"] == [{"key": "rope_theta", "value": 5, "why": "no key here does this"}]
    assert values["values"]["optimizer.learning_rate"]["value"] == 1e-4
    assert "learning_rate = 0.0001" in values["toml"]


def test_import_lists_the_values_to_fill_in(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0}))
    result = call(path)
    assert result.exit_code == 0
    assert "to fill in:" in result.stderr and "model.model_name_or_path: a Hugging Face folder" in result.stderr
    assert "# FILL IN: a Hugging Face folder" in result.stdout


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("x: [", (), "invalid YAML"),
        ("x: 1", (), "unknown tool"),
        ("base_model: a\nrl: grpo\n", (), "GRPO is not supported"),
        (TEXT, ("--from", "nemo"), "'nemo' is not one of"),
        (TEXT, ("-o", "nowhere/ours.toml"), "this folder does not exist"),
    ],
)
def test_invalid_imports_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(text)
    result = call("theirs.yaml", *words)
    assert result.exit_code == 2 and message in result.stderr
    assert "Traceback" not in result.output and os.listdir() == ["theirs.yaml"]
    missing = call("nowhere.yaml")
    assert missing.exit_code == 2 and "no such file" in missing.stderr


SCRIPT = """#!/bin/bash
#SBATCH --gres=gpu:8
MODEL="org/Base-7B"
ARGS=(
  --per_device_train_batch_size 2   # rows
  --gradient_accumulation_steps 4
)
ARGS+=(--bf16)
# trl sft --model_name_or_path of/a-comment
NCCL_DEBUG=INFO accelerate launch --config_file zero3.yaml --num_processes 8 \\
  trl/scripts/sft.py --model_name_or_path "$MODEL" --dataset-name org/chats --learning_rate=2e-5 \\
  --eval_strategy no --run_name $(date +%s) --report_to wandb tensorboard --no_completion_only_loss \\
  --output_dir "${OUT:-outputs/x}" "${ARGS[@]}" --packing 2>&1 | tee log.txt
python eval.py --model outputs/x
"""


def test_shell_script_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables, arrays, continued lines, launchers and redirections work. Values that need a shell are listed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUT", raising=False)
    Path("train.sh").write_text(SCRIPT)
    result = call("train.sh", "-o", "run.toml")
    assert result.exit_code == 0, result.output
    config = load_config("run.toml").config
    assert config.model.model_name_or_path == "org/Base-7B" and config.data.train[0].path == "org/chats"
    assert config.optimizer.learning_rate == 2e-5 and config.data.packing is True
    assert config.output_dir == tmp_path / "outputs/x" and config.data.train_on == "all"
    assert config.training.per_device_train_batch_size == 2
    assert config.training.gradient_accumulation_steps == 32, "the rows of all processes"
    assert config.distributed.processes == 8
    assert set(config.logging.report_to) == {"jsonl", "wandb", "tensorboard"}
    assert (
        'accelerate --config_file = "zero3.yaml": with several processes, each process holds a shard' in result.stderr
    )
    assert "--run_name: only a shell can compute its value" in result.stderr
    assert "eval.py" not in result.stderr


@pytest.mark.parametrize(
    ("words", "steps", "processes"),
    [
        ("-- trl sft --model_name_or_path org/m --dataset_name org/d --bf16 True", 1, 1),
        ("trl sft --model_name_or_path org/m --dataset_name org/d", 1, 1),
        ("-- torchrun --nproc_per_node=4 --nnodes 2 my/train.py --model_name_or_path org/m --dataset_name org/d", 8, 1),
        ("-- torchrun --nproc_per_node 3 sft.py --model_name_or_path org/m --gradient_accumulation_steps 2", 6, 3),
        ("-- torchrun --nproc_per_node 3 sft.py --model_name_or_path org/m --optim adafactor", 3, 1),
        ("-- python -m torch.distributed.run --nproc_per_node 4 sft.py --model_name_or_path org/m", 4, 4),
        ("-- deepspeed --num_gpus 2 sft.py --deepspeed ds.json --model_name_or_path org/m", 2, 2),
        ("-- accelerate launch --config_file two.yaml -m trl.scripts.sft --model_name_or_path org/m", 2, 2),
        ("-- accelerate launch --num_processes 8 --num_machines 2 sft.py --model_name_or_path org/m", 8, 1),
        ("-- trl dpo --num_processes 2 --model_name_or_path org/m --dataset_name org/d", 2, 1),
        ("-- python sft.py --config recipe.yaml --gradient_accumulation_steps 3", 3, 1),
        ("-- llamafactory-cli train lf.yaml gradient_accumulation_steps=5", 5, 1),
    ],
)
def test_launch_command_line_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, steps: int, processes: int
) -> None:
    """The batch has the rows of all processes of the command line together, even if fewer processes train here."""
    monkeypatch.chdir(tmp_path)
    Path("two.yaml").write_text("compute_environment: LOCAL_MACHINE\nnum_processes: 2\n")
    Path("recipe.yaml").write_text("model_name_or_path: org/m\ngradient_accumulation_steps: 7\n")
    Path("lf.yaml").write_text("model_name_or_path: org/m\nstage: sft\nfinetuning_type: full\noutput_dir: o\n")
    result = call("-o", "run.toml", *words.split())
    assert result.exit_code == 0, result.output
    config = load_config("run.toml").config
    assert config.model.model_name_or_path == "org/m"
    assert (config.training.gradient_accumulation_steps, config.distributed.processes) == (steps, processes)
    if "--nnodes" in words:
        assert "torchrun --nnodes 2 --nproc-per-node 1 ... -m megatrain run CONFIG" in result.stderr


def test_unknown_number_of_processes_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("--", "accelerate", "launch", "sft.py", "--model_name_or_path", "org/m")
    assert result.exit_code == 0
    assert "the number of processes is unknown" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-- trl grpo --model_name_or_path org/m", "`grpo` is not supported here"),
        ("-- trl sft --model_name_or_path org/m --beta 0.1", "preference training"),
        ("-- make all", "starts no training with options"),
        ("-- python train.py --lr 3", "unknown tool"),
        ("train.py", "Pass the command line that starts it: megatrain-tier import -- python train.py"),
        ("empty.sh", "no command in this script starts a supported training"),
        ("acc.yaml", "import -- accelerate launch"),
        ("empty.sh --form trl", 'import reads only one FILE; unexpected argument "--form"'),
    ],
)
def test_command_lines_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.sh").write_text("#!/bin/sh\necho trl sft is nice\n")
    Path("acc.yaml").write_text("compute_environment: LOCAL_MACHINE\nnum_processes: 2\n")
    result = call(*words.split())
    assert result.exit_code == 2 and message in result.stderr, result.output
    assert "Traceback" not in result.output
