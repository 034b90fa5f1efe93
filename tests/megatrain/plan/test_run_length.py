"""Totals of a whole run, as `plan` shows them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from megatrain.config import load_config
from megatrain.plan.estimate import RunLength, run_length
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
    config = load_config(path, (), ["tiers.nvme.0.max_written=1GB", "tiers.nvme.1.max_written=2GB"]).config
    plan = plan_run(resolve(config))
    steps = plan.placement.run_traffic_bytes(450)
    assert steps["ram->nvme"] != steps["nvme->ram"]
    expected = RunLength(
        num_steps=450,
        num_tokens=450 * 6 * 64,
        seconds=225.0,
        moved_bytes=steps,
        written_bytes=steps["ram->nvme"],
        share_of_limit=steps["ram->nvme"] / 3e9,
        num_saves=3,  # after 200, 400 and 450 steps
        saved_bytes=3 * plan.checkpoint.output_dir_bytes,
    )
    assert run_length(plan, None, 0.5) == expected
    assert run_length(plan, 400, None).num_saves == 2 and run_length(plan, 401, None).num_saves == 3
    for strategy, num_saves in (("no", 0), ("epoch", 1)):
        table = plan.run.checkpoint.table.model_copy(update={"save_strategy": strategy})
        run = replace(plan.run, checkpoint=replace(plan.run.checkpoint, table=table))
        saved_bytes = num_saves * plan.checkpoint.output_dir_bytes
        assert run_length(replace(plan, run=run), None, 0.5) == replace(
            expected, num_saves=num_saves, saved_bytes=saved_bytes
        )
    plan = plan_run(resolve(load_config(write(tmp_path, ram="7MiB"), (), ["tiers.nvme.0.max_written=1GB"]).config))
    assert run_length(plan, None, 0.5) == RunLength(None)
    found = run_length(plan, 7, None)
    assert (found.num_steps, found.num_tokens, found.seconds, found.share_of_limit) == (7, 7 * 6 * 64, None, None)


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
