"""Prints the planner's predictions for parts of `bench/gpu.py` on machines that `plan --machine list` lists.

    . temp/null_gpu/env.sh; python tests/null_gpu/predict.py --machines h200-1.5tb,h100-512gb 7b_64k 7b_4k

Nothing is measured. The output is one Markdown table per machine. The RAM tier has 110 GiB on each machine, as in
`bench/gpu_fifteen.sh`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from null_gpu.steps import RAM_TIER

from bench.common import ROOT
from bench.gpu_sides.cases import OURS, part_named
from bench.gpu_sides.job import make_job
from bench.gpu_sides.ours import planned_peak, run_config_of
from megatrain.engine.device.work import NO_WORK
from megatrain.machine.planned_machine import find_machine
from megatrain.machine.profiles import LoadedProfile
from megatrain.plan.costs import DeviceCosts
from megatrain.plan.estimate import estimate_step
from megatrain.plan.flops import flops_per_token, work_of_phases
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.training.resolve import resolve

MACHINES = ("h200-1.5tb", "h100-512gb", "rtx4090-128gb")
PARTS = ("7b_4k_equal", "7b_4k", "7b_64k_equal", "7b_64k", "14b")


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS, help=f"default: {' '.join(PARTS)}")
    parser.add_argument("--machines", default=",".join(MACHINES), help="with commas between them")
    arguments = parser.parse_args()
    if torch.version.cuda is None:
        parser.error("torch has no CUDA here: read the env.sh of the null GPU first")
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    print(f"Commit {commit.stdout.strip()}. Predictions of the planner. Nothing was measured on a GPU.")
    for machine in arguments.machines.split(","):
        columns = {name: column(name, machine) for name in arguments.parts}
        rows = list(dict.fromkeys(row for found in columns.values() for row in found))
        print(f"\n| {machine} |", " | ".join(columns), "|")
        print("|---|" + "---|" * len(columns))
        for row in rows:
            print(f"| {row} |", " | ".join(found.get(row, "") for found in columns.values()), "|", flush=True)
    return 0


def column(name: str, machine: str) -> Mapping[str, str]:
    """Return the table column of a part on a machine: row title -> figure."""
    planned = find_machine(machine)
    with tempfile.TemporaryDirectory() as folder:
        job = make_job(
            OURS, part_named(name), Path(folder, "ours"), budget_s=0.0, device="cuda", quick=False, ram=RAM_TIER
        )
        start_s = time.process_time()
        try:
            plan = plan_run(resolve(run_config_of(job), planned), padded=False, with_remedies=False)
        except DoesNotFitError as error:
            return {"plan": f"refused: {str(error).partition('. Give')[0]}"}
        plan_s = time.process_time() - start_s
        return figures(plan, LoadedProfile(planned.profile)) | {"planning, CPU s": f"{plan_s:.0f}"}


def figures(plan: Plan, loaded: LoadedProfile) -> dict[str, str]:
    """Return the figures of a plan, by row title."""
    estimate = estimate_step(plan, plan.shape, loaded)
    costs = DeviceCosts.of(loaded.machine, "cuda", "bfloat16")
    assert costs is not None and estimate.step_s is not None, estimate.unmeasured
    work, count = sum(work_of_phases(plan).values(), NO_WORK), plan.shape.tokens_per_step / plan.trace.num_tokens
    products_s = count * work.product_flops / costs.product_flops_per_s
    attention_s = count * (work.attention_flops - work.skipped_flops) / costs.attention_flops_per_s
    moved_s = count * work.moved_nbytes / costs.moved_bytes_per_s
    seconds, recompute = estimate.seconds, plan.program.recompute
    links: dict[str, Any] = {link: nbytes for link, nbytes in plan.traffic.items() if nbytes}
    return {
        "tokens of a step": f"{plan.shape.tokens_per_step:,}",
        "micro-batch tokens, order": f"{plan.trace.num_tokens:,}, {plan.run.batch.order}",
        "layers with kept graphs, with saved results": f"{len(recompute.kept_graphs)}, {len(recompute.saving_visits)}",
        "FLOP/token": f"{flops_per_token(plan):.3g}",
        "products, s": f"{products_s:.3f}",
        "attention, s": f"{attention_s:.3f}",
        "other operators, TB / s": f"{count * work.moved_nbytes / 1e12:.2f} / {moved_s:.3f}",
        "fp32 sums of gradients, s": f"{max(0.0, seconds['compute'] - products_s - attention_s - moved_s):.3f}",
        "updates on the GPU, s": f"{seconds.get('gpu optimizer', 0.0):.3f}",
        "updates on the CPU, s": f"{seconds.get('optimizer', 0.0):.3f}",
        "launches": f"{count * work.launches:,.0f}",
        "host, s": f"{seconds.get('host', 0.0):.3f}",
        "bytes over each link, GB": ", ".join(f"{link} {nbytes / 1e9:.1f}" for link, nbytes in links.items()) or "0",
        "planned peak of the GPU, GB": f"{planned_peak(plan.placement, 'gpu') / 1e9:.2f}",
        "bound by": str(estimate.bound_by),
        "step, s": f"{estimate.step_s:.3f}",
        "tokens/s": f"{plan.shape.tokens_per_step / estimate.step_s:,.0f}",
    }


if __name__ == "__main__":
    sys.exit(main())
