"""What kept graphs are worth: steps that run every layer again in the backward, and steps that keep what memory allows.

    python bench/recompute.py --json
    python bench/recompute.py --quick             # a minute, a small model
    python bench/recompute.py --tokens 2x2x512 --layers 6

All sides have every block in RAM; they differ in ``advanced.keep_graphs`` alone: none, half of the layers, all. They
take turns step by step in one process, on the same micro-batches. Claims: losses, norms, final weights and final state
are the same bits; the plan's total is not exceeded; a step that keeps all graphs takes less time than one that keeps
none. ``ratio.flops`` is what counting operations says of the same ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.common import QUICKSTART, Report, step_shape
from bench.models import write_llama
from bench.sides import Ours, StepTimes, batches, run_config
from megatrain.config.schema import RunConfig
from megatrain.engine.trace import step_flops
from megatrain.optim.threads import default_num_threads
from megatrain.plan.kept import num_layers_kept

NONE, HALF, ALL = "none", "half", "all"
LR = 1e-4
TEXT = QUICKSTART / "loomings.txt"

Rounds = Sequence[Mapping[str, StepTimes]]


def main() -> int:
    """Run the bench; 1 if a row that is not about time is not ok."""
    arguments = parse_arguments()
    torch.set_num_threads(default_num_threads())
    shape = arguments.tokens
    report = Report("recompute", as_json=arguments.json, tokens_per_step=shape[0] * shape[1] * shape[2])
    hidden, layers, vocabulary = (128, 4, 1024) if arguments.quick else (768, 12, 8192)
    layers = arguments.layers or layers
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        model = write_llama(Path(scratch, "model"), hidden=hidden, layers=layers, vocabulary=vocabulary)
        report.row("model", f"llama {hidden}x{layers}, vocabulary {vocabulary}", "")
        report.row("shape", "x".join(map(str, shape)), "micro-batches x rows x tokens")
        Bench(model, layers, arguments, Path(scratch), report).run()
    return 0 if report.all_ok else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument(
        "--tokens", type=step_shape, default=(2, 2, 256), help="micro-batches x rows x tokens of a step"
    )
    parser.add_argument("--layers", type=int, help="layers of the model")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are measured, after one that is not")
    parser.add_argument("--scratch", type=Path, help="folder for the model; default: the temporary folder")
    return parser.parse_args()


class Bench:
    """The three sides, their rounds, and the rows about them."""

    def __init__(
        self, model: Path, num_layers: int, arguments: argparse.Namespace, folder: Path, report: Report
    ) -> None:
        self._model, self._arguments, self._folder, self._report = model, arguments, folder, report
        self._num_kept = {NONE: 0, HALF: num_layers // 2, ALL: num_layers}

    def run(self) -> None:
        """Take one unmeasured round and then the measured ones, and print the rows."""
        rounds: list[dict[str, StepTimes]] = []
        with ExitStack() as stack:
            sides = {name: stack.enter_context(self._side(name)) for name in self._num_kept}
            data = batches(self._config(NONE))
            for _ in range(1 + self._arguments.rounds):
                micro_batches = next(data)
                rounds.append({name: side.step(micro_batches, LR) for name, side in sides.items()})
            self._report.row("load_average", round(os.getloadavg()[0], 2), "threads, 1 minute")
            self._tell_times(rounds[1:])
            for name, side in sides.items():
                self._tell_plan(name, side)
            self._tell_flops(sides)
            self._tell_differences(rounds, {name: side.digests() for name, side in sides.items()})

    def _config(self, name: str) -> RunConfig:
        shape, tables = self._arguments.tokens, {"advanced": {"keep_graphs": self._num_kept[name], "save_attention": 0}}
        return run_config(self._model, TEXT, shape, self._folder / name, **tables)

    def _side(self, name: str) -> Ours:
        return Ours(self._config(name), 1 + self._arguments.rounds)

    def _tell_times(self, rounds: Rounds) -> None:
        row = self._report.row
        for name in self._num_kept:
            row(f"{name}.step", statistics.median(turn[name].total_s for turn in rounds), "s")
            row(f"{name}.steps", [round(turn[name].total_s, 4) for turn in rounds], "s")
            row(f"{name}.cpu", statistics.median(turn[name].parts_s["cpu"] for turn in rounds), "s")
        for name in (HALF, ALL):
            ratios = [turn[name].total_s / turn[NONE].total_s for turn in rounds]
            ratio, target = statistics.median(ratios), 1.0 if name == ALL else None
            ok = None if target is None else ratio < target
            row(f"ratio.step.{name}/{NONE}", ratio, "x", target=target, ok=ok, timing=True)
            row(f"ratio.step.{name}/{NONE}.each", [round(each, 3) for each in ratios], "x")

    def _tell_plan(self, name: str, side: Ours) -> None:
        plan, row = side.plan, self._report.row
        kept, wanted = num_layers_kept(plan.graph, plan.trace, plan.program)[0], self._num_kept[name]
        row(f"{name}.layers_kept", kept, "layers", target=wanted, ok=kept == wanted)
        row(f"{name}.kept_graphs", plan.kept_bytes, "bytes")
        total, most = plan.totals["ram"], max(window.tiers["ram"].high_water_bytes for window in side.windows)
        row(f"{name}.ram", most, "bytes", target=total, ok=most <= total)

    def _tell_flops(self, sides: Mapping[str, Ours]) -> None:
        num_micro_batches, rows, length = self._arguments.tokens
        places = num_micro_batches * rows * length
        found = {
            name: step_flops(
                side.plan.trace,
                num_places=places,
                num_real_tokens=places,
                num_trained_tokens=places,
                kept=side.plan.program.recompute.kept_graphs,
            )
            for name, side in sides.items()
        }
        for name, flops in found.items():
            self._report.row(f"{name}.hardware_flops", flops.hardware, "FLOP/step")
        for name in (HALF, ALL):
            self._report.row(f"ratio.flops.{name}/{NONE}", found[name].hardware / found[NONE].hardware, "x")

    def _tell_differences(self, rounds: Rounds, digests: Mapping[str, Mapping[str, str]]) -> None:
        for name in (HALF, ALL):
            steps = sum(
                (turn[name].loss, turn[name].grad_norm) != (turn[NONE].loss, turn[NONE].grad_norm) for turn in rounds
            )
            self._report.row(f"{name}/{NONE}.steps_that_differ", steps, "steps", target=0, ok=steps == 0)
            blocks = sum(digest != digests[NONE][key] for key, digest in digests[name].items())
            self._report.row(f"{name}/{NONE}.blocks_that_differ", blocks, "blocks", target=0, ok=blocks == 0)


if __name__ == "__main__":
    sys.exit(main())
