"""Share of weights that change at a small learning rate, with bf16 weights updated in place and with our split masters.

    python bench/freezing.py --json
    python bench/freezing.py --quick

Three optimizers start from the same bf16 weights and run the same number of steps at a constant learning rate: torch's
AdamW on fp32 masters, torch's AdamW on bf16 weights with bf16 state, and our AdamW on a bf16 and an int16 half. Each
computes gradients with its weights rounded to bf16. A linear layer learns the outputs of another linear layer with
added noise, so that gradients have a mean and a spread.

Claims: our optimizer changes nearly every weight, and its total update has nearly the same direction as the total
update with fp32 masters. No row depends on time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from bench.common import Report
from megatrain.base.precision import decode, encode
from megatrain.optim.base import Segment, Update
from megatrain.optim.elementwise import AdamW
from megatrain.optim.threads import KernelThreads

TARGET_MOVED, TARGET_COSINE = 0.99, 0.999
WEIGHT_STD, NOISE_STD, BATCH_ROWS = 0.02, 0.5, 64
BETAS, EPS = (0.9, 0.95), 1e-8

Weights = tuple[Tensor, Tensor]  # fp32 weights before and after training
Gradient = Callable[[Tensor, int], Tensor]  # (bf16 weights, step number) -> fp32 gradient


def main() -> int:
    """Run the bench. Return 1 if a row fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="a small layer; else 512 x 512")
    parser.add_argument("--steps", type=int, default=200, help="updates")
    parser.add_argument("--scratch", type=Path, help="accepted by every bench; nothing is written here")
    arguments = parser.parse_args()
    report = Report("freezing", as_json=arguments.json, tokens_per_step=None)
    size = 64 if arguments.quick else 512
    report.row("shape", f"{size}x{size}", "weights")
    report.row("steps", arguments.steps, "updates")
    for lr in (1e-6, 1e-5):
        print_results(report, size, lr, arguments.steps)
    return 0 if report.all_ok else 1


def print_results(report: Report, size: int, lr: float, num_steps: int) -> None:
    """Print how many weights each optimizer changes at one learning rate, and compare its total update with fp32."""
    start, gradient = make_problem(size)
    runs = {
        "fp32_master": train_torch(start.float(), gradient, lr, num_steps),
        "bf16_in_place": train_torch(start, gradient, lr, num_steps),
        "ours": train_ours(start, gradient, lr, num_steps),
    }
    before, after = runs["fp32_master"]
    exact = after - before
    for name, (first, last) in runs.items():
        moved = float((first != last).float().mean())
        visible = float((first.bfloat16() != last.bfloat16()).float().mean())
        cosine = float(torch.nn.functional.cosine_similarity((last - first).double(), exact.double(), dim=0))
        length = float((last - first).double().norm() / exact.double().norm())
        claimed = name == "ours"
        prefix = f"lr={lr:g}.{name}"
        report.row(
            f"{prefix}.moved",
            moved,
            "of weights",
            target=TARGET_MOVED if claimed else None,
            ok=moved >= TARGET_MOVED if claimed else None,
        )
        report.row(f"{prefix}.moved_in_bf16", visible, "of weights")
        report.row(
            f"{prefix}.cosine_to_fp32_update",
            cosine,
            "",
            target=TARGET_COSINE if claimed else None,
            ok=cosine >= TARGET_COSINE if claimed else None,
        )
        report.row(f"{prefix}.length_of_update", length, "of fp32's")


def make_problem(size: int) -> tuple[Tensor, Gradient]:
    """Return flat initial bf16 weights, and a function that computes the gradient of a step's mean squared error."""
    generator = torch.Generator().manual_seed(0)
    start = (torch.randn(size * size, generator=generator) * WEIGHT_STD).bfloat16()
    wanted = torch.randn(size, size, generator=generator) * WEIGHT_STD

    def gradient(weights: Tensor, step: int) -> Tensor:
        own = torch.Generator().manual_seed(1 + step)
        rows = torch.randn(BATCH_ROWS, size, generator=own)
        outputs = rows @ wanted.T + NOISE_STD * torch.randn(BATCH_ROWS, size, generator=own)
        error = rows @ weights.float().view(size, size).T - outputs
        return (2 / error.numel()) * (error.T @ rows).reshape(-1)

    return start, gradient


def train_torch(start: Tensor, gradient: Gradient, lr: float, num_steps: int) -> Weights:
    """Train with torch's AdamW. Weights and state have the dtype of `start`."""
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([parameter], lr, BETAS, EPS, weight_decay=0.0)
    for step in range(num_steps):
        parameter.grad = gradient(parameter.detach().bfloat16(), step).to(parameter.dtype)
        optimizer.step()
    return start.float(), parameter.detach().float()


def train_ours(start: Tensor, gradient: Gradient, lr: float, num_steps: int) -> Weights:
    """Train with our AdamW on bf16 and int16 halves."""
    size, threads = start.numel(), KernelThreads(1)
    blocks = {"weight": torch.empty_like(start), "low": torch.empty(size, dtype=torch.int16)}
    encode(start.float(), blocks["weight"], blocks["low"])
    blocks |= {"m": torch.zeros(size), "v": torch.zeros(size)}
    optimizer = AdamW(*BETAS, EPS, threads=threads)
    for step in range(num_steps):
        optimizer.update(blocks, gradient(blocks["weight"], step), (Segment(0, size, 0.0),), Update(step + 1, lr))
    master = torch.empty(size)
    decode(blocks["weight"], blocks["low"], master)
    return start.float(), master


if __name__ == "__main__":
    sys.exit(main())
