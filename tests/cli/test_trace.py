"""``megatrain-tier trace``: where a run's timeline is, whether it is whole, and a copy of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from processes.saved_run import command_group, make_run


def call(*words: object) -> Result:
    return CliRunner().invoke(command_group(), list(map(str, words)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output_dir of a run with one traced step."""
    made = make_run(tmp_path_factory.mktemp("traced") / "w")
    result = made.run(steps=2, more="[profile]\ntrace_steps = [2]\n")
    assert result.exit_code == 0, result.output
    return made.out


def test_a_traced_run(run: Path, tmp_path: Path) -> None:
    result = call("trace", run)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"trace  {run / 'trace.json'}  ")
    assert any(line.split()[0] == "compute" for line in lines[1:-1])
    assert lines[-1].startswith("open   https://ui.perfetto.dev")
    values = json.loads(call("trace", run, "--json").stdout)
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    end_us = max(event["ts"] + event["dur"] for event in spans) - min(event["ts"] for event in spans)
    assert (values["path"], values["num_spans"]) == (str(run / "trace.json"), len(spans)) and spans
    assert values["seconds"] == pytest.approx(end_us / 1e6, rel=1e-3)


def test_a_copy(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "copy.json"
    result = call("trace", run, "-o", out)
    assert result.exit_code == 0 and str(out) in result.stdout
    assert out.read_bytes() == (run / "trace.json").read_bytes()
    again = call("trace", run, "-o", out)
    assert again.exit_code == 2 and "is there already" in again.stderr
    (tmp_path / "folder").mkdir()
    assert call("trace", run, "-o", tmp_path / "folder").exit_code == 0
    assert (tmp_path / "folder/trace.json").is_file()
    assert call("trace", run, "-o", tmp_path / "nowhere/x.json").exit_code == 2


def test_what_is_no_timeline(tmp_path: Path) -> None:
    result = call("trace", tmp_path)
    assert result.exit_code == 2 and "trace_steps = [3, 4]" in result.stderr
    (tmp_path / "trace.json").write_text('{"traceEvents": [')
    broken = call("trace", tmp_path)
    assert broken.exit_code == 1 and "not JSON" in broken.stderr
    assert call("trace", tmp_path / "nowhere").exit_code == 2
