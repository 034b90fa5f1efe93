"""Gain from overlapping updates with other work: normal steps, compared with steps that run all updates at the end.

    python bench/overlap.py --json
    python bench/overlap.py --quick           # a minute, a small model
    python bench/overlap.py --tokens 2x2x256 --ram 400MiB

Overlapped: with clipping, a layer is updated just before its next forward, while the drive moves the state of later
layers. Without clipping and without a norm check, a layer is updated right after its backward. Serial: the same engine
runs all updates of a step at the end of the step. Copies that were fetched for updates then cannot stay for the next
forward, so the serial side also reads more. The rows show how much more. The two modes alternate in one process, on the
same micro-batches.

Gradients are clipped never, always (tiny limit) or sometimes (limit at the median norm). Each of these cases runs with
everything in RAM, and with weights, gradients, state and activations on NVMe.

Claims: losses, norms, final weights and final state are bit-identical in both modes and both placements. With state
on NVMe, an overlapped step takes no longer than a serial one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # `import megatrain` would set this too late, after torch
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.common import QUICKSTART, Report, step_shape
from bench.models import write_llama
from bench.sides import Ours, StepTimes, batches, run_config
from megatrain.config.schema import RunConfig
from megatrain.engine.step import StepEngine, StepResult
from megatrain.optim.threads import default_num_threads
from megatrain.plan.planner import plan_run
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.training.resolve import resolve
from tiered.units import parse_size

OVERLAPPED, SERIAL = "overlapped", "serial"
PLACEMENTS = ("ram", "nvme")
TINY_NORM, LR = 0.01, 1e-4
TEXT = QUICKSTART / "loomings.txt"
ON_NVME = {kind: ["nvme"] for kind in ("weights", "gradients", "optimizer", "activations")}


def main() -> int:
    """Run the bench. Return 1 if a row fails, except for timing rows."""
    arguments = parse_arguments()
    torch.set_num_threads(default_num_threads())
    shape = arguments.tokens
    report = Report("overlap", as_json=arguments.json, tokens_per_step=shape[0] * shape[1] * shape[2])
    hidden, layers, vocabulary = (128, 4, 1024) if arguments.quick else (768, 12, 8192)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        model = write_llama(Path(scratch, "model"), hidden=hidden, layers=layers, vocabulary=vocabulary)
        report.row("model", f"llama {hidden}x{layers}, vocabulary {vocabulary}", "")
        report.row("shape", "x".join(map(str, shape)), "micro-batches x rows x tokens")
        Bench(model, arguments, Path(scratch), report).run()
    return 0 if report.all_ok else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="a model of 1 M parameters")
    parser.add_argument(
        "--tokens", type=step_shape, default=(1, 1, 256), help="micro-batches x rows x tokens of a step"
    )
    parser.add_argument("--ram", help='RAM tier of the NVMe sides, e.g. "400MiB"; default: twice their minimum')
    parser.add_argument("--steps", type=int, default=2, help="consecutive steps of a turn")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one warm-up round")
    parser.add_argument("--placements", default=",".join(PLACEMENTS), help="of ram,nvme")
    parser.add_argument("--scratch", type=Path, help="folder on the drive to measure; default: the temporary folder")
    return parser.parse_args()


class _RecordingEngine:
    """Engine that records the result of each step. A serial engine completes a step's updates within the step."""

    def __init__(self, engine: StepEngine, *, is_serial: bool) -> None:
        self._engine, self._is_serial = engine, is_serial
        self.results: list[StepResult] = []
        self.finish_updates = engine.finish_updates

    def step(self, micro_batches: Sequence[Mapping[str, torch.Tensor]], *, number: int, lr: float) -> StepResult:
        """Run a step. If the engine is serial, the measured time includes its updates."""
        result = self._engine.step(micro_batches, step_index=number, lr=lr)
        if self._is_serial:
            self._engine.finish_updates()
        self.results.append(result)
        return result


class Side(Ours):
    """Our engine with one placement of the blocks, either overlapped or serial."""

    def __init__(self, config: RunConfig, num_steps: int, *, is_serial: bool) -> None:
        super().__init__(config, num_steps)
        self.recorder = _RecordingEngine(self._engine, is_serial=is_serial)
        self._engine = self.recorder  # type: ignore[assignment]


class Bench:
    """Measurement of all placements and clipping modes."""

    def __init__(self, model: Path, arguments: argparse.Namespace, folder: Path, report: Report) -> None:
        self._model, self._arguments, self._folder, self._report = model, arguments, folder, report
        self._num_steps = (1 + arguments.rounds) * arguments.steps
        self._ram = self._ram_tier()

    def run(self) -> None:
        """Measure all modes and print their rows. The norms without clipping determine the limit for `sometimes`."""
        outcomes: dict[tuple[str, str], tuple[list[StepResult], dict[str, str]]] = {}
        placements = self._arguments.placements.split(",")
        limits = {"never": 0.0, "always": TINY_NORM}
        if "nvme" in placements:
            self._report.row("nvme.ram_tier", parse_size(self._ram), "bytes")
        for clipping in ("never", "always", "sometimes"):
            for placement in placements:
                outcomes[clipping, placement] = self._compare(
                    f"{placement}.{clipping}", placement, clipping, limits[clipping]
                )
            if clipping == "never":
                norms = [result.grad_norm for result in outcomes["never", placements[0]][0]]
                limits["sometimes"] = statistics.median(norms)
                self._report.row("sometimes.max_grad_norm", limits["sometimes"], "")
            first, *others = (outcomes[clipping, placement] for placement in placements)
            for placement, other in zip(placements[1:], others, strict=True):
                self._print_differences(f"{clipping}.{placement}/{placements[0]}", first, other)
        self._report.row("load_average", round(os.getloadavg()[0], 2), "threads, 1 minute")

    def _compare(
        self, prefix: str, placement: str, clipping: str, max_grad_norm: float
    ) -> tuple[list[StepResult], dict[str, str]]:
        """Run both sides alternately. Return the overlapped side's step results and final digests."""
        ram = self._ram if placement == "nvme" else None
        rounds: list[dict[str, StepTimes]] = []
        with ExitStack() as stack:
            sides = {}
            for name, table in self._tables(clipping, max_grad_norm).items():
                config = self._config(f"{prefix}.{name}", table, ram)
                sides[name] = stack.enter_context(Side(config, self._num_steps, is_serial=name == SERIAL))
            data = batches(self._config("data", {}, None))
            for _ in range(1 + self._arguments.rounds):
                turn = list(islice(data, self._arguments.steps))
                rounds.append({name: side.steps(turn, LR) for name, side in sides.items()})
            outcomes = {name: (side.recorder.results, side.digests()) for name, side in sides.items()}
            self._print_times(prefix, placement, rounds[1:])
            self._print_counters(prefix, sides)
        self._print_clipped(prefix, clipping, max_grad_norm, outcomes[OVERLAPPED][0])
        self._print_differences(f"{prefix}.{SERIAL}/{OVERLAPPED}", outcomes[OVERLAPPED], outcomes[SERIAL])
        return outcomes[OVERLAPPED]

    def _ram_tier(self) -> str:
        """Return the size of the RAM tier for all sides on NVMe. By default, it is twice the largest minimum."""
        if self._arguments.ram is not None:
            return str(self._arguments.ram)
        needs = [1]
        for table in self._tables("never", 0.0).values():
            try:
                plan_run(resolve(self._config("plan", table, "1MiB")))
            except DoesNotFitError as error:
                needs.append(error.need_bytes)
        return f"{2 * max(needs)}B"

    def _tables(self, clipping: str, max_grad_norm: float) -> dict[str, dict[str, Any]]:
        """Return the config tables that set clipping, for each side."""
        # Without clipping and without a norm check, the engine may update during the backward.
        nonfinite = {OVERLAPPED: "ignore" if clipping == "never" else "stop", SERIAL: "stop"}
        table = {"learning_rate": LR, "max_grad_norm": max_grad_norm}
        return {name: {"optimizer": {**table, "nonfinite": nonfinite[name]}} for name in (OVERLAPPED, SERIAL)}

    def _config(self, name: str, tables: Mapping[str, Any], ram: str | None) -> RunConfig:
        folder = self._folder / name
        if ram is not None:
            drive = {"ram": {"size": ram}, "nvme": [{"path": str(folder / "nvme")}]}
            tables = {**tables, "tiers": drive, "placement": ON_NVME}
        return run_config(self._model, TEXT, self._arguments.tokens, folder, **tables)

    def _print_times(self, prefix: str, placement: str, rounds: Sequence[Mapping[str, StepTimes]]) -> None:
        row = self._report.row
        for name in (OVERLAPPED, SERIAL):
            row(f"{prefix}.{name}.step", statistics.median(turn[name].total_s for turn in rounds), "s")
            row(f"{prefix}.{name}.steps", [round(turn[name].total_s, 4) for turn in rounds], "s")
            for part in rounds[0][name].parts_s:
                row(f"{prefix}.{name}.{part}", statistics.median(turn[name].parts_s[part] for turn in rounds), "s")
        ratios = [turn[SERIAL].total_s / turn[OVERLAPPED].total_s for turn in rounds]
        ratio, target = statistics.median(ratios), 1.0 if placement == "nvme" else None
        ok = None if target is None else ratio >= target
        row(f"{prefix}.ratio.{SERIAL}/{OVERLAPPED}", ratio, "x", target=target, ok=ok, timing=True)
        row(f"{prefix}.ratio.{SERIAL}/{OVERLAPPED}.each", [round(each, 3) for each in ratios], "x")

    def _print_counters(self, prefix: str, sides: Mapping[str, Side]) -> None:
        for name, side in sides.items():
            for link, moved in side.moved_bytes().items():
                self._report.row(f"{prefix}.{name}.{link}.moved", moved // self._num_steps, "bytes/step")
            wasted = sum(window.prefetch_wasted for window in side.windows) / self._num_steps
            self._report.row(f"{prefix}.{name}.prefetch_wasted", wasted, "copies/step")

    def _print_clipped(self, prefix: str, clipping: str, limit: float, results: Sequence[StepResult]) -> None:
        clipped = sum(0 < limit < result.grad_norm for result in results)
        wanted = {"never": clipped == 0, "always": clipped == len(results), "sometimes": 0 < clipped < len(results)}
        target = {"never": 0, "always": len(results), "sometimes": len(results) // 2}[clipping]
        self._report.row(f"{prefix}.clipped", clipped, "steps", target=target, ok=wanted[clipping])

    def _print_differences(
        self,
        prefix: str,
        left: tuple[Sequence[StepResult], Mapping[str, str]],
        right: tuple[Sequence[StepResult], Mapping[str, str]],
    ) -> None:
        steps = sum(one != other for one, other in zip(left[0], right[0], strict=True))
        assert left[1].keys() == right[1].keys(), sorted(left[1].keys() ^ right[1].keys())
        blocks = sum(left[1][key] != right[1][key] for key in left[1])
        self._report.row(f"{prefix}.losses_that_differ", steps, "steps", target=0, ok=steps == 0)
        self._report.row(f"{prefix}.blocks_that_differ", blocks, f"of {len(left[1])} blocks", target=0, ok=blocks == 0)


if __name__ == "__main__":
    sys.exit(main())
