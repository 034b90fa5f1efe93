"""Compares examples/python/diffusion.py with a copy that lacks the lines that use megatrain."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from processes import embed_examples

pytest.importorskip("diffusers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of other libraries

EXAMPLE = embed_examples.EXAMPLES / "diffusion.py"


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True], ids=["whole", "lora"])
def test_training_matches_program_without_added_lines(
    lora: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quickstart = EXAMPLE.parents[1] / "quickstart"
    text = embed_examples.plain(embed_examples.source("diffusion"))
    assert "megatrain." not in text, "a line that tiers is not marked"
    plain = tmp_path / "plain.py"
    plain.write_text(re.sub(r"^QUICKSTART = .*$", f"QUICKSTART = Path({str(quickstart)!r})", text, flags=re.M))
    more = ["--steps", "4", *(["--lora", "--rate", "0.01"] if lora else [])]
    losses = [run(program, tmp_path / name, more, capsys) for program, name in ((EXAMPLE, "a"), (plain, "b"))]
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    (found,) = (tmp_path / "a" / ("adapter" if lora else "transformer")).glob("*.safetensors")
    weights, wanted = load_file(found), load_file(tmp_path / "b" / found.relative_to(tmp_path / "a"))
    assert weights.keys() == wanted.keys()
    for key, expected in wanted.items():
        torch.testing.assert_close(weights[key], expected, rtol=1e-5, atol=2e-6)


def run(program: Path, folder: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> list[float]:
    """Run a program in this process, and return the losses that it prints."""
    with mock.patch.object(sys, "argv", [str(program), "--output", str(folder), *more]):
        runpy.run_path(str(program), run_name="__main__")
    return [float(found) for found in re.findall(r"^step \d+: loss (\S+)$", capsys.readouterr().out, flags=re.M)]


def test_diffusion_example_adds_at_most_five_lines() -> None:
    assert len(embed_examples.marked_lines(embed_examples.source("diffusion"))) <= 5
