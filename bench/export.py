"""Export of a trained model: whether transformers computes equal logits from it, and the RAM that the export needs.

    python bench/export.py --json                       # the real SmolLM2-135M, 10 steps; a few minutes
    python bench/export.py --quick                      # the 0.82 M model of the repository
    python bench/export.py --model FOLDER

Claims: from the exported folder, transformers computes the logits that the trainer computes from the checkpoint, within
rounding. In addition to the memory of the libraries, the export takes at most half as much RAM as the fp32 weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.common import QUICKSTART, ROOT, Report
from megatrain.base.observer import RunObserver
from megatrain.checkpoint.resume import find_candidates
from megatrain.config import load_config
from megatrain.data.row_order import LoaderPosition
from megatrain.engine.head.head_model import HeadModel
from megatrain.training.resolve import resolve_checkpoint
from megatrain.training.trainer import Trainer

NUM_STEPS = 10
#: Maximum difference between logits. A different number of rows, or a different kernel, changes the order of additions.
TOLERANCE = 2e-4
TARGET_RAM_SHARE = 0.5

CONFIG = """
task = "pretrain"
output_dir = "out"
device = "cpu"
[model]
model_name_or_path = "{model}"
[precision]
compute_dtype = "{dtype}"
[data]
max_length = 128
[[data.train]]
path = "{text}"
[training]
per_device_train_batch_size = 2
max_steps = {num_steps}
[optimizer]
learning_rate = 1e-4
[checkpoint]
save_steps = 5
min_free_disk = "0MiB"
[export]
dtype = "float32"
[tiers.ram]
size = "{ram}"
[[tiers.nvme]]
path = "state"
size = "12GiB"
"""

#: Program for a separate process: computes the logits of an exported model for the token ids in a file.
LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
ids = torch.load(sys.argv[2], weights_only=True)
with torch.no_grad():
    torch.save(model(input_ids=ids).logits, sys.argv[3])
"""

#: Program for a fresh process: prints the peak memory in KiB after importing the libraries that an export needs.
IMPORT = """
import megatrain.training.export
import transformers.models.llama.modeling_llama
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""

#: Program for a fresh process: runs a `megatrain-tier` command, and prints the peak memory of the process in KiB.
EXPORT = """
import sys
import importlib, importlib.util
package = "megatrain_tier_cli" if importlib.util.find_spec("megatrain_tier_cli") else "cli"
group = importlib.import_module(package + ".main").command_group
try:
    group.main(sys.argv[1:], prog_name="megatrain-tier")
finally:
    # Not ru_maxrss, which counts the memory of the parent process.
    print("peak", next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def main() -> int:
    """Run the bench. Return 1 if a claim fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="the 0.82 M model of the repository")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default: SmolLM2-135M, if it was fetched")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="what the run computes in")
    parser.add_argument("--scratch", type=Path, help="folder of the run; default: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        return measure(Path(folder), arguments)


def measure(folder: Path, arguments: argparse.Namespace) -> int:
    """Train the model in this process, export and load it in separate processes, and print the rows."""
    model = arguments.model or QUICKSTART / "smollm2-135m"
    if arguments.quick:
        model = make_small_model(folder)
    config_path = folder / "run.toml"
    values = {"dtype": arguments.dtype, "ram": "12MiB" if arguments.quick else "700MiB", "num_steps": NUM_STEPS}
    config_path.write_text(CONFIG.format(model=model.resolve(), text=QUICKSTART / "loomings.txt", **values))
    config = load_config(config_path).config
    trainer = Trainer(config, observer=RunObserver())
    report = Report("export", as_json=arguments.json, tokens_per_step=config.rows_per_step * config.data.max_length)
    trainer.train()
    ids, expected = engine_logits(config, trainer)
    out = folder / "exported"
    peak = export(folder, out)
    libraries = 1024 * int(run([sys.executable, "-c", IMPORT]).split()[-1])
    model_bytes = 4 * trainer.plan.graph.num_parameters
    report.row("model.bytes", model_bytes, "bytes, fp32")
    report.row("export.peak_rss", peak, "bytes")
    report.row("export.libraries_rss", libraries, "bytes")
    share = (peak - libraries) / model_bytes
    is_real = not arguments.quick
    report.row("export.beside_libraries", share, "of the model", **claim(TARGET_RAM_SHARE, share, is_real))
    torch.save(ids, folder / "ids.pt")
    run([sys.executable, "-c", LOAD, str(out), str(folder / "ids.pt"), str(folder / "logits.pt")])
    found = torch.load(folder / "logits.pt", weights_only=True)[:, :-1].reshape(expected.shape)
    difference = float((found - expected).abs().max())
    tolerance = TOLERANCE if arguments.dtype == "float32" else None
    report.row("logits.max_difference", difference, "", target=tolerance, ok=tolerance and difference <= tolerance)
    same = float((found.argmax(-1) == expected.argmax(-1)).float().mean())
    report.row("logits.same_choice", same, "of positions")
    at_end = (config.output_dir / "final/model.safetensors").read_bytes()
    same_bytes = (out / "model.safetensors").read_bytes() == at_end
    report.row("bytes_equal_the_runs_own_export", int(same_bytes), "", target=1, ok=same_bytes)
    return 0 if report.all_ok else 1


def claim(target: float, value: float, is_claimed: bool) -> dict[str, Any]:
    """Return the arguments that state a row's target, or no arguments if the row claims nothing."""
    return {"target": target, "ok": value <= target} if is_claimed else {}


def make_small_model(folder: Path) -> Path:
    """Write the repository's small model with random weights, and return its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    path = folder / "model"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(QUICKSTART / "model")).save_pretrained(path)
    AutoTokenizer.from_pretrained(QUICKSTART / "model").save_pretrained(path)
    return path


def engine_logits(config: Any, trainer: Trainer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [rows, tokens], and our engine's logits [rows * (tokens - 1), vocabulary] of the checkpoint."""
    loader = trainer.make_loader()
    loader.seek(LoaderPosition())
    ids = next(loader).micro_batches[0]["input_ids"]
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    pieces: list[torch.Tensor] = []
    with trainer.open() as opened:
        checkpoint = opened.load(find_candidates(resolve_checkpoint(config), print))
        assert checkpoint is not None and checkpoint.state.step == NUM_STEPS, checkpoint
        engine = opened.make_engine(1)
        make_logits = HeadModel.logits

        def noting(head: HeadModel, *given: Any) -> torch.Tensor:
            logits = make_logits(head, *given)
            pieces.append(logits.detach().float().clone())
            return logits

        with mock.patch.object(HeadModel, "logits", noting):
            engine.step([batch], step_index=0, lr=0.0)
    logits = torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in pieces])
    return ids, logits[: ids.shape[0] * (ids.shape[1] - 1)]


def export(folder: Path, out: Path) -> int:
    """Run the command that exports the newest checkpoint, and return its peak resident memory in bytes."""
    text = run([sys.executable, "-c", EXPORT, "export", str(folder / "out"), str(out), "--dtype", "float32"])
    return 1024 * int(text.split("peak")[-1].split()[0])


def run(command: list[str]) -> str:
    """Run a command and return its output."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{json.dumps(command[:4])} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
