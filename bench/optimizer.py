"""Parameters updated per second: our kernel, a memory-bound ceiling, torch, DeepSpeed and trainers' update chains.

    python bench/optimizer.py --json
    python bench/optimizer.py --quick                 # a few seconds
    python bench/optimizer.py --full --threads 1,2    # blocks of up to 256M parameters, 10 GB

A size is the number of parameters in a block, which is updated in one call. All sides use the same memory and alternate
in one process. A ceiling is a loop that reads and writes the same arrays but computes almost nothing.

Claims: the kernel reaches 0.95 of the ceiling for the same arrays, and the rate of DeepSpeedCPUAdam in fp32. In a
single pass, it reads bf16 gradients, scales them, and updates fp32 masters and bf16 weights. This is 1.4 times as fast
as the chain of operations that a trainer with a GPU runs on its host. Including the gradient norm, our kernels are 5
times as fast as the chain of a trainer without a GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import psutil
import torch

from bench.common import Report
from bench.update_sides import MEMORY_BYTES, TEMPORARY_BYTES, Block, Side, ceilings, chains, make_blocks, ours, peers
from megatrain.base.precision import decode, encode
from megatrain.optim import clip
from megatrain.optim.base import Segment, Update
from megatrain.optim.elementwise import AdamW
from megatrain.optim.threads import KernelThreads, default_num_threads

MILLION = 1 << 20
#: Minimum number of parameters per sample. If blocks are small, a sample updates several. They are then read from
#: memory, as in a step, and not from a cache that the previous sample filled.
SAMPLE_PARAMETERS = 32 * MILLION
QUICK_SAMPLE_PARAMETERS = 8 * MILLION
TARGET_CEILING, TARGET_DEEPSPEED, TARGET_GPU_CHAIN, TARGET_HOST_CHAIN = 0.95, 1.0, 1.4, 5.0
#: (side, reference side, minimum ratio of parameters per second)
CLAIMS: tuple[tuple[str, str, float], ...] = (
    ("ours.fp32", "deepspeed.fp32", TARGET_DEEPSPEED),
    ("ours.split_bf16grad", "deepspeed.fp32", TARGET_DEEPSPEED),
    ("ours.split_bf16grad", "chain.gpu_assisted", TARGET_GPU_CHAIN),
    ("ours.norm_and_split_bf16grad", "chain.host", TARGET_HOST_CHAIN),
)

Samples = Mapping[str, Sequence[float]]


def main() -> int:
    """Run the bench. Return 1 if a row fails, except for timing rows."""
    arguments = parse_arguments()
    report = Report("optimizer", as_json=arguments.json, tokens_per_step=None)
    clip.warm_up()
    print_bits(report)
    for size in sizes(arguments):
        num_blocks = -(-(QUICK_SAMPLE_PARAMETERS if arguments.quick else SAMPLE_PARAMETERS) // size)
        need = size * (num_blocks * MEMORY_BYTES + TEMPORARY_BYTES)
        if need > psutil.virtual_memory().available:
            report.row(f"{size // MILLION}M.skipped", need, "bytes needed")
            continue
        blocks = make_blocks(size, num_blocks)
        for num_threads in arguments.threads:
            print_size(report, blocks, num_threads, arguments.rounds)
        del blocks
    return 0 if report.all_ok else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    both = sorted({1, default_num_threads()})
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--quick", action="store_true", help="blocks of 1M and 8M parameters, 3 rounds")
    parser.add_argument("--full", action="store_true", help="also blocks of 256M parameters")
    parser.add_argument("--sizes", type=_numbers, help="parameters of a block in millions (2^20), e.g. 1,32")
    parser.add_argument("--threads", type=_numbers, default=both, help="numbers of threads, e.g. 1,2")
    parser.add_argument("--rounds", type=int, help="measured samples of each side, after one warm-up")
    parser.add_argument("--scratch", type=Path, help="accepted by every bench; nothing is written here")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (3 if arguments.quick else 9)
    return arguments


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def sizes(arguments: argparse.Namespace) -> list[int]:
    """Return the block sizes to measure, in parameters."""
    millions = arguments.sizes or ([1, 8] if arguments.quick else [1, 32, 128])
    if arguments.full and not arguments.sizes:
        millions = [*millions, 256]
    return [count * MILLION for count in millions]


def print_bits(report: Report) -> None:
    """Print whether fp32 and split masters are bit-identical after an update with different numbers of threads.

    If they differed, the rates of the two formats would not be comparable.
    """
    size, update = 3 * MILLION + 1024, Update(step=3, lr=1e-3, grad_scale=0.5)
    generator = torch.Generator().manual_seed(1)
    start, grad = torch.randn(size, generator=generator), torch.randn(size, generator=generator).bfloat16()
    results = []
    for split, gradient, num_threads in ((False, grad.float(), 1), (True, grad, 2)):
        blocks = {"weight": start.clone(), "m": torch.zeros(size), "v": torch.zeros(size)}
        if split:
            blocks |= {"weight": torch.empty(size, dtype=torch.bfloat16), "low": torch.empty(size, dtype=torch.int16)}
            encode(start, blocks["weight"], blocks["low"])
        threads = KernelThreads(num_threads)
        AdamW(threads=threads).update(blocks, gradient, (Segment(0, size, 0.1),), update)
        threads.close()
        master = torch.empty(size) if split else blocks["weight"]
        if split:
            decode(blocks["weight"], blocks["low"], master)
        results.append(master.numpy().view(np.uint32))
    differing = int((results[0] != results[1]).sum())
    report.row("bits.differ_by_format_and_threads", differing, "elements", target=0, ok=differing == 0)


def print_size(report: Report, blocks: Sequence[Block], num_threads: int, num_rounds: int) -> None:
    """Measure one size with one number of threads and print its rows."""
    torch.set_num_threads(num_threads)
    threads = KernelThreads(num_threads)
    sides = [*ceilings(blocks, threads), *ours(blocks, threads), *peers(blocks), *chains(blocks)]
    samples = measure(sides, num_rounds)
    threads.close()
    size = blocks[0].weight.numel()
    prefix, num_parameters = f"{size // MILLION}M.{num_threads}t", size * len(blocks)
    report.row(f"{prefix}.load_average", round(os.getloadavg()[0], 2), "threads, 1 minute")
    for side in sides:
        rate = num_parameters / statistics.median(samples[side.name])
        report.row(f"{prefix}.{side.name}.rate", rate / 1e6, "Mparams/s")
        report.row(f"{prefix}.{side.name}.bandwidth", rate * side.bytes_per_parameter / 1e9, "GB/s")
        report.row(f"{prefix}.{side.name}.times", [round(1e3 * second, 3) for second in samples[side.name]], "ms")
    claims = [*((side.name, side.ceiling, TARGET_CEILING) for side in sides if side.ceiling), *CLAIMS]
    for name, other, target in claims:
        if other in samples:
            print_ratio(report, f"{prefix}.ratio.{name}/{other}", samples[name], samples[other], target)
    for other in ("torch.fused.fp32", "torch.foreach.fp32", "deepspeed.bf16"):
        if other in samples:
            print_ratio(report, f"{prefix}.ratio.ours.fp32/{other}", samples["ours.fp32"], samples[other], None)


def print_ratio(
    report: Report, name: str, mine: Sequence[float], theirs: Sequence[float], target: float | None
) -> None:
    """Print the ratio of two sides' parameters per second: the median over the rounds, and each round's ratio."""
    ratios = [their / my for my, their in zip(mine, theirs, strict=True)]
    ratio = statistics.median(ratios)
    report.row(name, ratio, "x", target=target, ok=None if target is None else ratio >= target, timing=True)
    report.row(f"{name}.each", [round(each, 4) for each in ratios], "x")


def measure(sides: Sequence[Side], num_rounds: int) -> Samples:
    """Time updates of all blocks, alternating between the sides. Return the seconds per update, by side and round.

    Before each sample, the same work runs unmeasured, so that no side uses caches that another side filled. The two
    calls of a ceiling leave the memory unchanged, because the second one undoes the first.
    """
    samples: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(1 + num_rounds):
        for side in sides:
            side.call()
            start_s = time.perf_counter()
            side.call()
            if number:
                samples[side.name].append(time.perf_counter() - start_s)
    return samples


if __name__ == "__main__":
    sys.exit(main())
