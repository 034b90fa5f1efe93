"""The page of a run: its state, its message and the parts that depend on the state."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatrain.extras.report.figures import compute_figures
from megatrain.extras.report.history import RunHistory
from megatrain.extras.report.page import render_page
from megatrain.run.status import RunStatus

STEPS = [{"step": step, "loss": 4.0 - step, "step_s": 1.0} for step in (1, 2, 3)]


@pytest.mark.parametrize(
    ("state", "kind"),
    [("done", "good"), ("failed", "bad"), ("died", "bad"), ("training", "open"), ("stopped", "open")],
)
def test_header_of_a_page(state: str, kind: str) -> None:
    """Only the page of a run that ended badly shows the last message."""
    history = RunHistory(Path("/runs/x"), state, RunStatus("failed", message="why so"), steps=STEPS)
    page = render_page(history, compute_figures(history))
    assert f'<h1>x <span class="state {kind}">{state}</span></h1>' in page
    assert ('<p class="message">why so</p>' in page) is (kind == "bad")
    assert re.findall(r'aria-label="([^"]*)"', page) == ["Loss"] and "The traced steps" not in page
    assert re.search(r"<footer>written \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC by megatrain-tier report</footer>", page)
    colors = re.findall(r"^\.s(\d)\{stroke:var\(--c(\d)\)\}", page, re.MULTILINE)
    assert colors == [(number, number) for number in "123456"]
