"""`status` and `report` give no internal error, for any values that a user writes into the records of a run."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.strange_values import VALUES, places_in
from megatrain.base.observer import EvaluationMetrics, StepMetrics
from megatrain.run.status import RunStatus

CliModule = Callable[[str], ModuleType]
STEP = StepMetrics(
    step=1, max_steps=8, epoch=0.5, loss=1.25, grad_norm=0.5, lr=1e-5, num_real_tokens=24, num_trained_tokens=10,
    step_s=2.0, eta_s=75.0, tier_used_bytes={"ram": 61}, tier_capacity_bytes={"ram": 64}, rss_bytes=66,
).to_json()  # fmt: skip
EVALUATION = EvaluationMetrics(1, 8, "held", 1.5, 10, 0.5).to_json()
RECORDS: dict[str, Any] = {
    "status.json": {
        **RunStatus("training", run_name="tiny", step=1, max_steps=8, checkpoint_step=1).to_json(),
        "metrics": STEP,
        "evaluations": {"held": {"step": 1, "loss": 1.5, "perplexity": 4.5}},
    },
    "plan.json": {
        "format": 1, "headline": "tiny", "peak_bytes": {"ram": 40, "nvme": 90}, "budget_bytes": {"ram": 64},
        "link_bytes_per_step": {"ram->nvme": 1}, "estimate": {"predicted_step_s": 1.0}, "replayed": {"step_s": 1.6},
        "machine": {"host": "here", "ram_bytes": 1, "drives": {}}, "versions": {"torch": "2"},
        "starts": [{"at": "2026-01-01", "first_step": 0, "budget_bytes": {"ram": 1}}],
    },
    "summary.json": {
        "format": 1,
        "ends": [{"peak_rss_bytes": 7, "link_paths": {"a": "b"}, "tier_peak_bytes": {"ram": 3}, "export_dir": "x"}],
    },
    "metrics.jsonl": [STEP, {"event": "evaluation", **EVALUATION}, {"event": "checkpoint", "step": 1, "stall_s": 1.0}],
}  # fmt: skip
EXAMPLES: list[tuple[str, Any, Any]] = [
    ("summary.json", "ends", True), ("plan.json", "starts", 5), ("plan.json", "machine", 7),
    ("status.json", "step", "x"), ("plan.json", "peak_bytes", [1]),
    ("status.json", "evaluations", [1]), ("status.json", "activity", 1),
]  # fmt: skip


def check(folder: Path, records: dict[str, Any], group: Any) -> None:
    for name, value in records.items():
        lines = value if name == "metrics.jsonl" else [value]
        (folder / name).write_text("\n".join(map(json.dumps, lines)))
    for words in (["status"], ["status", "--json"], ["report"], ["report", "--html", str(folder / "page.html")]):
        result = CliRunner().invoke(group, [words[0], str(folder), *words[1:]])
        assert result.exit_code in (0, 1, 2) and "internal error" not in result.output, (words, result.output)
        assert isinstance(result.exception, SystemExit | None), (words, result.exception)


@pytest.mark.parametrize(("name", "key", "value"), EXAMPLES)
def test_record_value_of_wrong_type_causes_no_crash(
    tmp_path: Path, cli_module: CliModule, name: str, key: str, value: Any
) -> None:
    check(tmp_path, {**RECORDS, name: {**RECORDS[name], key: value}}, cli_module("main").command_group)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_arbitrary_values_in_records_cause_no_crash(tmp_path: Path, cli_module: CliModule, data: st.DataObject) -> None:
    records = copy.deepcopy(RECORDS)
    tree, key = data.draw(st.sampled_from(list(places_in(records[data.draw(st.sampled_from(sorted(records)))]))))
    tree[key] = data.draw(VALUES)
    check(tmp_path, records, cli_module("main").command_group)
