"""Accuracy of `plan --measure`: predicted seconds per step, bytes and peaks, compared with a run.

    python bench/plan_accuracy.py --json
    python bench/plan_accuracy.py --quick                 # a minute: three small models
    python bench/plan_accuracy.py --only mixtral,gpt2_lion

Each case is a model shape and a placement, with random weights. `plan --measure --json` predicts the case's run in one
process. Then `run --json` trains the model in another process, which does not know the measured times. Some cases
repeat this with changed settings (`--set`). Claims: predicted / measured is between 0.85 and 1.15 (0.90 and 1.10 for
"by_rates"), and the moved bytes equal the planned bytes.

Rows "by_rates" come from a plan that does not time any steps. This plan divides the work that the trace counted by the
rates that ``doctor --quick`` measured just before (with ``--quick``: before the first case).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # `import megatrain` would set this too late, after torch
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.accuracy_cases import CASES, QUICK_CASES, Case, write_config
from bench.common import QUICKSTART, ROOT, Report
from megatrain.config import load_config
from megatrain.plan.planner import plan_run
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.training.resolve import resolve

TOLERANCE, BY_RATES_TOLERANCE = 0.15, 0.10
WARM_STEPS = 2


@dataclass(frozen=True)
class Measurement:
    """Measurements of a run: seconds per step after the warm-up, moved bytes by link, and peaks by tier."""

    steps_s: Sequence[float]
    moved_bytes: Mapping[str, int]
    peak_bytes: Mapping[str, int]

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps_s)


def main() -> int:
    """Run the bench. Return 1 if a row fails, except for timing rows."""
    arguments = parse_arguments()
    cases = QUICK_CASES if arguments.quick else CASES
    wanted = arguments.only.split(",") if arguments.only else list(cases)
    unknown = sorted(set(wanted) - set(cases))
    if unknown:
        raise SystemExit(f"no such case: {', '.join(unknown)}; there are {', '.join(cases)}")
    all_ok, ratios, by_rates = True, [], []
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        os.environ["XDG_CACHE_HOME"] = str(Path(scratch, "cache"))  # keep this bench's rates out of the user's cache
        text = Path(scratch, "text.txt")
        text.write_text((QUICKSTART / "loomings.txt").read_text(encoding="utf-8") * 12, encoding="utf-8")
        for name in wanted:
            runs_doctor = name == wanted[0] or not arguments.quick  # the machine's speed changes within an hour
            report = Report("plan_accuracy", as_json=arguments.json, tokens_per_step=cases[name].tokens_per_step)
            found = Comparison(name, cases[name], Path(scratch, name), text, arguments.steps, report, runs_doctor)
            ratios += found.run()
            if found.by_rates is not None:
                by_rates.append(found.by_rates)
            all_ok &= report.all_ok
        report = Report("plan_accuracy", as_json=arguments.json, tokens_per_step=None)
        within, total = sum(abs(ratio - 1) <= TOLERANCE for ratio in ratios), len(ratios)
        report.row("ratios.median", statistics.median(ratios), "x")
        report.row("ratios.each", [round(ratio, 3) for ratio in ratios], "x")
        report.row("ratios.within_15_percent", within, "ratios", target=total, ok=within == total, timing=True)
        report.row("by_rates.median", statistics.median(by_rates) if by_rates else None, "x")
        near = sum(abs(ratio - 1) <= BY_RATES_TOLERANCE for ratio in by_rates)
        report.row(
            "by_rates.within_10_percent", near, "ratios", target=len(by_rates), ok=near == len(by_rates), timing=True
        )
        report.row("by_rates.each", [round(ratio, 3) for ratio in by_rates], "x")
        report.row("load_average", round(os.getloadavg()[0], 2), "threads, 1 minute")
    return 0 if all_ok else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="three small models")
    parser.add_argument("--only", help="names of cases, with commas between")
    parser.add_argument("--steps", type=int, default=8, help=f"steps of a run; the first {WARM_STEPS} do not count")
    parser.add_argument("--scratch", type=Path, help="folder on the drive to use; default: the temporary folder")
    return parser.parse_args()


class Comparison:
    """Comparison of one case's plan with its run."""

    def __init__(
        self, name: str, case: Case, folder: Path, text: Path, num_steps: int, report: Report, runs_doctor: bool
    ) -> None:
        self._name, self._case, self._folder, self._runs_doctor = name, case, folder, runs_doctor
        self._num_steps, self._report = num_steps, report
        folder.mkdir()
        self._config = write_config(case, folder, text, num_steps)
        self._tight = self._tight_ram() if any("TIGHT" in part for part in (case.ram, *case.changes)) else ""
        self._overrides = [f"tiers.ram.size={self._tight}"] if case.ram == "TIGHT" else []
        self.by_rates: float | None = None  # None if the plan lacks a rate for some of the work

    def run(self) -> list[float]:
        """Plan and run the case, and its changed version if there is one. Return predicted / measured for each run."""
        sets = [word for one in self._overrides for word in ("--set", one)]
        if self._runs_doctor:
            command("doctor", "--quick", "--json", "--config", self._config)
        plan = command("plan", self._config, "--measure", "--json", *sets)
        real = self._run_case(self._overrides, "run")
        self._report.row(f"{self._name}.parameters", self._num_parameters(), "1")
        ratios = [self._print_time(self._name, plan["estimate"]["predicted_step_s"], real)]
        by_rates = command("plan", self._config, "--json", *sets)["estimate"]
        for resource, seconds in by_rates["busy_s"].items():
            self._report.row(f"{self._name}.by_rates.{resource}", seconds, "s")
        if (predicted := by_rates["predicted_step_s"]) is not None:
            self.by_rates = predicted / real.step_s
        self._report.row(f"{self._name}.by_rates.ratio", self.by_rates, "x")
        self._print_bytes(self._name, plan["run"]["moved_bytes"], plan["totals"], plan["budgets"], real)
        if self._case.changes:
            changes = [one.replace("TIGHT", self._tight) for one in self._case.changes]
            changes = [*self._overrides, *(one.replace("FOLDER", str(self._folder)) for one in changes)]
            sets = [word for one in changes for word in ("--set", one)]
            plan = command("plan", self._config, "--measure", "--json", *sets)
            real = self._run_case(changes, "changed")
            name = f"{self._name}.set.{','.join(self._case.changes)}"
            ratios.append(self._print_time(name, plan["estimate"]["predicted_step_s"], real))
            self._print_bytes(name, plan["run"]["moved_bytes"], plan["totals"], plan["budgets"], real)
        return ratios

    def _num_parameters(self) -> int:
        return plan_run(resolve(load_config(self._config, (), self._overrides).config)).graph.num_parameters

    def _tight_ram(self) -> str:
        """Return the size of a RAM tier that is a third above the minimum."""
        try:
            plan_run(
                resolve(load_config(self._config, (), ["tiers.ram.size=1MiB", *self._case.drive(self._folder)]).config)
            )
        except DoesNotFitError as error:
            return f"{error.need_bytes * 4 // 3}B"
        return "1MiB"

    def _run_case(self, overrides: Sequence[str], folder: str) -> Measurement:
        output = self._folder / folder
        sets = [word for one in (*overrides, f'output_dir="{output}"') for word in ("--set", one)]
        end = command("run", self._config, "--json", *sets)
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        steps = [line["step_s"] for line in lines if "event" not in line]
        assert len(steps) == self._num_steps, len(steps)
        return Measurement(steps[WARM_STEPS:], end["link_bytes"], end["tier_peak_bytes"])

    def _print_time(self, name: str, predicted_s: float, real: Measurement) -> float:
        row, ratio = self._report.row, predicted_s / real.step_s
        row(f"{name}.predicted", predicted_s, "s")
        row(f"{name}.measured", real.step_s, "s")
        row(f"{name}.measured.each", [round(step_s, 4) for step_s in real.steps_s], "s")
        row(f"{name}.ratio", ratio, "x", target=1.0, ok=abs(ratio - 1) <= TOLERANCE, timing=True)
        return ratio

    def _print_bytes(
        self,
        name: str,
        moved: Mapping[str, int],
        peaks: Mapping[str, int],
        capacities: Mapping[str, int],
        real: Measurement,
    ) -> None:
        """Print whether moved bytes and the peaks of tiers are as planned. Prefetched copies may raise the RAM peak."""
        row, has_copies = self._report.row, len(peaks) > 1  # with several tiers, blocks have copies outside their home
        for link, nbytes in moved.items():
            found = real.moved_bytes[link]
            row(f"{name}.{link}.moved", found, "bytes", target=nbytes, ok=found == nbytes)
        for tier, nbytes in peaks.items():
            found = real.peak_bytes[tier]
            row(f"{name}.{tier}.planned_peak", nbytes, "bytes")
            if tier == "ram" and has_copies:
                most = capacities[tier]
                row(f"{name}.{tier}.high_water", found, "bytes", target=most, ok=nbytes <= found <= most)
            else:
                row(f"{name}.{tier}.high_water", found, "bytes", target=nbytes, ok=found == nbytes)


def command(name: str, *words: str | Path) -> dict[str, Any]:
    """Run a command of megatrain-tier in a separate process, and return the last JSON object of its output."""
    arguments = [sys.executable, "-m", "cli", name, *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}{done.stdout[-2000:]}")
    last: dict[str, Any] = json.loads(done.stdout if name == "doctor" else done.stdout.splitlines()[-1])
    return last


if __name__ == "__main__":
    sys.exit(main())
