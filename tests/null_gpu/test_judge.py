"""What counts where kernels do nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from null_gpu.judge import TESTS, faults_of_calls, is_about_numbers

TEST, OURS = str(TESTS / "gpu" / "test_steps.py"), str(Path("/src/megatrain/engine/step.py"))


@pytest.mark.parametrize(
    ("error", "file", "line", "is_number"),
    [
        (AssertionError("0.0 == 3.1"), TEST, "assert result.loss == expected.loss", True),
        (AssertionError("1 == 0"), TEST, "assert done.returncode == 0, done.stderr", False),
        (AssertionError("7 <= 5"), TEST, "assert peak <= graphs + libraries_bytes", False),
        (AssertionError("links"), TEST, "result.assert_as_planned()", False),
        (AssertionError("(3, 4)"), OURS, "assert index == 0, (3, 4)", False),
        (RuntimeError("called a synchronizing CUDA operation"), TEST, "engine.step(batch)", False),
        (ValueError("the loss is not finite"), OURS, "raise NonFiniteLossError(step)", True),
    ],
)
def test_what_is_judged(error: Exception, file: str, line: str, is_number: bool) -> None:
    assert is_about_numbers(type(error), str(error), [(OURS, "..."), (file, line)]) is is_number


def test_what_is_judged_of_calls(tmp_path: Path) -> None:
    def row(name: str, ok: bool | None, timing: bool = False) -> str:
        return json.dumps({"name": name, "value": 1, "ok": ok, "timing": timing}) + "\n"

    rows = row("plain.loss.relative_to.plain", False) + row("7b_64k.ours.share_of_matmul_rate", False, timing=True)
    (tmp_path / "gpu.jsonl").write_text(rows + row("plain.ours.rate", None) + row("plain.ours.runs", True))
    log = tmp_path / "log.txt"
    log.write_text(
        "== 3: gpu.py plain\n[3, 9 s] gpu.py plain : exit status 1 after 9 s\n[3, 9 s] 1 runs failed: gpu.py plain ;\n"
    )
    assert not faults_of_calls(tmp_path)
    with (tmp_path / "gpu.jsonl").open("a") as file:
        file.write(row("7b_4k.ours.runs", False))
    killed, late = "[3, 9 s] gpu.py plain : exit status 124 after 9 s", "[3, 9 s] profile: no time left"
    crashed, failed = "Traceback (most recent call last):", "[1, 9 s] tests: exit status 1 after 9 s"
    log.write_text("\n".join((killed, late, crashed, failed)))
    assert faults_of_calls(tmp_path) == ["7b_4k.ours.runs", killed, late, crashed, failed]
