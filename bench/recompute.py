"""Time and memory of activation checkpointing policies: steps that differ only in what they recompute.

    python bench/recompute.py --json
    python bench/recompute.py --quick             # a minute, a small model
    python bench/recompute.py --tokens 2x2x512 --layers 6
    python bench/recompute.py --model examples/quickstart/smollm2-135m

These are the sides. All blocks are in RAM unless stated otherwise.

* ``whole``: every layer is recomputed, including products that no gradient needs, as before decision 0080;
* ``full``: every layer is recomputed, without those products;
* ``selective``: results of products and attention are saved;
* ``nvme``: like ``selective``, with inputs and results on a drive, and a RAM tier a quarter above the minimum;
* ``none``: the graphs of all layers are kept, so that nothing is recomputed;
* ``streamed``: like ``full``, with the optimizer's state on a drive, and extra RAM for half of the results;
* ``filled``: like ``streamed`` with the same RAM, but the plan decides which layers save results, from the rates that
  `doctor` measured on this machine. Without these rates, it is the same as ``streamed``;
* ``checkpointed``, ``plain``: PyTorch with its own activation checkpointing, and without it.

The sides alternate step by step in one process, on the same micro-batches. Claims: losses, norms, final weights and
final state of our sides are bit-identical. No side exceeds the planned memory, and moved bytes equal planned bytes.
``ratio.flops`` is the ratio of counted FLOPs. Extra memory is the memory that a plan needs in addition to ``full``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
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
from bench.sides import Ours, Plain, StepTimes, batches, run_config, with_tight_ram
from megatrain.config.schema import RunConfig
from megatrain.engine.device.work import NO_PRODUCTS
from megatrain.optim.threads import default_num_threads
from megatrain.plan.kept import count_layers, num_layers_kept
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.trace.counting import step_flops
from megatrain.training.resolve import resolve

WHOLE, FULL, SELECTIVE, NVME, NONE = "whole", "full", "selective", "nvme", "none"
STREAMED, FILLED = "streamed", "filled"
OURS = (WHOLE, FULL, SELECTIVE, NVME, NONE, STREAMED, FILLED)
PLAIN, CHECKPOINTED = "plain", "checkpointed"
#: Maximum ratios of step times, from decisions 0080 and 0081.
TARGETS = {
    (FULL, WHOLE): 0.96,
    (SELECTIVE, WHOLE): 0.90,
    (NVME, WHOLE): None,
    (NONE, WHOLE): None,
    (FILLED, STREAMED): None,
}
MOST_EXTRA = 0.4  # for saved results, as a fraction of the extra memory for kept graphs
LR = 1e-4
TEXT = QUICKSTART / "loomings.txt"

Rounds = Sequence[Mapping[str, StepTimes]]


def main() -> int:
    """Run the bench. Return 1 if a row fails, except for timing rows."""
    arguments = parse_arguments()
    torch.set_num_threads(default_num_threads())
    shape = arguments.tokens
    report = Report("recompute", as_json=arguments.json, tokens_per_step=shape[0] * shape[1] * shape[2])
    hidden, layers, vocabulary = (128, 4, 1024) if arguments.quick else (768, 12, 8192)
    layers = arguments.layers or layers
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        model, about = arguments.model, str(arguments.model)
        if model is None:
            model = write_llama(Path(scratch, "model"), hidden=hidden, layers=layers, vocabulary=vocabulary)
            about = f"llama {hidden}x{layers}, vocabulary {vocabulary}"
        report.row("model", about, "")
        report.row("shape", "x".join(map(str, shape)), "micro-batches x rows x tokens")
        Bench(model, arguments, Path(scratch), report).run()
    return 0 if report.all_ok else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument(
        "--tokens", type=step_shape, default=(2, 2, 256), help="micro-batches x rows x tokens of a step"
    )
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: a Llama with random weights")
    parser.add_argument(
        "--without", default="", help="sides to leave out, with commas between, if RAM cannot hold seven models"
    )
    parser.add_argument("--layers", type=int, help="layers of the Llama")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one warm-up round")
    parser.add_argument("--scratch", type=Path, help="folder for the model; default: the temporary folder")
    return parser.parse_args()


def without_dead_results(plan: Plan) -> Plan:
    """Return a plan whose recomputes run all products, including those that no gradient needs."""
    visits = tuple(replace(visit, unneeded_products=NO_PRODUCTS) for visit in plan.trace.visits)
    return replace(plan, traced=replace(plan.traced, trace=replace(plan.trace, visits=visits)))


class Bench:
    """Compares all sides in rounds, and prints the rows."""

    def __init__(self, model: Path, arguments: argparse.Namespace, folder: Path, report: Report) -> None:
        self._model, self._arguments, self._folder, self._report = model, arguments, folder, report
        left_out = set(arguments.without.split(",")) - {"", WHOLE, FULL}  # required: other sides are compared with them
        self._ours = tuple(name for name in OURS if name not in left_out)
        self._plain = tuple(name for name in (CHECKPOINTED, PLAIN) if name not in left_out)

    def run(self) -> None:
        """Run one warm-up round and the measured rounds, and print the rows."""
        rounds: list[dict[str, StepTimes]] = []
        with ExitStack() as stack:
            ours = {name: stack.enter_context(self._side(name)) for name in self._ours}
            config = self._config(FULL)
            plain = {name: Plain(config, checkpointing=name == CHECKPOINTED) for name in self._plain}
            data = batches(config)
            sides: Mapping[str, Ours | Plain] = {**ours, **plain}
            for _ in range(1 + self._arguments.rounds):
                micro_batches = next(data)
                rounds.append({name: side.step(micro_batches, LR) for name, side in sides.items()})
            self._report.row("load_average", round(os.getloadavg()[0], 2), "threads, 1 minute")
            self._print_times(rounds[1:])
            for name, side in ours.items():
                self._print_plan(name, side)
            self._print_flops(ours)
            self._print_memory({name: side.plan for name, side in ours.items()})
            self._print_differences(rounds, {name: side.digests() for name, side in ours.items()})
            for name, side in ours.items():
                moved, planned = side.moved_bytes(), side.planned_bytes()
                self._report.row(
                    f"{name}.moved", sum(moved.values()), "bytes", target=sum(planned.values()), ok=moved == planned
                )

    def _config(self, name: str) -> RunConfig:
        training = {"recompute": {WHOLE: FULL, NVME: SELECTIVE, STREAMED: FULL, FILLED: "auto"}.get(name, name)}

        def config(**tables: Any) -> RunConfig:
            return run_config(
                self._model, TEXT, self._arguments.tokens, self._folder / name, training=training, **tables
            )

        drives = [{"path": str(self._folder / f"drive_{name}")}]
        if name in (STREAMED, FILLED):
            tiers = {"ram": {"size": f"{self._ram_for_half_bytes()}B"}, "nvme": drives}
            return config(placement={"optimizer": ["nvme"]}, tiers=tiers)
        if name != NVME:
            return config()
        placement = {"activations": ["nvme"]}
        return with_tight_ram(lambda ram: config(placement=placement, tiers={"ram": {"size": ram}, "nvme": drives}))

    def _ram_for_half_bytes(self) -> int:
        """Return the bytes of RAM for all blocks except the optimizer's state, and for half of the layers' results."""
        full, selective = (plan_run(resolve(self._config(name))) for name in (FULL, SELECTIVE))
        state = full.placement.home_bytes["ram"]["optimizer"]
        return (full.totals["ram"] + selective.totals["ram"]) // 2 - state

    def _side(self, name: str) -> Ours:
        config = self._config(name)
        plan = without_dead_results(plan_run(resolve(config))) if name == WHOLE else None
        return Ours(config, 1 + self._arguments.rounds, plan=plan)

    def _print_times(self, rounds: Rounds) -> None:
        row = self._report.row
        for name in (*self._ours, *self._plain):
            row(f"{name}.step", statistics.median(turn[name].total_s for turn in rounds), "s")
            row(f"{name}.steps", [round(turn[name].total_s, 4) for turn in rounds], "s")
            row(f"{name}.cpu", statistics.median(turn[name].parts_s["cpu"] for turn in rounds), "s")
        for name, base in (*TARGETS, (FULL, CHECKPOINTED), (SELECTIVE, CHECKPOINTED), (NONE, PLAIN)):
            if name not in rounds[0] or base not in rounds[0]:
                continue
            ratios = [turn[name].total_s / turn[base].total_s for turn in rounds]
            ratio, target = statistics.median(ratios), TARGETS.get((name, base))
            ok = None if target is None else ratio <= target
            row(f"ratio.step.{name}/{base}", ratio, "x", target=target, ok=ok, timing=True)
            row(f"ratio.step.{name}/{base}.each", [round(each, 3) for each in ratios], "x")

    def _print_plan(self, name: str, side: Ours) -> None:
        plan, row = side.plan, self._report.row
        recompute = plan.program.recompute
        row(f"{name}.layers_kept", num_layers_kept(plan.graph, plan.trace, plan.program)[0], "layers")
        row(f"{name}.layers_saving", count_layers(plan.graph, plan.trace, recompute.saving_visits), "layers")
        total = plan.budgets["ram"] if any(plan.traffic.values()) else plan.totals["ram"]
        most = max(window.tiers["ram"].high_water_bytes for window in side.windows)
        row(f"{name}.ram", most, "bytes", target=total, ok=most <= total)

    def _print_flops(self, sides: Mapping[str, Ours]) -> None:
        num_micro_batches, rows, length = self._arguments.tokens
        places = num_micro_batches * rows * length
        shape = {"num_positions": places, "num_real_tokens": places, "num_trained_tokens": places}
        found = {
            name: step_flops(side.plan.trace, **shape, recompute=side.plan.program.recompute)
            for name, side in sides.items()
        }
        # Traces do not count unneeded products in the backward, so add them for the side that runs them.
        visits = sides[FULL].plan.trace.visits
        left_out = (
            sum(visit.unneeded_products.work.flops for visit in visits) * places // sides[FULL].plan.trace.num_tokens
        )
        found[WHOLE] = replace(found[WHOLE], hardware=found[FULL].hardware + left_out)
        for name, flops in found.items():
            self._report.row(f"{name}.hardware_flops", flops.hardware, "FLOP/step")
            self._report.row(f"{name}.hardware_per_model", flops.hardware / found[FULL].model, "FLOP/FLOP")
        for name in {FULL, SELECTIVE, NONE}.intersection(found):
            self._report.row(f"ratio.flops.{name}/{WHOLE}", found[name].hardware / found[WHOLE].hardware, "x")

    def _print_memory(self, plans: Mapping[str, Plan]) -> None:
        extra = {name: plan.totals["ram"] - plans[FULL].totals["ram"] for name, plan in plans.items()}
        for name in {SELECTIVE, NONE}.intersection(extra):
            self._report.row(f"{name}.extra_memory", extra[name], "bytes")
        if SELECTIVE not in extra or NONE not in extra:
            return
        share = extra[SELECTIVE] / extra[NONE]
        self._report.row("share.extra_memory", share, "x", target=MOST_EXTRA, ok=share <= MOST_EXTRA, timing=True)

    def _print_differences(self, rounds: Rounds, digests: Mapping[str, Mapping[str, str]]) -> None:
        for name in set(self._ours) - {FULL}:
            steps = sum(
                (turn[name].loss, turn[name].grad_norm) != (turn[FULL].loss, turn[FULL].grad_norm) for turn in rounds
            )
            self._report.row(f"{name}/{FULL}.steps_that_differ", steps, "steps", target=0, ok=steps == 0)
            blocks = sum(digest != digests[FULL][key] for key, digest in digests[name].items())
            self._report.row(f"{name}/{FULL}.blocks_that_differ", blocks, "blocks", target=0, ok=blocks == 0)


if __name__ == "__main__":
    sys.exit(main())
