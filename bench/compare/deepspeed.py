"""Step times of our engine and of DeepSpeed ZeRO-3 on the CPU, both with parameters and optimizer state on NVMe.

    python bench/compare/deepspeed.py --json --python /path/to/environment/bin/python --scratch /mnt/drive
    python bench/compare/deepspeed.py --quick

Claims, with little compute per step (T = 128): if our RAM tier is a quarter above the minimum, our step takes at most
half as long as DeepSpeed's. If our RAM tier is as large as DeepSpeed's buffers (`same_ram`), our step takes at most a
third as long. Two more cases have the smaller RAM tier. In `gradients`, gradients are stored in bf16 between two
visits. In `unclipped`, neither side clips, so our side need not hold gradients.

Each side runs in a separate process. The sides alternate, a few steps each, from the same weights, on the same tokens,
with the same hyper-parameters, and their losses are compared. `--python` is the interpreter that has DeepSpeed. If it
cannot import DeepSpeed, the bench reports why and ends.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

# Remove this file's folder from the path, because `import deepspeed` would find this file.
sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from bench.common import Report, step_shape
from bench.compare.processes import SideFailedError, SideProcess, import_failure
from bench.compare.worker import Job
from bench.compare.zero3 import state_memory
from megatrain.optim.threads import default_num_threads

#: Minimum of DeepSpeed's step time / our step time, for a small RAM tier and for one as large as DeepSpeed's buffers.
TARGET_RATIO, TARGET_SAME_RAM = 2.0, 3.0
#: Maximum relative difference between the losses of two sides. Both compute in bf16, but add in different orders.
LOSS_TOLERANCE = 1e-2
#: Consecutive steps per round. The first round is not measured, because DeepSpeed records the module order in it.
STEPS_PER_ROUND = 2
OURS, OURS_GRADIENTS, OURS_SAME_RAM, OURS_FP32, OURS_UNCLIPPED = (
    "ours_bf16",
    "ours_bf16_gradients",
    "ours_bf16_same_ram",
    "ours_fp32",
    "ours_bf16_unclipped",
)
THEIRS = ("deepspeed_pipelined", "deepspeed_plain")
THEIRS_UNCLIPPED = ("deepspeed_pipelined_unclipped", "deepspeed_plain_unclipped")
SIDES = (OURS, OURS_GRADIENTS, OURS_SAME_RAM, OURS_FP32, OURS_UNCLIPPED, *THEIRS, *THEIRS_UNCLIPPED)
#: DeepSpeed's sides -> our sides and their target ratios. Our sides are compared with the fastest of DeepSpeed's sides.
COMPARED: Mapping[tuple[str, ...], Mapping[str, float | None]] = {
    THEIRS: {OURS: TARGET_RATIO, OURS_GRADIENTS: TARGET_RATIO, OURS_SAME_RAM: TARGET_SAME_RAM, OURS_FP32: None},
    THEIRS_UNCLIPPED: {OURS_UNCLIPPED: TARGET_RATIO},
}

Rounds = Mapping[str, Sequence[Mapping[str, Any]]]


def main() -> int:
    """Run the comparison. Return 1 if a row fails, except for timing rows."""
    arguments = parse_arguments()
    shape = arguments.tokens
    report = Report("compare/deepspeed", as_json=arguments.json, tokens_per_step=shape[0] * shape[1] * shape[2])
    wants_deepspeed = not set(THEIRS).isdisjoint(arguments.sides)
    reason = import_failure(arguments.python, "deepspeed") if wants_deepspeed else ""
    if reason:
        report.row("deepspeed.skipped", reason, "reason")
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        model = Path(scratch) / "model"
        sizes = make_model(model, quick=arguments.quick)
        Comparison(Path(scratch), model, sizes, arguments, report).run()
    return 0 if report.all_ok else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="a model of 7 M parameters instead of 97.5 M; 2 rounds")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has DeepSpeed; default: this one")
    parser.add_argument("--sides", type=_names, default=SIDES, help=f"sides that take part; default: {','.join(SIDES)}")
    parser.add_argument(
        "--rounds", type=int, help=f"measured rounds of {STEPS_PER_ROUND} steps, after one warm-up round"
    )
    parser.add_argument(
        "--tokens", type=step_shape, default=(1, 1, 128), help="micro-batches x rows x tokens of a step"
    )
    parser.add_argument("--ram", default="", help='our RAM tier, e.g. "700MiB"; default: a quarter above its minimum')
    parser.add_argument("--scratch", type=Path, help="folder on the drive to measure; default: the temporary folder")
    return parser.parse_args()


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(SIDES):
        raise argparse.ArgumentTypeError(f"'{text}': choose from {','.join(SIDES)}")
    return names


def make_model(folder: Path, *, quick: bool) -> list[int]:
    """Write a Llama with random weights that are exact in bf16, so that both sides start from the same weights.

    Returns:
        The number of elements of each parameter.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, num_layers, vocab = (256, 4, 8192) if quick else (768, 12, 8192)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2048 * hidden // 768,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=vocab,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).float()
    model.save_pretrained(folder)
    return [parameter.numel() for parameter in model.parameters()]


class Comparison:
    """Compares all sides in rounds, and prints the rows."""

    def __init__(
        self, scratch: Path, model: Path, sizes: Sequence[int], arguments: argparse.Namespace, report: Report
    ) -> None:
        self._scratch, self._report, self._python = scratch, report, arguments.python
        self._num_rounds = arguments.rounds or (2 if arguments.quick else 5)
        common = Job(
            side="ours",
            model=str(model),
            nvme="",
            shape=arguments.tokens,
            num_steps=(1 + self._num_rounds) * STEPS_PER_ROUND,
            num_threads=default_num_threads(),
            ram=arguments.ram,
        )
        theirs = replace(common, side="deepspeed")
        jobs = {
            OURS: common,
            OURS_GRADIENTS: replace(common, overrides={"precision": {"grad_dtype": "bfloat16"}}),
            OURS_SAME_RAM: replace(common, ram=f"{state_memory(sizes)}B"),
            OURS_FP32: replace(common, compute_dtype="float32"),
            OURS_UNCLIPPED: replace(common, max_grad_norm=0.0),
            THEIRS[0]: theirs,
            THEIRS[1]: replace(theirs, is_pipelined=False),
            THEIRS_UNCLIPPED[0]: replace(theirs, max_grad_norm=0.0),
            THEIRS_UNCLIPPED[1]: replace(theirs, is_pipelined=False, max_grad_norm=0.0),
        }
        self._jobs = {name: jobs[name] for name in arguments.sides}

    def run(self) -> None:
        """Start all sides, alternate between them, and print the rows."""
        with ExitStack() as stack:
            sides: dict[str, SideProcess] = {}
            for name in self._jobs:
                try:
                    sides[name] = stack.enter_context(self._start(name))
                except SideFailedError as error:
                    self._print_failure(name, error)
            measured = self._take_turns(sides)
        self._report.row("load_average", round(os.getloadavg()[0], 2), "threads, 1 minute")
        for name, rounds in measured.items():
            self._print_side(name, sides[name].about, rounds)
        if OURS in measured:
            self._print_ratios(measured)
            self._print_losses(measured)

    def _start(self, name: str) -> SideProcess:
        job = self._jobs[name]
        folder = self._scratch / name
        folder.mkdir()
        job = replace(job, nvme=str(folder))
        python = sys.executable if job.side == "ours" else self._python
        return SideProcess(python, asdict(job), self._scratch / f"{name}.log")

    def _take_turns(self, sides: Mapping[str, SideProcess]) -> Rounds:
        """Run all rounds, each starting with a different side. Return the measurements by side, including warm-up."""
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for number in range(1 + self._num_rounds):
            names = list(rounds)
            first = number % max(1, len(names))
            for name in [*names[first:], *names[:first]]:
                try:
                    rounds[name].append(sides[name].steps(STEPS_PER_ROUND))
                except SideFailedError as error:
                    self._print_failure(name, error)
                    del rounds[name]
        return rounds

    # -- rows --------------------------------------------------------------------------------------------------

    def _print_failure(self, name: str, error: SideFailedError) -> None:
        """Print why a side is missing. A failed peer is reported but does not fail the bench."""
        self._report.row(f"{name}.failed", str(error), "reason")
        if self._jobs[name].side == "ours":
            self._report.row(f"{name}.runs", 0, "1", target=1, ok=False)

    def _print_side(self, name: str, about: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> None:
        row, measured, num_parameters = self._report.row, rounds[1:], about["num_parameters"]
        row(f"{name}.parameters", num_parameters, "1")
        row(f"{name}.start", about["start_s"], "s")
        row(f"{name}.memory_for_state", about["state_memory"], "bytes")
        row(f"{name}.peak_rss", max(one["peak_rss"] for one in rounds), "bytes")
        row(f"{name}.step", _median(measured, "total_s"), "s")
        row(f"{name}.steps", [round(one["total_s"], 4) for one in measured], "s")
        for part in measured[0]["parts_s"]:
            row(f"{name}.{part}", statistics.median(one["parts_s"][part] for one in measured), "s")
        for way in ("read", "write"):
            moved = _median(measured, f"{way}_bytes")
            row(f"{name}.nvme_{way}_per_step", moved, "bytes")
            row(f"{name}.nvme_{way}_per_parameter", moved / num_parameters, "bytes")
        row(f"{name}.losses", [round(one["loss"], 5) for one in rounds], "nats")

    def _print_ratios(self, measured: Rounds) -> None:
        for peers, targets in COMPARED.items():
            theirs = [name for name in peers if name in measured]
            if not theirs:
                continue
            best = min(theirs, key=lambda name: _median(measured[name][1:], "total_s"))
            label = "best_deepspeed" + ("_unclipped" if peers is THEIRS_UNCLIPPED else "")
            self._report.row(label, best, "side")
            for name, target in targets.items():
                if name not in measured:
                    continue
                pairs = zip(measured[best][1:], measured[name][1:], strict=True)
                ratios = [its["total_s"] / ours["total_s"] for its, ours in pairs]
                ratio = statistics.median(ratios)
                ok = None if target is None else ratio >= target
                self._report.row(f"ratio.{label}/{name}", ratio, "x", target=target, ok=ok, timing=True)
                self._report.row(f"ratio.{label}/{name}.each", [round(each, 4) for each in ratios], "x")

    def _print_losses(self, measured: Rounds) -> None:
        for name in measured:
            reference = OURS_UNCLIPPED if name in THEIRS_UNCLIPPED else OURS
            if name in (OURS, OURS_UNCLIPPED) or reference not in measured:
                continue
            pairs = zip(measured[reference], measured[name], strict=True)
            apart = max(abs(ours["loss"] - its["loss"]) / abs(its["loss"]) for ours, its in pairs)
            row = f"loss.{reference}_relative_to.{name}"
            if name in (OURS_FP32, OURS_GRADIENTS):  # the precision differs: report the effect without a claim
                self._report.row(row, apart, "1")
                continue
            tolerance = 0.0 if name == OURS_SAME_RAM else LOSS_TOLERANCE  # placement does not change the loss
            self._report.row(row, apart, "1", target=tolerance, ok=apart <= tolerance)


def _median(rounds: Sequence[Mapping[str, Any]], field: str) -> float:
    return float(statistics.median(one[field] for one in rounds))


if __name__ == "__main__":
    sys.exit(main())
