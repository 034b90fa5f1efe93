"""Reports of recorded runs: finished, live, crashed and resumed runs, and runs with one step or none."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megatrain.base.observer import CheckpointMetrics, EvaluationMetrics, RunObserver, RunSummary, StepMetrics
from megatrain.config import load_config
from megatrain.extras.report.figures import ChangedKey, compute_figures
from megatrain.extras.report.history import NoRunRecordsError, read_history
from megatrain.extras.report.page import render_page
from megatrain.extras.report.step_picture import LEFT, PASSES, RIGHT, WIDTH, Bar, draw, read_bars
from megatrain.extras.report.text import report_lines
from megatrain.run.folder import RunFolder
from megatrain.run.record import write_plan, write_summary
from megatrain.run.status import RunStatus, write_status
from megatrain.training.trainer import Trainer
from oracles.tiered_run import EXAMPLES, config_text

MIB = 1 << 20
STEP = StepMetrics(
    step=1, max_steps=8, epoch=0.1, loss=4.0, grad_norm=0.5, lr=1e-3, num_real_tokens=100, num_trained_tokens=80,
    step_s=2.0, eta_s=4.5, tier_used_bytes={"ram": 50 * MIB, "nvme": 90 * MIB},
    tier_capacity_bytes={"ram": 64 * MIB, "nvme": 100 * MIB}, stall_s={"fill": 0.5, "drain": 0.0}, rss_bytes=200 * MIB,
    written_bytes={"/drive": MIB}, model_flops=10**9, hardware_flops=2 * 10**9,
    process_usage={"user_s": 1.5, "system_s": 0.25, "page_faults": 12_345},
)  # fmt: skip
RANKS = [
    {
        "tier_used_bytes": {"ram": (10 + rank) * MIB},
        "link_bytes": {"ram->nvme": MIB, "ranks->ram": MIB, "ram->ranks": MIB},
        "stall_s": {"fill": 0.25 * rank},
        "rss_bytes": 99 * MIB,
        "step_s": 2.0,
    }
    for rank in range(2)
]
PLAN = {
    "format": 1, "headline": "tiny", "peak_bytes": {"ram": 40 * MIB, "nvme": 90 * MIB},
    "budget_bytes": {"ram": 64 * MIB, "nvme": 100 * MIB}, "link_bytes_per_step": {"ram->nvme": MIB, "nvme->ram": MIB},
    "estimate": {"predicted_step_s": 1.0, "nvme_written_bytes_per_step": {"/drive": MIB}},
    "replayed": {"step_s": 1.6}, "machine": {"host": "here", "ram_bytes": MIB, "drives": {}},
    "versions": {"torch": "2"}, "starts": [{"at": "2026-01-01", "first_step": 0, "budget_bytes": {"ram": MIB}}],
}  # fmt: skip


def leave(folder: Path, losses: list[float], *, state: str = "done", plan: Any = PLAN, **status: Any) -> Path:
    """Write the files of a run with one step for each loss, and return the folder."""
    with RunFolder(folder) as run:
        lines: list[dict[str, Any]] = []
        for number, loss in enumerate(losses, 1):
            lines.append(replace(STEP, step=number, loss=loss).to_json())
        if losses:
            last = len(losses)
            lines.append({"event": "evaluation", **EvaluationMetrics(last, 8, "held <out>", 1.5, 10, 0.5).to_json()})
            checkpoint = CheckpointMetrics(last, folder, 9 * MIB, MIB, 8 * MIB, 1.5, 0.25)
            lines.append({"event": "checkpoint", **checkpoint.to_json()})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if plan is not None:
            (folder / "plan.json").write_text(json.dumps(plan))
        write_status(run.path, RunStatus(state, step=len(losses), max_steps=8, **status))  # type: ignore[arg-type]
    return folder


def lines_of(folder: Path) -> list[str]:
    return report_lines(compute_figures(read_history(folder)))


def page_of(folder: Path) -> str:
    history = read_history(folder)
    return render_page(history, compute_figures(history))


def check_page(page: str) -> int:
    """Check that a page is self-contained and well-formed, and return the number of its drawings."""
    markup = re.sub(r"(<pre[^>]*>)[^<]*(</pre>)", r"\1\2", page)  # the report's lines may contain URLs
    assert not re.search(r"<(script|link|img|iframe)|https?://|url\(|@import", markup)
    open_tags: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            if tag not in ("meta", "br"):
                open_tags.append(tag)

        def handle_startendtag(self, tag: str, attrs: Any) -> None: ...

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

    Reader().feed(page)
    assert not open_tags
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    for drawing in drawings:
        for number in re.findall(r'(?:x|y|width|height|points|cx|cy)="([^"]*)"', drawing):
            assert "nan" not in number and "inf" not in number, number
        assert ElementTree.fromstring(drawing).tag == "svg"
    return len(drawings)


def test_text_of_a_small_run(tmp_path: Path) -> None:
    """Every line follows from the numbers of ``STEP`` and ``PLAN``: four steps, one evaluation and one checkpoint."""
    assert lines_of(leave(tmp_path / "small", [4.0, 3.5, 3.0, 2.5])) == [
        "report  small   done 4/8   8.75 s with evaluations and saves   loss 3.7500 -> 2.7500 (means of 2 steps)   "
        "held <out> 1.5000",
        "tiny",
        "                       planned    measured",
        "median step s            1.600       2.000   +25%",
        "ram MiB                   40.0        50.0   of 64.0; planned: the least that it needs",
        "nvme MiB                  90.0        90.0   of 100.0; planned: the least that it needs",
        "ram->nvme MiB              1.0           -",
        "nvme->ram MiB              1.0           -",
        "mean step   computing 1.50 s (75%) | waiting for fetches 0.50 s (25%)",
        "speed   50 tok/s (trained 40)   500 MFLOP/s of the model, 1.0 GFLOP/s computed",
        "eval    held <out>: loss 1.5000, perplexity 4.48 at step 4",
        "tokens  400 real, 320 trained",
        "memory  process 200.00 MiB, +0.0 MiB since its first steps; the RAM tier + 150.00 MiB of Python, libraries "
        "and data",
        "cpu     1.50 s user, 0.25 s system, 12,345 page faults per step",
        "wrote   /drive   4.19 MB during steps (1.05 MB per step, planned 1.05 MB)",
        "saved   1 checkpoint, the last at step 4, 9.00 MiB; training waited 0.2 s for them in total",
    ]


def test_text_of_a_finished_run(tmp_path: Path) -> None:
    folder = leave(tmp_path / "out", [4.0, 3.5, 3.0, 2.5, 2.0, 1.75, 1.5, 1.25])
    lines = lines_of(folder)
    assert (
        lines[0] == "report  out   done 8/8   16.8 s with evaluations and saves   "
        "loss 3.2500 -> 1.6250 (means of 4 steps)   held <out> 1.5000"
    )
    text = "\n".join(lines)
    assert re.search(r"median step s +1\.600 +2\.000   \+25%", text)
    assert re.search(r"ram MiB +40\.0 +50\.0   of 64\.0", text)
    assert re.search(r"ram->nvme MiB +1\.0 +-$", text, re.MULTILINE)
    assert "mean step   computing 1.50 s (75%) | waiting for fetches 0.50 s (25%)" in lines
    assert "speed   50 tok/s (trained 40)   500 MFLOP/s of the model, 1.0 GFLOP/s computed" in lines
    assert "cpu     1.50 s user, 0.25 s system, 12,345 page faults per step" in lines
    assert "wrote   /drive   8.39 MB during steps (1.05 MB per step, planned 1.05 MB)" in lines
    assert any(line.startswith("saved   1 checkpoint, the last at step 8, 9.00 MiB") for line in lines)


def test_the_ranks_of_a_run_of_several_processes(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "out") as run:
        alone, both = STEP.to_json(), [replace(STEP, step=number, ranks=RANKS).to_json() for number in (2, 3, 4)]
        lines = [json.dumps(line) + "\n" for line in (alone, *both)]
        (run.path / "metrics.jsonl").write_text("".join(lines))
        write_status(run.path, RunStatus("done", step=4, max_steps=4))
    folder = tmp_path / "out"
    seen = "ram 11.00 MiB  moved 3.00 MiB, 1.00 MiB of it to other ranks  wait fill 0.2s  process 99.00 MiB"
    assert f"rank 1  {seen}" in lines_of(folder)
    assert f"rank 1  {seen}" in page_of(folder)
    assert compute_figures(read_history(folder)).to_json()["ranks"][0]["stall_s"] == {"fill": 0.0}


def test_evaluations_of_all_sets_are_shown(tmp_path: Path) -> None:
    folder = leave(tmp_path / "out", [4.0, 3.5, 3.0])
    with (folder / "metrics.jsonl").open("a") as file:
        for step, name, loss in (
            (0, "held <out>", 3.0),
            (2, "held <out>", 1.0),
            (2, "book", 2.0),
            (3, "book", math.nan),
        ):
            values = EvaluationMetrics(step, 8, name, loss, 10, 0.5).to_json()
            file.write(json.dumps({"event": "evaluation", **values}) + "\n")
    lines, page = lines_of(folder), page_of(folder)
    assert lines[0].endswith("held <out> 3.0000 -> 1.5000   book 2.0000 -> nan")
    assert "eval    held <out>: loss 1.5000, perplexity 4.48 at step 3; best 1.0000 at step 2" in lines
    assert "eval    book: loss nan, perplexity nan at step 3" in lines
    assert check_page(page) == 4
    assert all(html.escape(line) in page for line in lines)


def test_evaluations_fall_back_to_the_summary(tmp_path: Path) -> None:
    folder = leave(tmp_path / "out", [])
    last = EvaluationMetrics(5, 8, "book", math.inf, 10, 0.5)
    write_summary(RunSummary(5, 1.0, 1.0, 1.0, 1, 1, evaluations={"book": last}), folder)
    figures = compute_figures(read_history(folder))
    assert figures.evaluations == {"book": [(5, math.inf)]}
    assert "eval    book: loss inf, perplexity inf at step 5" in report_lines(figures)


def test_the_report_has_no_row_of_zeros(tmp_path: Path) -> None:
    links = {"ram->nvme": MIB, "nvme->ram": MIB, "folder->ram": 0}
    plan = PLAN | {"link_bytes_per_step": links, "peak_bytes": {**PLAN["peak_bytes"], "gpu": 0}}  # type: ignore[dict-item]
    names = [line.split()[0] for line in lines_of(leave(tmp_path / "out", [4.0, 3.5, 3.0], plan=plan)) if line]
    assert {"ram->nvme", "nvme"} <= {*names} and not {"folder->ram", "gpu"} & {*names}, names


def test_page_of_a_finished_run(tmp_path: Path) -> None:
    folder = leave(tmp_path / "out", [4.0, 3.5, 3.0, 2.5, 2.0, 1.75, 1.5, 1.25])
    page = page_of(folder)
    assert check_page(page) == 4  # loss, tokens per second, and the memory of two tiers
    for text in ("held &lt;out&gt;", "RAM in use", "NVME in use", "Tokens per second", "capacity", "color-scheme"):
        assert text in page, text
    assert html.unescape(page).count("\n".join(lines_of(folder))) == 1
    assert "<out>" not in page
    assert "prefers-color-scheme:dark" in page


def test_drive_writes_use_decimal_and_memory_uses_binary_units(tmp_path: Path) -> None:
    """Bytes written to drives use decimal units, like drive ratings. Memory and link traffic use binary units."""
    lines = lines_of(leave(tmp_path / "out", [4.0, 3.5, 3.0]))
    assert any("3.15 MB during steps (1.05 MB per step, planned 1.05 MB)" in line for line in lines)
    assert any(re.search(r"ram MiB +40\.0 +50\.0", line) for line in lines)


def test_text_of_a_run_is_never_markup(tmp_path: Path) -> None:
    folder = leave(tmp_path / "out", [4.0, 3.5], state="failed")
    history = read_history(folder)
    figures = compute_figures(history)
    evil = """</title><x y="z" on='t'>&amp;{{ 7 * 7 }}"""
    [drive] = figures.drives.values()
    figures = replace(
        figures, name=evil, path=evil, message=evil, headline=evil, evaluations={evil: [(1, 1.0)]},
        tiers={evil: figures.tiers["ram"]}, links={evil: figures.links["ram->nvme"]}, link_paths={evil: evil},
        drives={evil: drive}, restarts=[(2, evil)], settings=[ChangedKey(evil, evil, evil)], versions={evil: evil},
        machine={"host": evil, "system": evil, "cpu": evil, "num_cpus": evil, "gpu": evil, "drives": {evil: evil}},
    )  # fmt: skip
    plan = {**history.plan, "starts": [{"at": evil, "first_step": 1, "budget_bytes": {evil: 1}}]}
    steps = [{**step, "tier_used_bytes": {evil: MIB}} for step in history.steps]
    page = render_page(replace(history, plan=plan, steps=steps), figures)
    check_page(page)
    assert "<x" not in page and not re.search(r"\son=", re.sub(r">[^<]*<", "><", page))
    text = html.unescape(page)
    assert text.count(evil) >= 10 and f'aria-label="{evil.upper()} in use"' in text


@pytest.mark.parametrize("losses", [[], [4.0], [float("nan")], [4.0, float("inf"), 3.0, float("nan")], [2.0] * 1000])
@pytest.mark.parametrize("plan", [None, PLAN], ids=["no plan", "plan"])
def test_empty_long_and_diverged_runs_are_reported(losses: list[float], plan: Any, tmp_path: Path) -> None:
    folder = leave(tmp_path / "out", losses, state="training", plan=plan)
    lines, page = lines_of(folder), page_of(folder)
    assert "died" in lines[0]
    assert check_page(page) == (4 if losses else 0)
    assert len(page) < 400_000
    values = compute_figures(read_history(folder)).to_json()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    if not losses:
        assert any("no step was recorded" in line for line in lines)


def test_why_a_run_failed(tmp_path: Path) -> None:
    folder = leave(tmp_path / "out", [4.0, 3.0], state="failed", message="step 3: the <gradient> is not finite")
    assert "why: step 3: the <gradient> is not finite" in lines_of(folder)
    assert "the &lt;gradient&gt; is not finite" in page_of(folder)


def test_report_of_a_live_run(tmp_path: Path) -> None:
    folder = leave(tmp_path / "out", [4.0, 3.0], state="training")
    with RunFolder(folder):
        assert "training 2/8" in lines_of(folder)[0]
        assert '<span class="state open">training</span>' in page_of(folder)


def test_truncated_run_records_are_ignored(tmp_path: Path) -> None:
    folder = leave(tmp_path / "out", [4.0, 3.0])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('null\n[1]\n{"step": "x"}\n{"step": 3, "loss": 2.')
    (folder / "plan.json").write_text("{")
    (folder / "config.resolved.toml").write_text("= 1")
    figures = compute_figures(read_history(folder))
    assert (figures.step, figures.last_loss, figures.step_s.planned, figures.settings) == (2, 3.0, None, ())
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    assert read_history(folder).steps == [], "as if the file were missing"


def test_folder_without_run_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoRunRecordsError, match="Pass the output_dir"):
        read_history(tmp_path)


def test_per_step_link_bytes_take_precedence_over_run_means(tmp_path: Path) -> None:
    folder = leave(tmp_path / "out", [])
    link_bytes = {"ram->nvme": 2 * MIB, "nvme->ram": MIB}
    lines = [{**replace(STEP, step=n).to_json(), "link_bytes": link_bytes} for n in range(1, 6)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    moved, paths = {"ram->nvme": 50 * MIB, "nvme->ram": 5 * MIB}, {"ram->nvme": "kvikio-gds"}
    write_summary(RunSummary(5, 1.0, 1.0, 1.0, 1, 1, link_bytes=moved, link_paths=paths), folder)
    figures = compute_figures(read_history(folder))
    links = figures.links
    assert figures.link_paths == paths
    assert any("ram->nvme" in line and "kvikio-gds" in line for line in report_lines(figures))
    assert "kvikio-gds" in page_of(folder)
    assert links["ram->nvme"].measured == 2 * MIB and links["ram->nvme"].error == 1.0
    assert links["nvme->ram"].error == 0
    (folder / "metrics.jsonl").write_text(json.dumps(STEP.to_json()) + "\n")
    assert compute_figures(read_history(folder)).links["ram->nvme"].measured is None, "its first step has no update"


def test_only_steps_that_the_plan_describes_are_compared(tmp_path: Path) -> None:
    """The first step of a start, and a step after a checkpoint or evaluation, lack the bytes of an update."""
    folder = leave(tmp_path / "out", [])
    links = PLAN["link_bytes_per_step"]
    starts = [{"first_step": step, "link_bytes_per_step": links if step else {}} for step in (0, 3)]
    (folder / "plan.json").write_text(json.dumps(PLAN | {"starts": starts}))
    events = [
        {"event": "checkpoint", **CheckpointMetrics(4, folder, MIB, MIB, 0, 1.5, 0.25).to_json()},
        {"event": "evaluation", **EvaluationMetrics(6, 8, "book", 1.5, 10, 0.5).to_json()},
    ]
    # Steps 1 to 3 belong to a start with another plan. Only steps 6 and 8 follow a step directly.
    steps = [
        {**replace(STEP, step=n).to_json(), "link_bytes": {"ram->nvme": MIB * (1 if n in (6, 8) else 0)}}
        for n in range(1, 9)
    ]
    for count, measured in ((8, MIB), (5, None)):
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (*steps[:count], *events)))
        figures = compute_figures(read_history(folder))
        assert figures.links["ram->nvme"].measured == measured


@pytest.fixture(scope="module")
def real_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run in two starts, the second with less RAM, and return its output folder."""
    folder = tmp_path_factory.mktemp("report")
    book = EXAMPLES / "quickstart" / "loomings.txt"
    for max_steps, ram in ((2, "7MiB"), (5, "6MiB")):
        text = config_text(folder, tiny_model, ram=ram, placement='weights = ["nvme"]\noptimizer = ["nvme"]')
        text = text.replace("[training]\n", f"[training]\nmax_steps = {max_steps}\n")
        text += "[profile]\ntrace_steps = [4]\n"
        text += f'[checkpoint]\nsave_steps = 3\nmin_free_disk = "0MiB"\n[[data.eval]]\nname = "book"\npath = "{book}"\n'
        (folder / "run.toml").write_text(text)
        Trainer(load_config(folder / "run.toml").config, observer=RunObserver()).train()
    return folder / "out"


def test_a_real_run_in_two_starts(real_run: Path) -> None:
    history = read_history(real_run)
    figures = compute_figures(history)
    assert (figures.state, figures.step, figures.max_steps) == ("done", 5, 5)
    assert [step for step, _ in figures.restarts] == [2]
    assert [step for step, _ in figures.evaluations["book"]][-1] == 5
    assert figures.capacity_bytes["ram"] == 6 * MIB
    nvme = figures.tiers["nvme"]
    assert nvme.measured is not None and nvme.planned is not None
    assert 0.5 * nvme.planned < nvme.measured <= 256 * MIB
    [drive] = figures.drives.values()
    assert drive.bytes_per_step.planned == figures.links["ram->nvme"].planned
    assert {traffic.error for traffic in figures.links.values() if traffic.planned} == {0.0}
    ram_peaks = [end["tier_peak_bytes"]["ram"] for end in history.ends]
    assert figures.tiers["ram"].measured == ram_peaks[1] < 6 * MIB < ram_peaks[0], (
        "only of the start with this capacity"
    )
    error = drive.bytes_per_step.error
    assert error is not None and abs(error) < 0.1  # some writes of a step may finish after its metrics are recorded
    assert drive.lifetime_bytes is not None and drive.lifetime_bytes >= drive.nbytes > 0
    assert figures.padding_share is not None and 0 <= figures.padding_share < 0.5
    assert figures.versions["torch"] and figures.machine["cpu"] and figures.export_dir == str(real_run / "final")
    changed = {setting.key: (setting.value, setting.default) for setting in figures.settings}
    assert changed["data.max_length"] == ("64", "1024") and changed["training.max_steps"] == ("5", "-1")
    assert "optimizer.adam_beta1" not in changed and "output_dir" not in changed
    assert len(history.ends) == 2
    assert check_page(render_page(history, figures)) == 5  # with the timeline
    assert "starts  continued once, after step 2; peaks and bytes per step are from the last start" in report_lines(
        figures
    )


def test_restarted_run_drops_the_previous_metrics(real_run: Path, tmp_path: Path) -> None:
    config = load_config(real_run.parent / "run.toml", (), [f"output_dir={tmp_path}", "device=cpu"]).config
    plan = Trainer(config, observer=RunObserver()).plan
    for continued_from, count in ((None, 1), (3, 2), (None, 1), (0, 2)):
        record = json.loads(write_plan(plan, continued_from).read_text())
        assert read_history(tmp_path).plan == record and len(record["starts"]) == count
        assert (tmp_path / "summary.json").exists() == (continued_from is not None and count == 2)
        write_summary(RunSummary(1, 1.0, 1.0, 1.0, 1, 1), tmp_path)
    assert record["peak_bytes"] == dict(plan.totals) and record["link_bytes_per_step"] == dict(plan.traffic)


def test_the_command(real_run: Path, tmp_path: Path, cli_call: Callable[..., Any]) -> None:
    page = tmp_path / "report.html"
    result = cli_call("report", real_run, "--html", page)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"page    {page}" and "\x1b" not in result.output
    assert check_page(page.read_text()) == 5
    history = read_history(real_run)
    values = json.loads(cli_call("report", real_run, "--json").stdout)
    assert (
        values["step"] == 5
        and values["page"] is None
        and (values["links"]["ram->nvme"]["planned"] == history.plan["link_bytes_per_step"]["ram->nvme"] > 0)
    )
    missing = cli_call("report", real_run, "--html", tmp_path / "none" / "report.html")
    assert missing.exit_code == 1 and "Name another file" in missing.stderr


def test_the_page_shows_the_timeline(real_run: Path) -> None:
    history = read_history(real_run)
    figures = compute_figures(history)
    page = render_page(history, figures)
    assert (real_run / "trace.json").as_uri() in page
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", page)
    assert {"layers", "updates", "waiting", "fetch to ram", "write to nvme", "forward", "backward"} <= set(texts)
    assert figures.beside_tier_bytes is not None and figures.rss_peak_bytes is not None
    assert 0 < figures.beside_tier_bytes <= figures.rss_peak_bytes  # the peak includes earlier tests in this process
    text = "\n".join(report_lines(figures))
    assert "the RAM tier + " in text and f"trace   {real_run / 'trace.json'}" in text


SPAN = {"ph": "X", "pid": 0, "tid": 7, "name": "forward 0", "ts": 0, "dur": 5}
NAMED = {"ph": "M", "pid": 0, "tid": 7, "name": "thread_name", "args": {"name": "compute"}}


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"traceEvents": 3}', '{"traceEvents": [3]}']
    + [json.dumps({"traceEvents": events}) for events in ([], [SPAN], [NAMED], [NAMED, {**SPAN, "ts": math.nan}])],
)
def test_a_damaged_timeline_is_not_drawn(text: str, tmp_path: Path) -> None:
    folder = leave(tmp_path / "out", [4.0, 3.0])
    (folder / "trace.json").write_text(text)
    assert check_page(page_of(folder)) == 4


@pytest.mark.parametrize(
    ("row", "duration"), [("to ram 0", 5), ("to ram 99999999", 5), ("to ram", 1e16), ("to ram", 1e300)]
)
def test_timeline_with_unusual_rows_and_durations_is_drawn(row: str, duration: float, tmp_path: Path) -> None:
    folder = leave(tmp_path / "out", [4.0, 3.0])
    other = {**NAMED, "tid": 8, "args": {"name": row}}
    spans = [{**SPAN, "dur": duration}, {**SPAN, "tid": 8, "name": "model.layers.0/weight"}]
    (folder / "trace.json").write_text(json.dumps({"traceEvents": [NAMED, other, *spans]}))
    page = page_of(folder)
    assert "#72a1cf" in page and 1 <= page.count(" ms<") <= 14


def test_a_long_timeline_has_few_bars(tmp_path: Path) -> None:
    spans = [{**SPAN, "name": f"forward {n % 3}", "ts": 10 * n} for n in range(30_000)]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [NAMED, *spans]}))
    bars = read_bars(tmp_path / "trace.json")
    assert len(bars) == 30_000 and draw(bars, "", "").count("<rect") < 5000


def test_the_ruler_has_a_mark_at_every_tenth_of_a_second() -> None:
    text = draw([Bar(PASSES, 0, "forward", "", 0.0, 1.0)], "", "")
    marks = re.findall(r'<text x="([0-9.]+)"[^>]*>([0-9]+) ms<', text)
    assert [label for _, label in marks] == [str(100 * number) for number in range(11)]
    assert float(marks[0][0]) == LEFT and float(marks[-1][0]) == WIDTH - RIGHT


def test_distillation_and_cross_entropy_share_no_axis(tmp_path: Path) -> None:
    """Training and evaluation compute different losses, so each gets a separate chart and name."""
    folder = leave(tmp_path / "out", [4.0, 3.5, 3.0, 2.5])
    history = read_history(folder)
    assert 'aria-label="Loss"' in page_of(folder) or "Loss" in page_of(folder)
    config = load_config(EXAMPLES / "quickstart/first.toml").config.model_copy(update={"task": "distill"})
    distilled = replace(history, config=config)
    figures = compute_figures(distilled)
    assert "distillation loss 3.7500 -> 2.7500 (means of 2 steps)   held <out> cross entropy 1.5000" in "\n".join(
        report_lines(figures)
    )
    page = render_page(distilled, figures)
    check_page(page)
    assert "Loss of training (distillation)" in page and "Cross entropy of evaluations" in page
