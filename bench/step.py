"""Step time and memory: our engine with all blocks in RAM or with state on NVMe, and plain PyTorch in two variants.

    python bench/step.py --json
    python bench/step.py --quick              # a minute: the 0.82 M model of this repository
    python bench/step.py --model FOLDER --tokens 2x2x256 --steps 5

The sides alternate step by step in one process, on the same micro-batches, from the same weights, with the same number
of threads. Plain PyTorch recomputes its layers in the backward (`plain`), or keeps all activations (`plain_keeps`). Our
engine keeps the activations that fit. Claims: a step in RAM takes at most 1.10 times as long as `plain`. Losses are
bit-identical for both placements, and every link moves exactly the planned bytes. Each side's memory is measured in a
separate process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # `import megatrain` would set this too late, after torch
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.common import QUICKSTART, Report, high_water_bytes, step_shape
from bench.sides import Ours, Plain, StepTimes, batches, run_config, with_tight_ram
from megatrain.config.schema import RunConfig
from megatrain.optim.threads import default_num_threads

#: Maximum ratio of our step time in RAM to the time of a plain step.
TARGET_RATIO = 1.10
#: Maximum CPU seconds in the kernel, and page faults, per step with state on NVMe in the case `USAGE_CASE`.
TARGET_USAGE = {"system": 1.0, "page_faults": 250_000}
#: Model, tokens per step, and RAM tier of the case to which the limits above apply.
USAGE_CASE = ("smollm2-135m", 512, "420MiB")
UNITS_OF_USAGE = {"user": "s", "system": "s", "page_faults": "pages"}
#: Maximum relative difference of our losses from PyTorch's. They drift apart, because the order of additions differs.
LOSS_TOLERANCE = 1e-3
RAM, NVME, PLAIN, PLAIN_KEEPS = "ours_ram", "ours_nvme", "plain", "plain_keeps"
SIDES = (RAM, NVME, PLAIN, PLAIN_KEEPS)
#: Number of steps when memory is measured. The second step starts with the optimizer state that the first step created.
MEMORY_STEPS = 2
LR = 1e-4

Rounds = Sequence[Mapping[str, StepTimes]]


def main() -> int:
    """Run the bench. Return 1 if a row fails, except for timing rows."""
    arguments = parse_arguments()
    torch.set_num_threads(default_num_threads())
    model = model_folder(arguments)
    shape = arguments.tokens or ((2, 2, 128) if arguments.quick else (2, 2, 256))
    num_steps = arguments.steps or (10 if arguments.quick else 5)
    num_micro_batches, rows, length = shape
    report = Report("step", as_json=arguments.json, tokens_per_step=num_micro_batches * rows * length)
    report.row("model", model.name, "folder")
    report.row("shape", "x".join(map(str, shape)), "micro-batches x rows x tokens")
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        folder = Path(scratch)
        if not list(model.glob("*.safetensors")):
            model = with_random_weights(model, folder / model.name)
        bench = Bench(model, arguments, shape, num_steps, folder, report)
        bench.run()
    return 0 if report.all_ok else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="the 0.82 M model of this repository, random weights")
    parser.add_argument("--model", type=Path, help="Hugging Face folder; without weights they are random")
    parser.add_argument("--text", type=Path, default=QUICKSTART / "loomings.txt", help="text to train on")
    parser.add_argument("--steps", type=int, help="measured rounds, after one warm-up round")
    parser.add_argument("--tokens", type=step_shape, help="micro-batches x rows x tokens of a step, e.g. 2x2x256")
    parser.add_argument("--ram", help='RAM tier of the NVMe side, e.g. "700MiB"; default: a quarter above its minimum')
    parser.add_argument("--memory", action="store_true", help="with --quick: also measure memory, in more processes")
    parser.add_argument("--scratch", type=Path, help="folder on the drive to measure; default: the temporary folder")
    return parser.parse_args()


def model_folder(arguments: argparse.Namespace) -> Path:
    """Return the requested folder. By default, return SmolLM2-135M if it was downloaded, or else the tiny model."""
    if arguments.model is not None:
        return Path(arguments.model)
    fetched = QUICKSTART / "smollm2-135m"
    return fetched if fetched.is_dir() and not arguments.quick else QUICKSTART / "model"


def with_random_weights(model: Path, folder: Path) -> Path:
    """Copy a model folder and add random weights, because all sides must start from the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


class Bench:
    """Compares all sides in rounds, and prints the rows."""

    def __init__(
        self,
        model: Path,
        arguments: argparse.Namespace,
        shape: tuple[int, int, int],
        num_steps: int,
        folder: Path,
        report: Report,
    ) -> None:
        self._model, self._arguments, self._shape = model, arguments, shape
        self._num_steps, self._folder, self._report = num_steps, folder, report
        self._tokens = shape[0] * shape[1] * shape[2]

    def run(self) -> None:
        """Run one warm-up round and the measured rounds, and print the rows."""
        config = self._config()
        nvme_config = self._nvme_config()
        data = batches(config)
        with ExitStack() as stack:
            ours = {
                RAM: stack.enter_context(Ours(config, 1 + self._num_steps)),
                NVME: stack.enter_context(Ours(nvme_config, 1 + self._num_steps)),
            }
            sides: dict[str, Ours | Plain] = {
                **ours,
                PLAIN: Plain(config),
                PLAIN_KEEPS: Plain(config, checkpointing=False),
            }
            rounds = []
            for _ in range(1 + self._num_steps):
                micro_batches = next(data)
                rounds.append({name: side.step(micro_batches, LR) for name, side in sides.items()})
            for side in ours.values():
                side.finish()
        self._report.row("load_average", round(os.getloadavg()[0], 2), "threads, 1 minute")
        self._print_times(rounds[1:])
        self._print_parts(rounds[1:])
        self._print_usage(rounds[1:])
        self._print_losses(rounds)
        for name, side in ours.items():
            self._print_traffic(name, side)
        if self._arguments.memory or not self._arguments.quick:
            self._print_memory({RAM: config, NVME: nvme_config, PLAIN: config, PLAIN_KEEPS: config})

    def _nvme_config(self) -> RunConfig:
        """Return the config for state on NVMe, with the requested RAM tier or one a quarter above the minimum."""
        ram = self._arguments.ram
        return with_tight_ram(self._config_with_ram) if ram is None else self._config_with_ram(ram)

    def _config_with_ram(self, ram: str) -> RunConfig:
        return self._config(tiers={"ram": {"size": ram}, "nvme": [{"path": str(self._folder / "nvme")}]})

    def _config(self, **tables: Any) -> RunConfig:
        """Return a config that keeps the graphs that fit, as a run does by default."""
        training = {"recompute": "auto"}
        return run_config(self._model, self._arguments.text, self._shape, self._folder, training=training, **tables)

    def _print_times(self, rounds: Rounds) -> None:
        for name in SIDES:
            seconds = [step[name].total_s for step in rounds]
            self._report.row(f"{name}.step", statistics.median(seconds), "s")
            self._report.row(f"{name}.steps", [round(second, 4) for second in seconds], "s")
            self._report.row(f"{name}.rate", self._tokens / statistics.median(seconds), "tokens/s")
        pairs = ((RAM, PLAIN, TARGET_RATIO), (NVME, PLAIN, None), (RAM, PLAIN_KEEPS, None))
        for name, other, target in pairs:
            ratios = [step[name].total_s / step[other].total_s for step in rounds]
            ratio = statistics.median(ratios)
            ok = None if target is None else ratio <= target
            self._report.row(f"ratio.{name}/{other}", ratio, "x", target=target, ok=ok, timing=True)
            self._report.row(f"ratio.{name}/{other}.each", [round(each, 4) for each in ratios], "x")

    def _print_parts(self, rounds: Rounds) -> None:
        """Print how many seconds each part of a step takes. Our updates run during the forward."""
        for name in SIDES:
            for part in rounds[0][name].parts_s:
                seconds = statistics.median(step[name].parts_s[part] for step in rounds)
                self._report.row(f"{name}.{part}", seconds, "s")

    def _print_usage(self, rounds: Rounds) -> None:
        """Print the CPU time and the page faults per step, for each side."""
        has_targets = (self._model.name, self._tokens, self._arguments.ram) == USAGE_CASE
        for name in SIDES:
            for counter, unit in UNITS_OF_USAGE.items():
                median = statistics.median(step[name].usage[counter] for step in rounds)
                target = TARGET_USAGE.get(counter) if has_targets and name == NVME else None
                ok = None if target is None else median <= target
                self._report.row(f"{name}.{counter}", median, unit, target=target, ok=ok, timing=unit == "s")

    def _print_losses(self, rounds: Rounds) -> None:
        differing = sum(
            (step[RAM].loss, step[RAM].grad_norm) != (step[NVME].loss, step[NVME].grad_norm) for step in rounds
        )
        self._report.row("loss.steps_that_differ_by_placement", differing, "steps", target=0, ok=differing == 0)
        apart = max(abs(step[RAM].loss - step[PLAIN].loss) / abs(step[PLAIN].loss) for step in rounds)
        self._report.row("loss.relative_to_plain", apart, "1", target=LOSS_TOLERANCE, ok=apart <= LOSS_TOLERANCE)
        self._report.row("loss.first", rounds[0][RAM].loss, "nats")
        self._report.row("loss.last", rounds[-1][RAM].loss, "nats")

    def _print_traffic(self, name: str, side: Ours) -> None:
        num_steps, planned = 1 + self._num_steps, side.planned_bytes()
        for tier, stats in side.windows[-1].tiers.items():
            row = f"{name}.{tier}.high_water"
            fits = stats.high_water_bytes <= stats.capacity_bytes
            self._report.row(row, stats.high_water_bytes, "bytes", target=stats.capacity_bytes, ok=fits)
        for link, moved in side.moved_bytes().items():
            self._report.row(f"{name}.{link}.per_step", side.plan.traffic[link], "bytes")
            self._report.row(f"{name}.{link}.moved", moved, "bytes", target=planned[link], ok=moved == planned[link])
            if moved:
                busy_s = sum(window.links[link].busy_s for window in side.windows)
                self._report.row(f"{name}.{link}.rate", moved / busy_s, "bytes/s")
        misses = sum(window.schedule_misses for window in side.windows)
        self._report.row(f"{name}.schedule_misses", misses, "accesses", target=0, ok=misses == 0)
        for counter in ("prefetch_on_time", "prefetch_late", "prefetch_wasted"):
            total = sum(getattr(window, counter) for window in side.windows)
            self._report.row(f"{name}.{counter}", total / num_steps, "copies/step")

    def _print_memory(self, configs: Mapping[str, RunConfig]) -> None:
        """Run each side's steps in a new process, and print its peak memory: before the model exists, and overall."""
        context = multiprocessing.get_context("spawn")
        for name, config in configs.items():
            with context.Pool(1) as pool:
                before, peak = pool.apply(memory_of, (name, config))
            self._report.row(f"{name}.process.before", before, "bytes")
            self._report.row(f"{name}.process.peak", peak, "bytes")


def memory_of(name: str, config: RunConfig) -> tuple[int, int]:
    """Run one side's steps in this process. Return the process's peak memory in bytes, before and after the steps."""
    torch.set_num_threads(default_num_threads())
    data = batches(config)
    before = high_water_bytes()
    with ExitStack() as stack:
        side: Ours | Plain
        if name in (RAM, NVME):
            side = stack.enter_context(Ours(config, MEMORY_STEPS))
        else:
            side = Plain(config, checkpointing=name == PLAIN)
        for _ in range(MEMORY_STEPS):
            side.step(next(data), LR)
        if isinstance(side, Ours):
            side.finish()
    return before, high_water_bytes()


if __name__ == "__main__":
    sys.exit(main())
