"""One GPU: our engine at 7 to 20 B parameters and long context, compared with MegaTrain, PyTorch and DeepSpeed.

    python bench/gpu.py --parts 7b_64k,7b_4k --profile --json --out gpu.jsonl
    python bench/gpu.py --parts rates,7b_4k_equal --megatrain ../MegaTrain
    python bench/gpu.py --quick --device cpu       # every part at a tiny size, no GPU needed

Claims, on one H200: with the defaults of a run, our side reaches 12,000 tokens/s at 7 B and T = 64k. Its hardware
FLOP/s are at least 0.6 of the rate of matrix products in the same process. The other claims are for equal work at 7 B.
Our side has 1.5 times the tokens/s of the reference MegaTrain at T = 64k, and 2.5 times at 4k. Our side also updates an
fp32 master, which the reference lacks. Our side is at least as fast as plain PyTorch with everything on the GPU, at the
largest number of layers that fits. It has 1.84 times the tokens/s of DeepSpeed ZeRO-3 with offload. In every part, our
side moves the planned number of bytes.

The machine cannot hold all sides at once. They run one after the other in separate processes, from the same weights and
on the same tokens. In the part `rates`, the command `doctor` measures the machine; plans predict step times from these
rates. `--minutes` limits the whole call; parts that were skipped for lack of time are reported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # `import megatrain` would set this too late, after torch
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.common import ROOT, Report
from bench.compare.processes import import_failure
from bench.gpu_sides.cases import OURS, PARTS, PLAIN, REFERENCE, VARIANTS, ZERO3, Part, part_named
from bench.gpu_sides.job import Job, make_job
from bench.gpu_sides.rows import Rows

RATES = "rates"
#: Reduced numbers of layers to try with plain PyTorch if all 28 layers do not fit.
PLAIN_LAYERS = tuple(range(26, 3, -2))
#: Number of log lines to print after a side fails.
_LINES_KEPT = 200
#: Minimum remaining time for starting a side.
MIN_START_S = 30.0
HELP = "in this order; default: {}. A part and variants of our side, as in 7b_4k+eager: {}"
#: Default time limit for all parts together.
DEFAULT_MINUTES = 8.0


class TerminatedError(Exception):
    """Exception that ends the running side after SIGTERM."""


def main() -> int:
    """Run the parts. Return 1 if a row fails, except for timing rows. After SIGTERM, finished steps still count."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, _terminate)
    deadline_s = time.monotonic() + 60 * arguments.minutes
    all_ok = True
    for folder in (arguments.cache, arguments.traces, arguments.scratch, arguments.out and arguments.out.parent):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        cache = arguments.cache or Path(scratch, "cache")
        os.environ["XDG_CACHE_HOME"] = str(cache.absolute())  # doctor stores its rates there
        for name in arguments.parts:
            folder = Path(scratch, name)
            folder.mkdir()
            if name == RATES:
                all_ok &= measure_rates(folder, arguments, deadline_s)
                continue
            part = part_named(name)
            part = part.small() if arguments.quick else part
            report = Report("gpu", as_json=arguments.json, tokens_per_step=part.tokens, out=arguments.out)
            comparison = Comparison(name, part, folder, arguments, Rows(report, name, part), deadline_s)
            comparison.run()
            deadline_s = comparison.deadline_s
            all_ok &= report.all_ok
    return 0 if all_ok else 1


def _terminate(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ignore a second one: `timeout` signals the process, then its group
    raise TerminatedError


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (RATES, *PARTS)
    parser.add_argument("--parts", type=_names, default=names, help=HELP.format(",".join(names), ", ".join(VARIANTS)))
    parser.add_argument("--minutes", type=float, default=DEFAULT_MINUTES, help="for the whole call; default: 8")
    parser.add_argument("--out", type=Path, help="file to which every row is added as a JSON line")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few tokens in every part")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for --quick")
    parser.add_argument("--megatrain", type=Path, help="a checkout of the reference; without it that side is left out")
    parser.add_argument("--deepspeed", default="", help="interpreter that has DeepSpeed, for the part zero3")
    parser.add_argument("--tables", type=json.loads, default={}, help="more tables of our config, as JSON")
    parser.add_argument("--steps", type=int, help="measured steps; default: the part's")
    parser.add_argument("--layers", type=int, help="layers of the model; default: the part's")
    parser.add_argument("--ram", default="", help='our RAM tier, e.g. "110GiB"; default: what is free')
    parser.add_argument("--cache", type=Path, help="folder for measured rates, to be used by later calls")
    parser.add_argument("--traces", type=Path, help="folder for the timeline of our side in each part, for Perfetto")
    parser.add_argument(
        "--profile", action="store_true", help="one more step of our side under the profiler: rows PART.ours.profile.*"
    )
    parser.add_argument("--scratch", type=Path, help="folder on the drive to use; default: the temporary folder")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU that it can use; --quick --device cpu runs every part at a tiny size")
    if arguments.device == "cpu" and not arguments.quick:
        parser.error("--device cpu needs --quick: these models are too large for it")
    return arguments


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        part, *variants = name.split("+")
        if (name != RATES and part not in PARTS) or not set(variants) <= VARIANTS.keys():
            known = f"{', '.join((RATES, *PARTS))}; variants {', '.join(VARIANTS)}"
            raise argparse.ArgumentTypeError(f"no part {name}; there are {known}")
    return names


def measure_rates(folder: Path, arguments: argparse.Namespace, deadline_s: float) -> bool:
    """Run `doctor` to measure the machine and the drive of ``folder``. Print the rates. Return whether it worked."""
    report = Report("gpu", as_json=arguments.json, tokens_per_step=None, out=arguments.out)
    command = [sys.executable, "-m", "cli", "doctor", "--quick", "--json", str(folder)]
    environment = {**os.environ, "PYTHONPATH": _python_path(), "NO_COLOR": "1"}
    left_s = max(1.0, deadline_s - time.monotonic())
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=left_s)
    except subprocess.TimeoutExpired:
        report.row("rates.failed", "out of time", "reason", target=0, ok=False)
        return False
    if not done.stdout.strip():
        report.row("rates.failed", done.stderr.strip()[-300:], "reason", target=0, ok=False)
        return False
    seen = json.loads(done.stdout)
    for dtype, rate in seen["layers"]["matmul_flops"].items():
        report.row(f"rates.cpu.matmul.{dtype}", rate, "FLOP/s")
    if seen["gpu"]:
        for way in ("h2d", "d2h"):
            report.row(f"rates.gpu.{way}", seen["gpu"][way], "bytes/s")
        for dtype, rate in seen["gpu"]["matmul_flops"].items():
            report.row(f"rates.gpu.matmul.{dtype}", rate, "FLOP/s")
    for drive in seen["drives"]:
        for way in ("read", "write", "mixed"):
            report.row(f"rates.drive.{way}", drive["tier"][way], "bytes/s")
    return True


class Comparison:
    """Runs the sides of one part in turn and reports their rows.

    Attributes:
        deadline_s: Time at which every side must have ended. SIGTERM moves it to the past.
    """

    def __init__(
        self,
        name: str,
        part: Part,
        folder: Path,
        arguments: argparse.Namespace,
        rows: Rows,
        deadline_s: float,
    ) -> None:
        self._name, self._part, self._folder = name, part, folder
        self._arguments, self._rows, self.deadline_s = arguments, rows, deadline_s
        self._layers = arguments.layers

    def run(self) -> None:
        """Run all sides. Plain PyTorch runs first, because its memory use determines how many layers all sides have."""
        sides = sorted(self._part.sides, key=lambda side: side != PLAIN)
        found: dict[str, Mapping[str, Any]] = {}
        for number, side in enumerate(sides):
            reason = self._skip_reason(side)
            if reason:
                self._rows.skipped(side, reason)
                continue
            result, failure = self._run_side(side, num_left=len(sides) - number)
            if failure:
                self._rows.failed(side, failure, is_ours=side == OURS)
            if "start_s" in result:  # present even if time ran out before the first step
                self._rows.start(side, result)
            if result.get("steps"):
                found[side] = result
                self._rows.side(side, result, self._warm_ups())
            if side == PLAIN and "num_layers" in result and not self._arguments.quick:
                self._layers = result["num_layers"]
        if OURS in found:
            self._rows.ours(found[OURS], self._warm_ups())
        self._rows.compare(found, self._warm_ups())

    def _skip_reason(self, side: str) -> str:
        arguments = self._arguments
        if time.monotonic() > self.deadline_s - MIN_START_S:
            return "out of time; run this part in a separate call, or with more --minutes"
        if side == REFERENCE and arguments.megatrain is None:
            return "no --megatrain FOLDER"
        if side == ZERO3:
            return import_failure(arguments.deepspeed, "deepspeed") if arguments.deepspeed else "no --deepspeed PYTHON"
        return ""

    def _warm_ups(self) -> int:
        return int(self._part.num_steps > 0)

    def _run_side(self, side: str, *, num_left: int) -> tuple[Mapping[str, Any], str]:
        """Run a side's process until it ends or reaches its deadline. Return the results, and a failure message or "".

        Args:
            num_left: Number of the part's sides still to run, including this one. They share the remaining time.
        """
        budget_s = max(MIN_START_S, (self.deadline_s - time.monotonic()) / num_left)
        job = self._job(side, budget_s)
        if side == OURS and job.tables:
            self._rows.row("ours.tables", json.dumps(job.tables), "of the config")
        python = self._arguments.deepspeed if side == ZERO3 else sys.executable
        log = self._folder / f"{side}.log"
        environment = {
            **os.environ,
            "PYTHONPATH": _python_path(),
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        }
        if side == OURS:  # required for deterministic matrix products; adds host time per product in torch 2.11
            environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        else:
            environment.pop("CUBLAS_WORKSPACE_CONFIG", None)
        command = [python, "-P", "-c", "from bench.gpu_sides import worker; worker.main()", job.to_json()]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait(timeout=budget_s)
                failure = "" if code == 0 else f"exit code {code}: {_last_lines(log)}"
            except subprocess.TimeoutExpired:
                failure = f"out of time after {budget_s:.0f} s; the finished steps count: {_last_lines(log)}"
            except TerminatedError:
                self.deadline_s = 0.0
                failure = f"the bench received SIGTERM; the finished steps count: {_last_lines(log)}"
            finally:
                _kill_side(process)
        if failure:
            print(
                f"-- the last lines of {side} of {self._name}:", _log_tail(log), sep="\n", file=sys.stderr, flush=True
            )
        path = Path(job.result)
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return result, failure

    def _job(self, side: str, budget_s: float) -> Job:
        arguments = self._arguments
        is_profiled = arguments.profile and side == OURS
        traces = arguments.traces.absolute() if arguments.traces and side == OURS else None
        return make_job(
            side,
            self._part,
            self._folder / side,
            budget_s=budget_s,
            device=arguments.device,
            quick=arguments.quick,
            num_steps=arguments.steps,
            layers=self._layers,
            ram=arguments.ram,
            tables=arguments.tables,
            trace=str(traces / f"{self._name}.json") if traces else "",
            has_profile=is_profiled,
            profile=str(traces / f"{self._name}.profile.json.gz") if traces and is_profiled else "",
            megatrain=str(arguments.megatrain.absolute()) if arguments.megatrain else "",
            layers_to_try=() if arguments.quick else PLAIN_LAYERS,
        )


def _python_path() -> str:
    """Return PYTHONPATH for a side: this tree, then the current value, which may add libraries."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def _log_tail(log: Path) -> str:
    """Return the end of a side's log, to be printed before the log is deleted with the scratch folder."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES_KEPT:])


def _last_lines(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " | ".join(line.strip() for line in lines[-3:])[-500:]


def _kill_side(process: subprocess.Popen[bytes]) -> None:
    """Kill a side's remaining processes, and wait until it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    with contextlib.suppress(TerminatedError):  # raised while no side was running, so no row is lost
        sys.exit(main())
    sys.exit(128 + signal.SIGTERM)
