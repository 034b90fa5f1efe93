"""Resident memory of a training process over time, for plain PyTorch and for a small RAM tier with the rest on NVMe.

    python bench/memory_over_time.py --picture memory.svg
    python bench/memory_over_time.py --quick          # a few seconds, a small model

The sides run one after the other, each in a separate process. They load the same model and train the same steps in
fp32. Meanwhile, the bench samples the resident memory that the kernel reports for the process. Claims: both sides have
the same losses up to rounding, and the tiered side has a lower memory peak.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # `import megatrain` would set this too late, after torch
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch

from bench.common import QUICKSTART, Report, step_shape
from bench.models import write_llama
from bench.sides import Ours, Plain, batches, run_config, with_tight_ram
from megatrain.config.schema import RunConfig
from megatrain.optim.threads import default_num_threads
from tiered.units import MiB

LR = 1e-4
SAMPLE_S = 0.02
STATE_BYTES_PER_PARAMETER = 16  # fp32 weight, gradient and two moments
SIDES = {"plain": ("plain PyTorch", "#e45756"), "tiered": ("megatrain-tier", "#4c78a8")}


@dataclass(frozen=True)
class Curve:
    """Samples of a process: seconds since its start, resident bytes, and the losses of its steps."""

    seconds: Sequence[float]
    resident_bytes: Sequence[int]
    losses: Sequence[float]

    @property
    def peak_bytes(self) -> int:
        return max(self.resident_bytes)


def main() -> int:
    """Run the bench, or one side of it. Return 1 if a row fails."""
    arguments = parse_arguments()
    if arguments.side:
        run_side(arguments.side, Path(arguments.config), arguments.steps)
        return 0
    rows, length = arguments.tokens[1:]
    report = Report("memory_over_time", as_json=arguments.json, tokens_per_step=math.prod(arguments.tokens))
    hidden, layers, vocabulary = (256, 4, 1024) if arguments.quick else (768, 12, 8192)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        model = write_llama(Path(scratch, "model"), hidden=hidden, layers=layers, vocabulary=vocabulary)
        config = tiered_config(model, arguments.tokens, Path(scratch))
        path = Path(scratch, "config.json")
        path.write_text(config.model_dump_json(), encoding="utf-8")
        curves = {side: measure(side, path, arguments.steps) for side in SIDES}
        state_bytes = STATE_BYTES_PER_PARAMETER * num_parameters(model)
    ram_bytes = config.tiers.ram.size.nbytes
    for side, curve in curves.items():
        report.row(f"{side}.peak", curve.peak_bytes, "bytes")
    report.row("state", state_bytes, "bytes")
    report.row("ram_tier", ram_bytes, "bytes")
    saved = curves["plain"].peak_bytes - curves["tiered"].peak_bytes
    report.row("saved", saved, "bytes", target=0, ok=saved > 0)
    pairs = zip(*(curve.losses for curve in curves.values()), strict=True)
    error = max(abs(one - other) / abs(one) for one, other in pairs)
    report.row("loss_error", error, "", target=1e-5, ok=error < 1e-5)
    if arguments.picture:
        title = f"{num_text(state_bytes // STATE_BYTES_PER_PARAMETER)} parameters in fp32, {arguments.steps} steps of "
        title += f"{arguments.tokens[0] * rows * length} tokens, {torch.get_num_threads()} CPU cores"
        arguments.picture.write_text(picture(curves, title, state_bytes, ram_bytes), encoding="utf-8")
    return 0 if report.all_ok else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="a model of 3.7 M parameters")
    parser.add_argument(
        "--tokens", type=step_shape, default=(1, 1, 256), help="micro-batches x rows x tokens of a step"
    )
    parser.add_argument("--steps", type=int, default=4, help="steps of each side")
    parser.add_argument("--picture", type=Path, help="SVG file to write")
    parser.add_argument("--scratch", type=Path, help="folder on the drive to use; default: the temporary folder")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--config", help=argparse.SUPPRESS)
    return parser.parse_args()


def tiered_config(model: Path, shape: tuple[int, int, int], folder: Path) -> RunConfig:
    """Return the config of the tiered side: a RAM tier a quarter above the minimum, and the rest on the drive."""

    def with_ram(size: str) -> RunConfig:
        tiers = {"ram": {"size": size}, "nvme": [{"path": str(folder / "state"), "size": "8GiB"}]}
        return run_config(model, QUICKSTART / "loomings.txt", shape, folder, tiers=tiers)

    return with_tight_ram(with_ram)


def num_parameters(model: Path) -> int:
    """Return the number of parameters in a model folder."""
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def num_text(number: int) -> str:
    return f"{number / 1e6:.1f} M"


def run_side(side: str, config_path: Path, num_steps: int) -> None:
    """Train one side in this process, and print each loss."""
    torch.set_num_threads(default_num_threads())
    config = RunConfig.model_validate(json.loads(config_path.read_text(encoding="utf-8")))
    steps = islice(batches(config), num_steps)
    if side == "plain":
        plain = Plain(config)
        for micro_batches in steps:
            print(plain.step(micro_batches, LR).loss, flush=True)
    else:
        with Ours(config, num_steps) as ours:
            for micro_batches in steps:
                print(ours.step(micro_batches, LR).loss, flush=True)


def measure(side: str, config: Path, num_steps: int) -> Curve:
    """Run a side in a separate process and sample its resident memory."""
    words = [sys.executable, __file__, "--side", side, "--config", str(config), "--steps", str(num_steps)]
    start_s = time.monotonic()
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        samples = list(_samples(process, start_s))
        assert process.stdout is not None
        losses = [float(line) for line in process.stdout]
    if process.returncode:
        raise SystemExit(f"the side {side} ended with {process.returncode}")
    return Curve([seconds for seconds, _ in samples], [nbytes for _, nbytes in samples], losses)


def _samples(process: subprocess.Popen[str], start_s: float) -> Iterator[tuple[float, int]]:
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        try:
            yield time.monotonic() - start_s, watched.memory_info().rss
        except psutil.Error:  # the process has just ended
            return
        time.sleep(SAMPLE_S)


# -- picture -------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 360, 70, 250, 50, 40


def picture(curves: Mapping[str, Curve], title: str, state_bytes: int, ram_bytes: int) -> str:
    """Return an SVG of all curves with their peaks, and lines at the size of the state and of the RAM tier."""
    end_s = max(curve.seconds[-1] for curve in curves.values())
    top_gib = math.ceil(2 * max(state_bytes, *(curve.peak_bytes for curve in curves.values())) / 2**30 + 0.1) / 2

    def x(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * seconds / end_s

    def y(nbytes: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * nbytes / 2**30 / top_gib

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15" fill="#222">Resident memory of the process: {title}</text>',
    ]
    for half in range(int(2 * top_gib) + 1):
        height = y(half * 2**29)
        parts.append(f'<path d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end" fill="#555">{half / 2:.1f} GiB</text>'
        )
    step_s = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200) if end_s / step <= 10)
    for number in range(int(end_s / step_s) + 1):
        place = x(number * step_s)
        parts.append(
            f'<text x="{place:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle" fill="#555">'
            f"{number * step_s} s</text>"
        )
    labels = []
    for nbytes, text in ((state_bytes, "weights, gradients, moments"), (ram_bytes, "RAM tier")):
        parts.append(
            f'<path d="M{LEFT} {y(nbytes):.1f}H{WIDTH - RIGHT}" stroke="#777" stroke-dasharray="5 4" fill="none"/>'
        )
        labels.append((y(nbytes), f"{text}: {nbytes / MiB:,.0f} MiB", "#555"))
    for side, curve in curves.items():
        name, color = SIDES[side]
        points = " ".join(
            f"{x(seconds):.1f},{y(nbytes):.1f}"
            for seconds, nbytes in zip(curve.seconds, curve.resident_bytes, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        labels.append((y(curve.peak_bytes), f"{name}: {curve.peak_bytes / MiB:,.0f} MiB", color))
    last = -math.inf
    for height, text, color in sorted(labels):
        last = max(height, last + 16)
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{last + 4:.1f}" font-size="12" fill="{color}">{text}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
