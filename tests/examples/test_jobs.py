"""Scheduler files: the Slurm script requeues an interrupted run, and the other files are well formed."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from megatrain.config import load_config

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


def test_job_files_run_the_command() -> None:
    sky = yaml.safe_load((JOBS / "skypilot.yaml").read_text(encoding="utf-8"))
    assert set(sky["envs"]) == {"CONFIG", "SAVE_COPY"} and sky["envs"]["SAVE_COPY"].startswith("s3://")
    command = shlex.split(sky["run"])
    assert command[1:] == ["run", "$CONFIG", "--set", "checkpoint.save_copy=$SAVE_COPY"]
    setting = command[-1].replace("$SAVE_COPY", sky["envs"]["SAVE_COPY"])
    config = load_config(JOBS.parent / "01_tiny.toml", overrides=[setting]).config
    assert config.checkpoint.save_copy == sky["envs"]["SAVE_COPY"]
    job = yaml.safe_load((JOBS / "kubeflow.yaml").read_text(encoding="utf-8"))
    trainer = job["spec"]["trainer"]
    assert (job["kind"], trainer["command"], trainer["args"][0]) == ("TrainJob", ["megatrain-tier"], "run")
    for name in ("slurm.sbatch", "skypilot.yaml", "kubeflow.yaml", "ray_train.py"):
        assert len((JOBS / name).read_text(encoding="utf-8").splitlines()) <= 70, "one screen"
