"""Messages before a run: resident and streamed blocks, memory of the process, and the schedule with --max-steps."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from processes.saved_run import NVME, ON_NVME, SavedRun, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    return make_run(tmp_path_factory.mktemp("words") / "w")


def test_plan_lists_resident_and_streamed_blocks(run: SavedRun) -> None:
    lines = run.call("plan", run.write_config()).stdout.splitlines()
    assert any(re.match(r"weights .*float32; resident", line) for line in lines), lines
    assert "every block is resident in ram: nothing is streamed" in lines
    result = run.call("plan", run.write_config(placement=ON_NVME, more=NVME))
    lines = result.stdout.splitlines()
    assert any(re.match(r"optimizer .*float32; streamed", line) for line in lines), lines
    assert any("are prefetch room. Half of the ticks" in line for line in lines), lines
    (process,) = (line for line in lines if line.startswith("process"))
    assert re.search(r"about .*iB of RAM: .*iB in the tier \+ .*iB of Python and libraries", process)
    values = json.loads(run.call("plan", run.write_config(), "--json").stdout)
    beside_bytes = values["process_bytes"] - values["totals"]["ram"]
    assert 50 << 20 < beside_bytes < 4 << 30, "it includes Python and torch"
    assert 0.5 * values["totals"]["ram"] < values["process"]["tier_bytes"] <= values["totals"]["ram"], values["process"]


def test_predicted_process_memory_includes_additional_copies(run: SavedRun) -> None:
    """A tier with free space keeps more copies than the minimum that a step needs."""
    config = run.write_config(placement=ON_NVME, more=NVME, out="streamed", steps=2)
    planned = json.loads(run.call("plan", config, "--json").stdout)
    result = run.call("run", config, "--json")
    assert result.exit_code == 0, result.output
    (end,) = (row for row in map(json.loads, result.stdout.splitlines()) if row.get("event") == "end")
    held, least = end["tier_peak_bytes"]["ram"], planned["totals"]["ram"]
    assert least < held <= planned["process"]["tier_bytes"] < 1.1 * held


@pytest.mark.parametrize(
    ("words", "has_schedule_note"),
    [
        (("--max-steps", 3, "--set", "lr_scheduler_type=cosine"), True),
        (("--max-steps", 3), False),  # the schedule of this config is constant
        (("--set", "lr_scheduler_type=cosine"), False),
        (("--max-steps", 3, "--set", "lr_scheduler_type=constant_with_warmup", "--set", "warmup_steps=0.5"), True),
        (("--max-steps", 3, "--set", "lr_scheduler_type=constant_with_warmup", "--set", "warmup_steps=2"), False),
    ],
)
def test_note_reports_a_schedule_changed_by_max_steps(
    run: SavedRun, words: tuple[str | int, ...], has_schedule_note: bool
) -> None:
    result = run.call("run", run.write_config(), "--dry-run", *words)
    assert result.exit_code == 0, result.output
    assert ("note: the learning rate completes its whole schedule" in result.stderr) == has_schedule_note
    assert not Path(run.out).exists()


def test_messages_mention_no_documentation_page() -> None:
    """An installed package does not contain the documentation pages of the repository."""
    with_docstring = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = []
    for path in (path for folder in ("cli", "megatrain", "tiered") for path in sorted(Path(folder).rglob("*.py"))):
        if path.name in ("document.py", "reference.py"):  # these modules write pages
            continue
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = {
            id(node.body[0].value)
            for node in nodes
            if isinstance(node, with_docstring) and node.body
            if isinstance(node.body[0], ast.Expr)
        }
        found += [
            f"{path}:{node.lineno} {node.value[:80]!r}"
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"docs/\w+\.md", node.value)
            if id(node) not in docstrings
        ]
    assert not found, found


@pytest.fixture(scope="module")
def ended_run(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    """Return a run that has ended. Its blocks are on a drive, so that all lines of a plan are printed."""
    run = make_run(tmp_path_factory.mktemp("words") / "ended")
    assert run.run(placement=ON_NVME, more=NVME, steps=2).exit_code == 0
    return run


@pytest.mark.parametrize(
    ("command", "exit_code"),
    [
        (("plan", "CONFIG"), 0),
        (("plan", "CONFIG", "--set", "tiers.ram.size=1MiB"), 3),
        (("plan", "CONFIG", "--set", "warmup_ratio=0.1"), 0),
        (("plan", "--machine", "list"), 0),
        (("check", "CONFIG"), 0),
        (("data", "stats", "CONFIG"), 0),
        (("data", "preview", "CONFIG", "--row", "999999"), 4),
        (("run", "CONFIG", "--set", "NEW_FOLDER"), 0),
        (("report", "RUN"), 0),
        (("status", "RUN"), 0),
        (("ckpt", "ls", "RUN"), 0),
        (("ckpt", "verify", "RUN"), 0),
        (("config", "explain", "max_length"), 0),
        (("clean", "RUN"), 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_piped_lines_fit_into_the_columns(
    ended_run: SavedRun, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], exit_code: int
) -> None:
    """Long paths stay unbroken, so a line with a single word may be longer."""
    monkeypatch.setenv("COLUMNS", "60")
    words: dict[str, object] = {
        "CONFIG": ended_run.write_config(placement=ON_NVME, more=NVME, steps=2),
        "RUN": ended_run.out,
    }
    words["NEW_FOLDER"] = f"output_dir={ended_run.folder / 'new'}"
    result = ended_run.call(*(words.get(word, word) for word in command))
    assert result.exit_code == exit_code, result.output
    lines = result.output.splitlines()
    assert lines
    assert not [line for line in lines if len(line) > 60 and len(line.split()) > 1]
