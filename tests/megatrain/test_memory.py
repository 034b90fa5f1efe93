"""The memory of a training process stays within the plan, even if the run's state is many times larger than RAM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from oracles.tiered_run import EXAMPLES
from tiered import MiB

#: Allowance for the C library's allocator and for thread stacks. It excludes the interpreter and libraries, because
#: their memory is measured before the training starts.
ALLOCATOR_SLACK_BYTES = 96 * MiB

CONFIG = """
task = "pretrain"
output_dir = "out-{ram}"
device = "cpu"
[model]
model_name_or_path = "model"
tokenizer_name_or_path = "{tokenizer}"
[data]
max_length = 128
[[data.train]]
path = "{text}"
[training]
per_device_train_batch_size = 1
gradient_accumulation_steps = 2
max_steps = 2
[tiers.ram]
size = "{ram}"
"""
DRIVE = """
[[tiers.nvme]]
path = "drive"
size = "3GiB"
"""

PROGRAM = """
import json, re
from megatrain.config import load_config
from megatrain.base.observer import Observers
from megatrain.training.trainer import Trainer
from megatrain.optim import clip

def peak_bytes():
    # Not ru_maxrss: a child inherits it from the process that started it.
    return int(re.search(r"VmHWM:\\s+([0-9]+) kB", open("/proc/self/status").read())[1]) * 1024

trainer = Trainer(load_config("run.toml").config, observer=Observers([]))
trainer.make_loader(); trainer.plan.traced.optimizer.warm_up(); clip.warm_up()
before = peak_bytes()
trainer.train()
added = peak_bytes() - before
state = sum(block.nbytes for block in trainer.plan.program.blocks.values() if block.kind in ("weights", "optimizer"))
kept = trainer.plan.kept_bytes
print(json.dumps({"added": added, "ram_total": trainer.plan.totals["ram"], "state": state, "kept": kept}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory")
    tokenizer = EXAMPLES / "quickstart" / "model"
    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(tokenizer)),
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=20,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(path / "model")
    return path


def write_config(folder: Path, ram: str, more: str = "") -> None:
    tokenizer, text = EXAMPLES / "quickstart" / "model", EXAMPLES / "quickstart" / "loomings.txt"
    (folder / "run.toml").write_text(CONFIG.format(tokenizer=tokenizer, text=text, ram=ram) + more)


def measure(folder: Path) -> dict[str, int]:
    """Train in a new process. Return the bytes that training added to the peak, and the planned bytes."""
    root = Path(__file__).parents[2]
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    values: dict[str, int] = json.loads(process.stdout.splitlines()[-1])
    return values


def test_resident_memory_stays_within_the_plan(folder: Path) -> None:
    write_config(folder, "96MiB", DRIVE)
    run = measure(folder)
    assert run["state"] > 8 * run["ram_total"]
    assert run["ram_total"] <= 96 * MiB
    assert run["added"] <= run["ram_total"] + ALLOCATOR_SLACK_BYTES, run


@pytest.mark.slow
def test_graphs_that_are_kept_stay_within_the_plan(folder: Path) -> None:
    write_config(folder, "1800MiB")
    run = measure(folder)
    assert 128 * MiB < run["kept"] < run["ram_total"] <= 1800 * MiB
    assert 0.6 * run["ram_total"] < run["added"] <= run["ram_total"] + ALLOCATOR_SLACK_BYTES, run
