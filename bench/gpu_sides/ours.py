"""Our side of a part of `gpu.py`."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from bench.compare.worker import BETAS, EPSILON, LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY
from bench.gpu_sides.cases import merged
from bench.gpu_sides.job import SEED, Job, StepSeen, fill_range
from bench.gpu_sides.profile import profiled
from bench.sides import Ours, run_config, with_tight_ram
from megatrain.base.layout import UnitLayout, entries_within
from megatrain.base.timeline import COMPUTE
from megatrain.config.schema import RunConfig
from megatrain.plan.placement import Placement
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.simulate import step_seconds
from megatrain.trace.counting import step_flops
from megatrain.training.resolve import resolve
from megatrain.training.weights import RandomWeights


class _SeededWeights(RandomWeights):
    """Source of the initial weights that all sides share."""

    def read(self, layout: UnitLayout, start: int, out: Tensor) -> None:
        for entry, first, last in entries_within(layout, start, start + out.numel()):
            part = out[entry.offset + first - start : entry.offset + last - start]
            fill_range(entry.name, len(entry.shape), first, part)


def _seeded(plan: Plan) -> _SeededWeights:
    return _SeededWeights(plan.graph.model, SEED)


class _Traced(Ours):
    """Our engine, with a timeline that records steps on request."""

    @property
    def timeline(self) -> Any:
        """Timeline of the run. It records steps while its ``is_recording`` is True."""
        return self._run.timeline


class OursSide:
    """Our side. Each step waits for all transfers, although they could overlap the next step."""

    def __init__(self, job: Job) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        self._job = job
        self._batches = job.micro_batches()
        config, start_s = run_config_of(job), time.perf_counter()
        plan = plan_run(resolve(config), padded=False)
        self._plan_s = time.perf_counter() - start_s
        print(f"planned in {self._plan_s:.1f} s", file=sys.stderr, flush=True)
        num_steps = job.has_warm_up + job.num_steps + job.has_profile
        self._ours = _Traced(config, num_steps, plan=plan, source=_seeded)

    def about(self) -> dict[str, Any]:
        """Return the model's size, precision and FLOPs per step, and the plan's homes and predictions."""
        plan, job = self._ours.plan, self._job
        tokens, trained = job.rows * job.length, job.rows * (job.length - 1)
        program = plan.program
        flops = step_flops(
            plan.trace,
            num_positions=tokens,
            num_real_tokens=tokens,
            num_trained_tokens=trained,
            recompute=program.recompute,
        )
        return {
            "num_parameters": plan.graph.num_parameters,
            "trace_is_exact": plan.trace.exact,
            "start_parts_s": {"plan": self._plan_s, **self._ours.start_s},
            "start_bytes": self._ours.start_bytes,
            "num_updated": {place: plan.updates.num_weights(on_gpu=place == "gpu") for place in ("host", "gpu")},
            "num_layers": sum(unit.is_layer for unit in plan.graph.units),
            "optimizer": f"AdamW, fp32 master and moments, {job.dtype} layers",
            "model_flops": flops.model,
            "hardware_flops": flops.hardware,
            "predicted_s": step_seconds(plan),
            "home_bytes": {tier: dict(kinds) for tier, kinds in plan.placement.home_bytes.items()},
            "planned_peaks": {tier: planned_peak(plan.placement, tier) for tier in plan.tiers},
            "workspace_bytes": dict(plan.placement.workspace_bytes),
            "traffic": dict(plan.traffic),
        }

    def step(self, *, is_last: bool) -> StepSeen:
        """Run one step. Record the last step on the timeline, and add the host seconds of its phases as parts."""
        timeline = self._ours.timeline
        # With `read_usage`, every op of a measured step would count the bytes of all blocks in use.
        timeline.is_recording, timeline.read_usage = is_last, None
        times = self._ours.step(self._batches, LEARNING_RATE)
        timeline.is_recording = False
        phases: dict[str, float] = {}
        for span in timeline.spans:
            if span.row == COMPUTE:
                name = f"host_{span.name.split()[0]}"
                phases[name] = phases.get(name, 0.0) + span.end_s - span.start_s
        return StepSeen(times.loss, {**times.parts_s, **phases}, times.num_drops)

    def profile(self) -> dict[str, Any]:
        """Run an additional step under torch's profiler, and return rows about its kernels and gaps."""
        trace = Path(self._job.profile or Path(self._job.scratch, "profile.json"))
        return profiled(lambda: self._ours.step(self._batches, LEARNING_RATE), trace, self._job.device)

    def finish(self) -> dict[str, Any]:
        """Run the last update. Return planned and measured bytes and peaks, and how each link moves its bytes."""
        self._ours.finish()
        if self._job.trace:
            self._ours.timeline.write(Path(self._job.trace))
        stats = self._ours.windows[-1]
        found = {
            "planned_moved": self._ours.planned_bytes(),
            "moved": self._ours.moved_bytes(),
            "tiers": {name: [tier.high_water_bytes, tier.capacity_bytes] for name, tier in stats.tiers.items()},
            "paths": {name: link.path for name, link in stats.links.items()},
            "schedule_misses": sum(window.schedule_misses for window in self._ours.windows),
        }
        self._ours.__exit__(None, None, None)
        return found


def planned_peak(placement: Placement, tier: str) -> int:
    """Return the maximum bytes that a tier is planned to hold: homes, workspace, and buffers for copies.

    The result can exceed ``peak_bytes``, which is the minimum that the plan needs.
    """
    homes = sum(placement.home_bytes[tier].values())
    buffers = sum(size * count for size, count in placement.buffers.get(tier, {}).items())
    other_bytes = placement.workspace_bytes.get(tier, 0) + placement.generation_bytes.get(tier, 0)
    return max(placement.peak_bytes(tier), homes + buffers + other_bytes)


def run_config_of(job: Job) -> RunConfig:
    """Return the config of our run. A "tight" RAM tier is a quarter above the minimum."""
    return with_tight_ram(partial(_config, job)) if job.ram == "tight" else _config(job, job.ram)


def _config(job: Job, ram: str) -> RunConfig:
    folder = Path(job.model)
    tiers: dict[str, Any] = {"ram": {"size": ram}} if ram else {}
    if job.drive:
        tiers["nvme"] = [{"path": job.drive}]
    tables: dict[str, Any] = {
        "model": {"model_name_or_path": job.model, "attn_implementation": "sdpa", "train_from_scratch": True},
        "precision": {"compute_dtype": job.dtype},
        "optimizer": {
            "learning_rate": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "weight_decay_exclude": [],
            "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1],
            "adam_epsilon": EPSILON,
            "max_grad_norm": MAX_GRAD_NORM,
        },
        "checkpoint": {"save_strategy": "no", "save_on_signal": False},
        "tiers": tiers,
    }
    tables = merged(tables, job.tables)
    shape = (job.rows // job.micro_rows, job.micro_rows, job.length)
    no_text = folder / "config.json"  # the config requires a text file, but these steps do not read it
    return run_config(folder, no_text, shape, Path(job.scratch), device=job.device, seed=SEED, **tables)
