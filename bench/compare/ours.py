"""Our side of a comparison: the engine with its state on NVMe and a RAM tier slightly above the minimum."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.compare.worker import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY, Job, Steps
from bench.sides import Ours, run_config, with_tight_ram
from megatrain.config.schema import RunConfig
from megatrain.plan.planner import plan_run
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.plan.together import plan_together
from megatrain.ranks.collectives import Collectives
from megatrain.ranks.world import World, init
from megatrain.training.resolve import resolve


class OursSide:
    """Side that runs steps of our engine."""

    def __init__(self, job: Job) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        if job.size == 1:
            self._ours = Ours(nvme_config(job), job.num_steps)
            return
        world = World.local(job.rank, job.size)
        init(world, torch.device("cpu"), torch.distributed.FileStore(job.meeting, job.size))
        config = _config(job, job.ram)
        plan = plan_together(replace(resolve(config), world=world), Collectives().gather_objects)
        self._ours = Ours(config, job.num_steps, plan=plan)

    def about(self) -> dict[str, Any]:
        """Return the size of the model, the size of the RAM tier, and the bytes that a step is planned to move."""
        plan = self._ours.plan
        entries = [entry for layout in plan.graph.layouts.values() for entry in layout.entries]
        return {
            "num_parameters": sum(math.prod(entry.shape) for entry in entries),
            "state_memory": plan.budgets_by_tier["ram"].capacity_bytes,
            "planned_bytes": dict(plan.traffic),
        }

    def steps(self, batches: Sequence[Sequence[Mapping[str, Tensor]]]) -> Steps:
        """Run steps. Each update runs during the next step. The part "settle" is the final wait for write-backs."""
        times = self._ours.steps(batches, LEARNING_RATE)
        return Steps(times.total_s, times.parts_s, times.loss)


def least_ram_bytes(job: Job) -> int:
    """Return the minimum total RAM for all processes of a job."""
    try:
        plan_run(replace(resolve(_config(job, "1MiB")), world=World.local(0, job.size)))
    except DoesNotFitError as error:
        return error.need_bytes * job.size
    return 1 << 20


def nvme_config(job: Job) -> RunConfig:
    """Return the config of the job's run. Without a given RAM size, the RAM tier is a quarter above the minimum."""
    return _config(job, job.ram) if job.ram else with_tight_ram(partial(_config, job))


def _config(job: Job, ram: str) -> RunConfig:
    folder = Path(job.nvme)
    tables: dict[str, dict[str, Any]] = {
        "precision": {"compute_dtype": job.compute_dtype},
        "optimizer": {
            "learning_rate": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "weight_decay_exclude": [],
            "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1],
            "adam_epsilon": EPSILON,
            "max_grad_norm": job.max_grad_norm,
        },
        "tiers": {"ram": {"size": ram}, "nvme": [{"path": str(folder / "blocks")}]},
    }
    for table, values in (job.overrides or {}).items():
        tables[table] = {**tables.get(table, {}), **values}
    no_text = Path(job.model) / "config.json"  # the config requires a text file, but these steps do not read it
    # Let the planner choose which layers to recompute (the default), because DeepSpeed also keeps its activations.
    return run_config(Path(job.model), no_text, job.shape, folder, training={"recompute": "auto"}, **tables)
