"""Totals of a whole run, as `plan` shows them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from megatrain.config import load_config
from megatrain.plan.estimate import run_length
from megatrain.plan.planner import plan_run
from megatrain.training.resolve import resolve
from oracles.tiered_run import EXAMPLES, config_text
from processes.saved_run import command_group

MODEL = EXAMPLES / "quickstart" / "model"


def write(folder: Path, **tables: Any) -> Path:
    path = folder / "run.toml"
    text = config_text(folder, MODEL, **{"nvme": 2, **tables})
    path.write_text(text.replace("[model]\n", "[model]\ntrain_from_scratch = true\n"))
    return path


def test_run_length_counts_steps_tokens_and_written_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, ram="7MiB", placement='optimizer = ["nvme"]', training="max_steps = 450")
    config = load_config(path, (), ["tiers.nvme.0.max_written=1GB", "tiers.nvme.1.max_written=1GB"]).config
    plan = plan_run(resolve(config))
    length = run_length(plan, None, 0.5)
    assert (length.num_steps, length.num_tokens, length.seconds) == (450, 450 * 6 * 64, 225.0)
    assert length.written_bytes == plan.placement.run_traffic_bytes(450)["ram->nvme"]
    assert length.share_of_limit == length.written_bytes / 2e9
    assert length.num_saves == 3 and length.saved_bytes == 3 * plan.checkpoint.output_dir_bytes
    plan = plan_run(resolve(load_config(write(tmp_path, ram="7MiB")).config))
    assert run_length(plan, None, 0.5).num_steps is None
    assert run_length(plan, 7, None).num_tokens == 7 * 6 * 64


def test_the_command(tmp_path: Path) -> None:
    group = command_group()
    path = write(tmp_path, ram="7MiB")
    result = CliRunner().invoke(group, ["plan", str(path), "--count-steps"])
    assert result.exit_code == 0, result.output
    found = re.search(r"^run +(\d+) steps, ([\d,]+) tokens", result.stdout, re.MULTILINE)
    assert found is not None and int(found[2].replace(",", "")) == int(found[1]) * 6 * 64
    assert "NVMe writes" in result.stdout
    values = json.loads(CliRunner().invoke(group, ["plan", str(path), "--json"]).stdout)
    assert values["run"]["num_steps"] is None and "what_if" not in values
