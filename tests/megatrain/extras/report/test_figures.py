"""All figures of a recorded run, compared with values that follow by hand from a small table of steps."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.base.observer import RunSummary
from megatrain.config import load_config
from megatrain.extras.report.figures import PlanComparison, compute_figures
from megatrain.extras.report.history import RunHistory, read_history
from megatrain.extras.report.text import format_flops, perplexity, report_lines
from megatrain.run.record import write_summary
from megatrain.run.status import RunStatus, write_status
from tiered import GiB, MiB

#: (loss, step_s, real tokens, trained tokens, resident MiB, RAM MiB, NVMe MiB, seconds of fill, of drain, MiB written,
#: MiB fetched). The first two steps warm up, and the first three belong to a start with more RAM. Steps 4 and 6 follow
#: a stop.
TABLE = [
    (9.0, 80.0, 10, 5, 200, 90, 10, 1.0, 0.0, 50, 60),
    (8.0, 70.0, 11, 6, 0, 80, 20, 1.0, 0.0, 51, 61),
    (7.0, 1.0, 20, 10, 220, 70, 30, 0.25, 0.0, 52, 62),
    (6.0, 3.0, 24, 12, 215, 20, 70, 0.5, 0.25, 53, 63),
    (5.0, 2.0, 28, 14, 240, 25, 60, 0.0, 0.5, 3, 8),
    (4.0, 6.0, 16, 8, 250, 22, 50, 1.25, 0.0, 54, 64),
    (3.0, 4.0, 8, 4, 230, 21, 40, 0.5, 0.25, 9, 14),
    (1.0, 8.0, 24, 12, 225, 23, 45, 0.5, 0.5, 5, 9),
]
LARGE, SMALL = {"ram": 128 * MiB, "nvme": 256 * MiB}, {"ram": 32 * MiB, "nvme": 256 * MiB}
SAMPLE = {"prompt": "Call me", "generated": "a cab", "reference": "Ishmael"}


def steps() -> list[dict[str, Any]]:
    found = []
    for number, row in enumerate(TABLE, 1):
        loss, step_s, real, trained, rss, ram, nvme, fill, drain, written, fetched = row
        step = {
            "step": number, "max_steps": 20 + number, "loss": loss, "step_s": step_s, "num_real_tokens": real,
            "num_trained_tokens": trained, "model_flops": 3e9 * real, "hardware_flops": 4e9 * real,
            "rss_bytes": rss * MiB, "tier_used_bytes": {"ram": ram * MiB, "nvme": nvme * MiB},
            "tier_capacity_bytes": LARGE if number <= 3 else SMALL, "stall_s": {"fill": fill, "drain": drain},
            "written_bytes": {"/drive": written * MiB},
            "link_bytes": {"ram->nvme": written * MiB, "nvme->ram": fetched * MiB},
        }  # fmt: skip
        found.append(step)
    del found[6]["link_bytes"]["nvme->ram"]  # as if nothing were fetched
    found[3]["process_usage"] = {"user_s": 9.0, "system_s": 0.5, "page_faults": 100}
    found[4]["process_usage"] = {"user_s": 2.0, "system_s": 0.75, "page_faults": 3000}
    found[7]["process_usage"] = {"user_s": 3.0, "system_s": 0.25, "page_faults": 200}
    found[1]["preferences"] = {"accuracy": 0.5, "margin": 4.0}
    found[7]["preferences"] = {"accuracy": 1.0}
    rank = {"link_bytes": {"ram->ranks": 2 * MiB, "ram->nvme": MiB}, "stall_s": {"fill": 3.0}, "rss_bytes": 70 * MiB}
    other = {"link_bytes": {"ram->nvme": 5 * MiB}, "stall_s": {"fill": 1.0, "drain": 6.0}, "rss_bytes": 90 * MiB}
    used = [{"tier_used_bytes": {"ram": nbytes * MiB}} for nbytes in (11, 17, 13, 12)]
    found[5]["ranks"] = [{**rank, **used[0]}]  # another number of ranks
    found[6]["ranks"] = [{**rank, **used[1]}, {**other, **used[2]}]
    found[7]["ranks"] = [{**other, **used[3]}, {**other, **used[0]}]
    return found


PLAN = {
    "headline": "tiny", "peak_bytes": {"ram": 24 * MiB, "gpu": 0}, "budget_bytes": {"ram": MiB},
    "link_bytes_per_step": {"ram->nvme": 4 * MiB, "nvme->ram": 16 * MiB, "ram->gpu": MiB},
    "estimate": {"predicted_step_s": 9.0, "nvme_written_bytes_per_step": {"/drive": 6 * MiB, "/idle": MiB}},
    "replayed": {"step_s": 2.5}, "machine": {"host": "here"}, "versions": {"torch": "2"},
    "starts": [
        {"at": "Monday", "first_step": 0, "link_bytes_per_step": {"ram->nvme": MiB}},
        {"at": "Tuesday", "first_step": 3},
    ],
}  # fmt: skip
EVALUATIONS = [
    {"step": 3, "name": "book", "loss": 5.5, "seconds": 0.5, "samples": [{**SAMPLE, "generated": "old"}]},
    {"step": 8, "name": "book", "loss": 2.5, "seconds": 0.25, "samples": [SAMPLE], "preferences": {"accuracy": 0.75}},
    {"step": 5, "name": "book", "loss": 1.5, "seconds": 0.75},
    {"step": 8, "loss": "nan"},
]
ENDS = [
    {"tier_peak_bytes": {"ram": 91 * MiB}, "tier_capacity_bytes": LARGE, "peak_rss_bytes": 270 * MiB, "export_dir": "a",
     "link_paths": {"ram->nvme": "posix"}, "evaluations": {"web": {"step": 2, "loss": 4.5, "samples": [SAMPLE]}}},
    {"tier_peak_bytes": {"ram": 28 * MiB}, "tier_capacity_bytes": SMALL, "peak_rss_bytes": 260 * MiB, "export_dir": "b",
     "link_paths": {"ram->nvme": "kvikio"}, "evaluations": {
         "book": {"step": 8, "loss": 7.0, "preferences": {"accuracy": 0.125}},
         "web": {"step": 8, "loss": 3.5, "preferences": {"margin": 2}},
     }},
    {"export_dir": None, "link_paths": {"ram->nvme": "direct"}},
]  # fmt: skip
CHECKPOINTS = [
    {"step": 3, "stall_s": 0.5, "nbytes": 7 * MiB},
    {"step": 5, "stall_s": 0.75, "nbytes": 9 * MiB},
]
CONFIG = """
task = "pretrain"
output_dir = "out"
run_name = "named"
[model]
model_name_or_path = "org/model"
[data]
max_length = 16
[[data.train]]
path = "one.txt"
[[data.train]]
path = "two.txt"
weight = 3
columns = { text = "body" }
[training]
per_device_train_batch_size = 2
gradient_accumulation_steps = 3
[optimizer]
weight_decay_exclude = ["*norm*"]
[[tiers.nvme]]
path = "drive"
max_written = "40MiB"
"""


@pytest.fixture
def history(tmp_path: Path) -> RunHistory:
    (tmp_path / "drive").mkdir()
    (tmp_path / "drive" / "WEAR.json").write_text(json.dumps({"written_bytes": 10 * MiB}))
    (tmp_path / "run.toml").write_text(CONFIG)
    config = load_config(tmp_path / "run.toml").config
    recorded = steps()
    recorded[7]["written_bytes"][str(tmp_path / "drive")] = 7 * MiB
    evaluations = [{**line, "loss": float(line["loss"])} for line in EVALUATIONS]  # type: ignore[arg-type]
    return RunHistory(
        Path("/runs/x"), "failed", RunStatus("failed", step=99, max_steps=98, message="no space"), steps=recorded,
        evaluations=evaluations, checkpoints=CHECKPOINTS, plan=PLAN, ends=ENDS, config=config,
        timeline=Path("/runs/x/trace.json"),
    )  # fmt: skip


def test_every_figure_of_a_run(history: RunHistory, tmp_path: Path) -> None:
    figures = asdict(compute_figures(history))
    settings = [tuple(setting.values()) for setting in figures.pop("settings")]
    assert math.isnan(figures["evaluations"].pop("eval")[0][1])
    assert figures == {
        "name": "named", "path": "/runs/x", "state": "failed", "message": "no space", "headline": "tiny", "step": 8,
        "max_steps": 28, "seconds": 174 + 1.5 + 1.25, "first_loss": 7.5, "last_loss": 3.25, "num_averaged": 4,
        "loss_name": "",
        "evaluations": {"book": [(3, 5.5), (5, 1.5), (8, 2.5)], "web": [(2, 4.5), (8, 3.5)]},
        "judged": {"book": {8: {"accuracy": 0.75}}, "web": {8: {"margin": 2.0}}},
        "samples": {"web": {"step": 2, "rows": [SAMPLE]}, "book": {"step": 8, "rows": [SAMPLE]}},
        "preferences": {"accuracy": 0.75, "margin": 4.0},
        "num_real_tokens": 141, "num_trained_tokens": 71, "padding_share": 1 - 141 / (8 * 6 * 16),
        "step_s": {"planned": 2.5, "measured": 3.5},  # the median of 1, 2, 3, 4, 6 and 8
        "time_s": {"computing": 3.25, "fill": 0.5, "drain": 0.25},
        "tokens_per_s": 5.0, "trained_tokens_per_s": 2.5, "model_flops_per_s": 15e9, "hardware_flops_per_s": 20e9,
        "tiers": {
            "ram": {"planned": 24 * MiB, "measured": 28 * MiB}, "gpu": {"planned": 0, "measured": None},
            "nvme": {"planned": None, "measured": 70 * MiB},
        },
        "capacity_bytes": SMALL,
        "links": {  # the medians of steps 5, 7 and 8
            "ram->nvme": {"planned": 4 * MiB, "measured": 5 * MiB},
            "nvme->ram": {"planned": 16 * MiB, "measured": 8 * MiB}, "ram->gpu": {"planned": MiB, "measured": 0},
        },
        "drives": {
            str(tmp_path / "drive"): {
                "nbytes": 7 * MiB, "bytes_per_step": {"planned": None, "measured": 0}, "limit_bytes": 40 * MiB,
                "lifetime_bytes": 10 * MiB,
            },
            "/drive": {
                "nbytes": 277 * MiB, "bytes_per_step": {"planned": 6 * MiB, "measured": 5 * MiB}, "limit_bytes": None,
                "lifetime_bytes": None,
            },
            "/idle": {
                "nbytes": 0, "bytes_per_step": {"planned": MiB, "measured": 0}, "limit_bytes": None,
                "lifetime_bytes": None,
            },
        },
        "rss_first_bytes": 250 * MiB, "rss_last_bytes": 225 * MiB, "rss_peak_bytes": 270 * MiB,
        "checkpoints": CHECKPOINTS, "restarts": [(3, "Tuesday")], "machine": {"host": "here"},
        "versions": {"torch": "2"}, "export_dir": "b", "link_paths": {"ram->nvme": "direct"},
        "beside_tier_bytes": 228 * MiB,  # step 6: 250 - 22
        "process_usage": {"user_s": 3.0, "system_s": 0.5, "page_faults": 200}, "timeline": "/runs/x/trace.json",
        "ranks": [
            {"tier_used_bytes": {"ram": 17 * MiB}, "link_bytes": {"ram->ranks": MiB, "ram->nvme": 3 * MiB},
             "stall_s": {"fill": 2.0, "drain": 3.0}, "rss_bytes": 90 * MiB},
            {"tier_used_bytes": {"ram": 13 * MiB}, "link_bytes": {"ram->nvme": 5 * MiB},
             "stall_s": {"fill": 1.0, "drain": 6.0}, "rss_bytes": 90 * MiB},
        ],
    }  # fmt: skip
    assert settings == [
        ("task", '"pretrain"', ""),
        ("model.model_name_or_path", '"org/model"', ""),
        ("data.max_length", "16", "1024"),
        ("data.train_on", '"all"', '"assistant"'),
        ("data.train.0.path", f'"{tmp_path / "one.txt"}"', ""),
        ("data.train.1.path", f'"{tmp_path / "two.txt"}"', ""),
        ("data.train.1.columns", '{ text = "body" }', ""),
        ("data.train.1.weight", "3.0", "1.0"),
        ("training.per_device_train_batch_size", "2", "8"),
        ("training.gradient_accumulation_steps", "3", "1"),
        ("optimizer.weight_decay_exclude", '["*norm*"]', '["*bias*", "*norm*", "*embed*"]'),
        ("tiers.nvme.0.path", f'"{tmp_path / "drive"}"', ""),
        ("tiers.nvme.0.max_written", '"40MiB"', ""),
    ]


def test_every_line_of_a_report(history: RunHistory, tmp_path: Path) -> None:
    lines = report_lines(compute_figures(history))
    assert [line.replace(str(tmp_path), "TMP") for line in lines] == [
        "report  named   failed 8/28   2m57s with evaluations and saves   loss 7.5000 -> 3.2500 (means of 4 steps)   "
        "book 5.5000 -> 2.5000   eval nan   web 4.5000 -> 3.5000",
        "tiny",
        "why: no space",
        "                       planned    measured",
        "median step s            2.500       3.500   +40%",
        "ram MiB                   24.0        28.0   of 32.0; planned: the least that it needs",
        "nvme MiB                     -        70.0   of 256.0; planned: the least that it needs",
        "ram->nvme MiB              4.0         5.0   per step, +25.00%, direct",
        "nvme->ram MiB             16.0         8.0   per step, -50.00%",
        "ram->gpu MiB               1.0         0.0   per step, -100.00%",
        "mean step   computing 3.25 s (81%) | waiting for fetches 0.50 s (12%) | waiting for write-backs 0.25 s (6%)",
        "speed   5 tok/s (trained 2)   15.0 GFLOP/s of the model, 20.0 GFLOP/s computed",
        "eval    book: loss 2.5000, accuracy 0.750 at step 8; best 1.5000 at step 5",
        "eval    eval: loss nan, perplexity nan at step 8",
        "eval    web: loss 3.5000, margin 2.000 at step 8",
        "samples of web at step 2",
        "      ...Call me >> a cab (reference: Ishmael)",
        "samples of book at step 8",
        "      ...Call me >> a cab (reference: Ishmael)",
        "answers accuracy 0.750, margin 4.000, means over the last steps",
        "tokens  141 real, 71 trained, padding 81.6%",
        "memory  process 225.00 MiB, -25.0 MiB since its first steps; the RAM tier + 228.00 MiB of Python, libraries "
        "and data",
        "cpu     3.00 s user, 0.50 s system, 200 page faults per step",
        "rank 0  ram 17.00 MiB  moved 4.00 MiB, 1.00 MiB of it to other ranks  wait fill 2.0s drain 3.0s  "
        "process 90.00 MiB",
        "rank 1  ram 13.00 MiB  moved 5.00 MiB, 0 B of it to other ranks  wait fill 1.0s drain 6.0s  process 90.00 MiB",
        "wrote   TMP/drive   7.34 MB during steps (0.00 MB per step); all runs in this folder 10.49 MB, 25.0% of "
        "max_written 41.94 MB",
        "wrote   /drive   0.29 GB during steps (5.24 MB per step, planned 6.29 MB)",
        "saved   2 checkpoints, the last at step 5, 9.00 MiB; training waited 1.2 s for them in total",
        "starts  continued once, after step 3; peaks and bytes per step are from the last start",
        "trace   /runs/x/trace.json: open it at https://ui.perfetto.dev",
        "model   b",
    ]


def test_figures_of_a_run_without_steps() -> None:
    status = RunStatus("stopped", step=4, max_steps=9, message="asked")
    figures = compute_figures(RunHistory(Path("/runs/x"), "stopped", status))
    assert {name: value for name, value in asdict(figures).items() if value not in (None, "", 0, [], {}, ())} == {
        "name": "x", "path": "/runs/x", "state": "stopped", "message": "asked", "step": 4, "max_steps": 9,
        "step_s": {"planned": None, "measured": None},
    }  # fmt: skip
    assert report_lines(figures) == [
        "report  x   stopped 4/9", "no step was recorded: nothing to compare",
    ]  # fmt: skip
    assert compute_figures(RunHistory(Path("/runs/x"), "died")).max_steps == 0


def test_missing_values_of_a_record_count_as_zero() -> None:
    step = {"step": 3, "loss": 1.0, "step_s": 2.0, "ranks": [{}, {}]}
    written = {"estimate": {"nvme_written_bytes_per_step": {"/drive": 5}}}
    figures = compute_figures(
        RunHistory(Path("/x"), "done", steps=[step], checkpoints=[{"step": 1}], evaluations=[{"step": 1, "loss": 4.0}],
                   ends=[{}], plan={"starts": [{}, {}], "link_bytes_per_step": {"a->b": 7}, **written}),
    )  # fmt: skip
    assert {name: value for name, value in asdict(figures).items() if value not in (None, "", [], {}, ())} == {
        "name": "x", "path": "/x", "state": "done", "step": 3, "max_steps": 0, "seconds": 2.0, "first_loss": 1.0,
        "last_loss": 1.0, "num_averaged": 1, "evaluations": {"eval": [(1, 4.0)]}, "num_real_tokens": 0,
        "num_trained_tokens": 0, "step_s": {"planned": None, "measured": 2.0}, "time_s": {"computing": 2.0},
        "links": {"a->b": {"planned": 7, "measured": None}},
        "drives": {"/drive": {"nbytes": 0, "bytes_per_step": {"planned": 5, "measured": 0}, "limit_bytes": None,
                              "lifetime_bytes": None}},
        "rss_peak_bytes": 0, "checkpoints": [{"step": 1}], "restarts": [(0, "")],
        "ranks": [{"tier_used_bytes": {}, "link_bytes": {}, "stall_s": {}, "rss_bytes": 0}] * 2,
    }  # fmt: skip
    assert "saved   1 checkpoint, the last at step 1, 0 B; training waited 0.0 s for them in total" in report_lines(
        figures
    )


@pytest.mark.parametrize(
    ("count", "num_averaged", "first", "last", "step_s", "rss"),
    [(1, 1, 1, 1, 1, 1), (2, 1, 1, 2, 1.5, 2), (3, 1, 1, 3, 3, 3), (19, 9, 5, 15, 11, 5), (25, 10, 5.5, 20.5, 14, 5)],
)
def test_averages_of_short_and_long_runs(
    count: int, num_averaged: int, first: float, last: float, step_s: float, rss: int
) -> None:
    """Losses, seconds and bytes equal the step. Figures of time exclude the first two steps if there are more."""
    numbers = range(1, count + 1)
    recorded = [{"step": n, "loss": n, "step_s": n, "rss_bytes": n, "preferences": {"kl": n}} for n in numbers]
    figures = compute_figures(RunHistory(Path("/x"), "done", steps=recorded))
    assert (figures.num_averaged, figures.first_loss, figures.last_loss) == (num_averaged, first, last)
    assert (figures.step_s.measured, figures.rss_first_bytes) == (step_s, rss)
    assert figures.preferences == {"kl": (max(1, count - 9) + count) / 2}


def test_nonfinite_figures_are_null_in_json(history: RunHistory) -> None:
    values = compute_figures(history).to_json()
    assert values["evaluations"] == {"book": [[3, 5.5], [5, 1.5], [8, 2.5]], "eval": [[8, None]],
                                     "web": [[2, 4.5], [8, 3.5]]}  # fmt: skip
    json.dumps(values, allow_nan=False)


@pytest.mark.parametrize(
    ("planned", "measured", "row"),
    [
        (None, 9.5, "           -       9.500   doctor measured no rates for a plan of times"),
        (4.0, 3.0, "       4.000       3.000   -25%"),
        (5.0, 10.0, "         5.0        10.0   +100%"),
        (4.0, 12.0, "         4.0        12.0   3.0 times as long"),
    ],
)
def test_row_of_the_step_time(history: RunHistory, planned: float | None, measured: float, row: str) -> None:
    figures = replace(compute_figures(history), step_s=PlanComparison(planned, measured))
    assert f"median step s     {row}" in report_lines(figures)


def test_rows_of_sizes_and_parts_of_a_step(history: RunHistory) -> None:
    """Sizes from 1 GiB have this unit. Parts of a step of up to 0.1 % are omitted, except the computation."""
    figures = replace(
        compute_figures(history),
        tiers={"ram": PlanComparison(GiB, 5 * MiB), "nvme": PlanComparison(0, None), "gpu": PlanComparison(0, MiB)},
        links={"a": PlanComparison(3 * GiB, 3 * GiB), "b": PlanComparison(0, 0), "c": PlanComparison(None, GiB - MiB)},
        time_s={"fill": 997.0, "space": 2.0, "drain": 1.0, "computing": 0.0},
        restarts=[(3, ""), (7, "")],
        state="died",
    )  # fmt: skip
    lines = report_lines(figures)
    assert lines[2] == "said last: no space"
    assert lines[5:10] == [
        "ram GiB                    1.0         0.0   of 0.0; planned: the least that it needs",
        "gpu MiB                    0.0         1.0",
        "a GiB                      3.0         3.0   per step",
        "c MiB                        -     1,023.0",
        "mean step   waiting for fetches 16m37s (100%) | waiting for free space 2.00 s (0%) | computing 0.00 s (0%)",
    ]
    starts = "starts  continued 2 times, after step 3, step 7; peaks and bytes per step are from the last start"
    assert starts in lines


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (1e15, "1.0 PFLOP/s"), (0.9999e15, "999.9 TFLOP/s"), (1e12, "1.0 TFLOP/s"), (2.5e11, "250.0 GFLOP/s"),
        (1e9, "1.0 GFLOP/s"), (3e8, "300 MFLOP/s"),
    ],
)  # fmt: skip
def test_unit_of_a_rate_of_operations(rate: float, text: str) -> None:
    assert format_flops(rate) == text


def test_perplexity_of_a_large_loss_is_infinite() -> None:
    assert (perplexity(0.0), perplexity(709.0), perplexity(709.5)) == (1.0, math.exp(709), math.inf)


def test_all_records_of_a_run_are_read(tmp_path: Path) -> None:
    """The last line of a repeated step counts. Lines without a step, or without a loss, are not steps."""
    evaluation = {"event": "evaluation", "step": 2, "loss": "-inf", "name": "nan of it"}
    checkpoint = {"event": "checkpoint", "step": 2, "loss": 3.0}
    lines: list[Any] = [
        {"step": 2, "loss": 1.0}, {"step": 1, "loss": "inf"}, {"step": 2, "loss": 2.0, "what": "text"}, evaluation,
        {"step": 3}, {"loss": 4.0}, {"step": 4.5, "loss": 1.0}, 7, checkpoint, {"step": 5, "loss": 5.0},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n{\n".join(map(json.dumps, lines)))
    (tmp_path / "plan.json").write_text(json.dumps({"format": 1, "headline": "tiny"}))
    (tmp_path / "trace.json").write_text("{}")
    expected = RunHistory(
        tmp_path,
        "not known",
        plan={"format": 1, "headline": "tiny"},
        ends=[],
        steps=[{"step": 1, "loss": math.inf}, {"step": 2, "loss": 2.0, "what": "text"}, {"step": 5, "loss": 5.0}],
        evaluations=[{**evaluation, "loss": -math.inf}],
        checkpoints=[checkpoint],
        timeline=tmp_path / "trace.json",
    )
    assert read_history(tmp_path) == expected
    (tmp_path / "trace.json").unlink()
    write_summary(RunSummary(1, 2.0, 3.0, 4.0, 5, 6), tmp_path)
    (tmp_path / "config.resolved.toml").write_text(CONFIG)
    for state, shown in (("done", "done"), ("stopped", "stopped"), ("failed", "failed"), ("paused", "died")):
        write_status(tmp_path, RunStatus(state))  # type: ignore[arg-type]
        history = read_history(str(tmp_path))
        assert (history.state, history.status and history.status.state, history.timeline) == (shown, state, None)
    assert history.ends[0]["first_loss"] == 2.0 and history.name == "named"
