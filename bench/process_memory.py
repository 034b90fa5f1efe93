"""Accuracy of the line "process about X" in a plan, which predicts a process's peak memory, for several row lengths.

    python bench/process_memory.py --json
    python bench/process_memory.py --quick                       # a minute: a small model
    python bench/process_memory.py --only narrow.ram.16384

`plan --json` predicts the memory in a separate process, as for a user who sets a container's memory limit. Then `run`
trains in another process, and the kernel reports its peak resident memory. Models of two shapes run in RAM and on a
drive, and one of them also with adapters. Rows have 1,024 to 65,536 tokens. Attention is narrow, so that steps with
long rows take only minutes. Claim: planned / measured is between 0.95 and 1.05.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # `import megatrain` would set this too late, after torch
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.accuracy_cases import KINDS, Case, llama, only_on_nvme, write_config
from bench.common import QUICKSTART, ROOT, Report

TOLERANCE = 0.05
QUICK_CASES = ("narrow.ram.1024", "narrow.drive.1024")
LORA = "\n[lora]\nr = 8\n"
#: The child process reports its own peak, because the value that its parent can read includes the parent's peak.
PROGRAM = """
import atexit, sys
from bench.common import high_water_bytes
from megatrain_tier_cli.main import main
path = sys.argv.pop(1)
atexit.register(lambda: open(path, "w").write(str(high_water_bytes())))
main()
"""


def narrow(num_tokens: int) -> dict[str, Any]:
    """Return the config values of a 0.2 M parameter model. A run's memory depends almost only on the row length."""
    return _with_positions(llama(64, 2, 1024), num_tokens)


def wide(num_tokens: int) -> dict[str, Any]:
    """Return the config values of a 7 M parameter model with a large vocabulary, so its logits take a lot of memory."""
    return _with_positions(llama(256, 3, 8192), num_tokens)


def _with_positions(values: Mapping[str, Any], num_tokens: int) -> dict[str, Any]:
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}
    return {**values, **heads, "max_position_embeddings": num_tokens}


def cases(lengths: tuple[int, ...]) -> dict[str, Case]:
    """Return the cases by name. Only the cases with the narrow model in RAM include the longest rows."""
    found = {}
    for length in lengths:
        rows = (1, 1, length)
        found[f"narrow.ram.{length}"] = Case("llama", narrow(length), rows)
        if length > 16384:
            continue
        found[f"narrow.drive.{length}"] = Case("llama", narrow(length), rows, placement=only_on_nvme(*KINDS))
        found[f"wide.ram.{length}"] = Case("llama", wide(length), rows)
        found[f"wide.drive.{length}"] = Case("llama", wide(length), rows, placement=only_on_nvme(*KINDS))
        found[f"wide.lora.{length}"] = Case("llama", wide(length), rows, model={"train_from_scratch": False})
    return found


def main() -> int:
    """Run the bench. Return 1 if a prediction error exceeds the tolerance."""
    arguments = parse_arguments()
    known = cases((1024, 4096, 16384, 65536))
    usual = QUICK_CASES if arguments.quick else list(known)
    wanted = arguments.only.split(",") if arguments.only else usual
    if unknown := sorted(set(wanted) - set(known)):
        raise SystemExit(f"no such case: {', '.join(unknown)}; there are {', '.join(known)}")
    all_ok = True
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        text = Path(scratch, "text.txt")
        text.write_text((QUICKSTART / "loomings.txt").read_text(encoding="utf-8") * 30, encoding="utf-8")
        for name in wanted:
            report = Report("process_memory", as_json=arguments.json, tokens_per_step=known[name].tokens_per_step)
            folder = Path(scratch, name)
            folder.mkdir()
            # Use an empty cache, so that the rows are tokenized, as in a user's first run.
            os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
            compare(name, known[name], folder, text, arguments.steps, report)
            all_ok &= report.all_ok
    return 0 if all_ok else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="a small model and rows of 1,024 tokens")
    parser.add_argument("--only", help="names of cases, with commas between")
    parser.add_argument("--steps", type=int, default=2, help="steps of a run")
    parser.add_argument("--scratch", type=Path, help="folder on the drive to use; default: the temporary folder")
    return parser.parse_args()


def compare(name: str, case: Case, folder: Path, text: Path, num_steps: int, report: Report) -> None:
    """Print a case's planned memory, the memory that its run used, and their ratio."""
    config = write_config(case, folder, text, num_steps)
    if not case.model.get("train_from_scratch", True):  # adapters need a model with weights
        write_weights(folder / "model")
        config.write_text(config.read_text(encoding="utf-8") + LORA, encoding="utf-8")
    plan = json.loads(command("-m", "megatrain", "plan", config, "--json"))
    peak = folder / "peak"
    command("-c", PROGRAM, peak, "run", config, "--json")
    measured = int(peak.read_text())
    for part, nbytes in plan["process"].items():
        report.row(f"{name}.planned.{part.removesuffix('_bytes')}", nbytes, "bytes")
    report.row(f"{name}.planned", plan["process_bytes"], "bytes")
    report.row(f"{name}.measured", measured, "bytes")
    ratio = plan["process_bytes"] / measured
    report.row(f"{name}.ratio", round(ratio, 4), "x", target=1, ok=abs(ratio - 1) <= TOLERANCE)


def write_weights(folder: Path) -> None:
    """Write random weights into a model's folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)


def command(*words: object) -> str:
    """Run Python in a separate process and return its output."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
