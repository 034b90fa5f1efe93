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

#: Allowance for the C library's allocator and for thread stacks. It excludes the interpreter and libraries, which are
#: measured by a process that plans the same run and does not train.
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
import json, re, sys
from megatrain.config import load_config
from megatrain.base.observer import Observers
from megatrain.training.trainer import Trainer
trainer = Trainer(load_config("run.toml").config, observer=Observers([]))
if sys.argv[1] == "train":
    from numba import njit
    trainer.train()
else:
    from megatrain.optim import clip
    import megatrain.data.encoding
    trainer.make_loader(); trainer.plan.traced.optimizer.warm_up(); clip.warm_up()
# Not ru_maxrss: a child inherits it from the process that started it.
peak = int(re.search(r"VmHWM:\\s+([0-9]+) kB", open("/proc/self/status").read())[1]) * 1024
state = sum(block.nbytes for block in trainer.plan.program.blocks.values() if block.kind in ("weights", "optimizer"))
kept = trainer.plan.kept_bytes
print(json.dumps({"peak": peak, "ram_total": trainer.plan.totals["ram"], "state": state, "kept": kept}))
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


def measure(folder: Path, what: str) -> dict[str, int]:
    root = Path(__file__).parents[2]
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, what],
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
    libraries, run = measure(folder, "plan"), measure(folder, "train")
    assert run["state"] > 8 * run["ram_total"]
    assert run["ram_total"] <= 96 * MiB
    assert run["peak"] - libraries["peak"] <= run["ram_total"] + ALLOCATOR_SLACK_BYTES, (libraries, run)


@pytest.mark.slow
def test_graphs_that_are_kept_stay_within_the_plan(folder: Path) -> None:
    write_config(folder, "1800MiB")
    libraries, run = measure(folder, "plan"), measure(folder, "train")
    assert 128 * MiB < run["kept"] < run["ram_total"] <= 1800 * MiB
    resident = run["peak"] - libraries["peak"]
    assert 0.6 * run["ram_total"] < resident <= run["ram_total"] + ALLOCATOR_SLACK_BYTES, (libraries, run)
