#!/usr/bin/env python3
"""Run one config with several processes under Ray Train, on one host.

    python examples/jobs/ray_train.py examples/01_tiny.toml --workers 2
    python examples/jobs/ray_train.py run.toml --workers 8 --gpus

Each worker starts one rank of the run. If a worker fails, Ray starts all workers again, and the run resumes from its
last checkpoint. Needs `pip install "ray[train]"`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray.train
from ray.train.torch import TorchConfig, TorchTrainer


def train(job: dict[str, Any]) -> None:
    """Run the rank that belongs to this worker."""
    context = ray.train.get_context()
    world = {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": job["port"],
    }
    environment = os.environ | {name: str(value) for name, value in world.items()}
    subprocess.run([sys.executable, "-m", "megatrain", "run", job["config"]], env=environment, check=True)


def main() -> None:
    """Start the workers and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one GPU for each worker")
    parser.add_argument("--port", type=int, default=29_500, help="free port for the rendezvous of the ranks")
    arguments = parser.parse_args()
    trainer = TorchTrainer(
        train,
        torch_config=TorchConfig(backend="gloo"),  # for the workers only; the ranks create a separate group
        train_loop_config={"config": str(arguments.config.resolve()), "port": arguments.port},
        scaling_config=ray.train.ScalingConfig(
            num_workers=arguments.workers, use_gpu=arguments.gpus, placement_strategy="STRICT_PACK"
        ),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
