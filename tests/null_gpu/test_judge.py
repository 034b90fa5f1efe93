"""The pytest plugin that decides which failed assertions count on the null GPU, where kernels do nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from null_gpu.judge import KNOWN, SUITES, TESTS, find_call_failures, is_about_numbers, known

pytest_plugins = ("pytester",)
TEST, OURS = str(TESTS / "gpu" / "test_steps.py"), str(Path("/src/megatrain/engine/step.py"))
SUITE = str(SUITES / "tier_suite.py")


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
        (AssertionError("the slot was changed"), SUITE, "assert not problems, problems[0]", True),
    ],
)
def test_number_errors_are_recognized(error: Exception, file: str, line: str, is_number: bool) -> None:
    assert is_about_numbers(type(error), str(error), [(OURS, "..."), (file, line)]) is is_number


def test_torch_comparison_errors_are_attributed_to_the_calling_test() -> None:
    inside = (torch.testing._comparison.__file__, "raise error_metas[0].to_error(msg)")
    for line, is_number in (("assert_close(found, expected)", True), ("assert_close(peak, planned)", False)):
        assert is_about_numbers(AssertionError, "Scalars are not close!", [(TEST, line), inside]) is is_number


@pytest.mark.slow
def test_judged_test_continues_after_a_number(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    # The root of the repository comes first, because folders in tests have the same names as packages.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(TESTS.parent), str(TESTS))))
    source = """
        import pytest
        done = []
        def test_numbers():
            assert 1.0 == 2.0, "a loss"
            done.append(1)
        def test_bytes():
            assert done == [1]
            moved_bytes = 1
            assert moved_bytes == 2
        def test_exceptions():
            assert 1.0 == 2.0
            raise ValueError("ours")
        def test_right():
            assert done == [1]
    """
    pytester.makepyfile(source)
    outcomes = pytester.runpytest_subprocess("-p", "null_gpu.judge", "-p", "no:cacheprovider").parseoutcomes()
    assert outcomes == {"xfailed": 1, "failed": 2, "passed": 1}


def test_known_failures_name_existing_tests() -> None:
    for name, part, why in KNOWN:
        file, _, function = name.partition("::")
        assert f"def {function}(" in (TESTS / "gpu" / file).read_text(encoding="utf-8")
        assert known(f"tests/gpu/{name}[real]", f"visit 1: {part}") == why and not known(f"tests/gpu/{name}", "OOM")


def test_bench_rows_are_judged(tmp_path: Path) -> None:
    def row(name: str, ok: bool | None, timing: bool = False) -> str:
        return json.dumps({"name": name, "value": 1, "ok": ok, "timing": timing}) + "\n"

    rows = row("plain.loss.relative_to.plain", False) + row("7b_64k.ours.share_of_matmul_rate", False, timing=True)
    (tmp_path / "gpu.jsonl").write_text(rows + row("plain.ours.rate", None) + row("plain.ours.runs", True))
    log = tmp_path / "log.txt"
    log.write_text(
        "== 3: gpu.py plain\n[3, 9 s] gpu.py plain : exit status 1 after 9 s\n[3, 9 s] 1 runs failed: gpu.py plain ;\n"
    )
    assert not find_call_failures(tmp_path)
    with (tmp_path / "gpu.jsonl").open("a") as file:
        file.write(row("7b_4k.ours.runs", False))
    killed, late = "[3, 9 s] gpu.py plain : exit status 124 after 9 s", "[3, 9 s] profile: no time left"
    crashed, failed = "Traceback (most recent call last):", "[1, 9 s] tests: exit status 1 after 9 s"
    log.write_text("\n".join((killed, late, crashed, failed)))
    assert find_call_failures(tmp_path) == ["7b_4k.ours.runs", killed, late, crashed, failed]
