"""Scheduler files: the Slurm script requeues an interrupted run, and the other files are well formed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

JOBS = Path(__file__).parents[2] / "examples/jobs"


@pytest.mark.parametrize(("code", "is_requeued"), [(0, False), (75, True), (2, False)])
def test_slurm_requeues_a_run_that_saved_and_stopped(tmp_path: Path, code: int, is_requeued: bool) -> None:
    """Small scripts replace `srun` and `scontrol`."""
    for name, text in {"srun": f'echo "$@" > ran\nexit {code}', "scontrol": 'echo "$@" > requeued'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", JOBS / "slurm.sbatch", "run.toml"], cwd=tmp_path, env=environment, timeout=60)
    assert done.returncode == code
    assert (tmp_path / "ran").read_text() == "megatrain-tier run run.toml\n"
    assert (tmp_path / "requeued").exists() == is_requeued
    if is_requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_jobs_run_the_command() -> None:
    sky = yaml.safe_load((JOBS / "skypilot.yaml").read_text(encoding="utf-8"))
    assert 'megatrain-tier run "$CONFIG"' in sky["run"] and set(sky["envs"]) == {"CONFIG"}
    job = yaml.safe_load((JOBS / "kubeflow.yaml").read_text(encoding="utf-8"))
    trainer = job["spec"]["trainer"]
    assert (job["kind"], trainer["command"], trainer["args"][0]) == ("TrainJob", ["megatrain-tier"], "run")
    for name in ("slurm.sbatch", "skypilot.yaml", "kubeflow.yaml", "ray_train.py"):
        assert len((JOBS / name).read_text(encoding="utf-8").splitlines()) <= 70, "one screen"
