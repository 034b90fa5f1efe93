"""Tiny runs of the real command, which save checkpoints."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner, Result

from processes import warm

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
SMALLER = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
CONFIG = """task = "pretrain"
output_dir = "{out}"
device = "{device}"
{top}
[model]
model_name_or_path = "model"
{model}
[precision]
compute_dtype = "{dtype}"
[data]
max_length = 32
[[data.train]]
path = "data.txt"
[training]
per_device_train_batch_size = 2
max_steps = {steps}
[optimizer]
learning_rate = 1e-3
lr_scheduler_type = "constant"
[checkpoint]
save_steps = 2
save_total_limit = 3
min_free_disk = "1MiB"
{checkpoint}
[placement]
{placement}
[tiers.ram]
size = "{ram}"
{more}
"""
NVME = '[[tiers.nvme]]\npath = "drive"\nsize = "40MiB"\n'
ON_NVME = 'weights = "nvme"\noptimizer = "nvme"\n'


#: Package of the command: the installed package, or the folder ``cli`` if the project is not installed.
PACKAGE = "megatrain_tier_cli" if importlib.util.find_spec("megatrain_tier_cli") else "cli"


def cli_module(name: str) -> Any:
    """Return a module of the command's package."""
    return importlib.import_module(f"{PACKAGE}.{name}")


def command_group() -> Any:
    """Return the click group of the command."""
    return cli_module("main").command_group


def command_words() -> list[str]:
    """Return the command line, without arguments, that starts the command in a separate process."""
    return [sys.executable, "-m", PACKAGE]


def call_in_new_process(*words: object) -> tuple[subprocess.CompletedProcess[str], bool]:
    """Run a command in a new interpreter. Return its result, and whether it imported torch."""
    script = (
        "import sys, runpy, atexit\n"
        "atexit.register(lambda: print('torch:', sys.modules.get('torch') is not None, file=sys.stderr))\n"
        f"sys.argv = ['megatrain-tier', *{[str(word) for word in words]!r}]\n"
        f"runpy.run_module({command_words()[-1]!r}, run_name='__main__')\n"
    )
    # Without `env`, the child would inherit COLUMNS, which readline sets in the environment of the C library.
    command, env = [sys.executable, "-c", script], dict(os.environ)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.stderr.count("torch: ") == 1, done.stderr
    return done, "torch: True" in done.stderr


@dataclass
class SavedRun:
    """Folder with a model, training data and the output folders of runs."""

    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def write_config(self, *, out: str = "out", steps: int = 6, **tables: str) -> Path:
        values = {"device": "cpu", "dtype": "float32", "ram": "64MiB", "more": ""} | tables
        for name in ("top", "model", "checkpoint", "placement"):
            values.setdefault(name, "")
        path = self.folder / "run.toml"
        path.write_text(CONFIG.format(out=out, steps=steps, **values))
        return path

    def run(self, *options: str, **config: Any) -> Result:
        """Train in this process."""
        return self.call("run", self.write_config(**config), *options)

    def start(self, *options: str, **config: Any) -> subprocess.Popen[str]:
        """Start training in a separate process."""
        words = [*command_words(), "run", str(self.write_config(**config)), *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        return warm.Popen(words, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=environment)

    def call(self, *words: object) -> Result:
        """Run a command in this process."""
        return CliRunner().invoke(command_group(), [str(word) for word in words])

    def copy(self, folder: Path) -> SavedRun:
        shutil.copytree(self.folder, folder, symlinks=True)
        return SavedRun(folder)


def make_run(folder: Path) -> SavedRun:
    """Create a folder with a random model of 0.1 M parameters and some text, without training."""
    make_model(folder / "model")
    (folder / "data.txt").write_text((QUICKSTART / "loomings.txt").read_text()[:2500])
    return SavedRun(folder)


def make_model(folder: Path, **changes: int) -> None:
    """Create a model folder with a random model of 0.1 M parameters. ``changes`` override config values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(QUICKSTART / "model", folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **SMALLER, **changes}))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process if it is still running, for example after a failed test, and wait for it to end."""
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.communicate()
