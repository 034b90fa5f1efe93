"""CPU seconds of interactive commands: `report`, `data preview`, `plan` and `check`.

    python bench/startup.py --json
    git worktree add /tmp/old HEAD~50 && python bench/startup.py --old /tmp/old

Each command runs in a new interpreter, on the quickstart's model and text. With `--old`, the commands of another tree
and of this tree alternate, round by round. The row `imports` is for a process that only imports torch and the model's
class. `plan` and `check` need both imports, so their targets apply to the seconds beyond this row. All values are
medians of user plus system seconds, which depend less on the machine's load than elapsed time.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import QUICKSTART, ROOT, Report

COMMANDS: Mapping[str, Sequence[str]] = {
    "report": ("report", "outputs/first"),
    "preview": ("data", "preview", "-n", "1", "first.toml"),
    # Use a separate folder, because an older tree may not know all keys of a newer tree's run.
    "plan": ("plan", "first.toml", "--set", "output_dir=outputs/new"),
    "check": ("check", "first.toml", "--set", "output_dir=outputs/new"),
}
IMPORTS = "import torch; from transformers.models.llama.modeling_llama import LlamaForCausalLM"
#: Maximum CPU seconds by command. The second mapping excludes the time for imports.
TARGETS, ABOVE_IMPORTS = {"report": 0.8, "preview": 2.0}, {"plan": 2.0, "check": 2.0}


def main() -> int:
    """Run the bench. Return 1 if a row fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="accepted by every bench")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each command")
    parser.add_argument("--only", default=",".join(COMMANDS), help="commands, with commas between them")
    parser.add_argument("--old", type=Path, help="another tree of this repository, which alternates with this one")
    parser.add_argument("--scratch", type=Path, help="folder for the runs; a temporary one by default")
    arguments = parser.parse_args()
    names = [name for name in COMMANDS if name in arguments.only.split(",")]
    trees = {"new": ROOT, **({} if arguments.old is None else {"old": arguments.old.resolve()})}
    report = Report("startup", as_json=arguments.json, tokens_per_step=None)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        folder = Path(scratch, "quickstart")
        shutil.copytree(QUICKSTART, folder)
        if "report" in names:
            seconds(_command(["run", "first.toml"]), folder, ROOT)
        taken: dict[str, list[float]] = {}
        for _ in range(arguments.rounds):
            taken.setdefault("imports", []).append(seconds([sys.executable, "-c", IMPORTS], folder, ROOT))
            for name in names:
                for side, tree in trees.items():
                    taken.setdefault(f"{name}.{side}", []).append(seconds(_command(COMMANDS[name]), folder, tree))
    imports = median(taken["imports"])
    for name, each in taken.items():
        command, _, side = name.partition(".")
        target = TARGETS.get(command)
        if command in ABOVE_IMPORTS:
            target = round(imports + ABOVE_IMPORTS[command], 2)
        if side != "new":
            target = None
        value = round(median(each), 2)
        report.row(name, value, "CPU s", target=target, ok=None if target is None else value <= target, timing=True)
    return 0 if report.all_ok else 1


def _command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "cli", *words]


def seconds(command: Sequence[str], folder: Path, tree: Path) -> float:
    """Run a command with the code of a tree, and return its CPU seconds."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise each run would compile every module
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


if __name__ == "__main__":
    sys.exit(main())
