"""Read this test first. It trains a tiny model in two placements with identical results, resumes a run, and exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatrain_tier_cli.main import command_group

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart"
CONFIG = f"""
task = "pretrain"
output_dir = "out"
device = "cpu"
precision.compute_dtype = "float32"
optimizer = {{ learning_rate = 1e-3, lr_scheduler_type = "constant", warmup_steps = 0 }}
training = {{ per_device_train_batch_size = 2, gradient_accumulation_steps = 2, max_steps = 6 }}
export.dtype = "float32"
tiers.ram.size = "64MiB"
[model]
model_name_or_path = "model"
[data]
max_length = 32
train = [{{ path = "{QUICKSTART / "loomings.txt"}" }}]
[[tiers.nvme]]
path = "drive"
size = "64MiB"
"""
#: Command-line overrides that put everything on the drive, with enough RAM for two layers.
ON_DRIVE = ("tiers.ram.size=3MiB", *(f"placement.{kind}=nvme" for kind in ("weights", "gradients", "optimizer")))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a Hugging Face model folder with 0.3 M random weights, and a config next to it."""
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "run.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(output: str, *changes: str) -> list[float]:
    """Run `megatrain-tier run`. Return the losses of all steps, including steps from earlier starts of the same run."""
    words = ["run", "run.toml", *(f"--set={change}" for change in (f"output_dir={output}", *changes))]
    result = CliRunner().invoke(command_group, words)
    assert result.exit_code == 0, result.output
    lines = map(json.loads, Path(output, "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line and "event" not in line]


def test_tiny_run_is_bit_identical_across_placements_and_resume(folder: Path) -> None:
    losses = train("in_ram")
    assert len(losses) == 6 and losses[-1] < losses[0]

    # The placement affects only how long a step takes.
    assert train("on_drive", *ON_DRIVE) == losses
    assert json.loads(Path("on_drive/status.json").read_text())["metrics"]["tier_used_bytes"]["nvme"] > 8 << 20

    # Stop after step 4, which saves a checkpoint, and resume with everything on the drive.
    assert train("broken", "max_steps=4") == losses[:4]
    assert train("broken", *ON_DRIVE) == losses

    # Each run exports a Hugging Face folder, and all have the same weights.
    models = [AutoModelForCausalLM.from_pretrained(f"{name}/final") for name in ("in_ram", "on_drive", "broken")]
    for name, weight in models[0].state_dict().items():
        assert all(torch.equal(weight, model.state_dict()[name]) for model in models), name
