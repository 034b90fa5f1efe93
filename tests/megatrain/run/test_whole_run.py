"""The records of a finished run are complete and agree with each other."""

from __future__ import annotations

import json
import platform
from math import fsum
from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint.state import installed_versions
from processes.saved_run import SavedRun
from tiered import MiB

NUM_STEPS = 6
STEPS_PER_EPOCH = 16  # 31 documents with two rows of 32 tokens per step


def read(run: SavedRun, name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((run.out / name).read_text())
    return values


@pytest.fixture(scope="module")
def events(unbroken: SavedRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (unbroken.out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def steps(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if "event" not in event]


def test_each_step_and_each_checkpoint_is_logged(events: list[dict[str, Any]], unbroken: SavedRun) -> None:
    assert [event["step"] for event in events if "event" not in event] == list(range(1, NUM_STEPS + 1))
    saves = [event for event in events if event.get("event") == "checkpoint"]
    assert [event["step"] for event in saves] == [2, 4, 6] and len(events) == NUM_STEPS + 3
    for event in saves:
        assert Path(event["path"]).parts[-2:] == ("out", "checkpoints")
        assert event["written_bytes"] + event["linked_bytes"] == event["nbytes"] == event["written_bytes"]


def test_figures_of_steps_agree(steps: list[dict[str, Any]]) -> None:
    for number, row in enumerate(steps, start=1):
        assert row["epoch"] == number / STEPS_PER_EPOCH
        constant = {
            "max_steps": NUM_STEPS, "lr": 1e-3, "warmup_steps": 0, "tier_capacity_bytes": {"ram": 64 * MiB},
            "written_bytes": {}, "preferences": {}, "link_bytes": {}, "link_busy_s": {},
        }  # fmt: skip
        assert {key: row[key] for key in constant} == constant and "ranks" not in row
        seconds = [each["step_s"] for each in steps[:number]]
        assert row["mean_step_s"] == pytest.approx(fsum(seconds) / number)
        for rate, amount in (
            ("real_tokens_per_s", "num_real_tokens"), ("trained_tokens_per_s", "num_trained_tokens"),
            ("model_flops_per_s", "model_flops"), ("hardware_flops_per_s", "hardware_flops"),
        ):  # fmt: skip
            assert row[rate] == round(row[amount] / row["step_s"], 3) > 0
        assert row["num_trained_tokens"] < row["num_real_tokens"] <= 2 * 32
        assert 0 < row["tier_used_bytes"]["ram"] < 64 * MiB
        assert row["stall_s"].keys() == {"fill", "drain", "space", "lease", "commit"}
        assert row["process_usage"].keys() == {"user_s", "system_s", "page_faults"}
    elapsed_s = [row["eta_s"] * row["step"] / (NUM_STEPS - row["step"]) for row in steps[:-1]]
    assert elapsed_s == sorted(elapsed_s) and steps[-1]["eta_s"] == 0.0


def test_summary_agrees_with_the_steps(steps: list[dict[str, Any]], unbroken: SavedRun) -> None:
    values = read(unbroken, "summary.json")
    (end,) = values.pop("ends")
    assert values == {"format": 1}
    losses = [row["loss"] for row in steps]
    expected = {
        "num_steps": NUM_STEPS, "first_loss": losses[0], "last_loss": losses[-1], "num_averaged": 3,
        "mean_losses": [fsum(losses[:3]) / 3, fsum(losses[3:]) / 3],
        "num_real_tokens": sum(row["num_real_tokens"] for row in steps),
        "num_trained_tokens": sum(row["num_trained_tokens"] for row in steps),
        "tier_capacity_bytes": {"ram": 64 * MiB}, "link_bytes": {}, "link_paths": {}, "written_bytes": {},
        "export_dir": str(unbroken.out / "final"), "interrupted": False, "saved_step": NUM_STEPS, "evaluations": {},
        "num_processes": 1,
    }  # fmt: skip
    assert {key: end[key] for key in expected} == expected
    assert end.keys() == {*expected, "at", "seconds", "tier_peak_bytes", "peak_rss_bytes"}
    assert end["seconds"] == pytest.approx(fsum(row["step_s"] for row in steps))
    assert end["tier_peak_bytes"]["ram"] == max(row["tier_used_bytes"]["ram"] for row in steps)


def test_status_agrees_with_the_steps(steps: list[dict[str, Any]], unbroken: SavedRun) -> None:
    status = read(unbroken, "status.json")
    expected = {
        "state": "done", "run_name": "out", "step": NUM_STEPS, "max_steps": NUM_STEPS, "metrics": steps[-1],
        "checkpoint_step": NUM_STEPS, "evaluations": {}, "activity": {}, "exit_code": 0, "host": platform.node(),
    }  # fmt: skip
    assert {key: status[key] for key in expected} == expected
    assert status.keys() == {*expected, "pid", "checkpoint_at", "updated_at", "message"}


def test_plan_of_a_run_is_recorded(unbroken: SavedRun) -> None:
    plan = read(unbroken, "plan.json")
    shown = json.loads(unbroken.call("plan", unbroken.folder / "run.toml", "--json").stdout)
    assert (plan["budget_bytes"], plan["peak_bytes"]) == ({"ram": 64 * MiB}, shown["totals"])
    for mine, theirs in (("headline", "headline"), ("rows", "rows"), ("link_bytes_per_step", "traffic_per_step")):
        assert plan[mine] == shown[theirs]
    expected = {"format": 1, "device": "cpu", "compute_dtype": "float32", "micro_batch_size": 2, "num_micro_batches": 1}
    assert {key: plan[key] for key in expected} == expected
    assert plan["versions"] == installed_versions()
    (start,) = plan["starts"]
    del start["at"]
    links = plan["link_bytes_per_step"]
    assert start == {"first_step": 0, "budget_bytes": plan["budget_bytes"], "link_bytes_per_step": links}
    machine = plan["machine"]
    assert machine.keys() == {"host", "system", "cpu", "num_cpus", "ram_bytes", "gpu", "drives"}
    assert (machine["host"], machine["gpu"], list(machine["drives"])) == (platform.node(), None, ["output_dir"])
