"""Traffic, cost and predicted speed of several ranks.

    python bench/ranks.py --json
    python bench/ranks.py --quick                      # a minute, a small model and no large plans
    python bench/ranks.py --parts steps --worlds 1x2,2x1
    python bench/ranks.py --parts plans --plans 70B:32768,65536

`steps`: worlds of hosts x ranks run the same steps as one process. All ranks are on this machine, with gloo and one
thread each. State is either all in RAM or all on a drive. Claims: every rank moves exactly the planned bytes over every
link, including links between ranks and hosts. Losses and norms are bit-identical to one process. The CPU time of all
ranks together is at most 1.15 times the CPU time of one process with the same tokens.

`plans`: the planner plans steps of large models for other machines, like `plan --processes N --hosts H --machine NAME`.
It simulates the steps with the rates in the machine file. These rows are not measured. Claim, with 70 B parameters on 8
GPUs of one host: each GPU reaches 0.9 of a single GPU's speed if it has at least 16,384 tokens per step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # `import megatrain` would set this too late, after torch
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ["OMP_NUM_THREADS"] = "1"  # applies to each rank and to the single process
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import QUICKSTART, ROOT, Report, step_shape
from bench.models import write_llama
from bench.rank_sides import RankSteps, run_world
from bench.sides import run_config, with_tight_ram
from megatrain.config.schema import RunConfig
from megatrain.machine.planned_machine import PlannedMachine, find_machine
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.plan.simulate import replay
from megatrain.ranks.world import World
from megatrain.training.resolve import resolve

TEXT = QUICKSTART / "loomings.txt"
MODELS = ROOT / "examples" / "models"
MACHINE = "8xh100-2tb"
PARTS = ("steps", "plans")
PLACEMENTS = ("ram", "nvme")
ON_NVME = {kind: ["nvme"] for kind in ("weights", "gradients", "optimizer", "activations")}
#: Number of lanes. It is the same in every world, so that all worlds compute the same sums.
LANES = 4
TARGET_CPU, TARGET_EFFICIENCY, FROM_TOKENS = 1.15, 0.9, 16_384
LENGTH = 4096


@dataclass(frozen=True)
class PlannedModel:
    """Model whose steps are planned and simulated for hosts that need not be available.

    Attributes:
        model: Folder in examples/models.
        num_hosts: Number of hosts.
        per_host: Number of ranks per host.
        tokens_per_gpu: Tokens per step and GPU. Each value gets one plan.
        is_compared: Whether to compare the speed per GPU with the speed of a single GPU.
    """

    model: str
    num_hosts: int
    per_host: int
    tokens_per_gpu: Sequence[int]
    is_compared: bool

    @property
    def size(self) -> int:
        return self.num_hosts * self.per_host


PLANNED = (PlannedModel("Llama-3.1-70B", 1, 8, (4096, 8192, 16_384, 32_768, 65_536), is_compared=True),)


def main() -> int:
    """Run the bench. Return 1 if a row fails, except for timing rows."""
    arguments = parse_arguments()
    shape = arguments.tokens
    report = Report("ranks", as_json=arguments.json, tokens_per_step=shape[0] * shape[1] * shape[2])
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        if "steps" in arguments.parts:
            hidden, layers, vocabulary = (128, 2, 1024) if arguments.quick else (512, 8, 8192)
            model = write_llama(Path(scratch, "model"), hidden=hidden, layers=layers, vocabulary=vocabulary)
            report.row("model", f"llama {hidden}x{layers}, vocabulary {vocabulary}", "")
            report.row("shape", "x".join(map(str, shape)), "micro-batches x rows x tokens")
            Steps(model, arguments, Path(scratch), report).run()
        if "plans" in arguments.parts:
            for planned in planned_models(Path(scratch), arguments.plans, quick=arguments.quick):
                Plans(planned, Path(scratch), report).run()
    return 0 if report.all_ok else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="a model of 0.7 M parameters, one world, small plans")
    parser.add_argument(
        "--tokens", type=step_shape, default=(4, 1, 512), help="micro-batches x rows x tokens of a step"
    )
    parser.add_argument("--worlds", type=_worlds, help="hosts x ranks of each; default: 1x2,1x4,2x1, quick: 1x2")
    parser.add_argument("--placements", default=",".join(PLACEMENTS), help="of ram,nvme")
    parser.add_argument("--steps", type=int, help="measured steps, after one warm-up step; default: 4")
    parser.add_argument("--parts", type=_parts, default=PARTS, help="of steps,plans; default: both")
    parser.add_argument(
        "--plans", type=_plans, help="end of a model's name, and tokens per GPU: 70B:16384,32768; default: all of both"
    )
    parser.add_argument("--scratch", type=Path, help="folder on the drive to use; default: the temporary folder")
    arguments = parser.parse_args()
    arguments.worlds = arguments.worlds or ([(1, 2)] if arguments.quick else [(1, 2), (1, 4), (2, 1)])
    arguments.steps = arguments.steps or (2 if arguments.quick else 4)
    return arguments


def _worlds(text: str) -> list[tuple[int, int]]:
    hosts_and_ranks = [tuple(int(number) for number in part.split("x")) for part in text.split(",")]
    return [(num_hosts, per_host) for num_hosts, per_host in hosts_and_ranks]


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if not set(parts) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"'{text}': choose from {','.join(PARTS)}")
    return parts


def _plans(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, tokens = text.partition(":")
    return name, tuple(int(number) for number in tokens.split(",") if number)


# -- measured steps ------------------------------------------------------------------------------------------------


class Steps:
    """Measurement of all worlds and placements."""

    def __init__(self, model: Path, arguments: argparse.Namespace, folder: Path, report: Report) -> None:
        self._model, self._arguments, self._folder, self._report = model, arguments, folder, report

    def run(self) -> None:
        """Run the steps in every world, one after the other, and print the rows."""
        load = round(os.getloadavg()[0], 2)
        for placement in self._arguments.placements.split(","):
            alone = self._world(placement, 1, 1)
            self._print_results(f"{placement}.1x1", alone)
            for num_hosts, per_host in self._arguments.worlds:
                name = f"{placement}.{num_hosts}x{per_host}"
                ranks = self._world(placement, num_hosts, per_host)
                self._print_results(name, ranks)
                self._compare(name, ranks, alone[0])
        self._report.row("load_average.before", load, "threads, 1 minute")
        self._report.row("load_average", round(os.getloadavg()[0], 2), "threads, 1 minute")

    def _world(self, placement: str, num_hosts: int, per_host: int) -> list[RankSteps]:
        config = self._config(placement, num_hosts, per_host)
        return run_world(self._folder, config, num_hosts, per_host, 1, self._arguments.steps)

    def _config(self, placement: str, num_hosts: int, per_host: int) -> RunConfig:
        folder = self._folder / f"{placement}.{num_hosts}x{per_host}"
        num_micro_batches, rows, _ = self._arguments.tokens

        def config(ram: str) -> RunConfig:
            drive: dict[str, Any] = {"nvme": [{"path": str(folder / "nvme")}]} if placement == "nvme" else {}
            return run_config(
                self._model,
                TEXT,
                self._arguments.tokens,
                folder,
                tiers={"ram": {"size": ram}, **drive},
                training={
                    "per_device_train_batch_size": rows,
                    "gradient_accumulation_steps": num_micro_batches,
                    "gradient_lanes": LANES,
                },
                **({"placement": ON_NVME} if placement == "nvme" else {}),
            )

        # Each rank gets a share of the host's tiers, so reserve memory for the copies and sums of every rank.
        return config("4GiB") if placement == "ram" else config(f"{4 * per_host * self._least_bytes(config)}B")

    @staticmethod
    def _least_bytes(config: Any) -> int:
        return int(resolve(with_tight_ram(config)).tiers.table.ram.size.nbytes or 0)

    def _print_results(self, name: str, ranks: Sequence[RankSteps]) -> None:
        row = self._report.row
        steps = [statistics.median(each.total_s for each in rank.times) for rank in ranks]
        row(f"{name}.step", max(steps), "s")
        row(f"{name}.cpu", [round(_cpu_s(rank), 4) for rank in ranks], "CPU-s/step of each rank")
        num_steps = len(ranks[0].losses)
        for link in ranks[0].planned:
            planned = [rank.planned[link] for rank in ranks]
            row(f"{name}.{link}.planned", [nbytes // num_steps for nbytes in planned], "bytes/step of each rank")
            off = max(abs(rank.moved.get(link, 0) - rank.planned[link]) for rank in ranks)
            row(f"{name}.{link}.moved-planned", off, "bytes", target=0, ok=off == 0)

    def _compare(self, name: str, ranks: Sequence[RankSteps], alone: RankSteps) -> None:
        seen = list(zip(alone.losses, alone.norms, strict=True))
        differing = max(
            sum(one != other for one, other in zip(seen, zip(rank.losses, rank.norms, strict=True), strict=True))
            for rank in ranks
        )
        self._report.row(f"{name}.steps_that_differ", differing, f"of {len(seen)}", target=0, ok=differing == 0)
        ratio = sum(map(_cpu_s, ranks)) / _cpu_s(alone)
        self._report.row(
            f"{name}.ratio.cpu/one_process", ratio, "x", target=TARGET_CPU, ok=ratio <= TARGET_CPU, timing=True
        )


def _cpu_s(rank: RankSteps) -> float:
    return statistics.median(each.parts_s["cpu"] for each in rank.times)


# -- planned steps -------------------------------------------------------------------------------------------------


def planned_models(scratch: Path, chosen: tuple[str, tuple[int, ...]] | None, *, quick: bool) -> Sequence[PlannedModel]:
    """Return the models to plan. With ``quick``, write a small model, and return it for two worlds.

    Args:
        scratch: Folder for the small model.
        chosen: Suffix of the names of the models to plan, and tokens per GPU (empty for all). None plans all models.
        quick: Whether to use the small model.
    """
    if not quick:
        name, tokens = chosen or ("", ())
        models = [each for each in PLANNED if each.model.endswith(name)]
        return [replace(each, tokens_per_gpu=tokens or each.tokens_per_gpu) for each in models]
    model = write_llama(scratch / "planned", hidden=256, layers=2, vocabulary=1024)
    return [
        PlannedModel(str(model), 1, 2, (LENGTH,), is_compared=True),
        PlannedModel(str(model), 2, 1, (LENGTH,), is_compared=False),
    ]


class Plans:
    """Plans one model with several numbers of tokens per GPU, and prints the rows."""

    def __init__(self, planned: PlannedModel, folder: Path, report: Report) -> None:
        self._planned, self._folder, self._report = planned, folder, report
        self._machine: PlannedMachine = find_machine(MACHINE)
        self._like: Plan | None = None
        self._prefix = f"{Path(planned.model).name}.{planned.num_hosts}x{planned.per_host}"

    def run(self) -> None:
        """Plan and simulate a step for each number of tokens, and print the rows."""
        planned = self._planned
        for tokens in planned.tokens_per_gpu:
            name = f"{self._prefix}.{tokens}"
            step_s = self._print_results(name, tokens, planned.size, planned.num_hosts)
            if not planned.is_compared or step_s is None:
                continue
            one_s = self._print_results(f"{name}.one_gpu", tokens, 1, 1)
            if one_s is None:
                continue
            is_claimed = tokens >= FROM_TOKENS
            ratio = one_s / step_s
            self._report.row(
                f"{name}.ratio.efficiency/one_gpu",
                ratio,
                "x, replayed",
                target=TARGET_EFFICIENCY if is_claimed else None,
                ok=ratio >= TARGET_EFFICIENCY if is_claimed else None,
            )

    def _print_results(self, name: str, tokens: int, size: int, num_hosts: int) -> float | None:
        """Print a plan's rows. Return the seconds of its simulated step, or None if the model does not fit."""
        row = self._report.row
        try:
            plan = self._plan(tokens, size, num_hosts)
        except DoesNotFitError as error:
            row(f"{name}.step", None, f"does not fit: {error}")
            return None
        self._like = self._like or plan
        replayed = replay(plan)
        assert plan.estimate is not None and replayed is not None, "a machine file has all rates"
        row(f"{name}.tokens", tokens * size, "tokens/step of all GPUs")
        row(f"{name}.step", replayed.step_s, "s, replayed")
        row(f"{name}.bound_by", plan.estimate.bound_by or "-", "resource")
        row(f"{name}.efficiency", plan.estimate.seconds["compute"] / replayed.step_s, "matrix products / step")
        row(f"{name}.gathered_ahead", plan.program.sharding.gathers_ahead, "visits")
        for cause, seconds in replayed.stall_s.items():
            row(f"{name}.stall_{cause}", seconds, "s, replayed")
        for tier, nbytes in plan.totals.items():
            row(f"{name}.{tier}", nbytes, "bytes of each rank")
        for link, nbytes in plan.traffic.items():
            if nbytes:
                row(f"{name}.{link}.planned", nbytes, "bytes/step of each rank")
        return replayed.step_s

    def _plan(self, tokens: int, size: int, num_hosts: int) -> Plan:
        run = replace(
            resolve(self._config(tokens * size // LENGTH), self._machine), world=World.local(0, size, num_hosts)
        )
        return plan_run(run, like=self._like, with_remedies=False)

    def _config(self, num_micro_batches: int) -> RunConfig:
        """Return a config that trains in bf16 with micro-batches of one row."""
        path = Path(self._planned.model)
        drives: Sequence[Mapping[str, str]] = [
            {"path": str(self._folder / f"drive{number}")} for number in range(len(self._machine.drives))
        ]
        return RunConfig.model_validate(
            {
                "task": "pretrain",
                "output_dir": str(self._folder / "planned_run"),
                "model": {
                    "model_name_or_path": str(path if path.is_absolute() else MODELS / path),
                    "train_from_scratch": True,
                },
                "precision": {"compute_dtype": "bfloat16", "grad_dtype": "bfloat16"},
                "data": {"max_length": LENGTH, "train": [{"path": str(TEXT)}]},
                "training": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": num_micro_batches},
                "tiers": {"nvme": drives},
            }
        )


if __name__ == "__main__":
    sys.exit(main())
